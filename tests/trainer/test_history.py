"""Texts and tables of a history, and the display of a fit in a notebook."""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from onnxtrain import History, Trainer
from onnxtrain.errors import InputError, MissingPackageError
from trainer import problems

EPOCHS = [
    {"epoch": 1, "loss": 0.9, "f1": 0.2, "learning_rate": 0.1},
    {"epoch": 2, "loss": 0.5, "f1": 0.4, "val_loss": 0.8, "val_f1": 0.3, "learning_rate": 0.05},
    {"epoch": 3, "loss": 0.4, "f1": 0.5, "val_loss": 0.7, "val_f1": 0.35, "learning_rate": 0.01},
]


def drawn(axes: Any) -> dict[str, list[tuple[float, float]]]:
    return {
        line.get_label(): [(float(x), float(y)) for x, y in line.get_xydata()] for line in axes.get_lines()
    }


def test_plot_draws_what_was_recorded() -> None:
    figure = History(EPOCHS).plot()
    panels = {axes.get_title(loc="left"): drawn(axes) for axes in figure.axes}
    assert panels == {
        "loss": {"training": [(1, 0.9), (2, 0.5), (3, 0.4)], "validation": [(2, 0.8), (3, 0.7)]},
        "f1": {"training": [(1, 0.2), (2, 0.4), (3, 0.5)], "validation": [(2, 0.3), (3, 0.35)]},
        "learning rate": {"training": [(1, 0.1), (2, 0.05), (3, 0.01)]},
    }
    (only,) = History(EPOCHS[:1]).plot(keys=["loss"]).axes
    assert drawn(only) == {"training": [(1, 0.9)]}
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_plot_of_a_fit_in_a_file(tmp_path: Any) -> None:
    problem = problems.line()
    trainer = Trainer(problem.model, "mse", metrics=["mae", "mse", "rmse", "r2"])
    history = trainer.fit(problem.x, problem.y, epochs=2, validation=0.2, verbose=False)
    figure = history.plot()
    assert len(figure.axes) == 6
    figure.savefig(tmp_path / "history.png")
    assert (tmp_path / "history.png").stat().st_size > 10_000


def test_plot_of_nothing() -> None:
    with pytest.raises(InputError, match="no epoch has been recorded"):
        History().plot()
    with pytest.raises(InputError, match="val_f1 was not recorded; recorded: loss, f1, learning_rate"):
        History(EPOCHS).plot(keys=["loss", "val_f1"])


def test_a_history_becomes_a_frame() -> None:
    import pandas as pd

    frame = History(EPOCHS).to_frame()
    assert list(frame.index) == [1, 2, 3]
    assert list(frame["loss"]) == [0.9, 0.5, 0.4]
    assert pd.isna(frame.loc[1, "val_loss"])
    assert frame.loc[3, "val_f1"] == 0.35
    assert len(History().to_frame()) == 0


@pytest.mark.parametrize(("module", "call"), [("matplotlib", "plot"), ("pandas", "to_frame")])
def test_missing_packages_are_named(module: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        MissingPackageError, match=f"needs {module}, which is not installed: pip install {module}"
    ):
        getattr(History(EPOCHS), call)()


class ZMQInteractiveShell:
    """Stands for IPython's shell of a notebook."""


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """IPython of a notebook; returns what the output of the cell has been, one text after the other."""
    shown: list[str] = []
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")

    def first(content: str, *, display_id: bool) -> SimpleNamespace:
        assert display_id
        shown.append(content)
        return SimpleNamespace(update=shown.append)

    display.HTML, display.display = str, first  # type: ignore[attr-defined]
    ipython.get_ipython, ipython.display = ZMQInteractiveShell, display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


def test_notebook_shows_a_bar_and_a_table(notebook: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    problem = problems.classes()
    trainer = Trainer(problem.model, problem.loss)
    history = trainer.fit(problem.x, problem.y, epochs=3, batch_size=16, validation=0.2)
    assert capsys.readouterr() == ("", "")
    last = notebook[-1]
    assert "epoch 3/3" in last
    assert '<progress value="3" max="3"></progress> 3/3' in last
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", last)[1:]]
    keys = re.findall(r"<th>(.*?)</th>", last)
    assert keys == history.keys()
    assert len(rows) == 3
    for row, epoch in zip(rows, history, strict=True):
        for key, text in zip(keys, row, strict=True):
            assert float(text) == pytest.approx(epoch[key], abs=5e-5)


def test_notebook_counts_the_batches_of_a_stream_of_unknown_length(notebook: list[str]) -> None:
    problem = problems.classes()
    trainer = Trainer(problem.model, problem.loss)
    trainer.fit(lambda: iter([(problem.x[:8], problem.y[:8])] * 3), epochs=1)
    assert "</progress> 3/?" in notebook[-1]


def test_notebook_is_told_of_an_interruption(notebook: list[str], tmp_path: Any) -> None:
    from trainer.test_resume import InterruptAt

    problem = problems.classes()
    trainer = Trainer(problem.model, problem.loss, directory=tmp_path / "<run>")
    trainer.fit(problem.x, problem.y, epochs=3, callbacks=[InterruptAt(1)])
    assert "<p>Interrupted in epoch 1 after 1 of 2 batches. The state is saved in" in notebook[-1]
    assert "&lt;run&gt;" in notebook[-1]


def test_the_shell_of_a_terminal_is_no_notebook(
    notebook: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: None)
    problem = problems.line()
    Trainer(problem.model, "mse").fit(problem.x, problem.y)
    assert not notebook
    assert "epoch 1/1" in capsys.readouterr().err
