"""`train`, `evaluate` and `predict` on pairs of texts."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from onnxtrain import Trainer
from onnxtrain.losses import InfoNCELoss
from texts import small


@pytest.fixture
def job(tmp_path: Path) -> Path:
    small.write(tmp_path)
    write(tmp_path / "pairs.csv", ["anchor", "positive"], small.PAIRS)
    return tmp_path


def write(path: Path, header: list[str], rows: list[Any]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def test_train_prints_metrics_before_and_after_as_python_computes_them(job: Path, run: Any) -> None:
    options = [
        "--loss",
        "info_nce",
        "--loss-option",
        "scale=10",
        "--lr",
        "0.01",
        "--epochs",
        "4",
        "--batch-size",
        "3",
    ]
    result = run(
        "train", job / "model.onnx", "--data", job / "pairs.csv", *options, "--validation", "0.3", "--json"
    )
    assert result.code == 0, result.err
    document = result.json()
    trainer = Trainer(job / "model.onnx", InfoNCELoss(scale=10), learning_rate=0.01)
    history = trainer.fit(small.PAIRS, epochs=4, batch_size=3, validation=0.3, verbose=False)
    assert [epoch["loss"] for epoch in document["epochs"]] == [epoch["loss"] for epoch in history.epochs]
    names = {f"val_{name}" for name in ("recall@1", "recall@5", "recall@10", "mrr", "ndcg@10")}
    assert document["before"].keys() == names
    assert names <= document["exported"].keys()
    assert "Before training: val_recall@1" in result.err
    # All pairs, before and after, with the run that the command left.
    for directory, wanted in ((job / "model-trained", trainer),):
        found = run("evaluate", directory, "--data", job / "pairs.csv", "--json").json()
        assert {key: found[key] for key in ("loss", "mrr")} == pytest.approx(
            {key: value for key, value in wanted.evaluate(small.PAIRS).items() if key in ("loss", "mrr")}
        )


def test_tables_of_results_are_for_people(job: Path, run: Any) -> None:
    result = run(
        "train", job / "model.onnx", "--data", job / "pairs.csv", "--loss", "info_nce", "--epochs", "1"
    )
    assert result.code == 0, result.err
    assert "recall@1" in result.out
    assert "→" in result.out
    result = run("evaluate", job / "model-trained", "--data", job / "pairs.csv")
    assert "ndcg@10" in result.out


def test_resumed_run_reads_the_same_columns_and_needs_no_tokenizer(job: Path, run: Any) -> None:
    rows = [(b, i, a) for i, (a, b) in enumerate(small.PAIRS)]
    write(job / "other.csv", ["reply", "number", "ask"], rows)
    columns = ["--text-columns", "ask,reply"]
    first = run(
        "train", job / "model.onnx", "--data", job / "other.csv", "--loss", "info_nce", "--epochs", "1", *columns,
        "--max-length", "5", "--tokenizer", job / "tokenizer.json", "-o", job / "run",
    )  # fmt: skip
    assert first.code == 0, first.err
    (job / "tokenizer.json").unlink()
    again = run("train", job / "run", "--data", job / "other.csv", "--epochs", "2", "--json")
    assert again.code == 0, again.err
    assert [epoch["epoch"] for epoch in again.json()["epochs"]] == [1, 2, 3]
    assert "before" not in again.json()
    assert run("evaluate", job / "run", "--data", job / "other.csv").code == 0
    # Without names, a file of another shape is unclear.
    write(job / "unclear.csv", ["a", "b", "c", "d"], [("1", "2", "3", "4")])
    result = run("evaluate", job / "run", "--data", job / "unclear.csv")
    assert result.code == 1
    assert "there is no column ask, reply; it has a, b, c, d" in result.err
    result = run("train", job / "run", "--data", job / "other.csv", "--tokenizer", job / "model.onnx")
    assert "--tokenizer is for new runs" in result.err


def test_predict_writes_embeddings(job: Path, run: Any) -> None:
    run("train", job / "model.onnx", "--data", job / "pairs.csv", "--loss", "info_nce", "--epochs", "1")
    shown = run("inspect", job / "model-trained", "--json")
    assert "embeddings.npy" in shown.json()["run"]["next"]["predict"]
    # It has no place for a vocabulary.
    assert "[CLS]" not in shown.out
    wanted = Trainer.resume(job / "model-trained").predict([row[0] for row in small.PAIRS])
    (job / "lines.txt").write_text("\n".join(row[0] for row in small.PAIRS) + "\n")
    for data, columns in (("lines.txt", []), ("pairs.csv", ["--text-columns", "anchor"])):
        output = job / "embeddings.npy"
        result = run("predict", job / "model-trained", "--data", job / data, "-o", output, *columns)
        assert result.code == 0, result.err
        assert f"Embeddings of {len(small.PAIRS)} texts" in result.out
        assert (np.load(output) == wanted).all()
    result = run("predict", job / "model-trained", "--data", job / "lines.txt", "-o", job / "e.npz", "--json")
    assert result.json()["shape"] == list(wanted.shape)
    assert (np.load(job / "e.npz")["embedding"] == wanted).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "a.csv"], "embeddings of texts are written to an .npy or .npz file"),
        (["-o", "a.npy"], "it has the columns anchor, positive. Name the one with the texts: --text-columns"),
        (["-o", "a.npy", "--text-columns", "c"], "Name the one with the texts"),
    ],
)
def test_predict_says_what_is_missing(job: Path, run: Any, arguments: list[str], message: str) -> None:
    run("train", job / "model.onnx", "--data", job / "pairs.csv", "--loss", "info_nce", "--epochs", "1")
    result = run("predict", job / "model-trained", "--data", job / "pairs.csv", *arguments)
    assert result.code == 1
    assert message in result.err


def test_pooling_is_written_on_request(job: Path, run: Any) -> None:
    run(
        "train", job / "model.onnx", "--data", job / "pairs.csv", "--loss", "info_nce", "--epochs", "1",
        "--include-pooling",
    )  # fmt: skip
    session = ort.InferenceSession(job / "model-trained" / "trained.onnx")
    assert [value.name for value in session.get_outputs()] == ["last_hidden_state", "sentence_embedding"]
    tokens = small.tokenizer().encode("red cat")
    feeds = {"input_ids": np.array([tokens.ids]), "attention_mask": np.array([tokens.attention_mask])}
    wanted = Trainer.resume(job / "model-trained").predict(["red cat"])
    assert np.abs(session.run(["sentence_embedding"], feeds)[0] - wanted).max() < 1e-6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--loss", "triplet"],
            "samples have 2 texts, but the loss compares 3. Choose the columns (--text-columns)",
        ),
        (["--loss", "mse", "--max-length", "4"], "--max-length are for texts"),
        (["--loss", "mse", "--tokenizer", "t.json"], "--tokenizer are for texts"),
        (["--loss", "info_nce", "--target", "positive"], "--target are for tables"),
        (["--loss", "info_nce", "--validation", "missing.csv"], "Reading texts from 'missing.csv'"),
        (["--loss", "info_nce", "--text-columns", "a,b"], "there is no column a, b; it has anchor, positive"),
    ],
)
def test_options_that_do_not_fit_leave_no_run(
    job: Path, run: Any, arguments: list[str], message: str
) -> None:
    result = run("train", job / "model.onnx", "--data", job / "pairs.csv", *arguments)
    assert result.code == 1
    assert message in result.err
    assert not (job / "model-trained").exists()
