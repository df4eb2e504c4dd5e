"""Metrics of one class: `--positive`, and the messages about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pandas as pd
import pytest
from sklearn import metrics

import models
from onnxtrain.cli._classes import chosen_metrics, class_report
from onnxtrain.trainer._metrics.probabilities import probabilities


@pytest.fixture
def frauds(tmp_path: Path) -> Path:
    """One sample in ten is a fraud, and nothing tells which: a model that says "ok" for all is right in 90 %."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(200, 3)).round(3), columns=["a", "b", "c"])
    frame["verdict"] = np.where(np.arange(200) % 10 == 0, "fraud", "ok")
    frame.to_csv(tmp_path / "t.csv", index=False)
    model = models.mlp(features=3, classes=2)
    onnx.save(model, tmp_path / "net.onnx")
    return tmp_path / "t.csv"


def train(run: Any, table: Path, *options: object) -> Any:
    return run(
        *(
            "train",
            table.with_name("net.onnx"),
            "--data",
            table,
            "--target",
            "verdict",
            "--loss",
            "cross_entropy",
        ),
        *("--epochs", 4, "--lr", 0.02, "--overwrite", "-o", table.with_name("run"), *options),
    )


def test_classes_are_weighed_by_name(run: Any, frauds: Path) -> None:
    """With equal weights for both classes in all a model that learns nothing says "fraud" as often as "ok"."""
    for options, found in ((("--class-weight", "fraud=1000"), 20), (("--class-weight", "ok=1000"), 0)):
        assert train(run, frauds, *options, "--epochs", 30).code == 0
        document = run("evaluate", frauds.with_name("run"), "--data", frauds, "--json").json()
        assert document["confusion_matrix"][0][0] == found
    result = train(run, frauds, "--class-weight", "rose=2")
    assert result.code == 1
    assert "such as ok=10; the classes are fraud, ok." in " ".join(result.err.split())


def test_texts_are_judged_by_all_classes(run: Any, frauds: Path) -> None:
    """F1 of "ok", the last in the alphabet, is 0.95 for a model that finds no fraud; that must not be what is shown."""
    result = train(run, frauds, "--metric", "f1", "--metric", "auroc")
    assert result.code == 0, result.err
    assert "│ auroc  " in result.out  # of two classes both have the same
    assert "Metrics: f1_macro: the mean over classes; --positive CLASS names one." in result.err
    assert "fraud 20 (10.0 %), ok 180 (90.0 %)" in result.err
    document = run("evaluate", frauds.with_name("run"), "--data", frauds, "--json").json()
    assert (
        run("predict", frauds.with_name("run"), "--data", frauds, "-o", frauds.with_name("p.csv")).code == 0
    )
    truth, guess = pd.read_csv(frauds)["verdict"], pd.read_csv(frauds.with_name("p.csv"))["class"]
    assert document["f1_macro"] == pytest.approx(metrics.f1_score(truth, guess, average="macro"))
    assert "f1" not in document
    fraud = document["classes"][0]
    assert fraud["f1"] == pytest.approx(metrics.f1_score(truth == "fraud", guess == "fraud", zero_division=0))
    assert metrics.f1_score(truth == "ok", guess == "ok") > 0.9  # what was shown as "f1"


def test_positive_names_the_class(run: Any, frauds: Path) -> None:
    result = train(run, frauds, "--positive", "fraud")
    assert result.code == 0, result.err
    assert "Metrics: f1, precision, recall: of the class 'fraud'." in result.err
    for shown in ("accuracy", "f1 of 'fraud'", "precision of 'fraud'", "recall of 'fraud'"):
        assert shown in result.out
    again = run("train", frauds.with_name("run"), "--data", frauds, "--positive", "ok")
    assert "--positive ok (it was fraud)" in again.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--positive", "froud"], "--positive is 'froud'; the classes are fraud, ok."),
        (["--positive", "1"], "--positive is '1'; the classes are fraud, ok."),
    ],
)
def test_positive_must_be_a_class(run: Any, frauds: Path, options: list[str], message: str) -> None:
    result = train(run, frauds, *options)
    assert result.code == 1
    assert message in result.err
    assert not frauds.with_name("run").exists()


def test_numbers_as_labels(run: Any, mlp: Path, data: Path) -> None:
    """Of .npz arrays a class has a number only; of three there is no class 1 by default."""
    arguments = ("train", mlp, "--data", data, "--loss", "cross_entropy", "--epochs", 1, "--metric", "f1")
    plain = run(*arguments, "--json")
    assert plain.code == 0, plain.err
    assert "Metrics" not in plain.err
    named = run(*arguments, "--positive", 2, "-o", mlp.with_name("two"))
    assert "f1 of '2'" in named.out
    assert (
        "positive is 3, but the classes are 0 to 2"
        in run(*arguments, "--positive", 3, "-o", mlp.with_name("x")).err
    )
    text = run(*arguments, "--positive", "fraud", "-o", mlp.with_name("y"))
    assert "--positive is 'fraud', but the target contains numbers, not strings" in text.err


def test_names_of_metrics() -> None:
    texts = ["fraud", "ok"]
    assert chosen_metrics(["f1", "auroc", "f1_macro"], None, texts) == (["f1_macro", "auroc"], None)
    assert chosen_metrics(["f1"], None, None) == (["f1"], None)
    assert chosen_metrics(None, None, texts) == (None, None)
    assert chosen_metrics(["recall"], "ok", texts) == (["recall"], 1)
    assert chosen_metrics(None, "0", None) == (["accuracy", "f1", "precision", "recall"], 0)


@pytest.mark.parametrize("seed", range(5))
def test_class_report_is_scikit_learns(seed: int) -> None:
    """Classes that are never right, never there, or never predicted among them."""
    rng = np.random.default_rng(seed)
    truth, guess = rng.integers(0, 3, 30), rng.integers(1, 5, 30)
    matrix = metrics.confusion_matrix(truth, guess, labels=range(5))
    scores = metrics.precision_recall_fscore_support(truth, guess, labels=range(5), zero_division=0)
    for index, row in enumerate(class_report(matrix, list("abcde"))):
        assert (row["class"], row["samples"]) == ("abcde"[index], scores[3][index])
        assert [row[key] for key in ("precision", "recall", "f1")] == pytest.approx(
            [s[index] for s in scores[:3]]
        )


def test_probabilities_of_large_scores_do_not_overflow() -> None:
    scores = np.array([[1e4, -1e4]], np.float32)
    with np.errstate(all="raise", under="ignore"):
        np.testing.assert_array_equal(probabilities("CrossEntropyLoss", scores), [[1.0, 0.0]])
        np.testing.assert_array_equal(probabilities("BCEWithLogitsLoss", scores), [[1.0, 0.0]])
    assert probabilities("MSELoss", scores) is None
