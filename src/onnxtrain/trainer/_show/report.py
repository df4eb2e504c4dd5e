"""Defines `Report`, the interface through which a fit reports its progress, and the format of numbers in reports."""

from __future__ import annotations

from collections.abc import Mapping


class Report:
    """Receives the progress of a fit. This base class shows nothing.

    Attributes:
        shows_steps: True if the fit should call :meth:`step`.
    """

    shows_steps = False

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def begin_epoch(self, epoch: int, epochs: int, batches: int | None, done: int) -> None:
        """Called when an epoch begins.

        Args:
            epoch: number of the epoch, counted from 1.
            epochs: number of epochs of the fit.
            batches: number of batches; None if unknown.
            done: number of batches that were finished before an interruption.
        """

    def step(self, batches: int, values: dict[str, float], rate: float) -> None:
        """Called after one or more batches.

        Args:
            batches: number of batches since the last call.
            values: averages over the epoch so far, by key.
            rate: samples per second in the epoch so far.
        """

    def end_epoch(self, epoch: int, epochs: int, record: dict[str, float], rate: float) -> None:
        """Called when an epoch has been recorded.

        Args:
            epoch: number of the epoch, counted from 1.
            epochs: number of epochs of the fit.
            record: history entry of the epoch.
            rate: samples per second.
        """

    def evaluation(self, values: Mapping[str, float]) -> None:
        """Called when an evaluation in the middle of an epoch has been recorded."""

    def note(self, text: str) -> None:
        """Called with a sentence for the user, e.g. after Ctrl-C."""


def format_value(value: float) -> str:
    """Formats a value with four decimals or four significant digits: 0.0412, 12.34, 3.1e-05.

    >>> [format_value(v) for v in (0.98611, 0.0412, 12.3456, 3.1e-5, 0.0)]
    ['0.9861', '0.0412', '12.35', '3.1e-05', '0.0000']
    """
    # Small values in fixed notation would lose digits.
    if value == 0 or 1e-3 <= abs(value) < 10:
        return f"{value:.4f}"
    return f"{value:.4g}"


def describe_epoch(epoch: int, epochs: int, record: dict[str, float], rate: float | None) -> str:
    """Formats an epoch as a line of text, e.g. "epoch 3/20  loss 0.4120  42,000 samples/s"."""
    # Padded, so that the columns of all epochs are aligned.
    width = len(str(epochs))
    parts = [f"epoch {epoch:>{width}}/{epochs}"]
    parts += [
        f"{key} {format_value(value)}"
        for key, value in record.items()
        if key not in ("epoch", "learning_rate")
    ]
    if rate is not None:
        parts.append(f"{rate:,.0f} samples/s")
    return "  ".join(parts)
