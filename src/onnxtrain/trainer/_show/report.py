"""Shows the progress of a fit: a bar on a terminal or in a notebook, one line per epoch elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from onnxtrain._console import PlainConsole
from onnxtrain._printable import printable


class Report:
    """Receives the progress of a fit. This base class shows nothing.

    Attributes:
        shows_steps: True if the fit shall call :meth:`step`.
    """

    shows_steps = False

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def begin_epoch(self, epoch: int, epochs: int, batches: int | None, done: int) -> None:
        """Called when an epoch begins: number of batches (None if unknown), `done` of them before an interruption."""

    def step(self, batches: int, values: dict[str, float], rate: float) -> None:
        """Called after `batches` further batches with the running averages, and samples per second so far."""

    def end_epoch(self, epoch: int, epochs: int, record: dict[str, float], rate: float) -> None:
        """Called when an epoch has been recorded."""

    def evaluation(self, values: Mapping[str, float]) -> None:
        """Called when an evaluation in the middle of an epoch has been recorded."""

    def note(self, text: str) -> None:
        """Called with a sentence for the user, e.g. after Ctrl-C."""


def make_report(verbose: bool) -> Report:
    """Chooses the report: of a notebook, a bar on a terminal, plain lines elsewhere; nothing if not `verbose`."""
    if not verbose:
        return Report()
    from onnxtrain.trainer._show.notebook import NotebookReport, in_notebook

    if in_notebook():
        return NotebookReport()
    # Standard error: a program may print its results to standard output.
    console = PlainConsole(stderr=True)
    return BarReport(console) if console.is_terminal else PlainReport(console)


def format_value(value: float) -> str:
    """Formats a value with four significant digits or decimals: 0.0412, 12.34, 3.1e-05.

    >>> [format_value(v) for v in (0.98611, 0.0412, 12.3456, 3.1e-5, 0.0)]
    ['0.9861', '0.0412', '12.35', '3.1e-05', '0.0000']
    """
    # Four decimals where they say enough; the exponent of small values would be lost in them.
    if value == 0 or 1e-3 <= abs(value) < 10:
        return f"{value:.4f}"
    return f"{value:.4g}"


def describe_epoch(epoch: int, epochs: int, record: dict[str, float], rate: float) -> str:
    """Formats the line of an epoch, e.g. "epoch 3/20  loss 0.4120  42,000 samples/s"."""
    # Numbers of one width keep the columns of all epochs aligned.
    width = len(str(epochs))
    parts = [f"epoch {epoch:>{width}}/{epochs}"]
    parts += [
        f"{key} {format_value(value)}"
        for key, value in record.items()
        if key not in ("epoch", "learning_rate")
    ]
    return "  ".join([*parts, f"{rate:,.0f} samples/s"])


class PlainReport(Report):
    """Prints one line per epoch."""

    def __init__(self, console: PlainConsole) -> None:
        self._console = console

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def end_epoch(self, epoch: int, epochs: int, record: dict[str, float], rate: float) -> None:
        """Prints the epoch."""
        self._print(describe_epoch(epoch, epochs, record, rate))

    def evaluation(self, values: Mapping[str, float]) -> None:
        """Prints the values."""
        parts = [f"{key} {format_value(value)}" for key, value in values.items() if key.startswith("val_")]
        self._print("  ".join([f"step {values['step']:,}", *parts]))

    def note(self, text: str) -> None:
        """Prints the text."""
        self._print(text)


class BarReport(PlainReport):
    """Shows a progress bar for the epoch under way, below one line for each epoch before it."""

    shows_steps = True

    def __init__(self, console: PlainConsole) -> None:
        super().__init__(console)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("{task.fields[values]}", markup=False),
            TextColumn("{task.fields[rate]}", style="dim"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> BarReport:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def begin_epoch(self, epoch: int, epochs: int, batches: int | None, done: int) -> None:
        """Starts the bar anew."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        title = f"epoch {epoch:>{len(str(epochs))}}/{epochs}"
        self._task = self._progress.add_task(title, total=batches, completed=done, values="", rate="")

    def step(self, batches: int, values: dict[str, float], rate: float) -> None:
        """Advances the bar."""
        assert self._task is not None
        # The column makes a Text itself, without the console.
        text = printable("  ".join(f"{key} {format_value(value)}" for key, value in values.items()))
        self._progress.update(self._task, advance=batches, values=text, rate=f"{rate:,.0f} samples/s")
