"""Guides that tell one story: their blocks run in order, Python in one namespace, commands as in a shell."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression

from onnxtrain.cli import main

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a page in an empty directory; returns its names, and what each command printed."""
    monkeypatch.chdir(tmp_path)

    def run(page: str) -> tuple[dict[str, Any], list[str]]:
        names: dict[str, Any] = {"__name__": "__main__"}
        printed = []
        for kind, text in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
            if kind == "python":
                exec(compile(text, page, "exec"), names)
                continue
            for line in filter(None, text.splitlines()):
                capsys.readouterr()
                monkeypatch.setattr(sys, "argv", [*shlex.split(line), "--json"])
                with pytest.raises(SystemExit) as end:
                    main()
                output = capsys.readouterr()
                assert not end.value.code, output.err
                printed.append(output.out)
        return names, printed

    return run


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_the_guide_to_transfer_learning_runs(play: Any) -> None:
    names, printed = play("docs/transfer-learning.md")
    before, after, in_torch = names["before"], names["after"], names["in_torch"]
    assert before < 0.4
    assert after > 0.9
    assert abs(after - in_torch) < 0.04
    assert names["head_only"].evaluate(names["x"][200:], names["y"][200:])["accuracy"] > 0.8
    assert json.loads(printed[1])["accuracy"] == pytest.approx(after, abs=0.02)
    page = (ROOT / "docs/transfer-learning.md").read_text(encoding="utf-8")
    block = next(t for _, t in BLOCK.findall(page) if "replace_head(make_batch" in t)
    assert len([line for line in block.splitlines() if line.strip()]) <= 10


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_the_guide_to_tabular_data_runs(play: Any) -> None:
    names, printed = play("docs/tabular-data.md")
    frame = names["frame"]
    assert len(frame) == 1309
    assert frame.isna().sum()[lambda n: n > 0].to_dict() == {"age": 263, "fare": 1, "embarked": 2}
    evaluated, result = json.loads(printed[1]), names["result"]
    # The columns stand in another order in Python, so that the results are not the same numbers.
    assert evaluated["accuracy"] == pytest.approx(result["accuracy"], abs=0.03)
    linear = LogisticRegression().fit(names["x"], names["y"]).score(names["others"], names["fates"])
    assert result["accuracy"] > linear - 0.02
    assert names["accuracy"] > linear - 0.02
    assert Path("perceptron.onnx").is_file()
    predictions = pd.read_csv("predictions.csv")
    accuracy = (predictions["class"].to_numpy() == names["fates"]).mean()
    assert accuracy == pytest.approx(evaluated["accuracy"])


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_the_guide_to_text_classification_runs(play: Any) -> None:
    names, _ = play("docs/text-classification.md")
    found = names["trainer"].evaluate(names["unseen"])
    assert found["f1"] == pytest.approx(names["f1"], rel=1e-9)
    assert found["auroc"] == pytest.approx(names["auroc"], rel=1e-9)
    assert names["history"]["val_f1"][-1] == pytest.approx(names["f1"], rel=1e-9)
    assert names["f1"] > 0.8
    assert len({batch[0].shape[1] for batch in names["unseen"]}) > 1  # padded to different lengths
