"""Shows the progress of a fit on a terminal: a bar for the current epoch, and one line per finished epoch."""

from __future__ import annotations

from collections.abc import Mapping

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from onnxtrain._console import PlainConsole
from onnxtrain._printable import printable
from onnxtrain.trainer._show.report import Report, describe_epoch, format_value
from onnxtrain.trainer._show.time_left import TimeLeft

# Columns from which on a terminal is wide, and those of the time left and of the rate, with the blanks around them.
_WIDE, _TIME, _RATE = 100, 14, 20


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
    """Shows a progress bar for the current epoch, and one line for each finished epoch."""

    shows_steps = True

    def __init__(self, console: PlainConsole) -> None:
        super().__init__(console)
        # rich would drop the bar and the count, to make room for the texts.
        self._wide = console.width >= _WIDE
        bar = 28 if self._wide else 10
        rate = [TextColumn("{task.fields[rate]}", style="dim")] if self._wide else []
        self._room = console.width - bar - _TIME - (_RATE if self._wide else 0)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=bar),
            MofNCompleteColumn(),
            TextColumn("{task.fields[values]}", markup=False),
            *rate,
            TextColumn("{task.fields[left]}", style="cyan"),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._left = TimeLeft()

    def __enter__(self) -> BarReport:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def begin_epoch(self, epoch: int, epochs: int, batches: int | None, done: int) -> None:
        """Restarts the bar."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        title = f"epoch {epoch:>{len(str(epochs))}}/{epochs}"
        self._left.begin_epoch(epoch, epochs, batches, done)
        self._task = self._progress.add_task(
            title, total=batches, completed=done, values="", rate="", left=self._left.text()
        )

    def end_epoch(self, epoch: int, epochs: int, record: dict[str, float], rate: float) -> None:
        """Prints the epoch, on a narrow terminal without the rate, with which the line would often be too long."""
        self._print(describe_epoch(epoch, epochs, record, rate if self._wide else None))

    def step(self, batches: int, values: dict[str, float], rate: float) -> None:
        """Advances the bar."""
        assert self._task is not None
        task = self._progress.tasks[-1]
        count = len(f"{task.description} {task.total or 0:.0f}/{task.total or 0:.0f}  ")
        # The column makes its text without the console, which would escape control characters.
        parts = [printable(f"{key} {format_value(value)}") for key, value in values.items()]
        while len(parts) > 1 and len("  ".join(parts)) > self._room - count:
            parts.pop()
        text = "  ".join(parts)
        self._left.step(batches)
        self._progress.update(
            self._task,
            advance=batches,
            values=text,
            rate=f"{rate:,.0f} samples/s",
            left=self._left.text(),
        )
