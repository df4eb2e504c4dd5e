"""The time left of a fit, and what of the progress line fits on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from onnxtrain._console import PlainConsole
from onnxtrain.trainer._show.terminal import BarReport
from onnxtrain.trainer._show.time_left import TimeLeft


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_left_of_epochs_that_take_equally_long() -> None:
    """Ten epochs of 20 batches, a batch a second and 20 seconds of validation: 400 s in all."""
    clock = Clock()
    left = TimeLeft(clock)
    for epoch in range(1, 11):
        left.begin_epoch(epoch, 10, 20, 0)
        assert left.text() == (
            "" if epoch == 1 else f"{(11 - epoch) * 40 // 60}:{(11 - epoch) * 40 % 60:02} left"
        )
        for batch in range(1, 21):
            clock.now += 1
            left.step(1)
            # In the first epoch, nothing is known of the validation.
            seconds = 200 - batch if epoch == 1 else 40 * (11 - epoch) - 2 * batch
            assert left.text() == f"{seconds // 60}:{seconds % 60:02} left"
        clock.now += 20


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        # 75 of 100 batches are left in this epoch, and 9 epochs of 100 follow; 5 batches took 10 s.
        (100, "32:30 left"),
        (None, ""),
    ],
)
def test_a_resumed_epoch(batches: int | None, expected: str) -> None:
    clock = Clock()
    left = TimeLeft(clock)
    left.begin_epoch(3, 12, batches, 20)
    clock.now += 10
    left.step(5)
    assert left.text() == expected
    # The part of an epoch is not taken for a whole one.
    left.begin_epoch(4, 12, batches, 0)
    assert left.text() == ""


def test_hours_and_streams() -> None:
    clock = Clock()
    left = TimeLeft(clock)
    left.begin_epoch(1, 3, None, 0)
    clock.now += 7200
    left.begin_epoch(2, 3, None, 0)
    assert left.text() == "4:00:00 left"
    clock.now += 1800
    assert left.text() == "3:30:00 left"
    clock.now += 7200
    assert left.text() == "2:00:00 left"


def test_a_clock_that_stands_still() -> None:
    left = TimeLeft(Clock())
    left.begin_epoch(1, 2, 4, 0)
    left.step(4)
    assert left.text() == "0:00 left"


@pytest.mark.parametrize("width", [80, 120])
def test_bar_count_loss_and_time_are_always_shown(width: int) -> None:
    console = PlainConsole(stderr=True, width=width)
    report = BarReport(console)
    clock = Clock()
    report._left = TimeLeft(clock)
    report.begin_epoch(3, 20, 1450, 0)
    clock.now += 30
    report.step(700, {"loss": 0.4123, "accuracy": 0.9123, "f1_macro": 0.88, "top5_accuracy": 0.99}, 42_000)
    shown = Console(width=width, file=io.StringIO())
    shown.print(report._progress.get_renderable())
    (line,) = shown.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "epoch  3/20 " in line
    assert " 700/1450 " in line
    assert "loss 0.4123" in line
    assert "━━━" in line
    # 700 batches took 30 s, and 750 + 17 * 1450 are left.
    assert line.rstrip().endswith("18:09 left")
    assert ("42,000 samples/s" in line) == (width == 120)


@pytest.mark.parametrize("width", [80, 120])
def test_line_of_an_epoch_fits_on_the_terminal(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"loss": 1.0303, "accuracy": 0.7927, "val_loss": 0.3871, "val_accuracy": 0.9306}
    BarReport(PlainConsole(width=width)).end_epoch(1, 15, record, 42_000)
    (line,) = capsys.readouterr().out.splitlines()
    assert len(line) <= width
    assert line.endswith("42,000 samples/s" if width == 120 else "val_accuracy 0.9306")
