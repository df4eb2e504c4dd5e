"""Tables from the shell: encoded as scikit-learn does it, remembered by the run, and refused where they do not fit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pandas as pd
import pytest

import models
from onnxtrain import Trainer
from onnxtrain.tables import PROPERTY, TableEncoder

ENCODED = ["--one-hot", "--impute", "mean"]
NUMBERS, TEXTS = ["age", "fare"], ["sex", "town"]


def passengers(rows: int = 120, seed: int = 0) -> pd.DataFrame:
    """Numbers and texts, some missing; the class follows from them."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.normal(40, 12, rows).round(1),
            "sex": rng.choice(["female", "male"], rows),
            "fare": rng.exponential(30, rows),
            "town": rng.choice(["C", "Q", "S"], rows, p=[0.2, 0.2, 0.6]),
            "member": rng.random(rows) < 0.5,
        }
    )
    lives = (frame["sex"] == "female") ^ (frame["age"] > 55)
    frame["fate"] = np.where(lives, "saved", "lost")
    frame.loc[rng.choice(rows, rows // 6, replace=False), "age"] = np.nan
    frame.loc[rng.choice(rows, 5, replace=False), "town"] = None
    return frame


def write(frame: pd.DataFrame, path: Path) -> Path:
    frame.to_csv(path, index=False) if path.suffix == ".csv" else frame.to_parquet(path, index=False)
    return path


@pytest.fixture
def net(tmp_path: Path) -> Path:
    onnx.save(models.mlp(features=8, classes=2), tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


def train(run: Any, net: Path, table: Path, *options: object) -> Any:
    return run(
        *("train", net, "--data", table, "--target", "fate", "--loss", "cross_entropy", "--lr", 0.02),
        *("-o", net.parent / "run", "--json", *options),
    )


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_train_evaluate_and_predict_a_table(run: Any, net: Path, tmp_path: Path, suffix: str) -> None:
    table = write(passengers(), tmp_path / f"a.{suffix}")
    other = write(passengers(60, seed=1), tmp_path / f"b.{suffix}")
    result = train(
        run, net, table, "--impute", "mean", "--one-hot", "--scale", "--epochs", 20, "--validation", other
    )
    assert result.code == 0, result.err
    assert result.json()["epochs"][-1]["val_accuracy"] > 0.75

    trainer = Trainer.resume(tmp_path / "run")
    encoder = TableEncoder.from_json(str(trainer.state.properties[PROPERTY]), "run")
    arrays = encoder.arrays(
        other, trainer.manifest.inputs, trainer.manifest.targets,
    )  # fmt: skip
    expected = trainer.evaluate(arrays["x"], arrays["labels"])
    document = run("evaluate", tmp_path / "run", "--data", other, "--json").json()
    assert {key: document[key] for key in expected} == expected

    without = write(passengers(60, seed=1).drop(columns="fate"), tmp_path / f"c.{suffix}")
    output = tmp_path / f"p.{suffix}"
    assert run("predict", tmp_path / "run", "--data", without, "-o", output).code == 0
    frame = pd.read_csv(output) if suffix == "csv" else pd.read_parquet(output)
    names = [f"{output}_{name}" for output in ("logits", "probability") for name in ("lost", "saved")]
    assert list(frame) == [*names, "class"]
    x = arrays["x"].astype(np.float32)
    assert run("export", tmp_path / "run", "-o", tmp_path / "network.onnx", "--network").code == 0
    logits = ort.InferenceSession(tmp_path / "network.onnx").run(None, {"x": x})[0]
    np.testing.assert_allclose(frame[["logits_lost", "logits_saved"]], logits, rtol=1e-4, atol=1e-5)
    assert (frame["class"] == np.array(["lost", "saved"])[logits.argmax(1)]).all()
    assert (frame["class"] == passengers(60, seed=1)["fate"]).mean() == pytest.approx(expected["accuracy"])

    more = run("train", tmp_path / "run", "--data", table, "--epochs", 1, "--json")
    assert more.code == 0, more.err
    assert len(more.json()["epochs"]) == 21
    refused = run("train", tmp_path / "run", "--data", table, "--impute", "median")
    assert "--impute median (it was mean)" in refused.err


def test_a_trial_run_checks_the_model_of_the_columns(run: Any, net: Path, tmp_path: Path) -> None:
    table = write(passengers(), tmp_path / "a.csv")
    options = (
        "--impute",
        "mean",
        "--one-hot",
        "--scale",
        "--epochs",
        1,
        "--batch-size",
        16,
        "--limit-batches",
        2,
    )
    result = train(run, net, table, *options)
    assert result.code == 0, result.err
    assert result.json()["differences"]["logits"] < 1e-5
    assert Trainer.resume(tmp_path / "run").global_step == 2


def test_regression_on_chosen_columns(run: Any, tmp_path: Path) -> None:
    frame = passengers().drop(columns=["age", "town"])
    onnx.save(models.mlp(features=2, classes=1), tmp_path / "net.onnx")
    frame["price"] = 2 * frame["member"] + 1
    table = write(frame, tmp_path / "a.csv")
    result = run(
        *("train", tmp_path / "net.onnx", "--data", table, "--target", "price", "--inputs", "fare,member"),
        *("--scale", "--loss", "mse", "--lr", 0.03, "--epochs", 40, "-o", tmp_path / "run", "--json"),
    )
    assert result.code == 0, result.err
    assert result.json()["epochs"][-1]["loss"] < 0.05
    assert run("predict", tmp_path / "run", "--data", table, "-o", tmp_path / "p.csv").code == 0
    predicted = pd.read_csv(tmp_path / "p.csv")
    assert list(predicted) == ["logits"]
    assert np.abs(predicted["logits"] - frame["price"]).mean() < 0.3


def test_several_inputs_are_columns_of_their_names(run: Any, tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> net (float[n, 1] fare, int64[n] kind) => (float[n, 1] y)
        <float[1, 1] w = {0.}, float[3, 1] table = {0., 0., 0.}>
        { a = MatMul(fare, w) b = Gather(table, kind) y = Add(a, b) }"""
    )
    onnx.save(model, tmp_path / "net.onnx")
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"kind": rng.choice(["a", "b", "c"], 90), "fare": rng.standard_normal(90)})
    frame["y"] = 3 * frame["fare"] + frame["kind"].map({"a": 1.0, "b": 2.0, "c": 4.0})
    table = write(frame, tmp_path / "a.csv")
    result = run(
        *("train", tmp_path / "net.onnx", "--data", table, "--target", "y", "--ordinal", "--loss", "mse"),
        *("--optimizer", "adam", "--lr", 0.1, "--epochs", 60, "-o", tmp_path / "run"),
    )
    assert result.code == 0, result.err
    trainer = Trainer.resume(tmp_path / "run")
    np.testing.assert_allclose(trainer.parameters["table"].data.ravel(), [1, 2, 4], atol=0.05)
    np.testing.assert_allclose(trainer.parameters["w"].data.ravel(), [3], atol=0.05)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, ["--one-hot"], "column 'age', row 3 {}: the value is missing. Fill such values by --impute"),
        ({}, ["--impute", "mode"], "--impute is 'mode'; pass mean, median, most_frequent or value=VALUE"),
        ({}, ["--impute", "mean"], "column 'sex', row 1 {}: 'male' is not a number. Encode"),
        ({"age": "old"}, ["--impute", "mean", "--inputs", "age,fare"], "column 'age', row 5 {}: 'old'"),
        ({}, ["--one-hot", "--ordinal"], "--one-hot and --ordinal are alternative encodings"),
        ({}, ["--inputs", "weight"], "has no column 'weight'; its columns are age, sex, fare, town, member, fate"),
        ({}, ["--inputs", "fare,fate"], "fate cannot be both in --inputs and the --target"),
        ({}, ["--inputs", "fare,member"], "has 2 values per row (fare, member), but the input 'x' of the model"),
        ({}, [*ENCODED, "--inputs", "sex,town,fare"], "has 6 values per row (sex (2), town (3), fare)"),
        ({"fate": None}, ENCODED, "column 'fate', row 5 {}: the target is missing"),
        ({"fate": "unknown"}, ENCODED, "class labels must be 0 to 1"),
    ],
)  # fmt: skip
def test_bad_tables_are_one_message(
    run: Any, net: Path, tmp_path: Path, change: dict[str, Any], options: list[str], message: str
) -> None:
    frame = passengers().astype({"age": object})
    frame.loc[:, "sex"] = ["male", *frame["sex"][1:]]
    frame.loc[[0, 1], "age"], frame.loc[2, "age"] = 30.0, np.nan
    for name, value in change.items():
        frame.loc[4, name] = value
    result = train(run, net, write(frame, tmp_path / "a.csv"), *options)
    assert result.code == 1
    assert message.format("(counted from 1, without the header)") in result.err, result.err
    assert len(result.err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_new_categories_and_gaps_are_told(run: Any, net: Path, tmp_path: Path) -> None:
    frame = passengers().dropna()
    table = write(frame, tmp_path / "a.csv")
    assert train(run, net, table, "--one-hot", "--epochs", 1).code == 0
    for name, value, message in (
        (
            "town",
            "X",
            "column 'town', row 4 (counted from 1, without the header): 'X' is not a category of the training "
            "data: C, Q, S",
        ),
        ("town", None, "column 'town', row 4 (counted from 1, without the header): the value is missing"),
        ("fare", None, "column 'fare', row 4 (counted from 1, without the header): the value is missing"),
    ):
        other = frame.copy()
        other.loc[other.index[3], name] = value
        result = run("predict", tmp_path / "run", "--data", write(other, tmp_path / "b.csv"))
        assert message in result.err, result.err
    fewer = write(frame.drop(columns="fare"), tmp_path / "c.csv")
    assert "has no column 'fare'" in run("evaluate", tmp_path / "run", "--data", fewer).err


def test_target_and_table_go_together(run: Any, net: Path, mlp: Path, data: Path, tmp_path: Path) -> None:
    table = write(passengers().dropna(), tmp_path / "a.csv")
    missing = run("train", net, "--data", table, "--loss", "cross_entropy")
    assert "name the column to predict with --target; its columns are age, sex" in missing.err
    arrays = run("train", mlp, "--data", data, "--loss", "cross_entropy", "--target", "y", "--one-hot")
    assert "--target, --one-hot are for tables (.csv, .tsv, .parquet)" in arrays.err
    assert run("train", mlp, "--data", data, "--loss", "cross_entropy", "--epochs", 1).code == 0
    other = run("evaluate", mlp.with_name("mlp-trained"), "--data", table)
    assert "was not trained on a table" in other.err


def test_without_pandas_it_says_what_to_install(
    run: Any, net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = write(passengers(), tmp_path / "a.csv")
    monkeypatch.setitem(sys.modules, "pandas", None)
    result = train(run, net, table)
    assert "Tables need pandas: pip install 'onnxtrain[data]'." in result.err


@pytest.mark.parametrize("policy", ["error", "own", "ignore"])
def test_run_and_exported_file_take_both_spellings_of_a_number(run: Any, policy: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    store = rng.integers(1, 5, 80).astype(float)
    store[:5] = np.nan
    frame = pd.DataFrame({"store": store, "x": rng.normal(size=80), "y": (store == 2).astype(int)})
    files = [write(frame, tmp_path / name) for name in ("t.csv", "t.parquet")]
    onnx.save(models.mlp(features=5 + (policy == "own"), classes=2), tmp_path / "net.onnx")
    options = [
        "--one-hot",
        "--impute",
        "most_frequent",
        "--categorical",
        "store",
        "--unknown-category",
        policy,
    ]
    trained = run(
        *(
            "train",
            tmp_path / "net.onnx",
            "--data",
            files[0],
            "--target",
            "y",
            "--loss",
            "cross_entropy",
            "--seed",
            1,
        ),
        *("--lr", 0.05, "--epochs", 30, "--positive", "1", "-o", tmp_path / "run", *options),
    )
    assert trained.code == 0, trained.err
    results, rows = [], []
    for index, path in enumerate(files):
        result = run("evaluate", tmp_path / "run", "--data", path, "--json")
        results.append(result.out)
        for source in ("run", "run/trained.onnx"):
            written = tmp_path / f"p{index}.csv"
            assert run("predict", tmp_path / source, "--data", path, "-o", written).code == 0
            rows.append(written.read_text())
    assert results[0].replace(str(files[0]), "") == results[1].replace(str(files[1]), "")
    assert rows[0] == rows[2]
    assert rows[1] == rows[3]
    session = ort.InferenceSession(tmp_path / "run" / "trained.onnx")
    scores = [
        session.run(None, {"store": np.array(texts, object), "x": frame["x"].to_numpy()[:4]})[0]
        for texts in (["1", "2", "3", ""], ["1.0", "2.0", "3.0", ""])
    ]
    np.testing.assert_array_equal(*scores)
    assert len({tuple(row) for row in scores[0]}) == 4
