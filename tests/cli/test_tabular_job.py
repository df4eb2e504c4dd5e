"""A tabular job from the shell, end to end: every number that is shown is scikit-learn's on the exported file's output.

The table is imbalanced, has texts, gaps and ids. What the exported file gives is computed by a plain session from the
raw columns alone; nothing of this package is between the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pandas as pd
import pytest
from sklearn import metrics
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import models

NUMBERS, TEXTS = ["amount", "hour"], ["country", "card"]
CLASSES = ["fine", "fraud", "zero"]  # of which the last in the alphabet is not the one that matters
WIDTH = 2 + 4 + 2 + 1


def payments(rows: int, seed: int) -> pd.DataFrame:
    """Payments of which one in fourteen is a fraud; "NA" is Namibia, and "None" a kind of card."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "number": [f"{n:05d}" for n in rng.permutation(rows)],
            "amount": rng.exponential(80, rows).round(2),
            "country": rng.choice(["DE", "FR", "NA", "null"], rows, p=[0.5, 0.3, 0.1, 0.1]),
            "hour": rng.integers(0, 24, rows),
            "card": rng.choice(["None", "gold"], rows, p=[0.7, 0.3]),
            "foreign": rng.random(rows) < 0.3,
        }
    )
    odd = (frame["amount"] > 130) & (frame["country"] == "NA") | (rng.random(rows) < 0.02)
    frame["verdict"] = np.where(odd, "fraud", np.where(frame["amount"] < 20, "zero", "fine"))
    frame["hour"] = frame["hour"].astype("Int64")
    frame.loc[rng.choice(rows, rows // 8, replace=False), "hour"] = pd.NA
    frame.loc[rng.choice(rows, rows // 20, replace=False), "country"] = None
    return frame


def raw(frame: pd.DataFrame) -> dict[str, np.ndarray]:
    """The columns as anybody would feed them: NaN and the empty text where there is nothing."""
    feeds = {name: frame[name].astype("Float64").to_numpy(np.float64, na_value=np.nan) for name in NUMBERS}
    feeds |= {
        name: np.array(["" if pd.isna(text) else text for text in frame[name]], object) for name in TEXTS
    }
    return feeds | {"foreign": frame["foreign"].to_numpy(np.float64)}


class Job:
    """The commands of the job, once for all tests."""

    def __init__(self, run: Any, folder: Path) -> None:
        self.folder = folder
        self.training, self.validation, self.unseen = (
            payments(rows, seed) for rows, seed in ((700, 0), (300, 1), (400, 2))
        )
        for name in ("training", "validation", "unseen"):
            getattr(self, name).to_csv(folder / f"{name}.csv", index=False)
        onnx.save(models.mlp(features=WIDTH, classes=3), folder / "net.onnx")
        metric = [
            part
            for name in ("accuracy", "f1", "precision", "recall", "auroc", "f1_macro")
            for part in ("--metric", name)
        ]
        self.trained = run(
            *("train", folder / "net.onnx", "--data", folder / "training.csv"),
            *("--validation", folder / "validation.csv"),
            *("--target", "verdict", "--id", "number", "--impute", "median", "--one-hot", "--scale"),
            *("--loss", "cross_entropy", "--optimizer", "adam", "--lr", 0.2, "--epochs", 12, "--patience", 4),
            *(*metric, "--positive", "fraud", "-o", folder / "run"),
        )  # fmt: skip
        assert self.trained.code == 0, self.trained.err
        self.evaluated = run("evaluate", folder / "run", "--data", folder / "unseen.csv")
        self.document = run("evaluate", folder / "run", "--data", folder / "unseen.csv", "--json").json()
        self.predicted = run(
            "predict", folder / "run", "--data", folder / "unseen.csv", "-o", folder / "predictions.csv"
        )
        self.session = ort.InferenceSession(folder / "run" / "trained.onnx")

    def output(self, frame: pd.DataFrame) -> dict[str, np.ndarray]:
        """Run the exported file on raw columns."""
        names = [value.name for value in self.session.get_outputs()]
        return dict(zip(names, self.session.run(names, raw(frame)), strict=True))

    def expected(self, frame: pd.DataFrame) -> dict[str, float]:
        """Every figure of a data set, by scikit-learn."""
        found, truth = self.output(frame), frame["verdict"].to_numpy()
        probability, guess = found["probability"].astype(np.float64), found["class"]
        one = {"average": "binary", "zero_division": 0}
        fraud = (truth == "fraud", guess == "fraud")
        return {
            "loss": metrics.log_loss(
                truth, probability / probability.sum(axis=1, keepdims=True), labels=CLASSES
            ),
            "accuracy": metrics.accuracy_score(truth, guess),
            "f1 of 'fraud'": metrics.f1_score(*fraud, **one),
            "precision of 'fraud'": metrics.precision_score(*fraud, **one),
            "recall of 'fraud'": metrics.recall_score(*fraud, **one),
            "auroc of 'fraud'": metrics.roc_auc_score(fraud[0], probability[:, 1]),
            "f1_macro": metrics.f1_score(truth, guess, average="macro"),
        }


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    from cli.conftest import Runner

    with pytest.MonkeyPatch.context() as patch:
        yield Job(Runner(patch), tmp_path_factory.mktemp("job"))


def shown(text: str) -> dict[str, float]:
    """The names and numbers of a table with a frame."""
    rows = re.findall(r"^│ (.+?) +│ +([-\d.,e+]+) │$", text, re.MULTILINE)
    return {name: float(value.replace(",", "")) for name, value in rows}


def test_what_train_shows_is_what_the_exported_file_gives(job: Job) -> None:
    values = shown(job.trained.out)
    expected = job.expected(job.training)
    expected |= {f"val_{name}": value for name, value in job.expected(job.validation).items()}
    assert set(values) == {*expected, "learning_rate", "samples/s"}
    for name, value in expected.items():
        assert values[name] == pytest.approx(value, rel=1e-4), name
    assert expected["accuracy"] > 0.9 > expected["f1 of 'fraud'"] > 0.2
    title = re.search(r"Exported weights: epoch (\d+), of (\d+), with the best val_loss", job.trained.out)
    assert title is not None, job.trained.out  # it is not the last one that was exported
    assert int(title[1]) < int(title[2]) < 12
    losses = re.findall(r"val_loss ([\d.]+)", job.trained.err)
    assert int(title[1]) == 1 + int(np.argmin([float(loss) for loss in losses]))


def test_what_train_says_of_the_table(job: Job) -> None:
    rows = {line.split()[0]: line for line in job.trained.err.splitlines() if line.strip()}
    imputer = SimpleImputer(strategy="median").fit(job.training[NUMBERS].astype(float))
    for name, fill in zip(NUMBERS, imputer.statistics_, strict=True):
        gaps = int(job.training[name].isna().sum())
        found = re.search(r" (\d+)(?: +([\d.]+))?$", rows[name])
        assert found is not None
        assert int(found[1]) == gaps
        assert (float(found[2]) if gaps else None) == (fill if gaps else None)
    gaps = int(job.training["country"].isna().sum())
    assert re.search(rf"4 categories, one-hot +{gaps} +DE$", rows["country"])
    assert "2 categories, one-hot" in rows["card"]
    counts = job.training["verdict"].value_counts()
    shares = ", ".join(f"{name} {counts[name]} ({100 * counts[name] / 700:.1f} %)" for name in CLASSES)
    assert f"Classes of 'verdict', in the order of the model's outputs: {shares}" in job.trained.err
    assert "Metrics: f1, precision, recall, auroc: of the class 'fraud'." in job.trained.err
    remark = (
        "'NA', 'null' are categories. If they stand for a missing value, pass --missing NA --missing null."
    )
    assert f"Column 'country': {remark}" in job.trained.err


def test_what_evaluate_shows_is_scikit_learns(job: Job) -> None:
    expected, truth = job.expected(job.unseen), job.unseen["verdict"]
    values = shown(job.evaluated.out)
    assert set(values) == set(expected)
    for name, value in expected.items():
        assert values[name] == pytest.approx(value, rel=1e-5), name
        assert job.document[name.split(" ")[0]] == pytest.approx(value, rel=1e-5)
    guess = job.output(job.unseen)["class"]
    scores = metrics.precision_recall_fscore_support(truth, guess, labels=CLASSES, zero_division=0)
    matrix = metrics.confusion_matrix(truth, guess, labels=CLASSES)
    for index, name in enumerate(CLASSES):
        row = re.search(
            rf"^ {name} +(\d+) +([\d.]+) % +([\d.]+) +([\d.]+) +([\d.]+)$", job.evaluated.out, re.MULTILINE
        )
        assert row is not None
        assert int(row[1]) == scores[3][index]
        assert float(row[2]) == pytest.approx(100 * scores[3][index] / 400, abs=0.05)
        assert [float(row[i]) for i in (3, 4, 5)] == pytest.approx(
            [score[index] for score in scores[:3]], rel=1e-5
        )
        counts = re.search(rf"^ {name} +(\d+) +(\d+) +(\d+)$", job.evaluated.out, re.MULTILINE)
        assert counts is not None
        assert [int(count) for count in counts.groups()] == list(matrix[index])
        document = job.document["classes"][index]
        assert document["class"] == name
        assert document["share"] == pytest.approx(scores[3][index] / 400)
        assert [document[key] for key in ("precision", "recall", "f1")] == pytest.approx(
            [s[index] for s in scores[:3]]
        )
    assert job.document["confusion_matrix"] == matrix.tolist()


def test_predictions_are_the_exported_files(job: Job) -> None:
    frame = pd.read_csv(job.folder / "predictions.csv", dtype={"number": str})
    found = job.output(job.unseen)
    assert list(frame["number"]) == list(job.unseen["number"])  # with their zeros in front
    assert list(frame["class"]) == list(found["class"])
    np.testing.assert_allclose(
        frame[[f"probability_{n}" for n in CLASSES]], found["probability"], rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(frame[[f"logits_{n}" for n in CLASSES]], found["logits"], rtol=1e-4, atol=1e-5)
    assert len(frame.columns) == 1 + 3 + 3 + 1


def test_encoding_inside_of_the_file_is_scikit_learns_pipeline(job: Job) -> None:
    """The weights of the file, behind a pipeline of scikit-learn: the same scores."""
    most_frequent = SimpleImputer(strategy="most_frequent", missing_values=None)
    pipeline = ColumnTransformer(
        [
            ("amount", make_pipeline(SimpleImputer(strategy="median"), StandardScaler()), ["amount"]),
            ("country", make_pipeline(most_frequent, OneHotEncoder()), ["country"]),
            ("hour", make_pipeline(SimpleImputer(strategy="median"), StandardScaler()), ["hour"]),
            ("card", OneHotEncoder(), ["card"]),
            ("foreign", StandardScaler(), ["foreign"]),
        ],
        sparse_threshold=0,
    )

    def plain(frame: pd.DataFrame) -> pd.DataFrame:
        texts = frame[TEXTS].astype(object)
        return frame[[*NUMBERS, "foreign"]].astype(float).join(texts.where(texts.notna(), None))

    x = pipeline.fit(plain(job.training)).transform(plain(job.unseen))
    tensors = onnx.load(job.folder / "run" / "trained.onnx").graph.initializer
    weights = {t.name: onnx.numpy_helper.to_array(t).astype(np.float64) for t in tensors if t.data_type == 1}
    hidden = np.tanh(x @ weights["w1"] + weights["b1"])
    logits = hidden @ weights["w2"] + weights["b2"]
    np.testing.assert_allclose(job.output(job.unseen)["logits"], logits, rtol=1e-4, atol=1e-4)
