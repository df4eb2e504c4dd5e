"""`train`, `evaluate` and `predict` on pairs of texts."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxtrain import Trainer
from onnxtrain.losses import InfoNCELoss
from onnxtrain.texts import TextPairs, TextTokenizer, mine_hard_negatives
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


@pytest.mark.parametrize("pooling", [[], ["--include-pooling"]])
def test_a_trial_run_on_pairs(job: Path, run: Any, pooling: list[str]) -> None:
    options = [
        "--loss",
        "info_nce",
        "--batch-size",
        2,
        "--epochs",
        2,
        "--limit-batches",
        2,
        "--json",
        *pooling,
    ]
    result = run("train", job / "model.onnx", "--data", job / "pairs.csv", *options)
    assert result.code == 0, result.err
    document = result.json()
    assert document["differences"]["last_hidden_state"] < 1e-5
    # Retrieval is measured on all texts, and left out.
    assert document["exported"].keys() == {"epoch", "loss"}
    assert Trainer.resume(job / "model-trained").global_step == 4


def test_tables_of_results_are_for_people(job: Path, run: Any) -> None:
    result = run(
        "train", job / "model.onnx", "--data", job / "pairs.csv", "--loss", "info_nce", "--epochs", "1"
    )
    assert result.code == 0, result.err
    assert "recall@1" in result.out
    assert "→" in result.out
    result = run("evaluate", job / "model-trained", "--data", job / "pairs.csv")
    assert "ndcg@10" in result.out


@pytest.mark.parametrize("loss", ["info_nce", "cosine_similarity", "triplet"])
@pytest.mark.parametrize("batch", ["batch", "4"])
def test_evaluate_of_a_model_computes_what_python_computes(
    tmp_path: Path, run: Any, loss: str, batch: str
) -> None:
    """For a model of a fixed batch size, too, which cannot be trained on texts; pooling and length are in files."""
    model = small.write(tmp_path)
    small.pooling_files(tmp_path, "cls_token", normalize=True)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4}')
    data = tmp_path / "data.csv"
    if loss == "cosine_similarity":
        write(data, ["text1", "text2", "score"], small.SCORED)
    else:
        rows = small.TRIPLES if loss == "triplet" else small.PAIRS
        write(data, ["anchor", "positive", "negative"][: len(rows[0])], rows)
    trainer = Trainer(model, loss)
    # One batch: the loss of a batch depends on its other pairs.
    wanted = trainer.evaluate(str(data))
    small.write(tmp_path, batch=batch)
    result = run("evaluate", model, "--data", data, "--loss", loss, "--json")
    assert result.code == 0, result.err
    found = result.json()
    assert (found.pop("model"), found.pop("data")) == (str(model), str(data))
    assert found == pytest.approx(wanted, rel=1e-5)
    assert len(found) == (3 if loss == "cosine_similarity" else 6)
    if batch == "batch":
        longer = Trainer(model, loss, max_length=9).evaluate(str(data))
        assert longer["loss"] != pytest.approx(wanted["loss"], rel=1e-3)
        halves = run("evaluate", model, "--data", data, "--loss", loss, "--batch-size", 3, "--json").json()
        assert halves["loss"] == pytest.approx(trainer.evaluate(str(data), batch_size=3)["loss"], rel=1e-5)


def test_evaluate_of_a_model_of_a_run_takes_the_tokenizer_as_an_option(job: Path, run: Any) -> None:
    (job / "tokenizer.json").rename(job / "words.json")
    command = ["evaluate", job / "model.onnx", "--data", job / "pairs.csv", "--loss", "info_nce"]
    result = run(*command)
    assert result.code == 1
    assert "there is no tokenizer.json beside the model. Put it there, or pass --tokenizer" in result.err
    command += ["--tokenizer", job / "words.json", "--max-length", 3]
    result = run(*command, "--loss-option", "scale=10", "--json").json()
    tokenizer = TextTokenizer(job / "words.json", 3)
    trainer = Trainer(onnx.load(job / "model.onnx"), InfoNCELoss(scale=10), tokenizer=tokenizer)
    wanted = trainer.evaluate(small.PAIRS)
    assert {name: result[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loss", "triplet"], "samples have 2 texts, but the loss compares 3"),
        (["--loss", "cosine_similarity"], "it has no scores, which the loss needs"),
        (
            ["--loss", "info_nce", "--loss-input", "z"],
            "it has no output 'z'; its outputs are last_hidden_state.",
        ),
        (["--loss", "info_nce", "--text-columns", "a,b"], "there is no column a, b; it has anchor, positive"),
        (["--loss", "info_nce", "--metric", "mae"], "metrics need a target"),
        (
            ["--loss", "info_nce", "--max-length", "8"],
            "tokens. If the model takes fewer, pass their number as --max-",
        ),
        (
            ["--loss", "mse", "--max-length", "4"],
            "--max-length: for texts, pass a .csv, .tsv, .jsonl file and a loss",
        ),
        (
            ["--loss", "info_nce", "--mistakes", "a.png"],
            "--mistakes plots images; 'pairs.csv' contains texts.",
        ),
    ],
)
def test_evaluate_of_a_model_on_texts_says_what_does_not_fit(
    job: Path, run: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    small.write(job, positions=4 if "--max-length" in arguments else None)
    monkeypatch.chdir(job)
    result = run("evaluate", "model.onnx", "--data", "pairs.csv", *arguments)
    assert result.code == 1
    assert message in result.err


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


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_mine_writes_what_python_finds_and_train_reads_it(job: Path, run: Any, suffix: str) -> None:
    corpus = [*dict.fromkeys(text for pair in small.PAIRS for text in pair), "blue tree here"]
    (job / "corpus.txt").write_text("\n".join(corpus))
    output = job / f"mined{suffix}"
    options = ["--corpus", job / "corpus.txt", "--num-negatives", 2, "--range-min", 1, "--range-max", 9]
    result = run("mine", job / "model.onnx", "--data", job / "pairs.csv", *options, "-o", output)
    assert result.code == 0, result.err
    trainer = Trainer(job / "model.onnx", "info_nce")
    expected = mine_hard_negatives(trainer, small.PAIRS, corpus, num_negatives=2, range_min=1, range_max=9)
    assert TextPairs.read(output).texts == expected.texts
    assert f"{len(expected)} rows with 2 negatives each" in result.out
    trained = [
        "--loss",
        "info_nce",
        "--loss-option",
        "in_batch_negatives=false",
        "--epochs",
        1,
        "-o",
        job / "run",
    ]
    result = run("train", job / "model.onnx", "--data", output, *trained)
    assert result.code == 0, result.err
    # With the weights of the run.
    again = ["--margin", "-0.5", "--relative-margin", "-1", "--min-score", "-0.9", "--max-score", "0.999"]
    others = ["--random", "--seed", 3, "--triplets", "--num-negatives", 1, "--json"]
    document = run(
        "mine", job / "run", "--data", job / "pairs.csv", *again, *others, "-o", job / "more.csv"
    ).json()
    expected = mine_hard_negatives(
        Trainer.resume(job / "run"),
        small.PAIRS,
        num_negatives=1,
        margin=-0.5,
        relative_margin=-1,
        min_score=-0.9,
        max_score=0.999,
        sampling="random",
        seed=3,
        triplets=True,
    )
    assert TextPairs.read(job / "more.csv").texts == expected.texts
    assert document == {"output": str(job / "more.csv"), "rows": len(expected), "pairs": 7, "texts": 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text-columns", "positive"], "has 1 texts"),
        (["-o", "mined.txt"], "--output is 'mined.txt'"),
        (["--corpus", "missing.txt"], "missing.txt"),
        (["--max-score", "-1"], "no pair of"),
        (["--tokenizer", "missing.json"], "missing.json"),
    ],
)
def test_what_mine_refuses(job: Path, run: Any, options: list[str], message: str) -> None:
    output = [] if "-o" in options else ["-o", job / "mined.csv"]
    result = run("mine", job / "model.onnx", "--data", job / "pairs.csv", *output, *options)
    assert result.code == 1
    assert message in result.err
    assert not (job / "mined.csv").exists()
