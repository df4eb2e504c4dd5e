"""Pages that tell one story: their blocks run in order, in one namespace, and print what the page shows."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression

import pages
from pages import Block, difference, read_blocks, run_block


def check_transfer_learning(names: dict[str, Any]) -> None:
    before, after = names["before"], names["after"]
    assert before < 0.4
    assert after > 0.9
    assert abs(after - _accuracy_of_the_module(names)) < 0.04
    rest = names["x"][200:], names["y"][200:]
    assert names["head_only"].evaluate(*rest)["accuracy"] > 0.8
    from onnxtrain import Trainer

    in_the_shell = Trainer.resume("run").evaluate(*rest)["accuracy"]
    assert in_the_shell == pytest.approx(after, abs=0.02)
    block = next(
        b.code
        for b in read_blocks("docs/guides/train-part-of-a-model.md")
        if "replace_head(make_batch" in b.code
    )
    assert len([line for line in block.splitlines() if line.strip()]) <= 10


def _accuracy_of_the_module(names: dict[str, Any]) -> float:
    """Replaces the head of the page's PyTorch module, trains it as the page trains the file, and evaluates it."""
    import torch

    torch.manual_seed(0)
    module, x, y = copy.deepcopy(names["net"]), names["x"], names["y"]
    module.head = torch.nn.Linear(128, 5)
    names["train_in_torch"](module, x[:200], y[:200], epochs=30)
    with torch.no_grad():
        return float((module(torch.tensor(x[200:])).argmax(1).numpy() == y[200:]).mean())


def check_tabular_data(names: dict[str, Any]) -> None:
    frame = names["frame"]
    assert len(frame) == 1309
    assert frame.isna().sum()[lambda n: n > 0].to_dict() == {"age": 263, "fare": 1, "embarked": 2}
    predictions = pd.read_csv("predictions.csv")
    in_the_shell = (predictions["class"].to_numpy() == names["test_y"]).mean()
    result = names["result"]
    # The transformers of scikit-learn put the columns into another order.
    assert in_the_shell == pytest.approx(result["accuracy"], abs=0.03)
    linear = LogisticRegression().fit(names["x"], names["y"]).score(names["test_x"], names["test_y"])
    assert result["accuracy"] > linear - 0.02
    assert names["accuracy"] > linear - 0.02
    assert Path("perceptron.onnx").is_file()


def check_text_classification(names: dict[str, Any]) -> None:
    found = names["trainer"].evaluate(names["test_loader"])
    assert found["f1"] == pytest.approx(names["f1"], rel=1e-9)
    # Scores that are almost equal may be ordered differently; each such pair counts 1 / (500 * 500).
    assert found["auroc"] == pytest.approx(names["auroc"], abs=2e-5)
    assert names["history"]["val_f1"][-1] == pytest.approx(names["f1"], rel=1e-9)
    assert names["f1"] > 0.8
    assert len({batch[0].shape[1] for batch in names["test_loader"]}) > 1  # padded to different lengths


def check_extend_the_trainer(names: dict[str, Any]) -> None:
    x, y, own = names["test_x"], names["test_y"], names["own"]
    logits = own.predict(x).astype(np.float64)
    p = (np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True))[np.arange(len(y)), y]
    loss = -((1 - p) ** 1.5 * np.log(p)).mean()
    assert own.evaluate(x, y)["loss"] == pytest.approx(loss, rel=1e-4)
    logged = pd.read_csv("log.csv", float_precision="round_trip")
    epochs = names["trainer"].history.epochs[: len(logged)]
    assert logged["loss"].tolist() == [epoch["loss"] for epoch in epochs]


def check_command_line(names: dict[str, Any]) -> None:
    predictions = pd.read_csv("predictions.csv")
    assert (predictions["class"] == names["test_y"]).mean() > 0.9
    session = ort.InferenceSession("digits.onnx")
    (logits,) = session.run(["logits"], {session.get_inputs()[0].name: names["test_x"]})
    assert (logits.argmax(axis=1) == predictions["class"]).all()


def check_first_fine_tuning(names: dict[str, Any]) -> None:
    x, y = names["new_test_x"], names["test_y"]
    assert names["trainer"].evaluate(x, y)["accuracy"] < 0.4
    assert names["tuned"].evaluate(x, y)["accuracy"] > 0.8


def check_from_pytorch(names: dict[str, Any]) -> None:
    assert names["largest"] < 1e-3
    for model in (names["in_pytorch"], names["in_onnxruntime"], names["trained"]):
        assert names["accuracy"](model) > 0.8


def check_forecasting(names: dict[str, Any]) -> None:
    assert names["after"] < 0.6 * names["before"]
    assert Path("ada.delta").stat().st_size < Path("base/trained").stat().st_size / 4
    assert len(names["forecast"]) == 24


def check_readme(names: dict[str, Any]) -> None:
    from onnxtrain import Trainer

    data = names["test_x"], names["test_y"]
    in_the_shell = Trainer.resume("network-trained").evaluate(*data)
    assert in_the_shell == pytest.approx(names["trainer"].evaluate(*data), rel=1e-6)
    assert in_the_shell["accuracy"] > 0.95


CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "README.md": check_readme,
    "docs/guides/train-part-of-a-model.md": check_transfer_learning,
    "docs/guides/train-on-a-table.md": check_tabular_data,
    "docs/guides/extend-the-trainer.md": check_extend_the_trainer,
    "docs/guides/command-line.md": check_command_line,
    "examples/text_classification/README.md": check_text_classification,
    "examples/forecasting/personalise.md": check_forecasting,
    "docs/tutorials/first-fine-tuning.md": check_first_fine_tuning,
    "docs/tutorials/from-pytorch.md": check_from_pytorch,
}


def _each_page() -> list[Any]:
    """Returns the README and the first tutorial, and marks all other pages thorough."""
    first = ("README.md", "docs/tutorials/first-fine-tuning.md")
    return [
        page if page.startswith(first) else pytest.param(page, marks=pytest.mark.thorough)
        for page in pages.STORIES
    ]


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # of the exporter
@pytest.mark.parametrize("page", _each_page())
def test_a_page_runs_and_prints_what_it_shows(page: str) -> None:
    missing: list[str] = []

    def check(names: dict[str, Any]) -> None:
        missing.extend(pages.saved_pictures(page))
        CHECKS.get(page, lambda names: None)(names)

    printed = pages.run_story(page, check)
    assert missing == []
    for block, output in zip(read_blocks(page), printed, strict=True):
        assert difference(block.shown, output, block.marks) is None, block.code


def test_every_tutorial_is_run() -> None:
    found = {f"docs/tutorials/{path.name}" for path in (pages.ROOT / "docs" / "tutorials").glob("*.md")}
    assert found <= set(pages.STORIES)


def test_every_block_in_python_is_run() -> None:
    """Here, or by the test that `ELSEWHERE` names, which reads the page."""
    files = [path for path in (pages.ROOT / "docs").rglob("*.md") if "reference" not in path.parts]
    names = [path.relative_to(pages.ROOT).as_posix() for path in files]
    with_blocks = {name for name in names if read_blocks(name)}
    assert with_blocks <= {*pages.STORIES, *pages.EXAMPLES, *pages.ELSEWHERE}
    for page, test in pages.ELSEWHERE.items():
        assert Path(page).name in (pages.ROOT / test).read_text(encoding="utf-8"), page


def test_an_output_block_belongs_to_a_block_that_runs() -> None:
    for page in [*pages.STORIES, *pages.EXAMPLES]:
        text = (pages.ROOT / page).read_text(encoding="utf-8")
        shown = [block.shown for block in read_blocks(page) if block.shown is not None]
        assert len(re.findall(r"^```output$", text, re.MULTILINE)) == len(shown), page


@pytest.mark.parametrize(
    ("shown", "printed", "marks", "agree"),
    [
        ("a 1\n", "a 1\n", "", True),
        ("a 1\n", "a 2\n", "", False),
        (None, "", "", True),
        (None, "a\n", "", False),
        ("a\n", "", "", False),
        ("loss 1.00\n", "loss 1.04\n", "numbers within 5 %", True),
        ("loss 1.00\n", "loss 1.06\n", "numbers within 5 %", False),
        ("loss 1.00\n", "cost 1.00\n", "numbers within 5 %", False),
        ("loss 1.00\n", "loss nan\n", "numbers within 5 %", False),
        ("1 2\n", "1\n", "numbers within 5 %", False),
        ("took 1 s, loss 2\n", "took 9 s, loss 2\n", "times vary", True),
        ("took 1 s, loss 2\n", "took 9 s, loss 3\n", "times vary", False),
        ("1,736 samples/s\n", "902 samples/s\n", "times vary", True),
        ("[1, 2]\n", "[7, 9]\n", "numbers vary", True),
        ("[1, 2]\n", "[7; 9]\n", "numbers vary", False),
        ("conv2.weight 1\n", "conv3.weight 1\n", "numbers vary", False),
        ("False\n", "True\n", "words vary", True),
        ("False\n", "", "words vary", False),
    ],
)
def test_outputs_are_compared(shown: str | None, printed: str, marks: str, agree: bool) -> None:
    assert (difference(shown, printed, marks) is None) is agree


def test_outputs_of_a_page_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "STORIES", ["page.md"])
    first = "# A page\n\n```python\nx = 1\n```\n\n```python\nprint(x + 1, 'a')\n```\n"
    near = "\n```python\nprint(0.5)\n```\n\n<!-- output numbers within 9 % -->\n```output\n0.49\n```\n"
    silent = "\n```python\n0\n```\n"
    page.write_text(f"{first}{near}{silent}\n```output\nold\n```\n\nEnd.\n")
    assert len(pages.compare("page.md")) == 2
    assert pages.write("page.md")
    assert page.read_text() == f"{first}\n```output\n2 a\n```\n{near}{silent}\nEnd.\n"
    assert pages.compare("page.md") == []
    assert not pages.write("page.md")


def test_standard_error_is_shown_where_the_page_says_so() -> None:
    code = "import sys\nprint('a')\nprint('b', file=sys.stderr)\n"
    assert run_block(Block("python", code, None, ""), {}) == "a\n"
    assert run_block(Block("python", code, None, "with progress"), {}) == "a\nb\n"


def test_a_command_that_fails_names_itself() -> None:
    block = Block("bash", "onnxtrain inspect nothing.onnx\n", None, "")
    with pytest.raises(RuntimeError, match=r"onnxtrain inspect nothing.onnx.*ended with code 1"):
        run_block(block, {})
