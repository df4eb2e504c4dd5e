"""The exported file of a run on a table: all kinds of networks, fed with raw columns, beside the network alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pandas as pd
import pytest
from scipy.special import expit, softmax

import models
from onnxtrain import Trainer
from onnxtrain.tables import PROPERTY, TableEncoder


def table(folder: Path, rows: int = 40) -> tuple[Path, pd.DataFrame]:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"w1": rng.normal(5, 2, rows), "kind": rng.choice(["a", "b", "c"], rows)})
    frame["many"] = 10**9 + rng.integers(0, 9, rows)  # float32 cannot tell these apart
    frame["label"] = np.where(frame["kind"] == "a", "yes", "no")
    frame["number"] = (frame["kind"] == "a").astype(int)
    frame["price"] = frame["w1"] * 2
    frame.to_csv(folder / "t.csv", index=False)
    return folder / "t.csv", frame


def raw(session: ort.InferenceSession, frame: pd.DataFrame) -> dict[str, np.ndarray]:
    kinds = {"tensor(string)": object, "tensor(double)": np.float64}
    names = {value.name: value.name.removesuffix("_column") for value in session.get_inputs()}
    return {v.name: frame[names[v.name]].to_numpy().astype(kinds[v.type]) for v in session.get_inputs()}


def outputs(path: Path, frame: pd.DataFrame) -> dict[str, np.ndarray]:
    session = ort.InferenceSession(path)
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, raw(session, frame)), strict=True))


def encoded(run_directory: Path, path: Path) -> dict[str, np.ndarray]:
    """The arrays that the network was trained on."""
    trainer = Trainer.resume(run_directory)
    encoder = TableEncoder.from_json(str(trainer.state.properties[PROPERTY]), "run")
    return encoder.arrays(path, trainer.manifest.inputs, [])


def alone(run: Any, folder: Path, path: Path) -> np.ndarray:
    """The scores of the network alone for the encoded arrays."""
    assert run("export", folder / "run", "-o", folder / "network.onnx", "--network").code == 0
    session = ort.InferenceSession(folder / "network.onnx")
    kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}
    feeds = {
        v.name: encoded(folder / "run", path)[v.name].astype(kinds[v.type]) for v in session.get_inputs()
    }
    return session.run(None, feeds)[0]


def train(
    run: Any, folder: Path, model: onnx.ModelProto, path: Path, loss: str, target: str, *more: object
) -> None:
    onnx.save(model, folder / "net.onnx")
    result = run(
        *("train", folder / "net.onnx", "--data", path, "--target", target, "--loss", loss, "--epochs", 2),
        *("-o", folder / "run", *more),
    )
    assert result.code == 0, result.err


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> net {text}')


def test_columns_that_have_names_of_the_network(run: Any, tmp_path: Path) -> None:
    """A column w1 beside the parameter w1, one called like an inner value, one called like the output."""
    path, frame = table(tmp_path)
    frame = frame.rename(columns={"kind": "logits", "many": "h"})
    frame.to_csv(path, index=False)
    train(
        run, tmp_path, models.mlp(features=5, classes=2), path, "cross_entropy", "label",
        "--one-hot", "--scale", "--inputs", "w1,logits,h",
    )  # fmt: skip
    session = ort.InferenceSession(tmp_path / "run" / "trained.onnx")
    assert {value.name for value in session.get_inputs()} == {"w1", "logits_column", "h"}
    found = outputs(tmp_path / "run" / "trained.onnx", frame)
    scores = alone(run, tmp_path, path)
    np.testing.assert_allclose(found["logits"], scores, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["probability"], softmax(scores.astype(np.float64), axis=1), rtol=1e-5)
    assert list(found["class"]) == list(np.array(["no", "yes"])[scores.argmax(axis=1)])
    onnx.checker.check_model(onnx.load(tmp_path / "run" / "trained.onnx"), full_check=True)
    predicted = run("predict", tmp_path / "run" / "trained.onnx", "--data", path, "-o", tmp_path / "p.npz")
    assert predicted.code == 0, predicted.err
    with np.load(tmp_path / "p.npz") as content:
        assert list(content["class"]) == list(found["class"])


def test_a_column_called_class(run: Any, tmp_path: Path) -> None:
    """As in the table of the Titanic: the column keeps its name, and the output gets another, in both files."""
    path, frame = table(tmp_path)
    frame = frame.rename(columns={"kind": "class"})
    frame.to_csv(path, index=False)
    train(
        run,
        tmp_path,
        models.mlp(features=3, classes=2),
        path,
        "cross_entropy",
        "label",
        "--one-hot",
        "--inputs",
        "class",
    )
    for source in ("run", "run/trained.onnx"):
        assert (
            run("predict", tmp_path / source, "--data", path, "-o", tmp_path / "p.csv", "--id", "class").code
            == 0
        )
        predicted = pd.read_csv(tmp_path / "p.csv")
        names = [f"{kind}_{name}" for kind in ("logits", "probability") for name in ("no", "yes")]
        assert list(predicted) == ["class", *names, "predicted_class"]
        assert list(predicted["class"]) == list(frame["class"])


def test_large_numbers_are_scaled_in_float64(run: Any, tmp_path: Path) -> None:
    path, frame = table(tmp_path)
    model = parse("(float[n, 1] x) => (float[n, 1] y) <float[1, 1] w = {1}> { y = MatMul(x, w) }")
    train(run, tmp_path, model, path, "mse", "price", "--scale", "--inputs", "many", "--lr", 0.000001)
    found = outputs(tmp_path / "run" / "trained.onnx", frame)
    standard = (frame["many"] - frame["many"].mean()) / frame["many"].std(ddof=0)
    np.testing.assert_allclose(found["y"][:, 0], standard, rtol=1e-4, atol=1e-5)
    assert set(found) == {"y"}  # a quantity has neither class nor probability


@pytest.mark.parametrize("shape", ["n", "n, 1"])
def test_yes_or_no(run: Any, tmp_path: Path, shape: str) -> None:
    path, frame = table(tmp_path)
    squeeze = "y = Squeeze(a, axes)" if shape == "n" else "y = Identity(a)"
    model = parse(
        f"(float[n, 1] x) => (float[{shape}] y) <float[1, 1] w = {{1}}, int64[1] axes = {{1}}> "
        f"{{ a = MatMul(x, w) {squeeze} }}"
    )
    train(run, tmp_path, model, path, "bce_with_logits", "number", "--scale", "--inputs", "w1")
    found = outputs(tmp_path / "run" / "trained.onnx", frame)
    scores = alone(run, tmp_path, path)
    np.testing.assert_allclose(found["probability"], expit(scores), rtol=1e-5)
    np.testing.assert_array_equal(found["class"], (scores.ravel() > 0).astype(int))
    assert run("predict", tmp_path / "run", "--data", path, "-o", tmp_path / "p.csv").code == 0
    predicted = pd.read_csv(tmp_path / "p.csv")
    np.testing.assert_allclose(predicted["probability"], expit(scores).ravel(), rtol=1e-4)
    assert list(predicted["class"]) == list(found["class"])
    shown = run("evaluate", tmp_path / "run", "--data", path, "--json").json()
    truth = frame["number"].to_numpy()
    assert shown["classes"][1]["samples"] == truth.sum()
    assert shown["confusion_matrix"][1][1] == ((found["class"] == 1) & (truth == 1)).sum()


def test_inner_values_may_be_called_like_the_new_outputs(run: Any, tmp_path: Path) -> None:
    path, frame = table(tmp_path)
    model = parse(
        """(float[n, 1] x) => (float[n, 2] y) <float[1, 2] w = {1, -1}, float[2] probability = {0, 0}>
        { class = MatMul(x, w) y = Add(class, probability) }"""
    )
    train(run, tmp_path, model, path, "cross_entropy", "label", "--scale", "--inputs", "w1")
    found = outputs(tmp_path / "run" / "trained.onnx", frame)
    assert set(found) == {"y", "probability", "class"}
    np.testing.assert_allclose(found["probability"], softmax(found["y"], axis=1), rtol=1e-5)


def test_several_inputs(run: Any, tmp_path: Path) -> None:
    path, frame = table(tmp_path)
    model = parse(
        """(float[n, 1] w1, int64[n] kind) => (float[n, 2] y)
        <float[1, 2] w = {1, -1}, float[3, 2] rows = {1, 2, 3, 4, 5, 6}>
        { a = MatMul(w1, w) b = Gather(rows, kind) y = Add(a, b) }"""
    )
    train(run, tmp_path, model, path, "cross_entropy", "label", "--ordinal", "--inputs", "kind,w1")
    found = outputs(tmp_path / "run" / "trained.onnx", frame)
    np.testing.assert_allclose(found["y"], alone(run, tmp_path, path), rtol=1e-5, atol=1e-5)


def test_half_precision_and_a_fixed_batch(run: Any, tmp_path: Path) -> None:
    path, frame = table(tmp_path)
    model = parse(
        "(float16[4, 1] x) => (float16[4, 2] y) <float16[1, 2] w = {15360, 0}> { y = MatMul(x, w) }"
    )
    train(run, tmp_path, model, path, "cross_entropy", "number", "--scale", "--inputs", "w1")
    session = ort.InferenceSession(tmp_path / "run" / "trained.onnx")
    assert session.get_inputs()[0].shape == [4]
    found = session.run(["y", "class"], {"w1": frame["w1"].to_numpy()[:4]})
    assert (
        run("predict", tmp_path / "run" / "trained.onnx", "--data", path, "-o", tmp_path / "p.csv").code == 0
    )
    predicted = pd.read_csv(tmp_path / "p.csv")
    assert len(predicted) == 40
    assert list(predicted["class"][:4]) == list(found[1])


def train_on_one_column(run: Any, tmp_path: Path, path: Path) -> None:
    """Trains a network of two classes on column `w1` of a table."""
    network = models.mlp(features=1, classes=2)
    train(run, tmp_path, network, path, "cross_entropy", "label", "--inputs", "w1", "--scale")


def test_other_values_of_the_network(run: Any, tmp_path: Path) -> None:
    path, frame = table(tmp_path)
    train_on_one_column(run, tmp_path, path)
    document = run("export", tmp_path / "run", "-o", tmp_path / "h.onnx", "--outputs", "a", "--json").json()
    assert document["outputs"] == ["a"]
    assert outputs(tmp_path / "h.onnx", frame)["a"].shape == (40, 8)


def test_predict_with_a_file_tells_the_row(run: Any, tmp_path: Path) -> None:
    """The file alone can name the column only; the command looks at the table first."""
    path, frame = table(tmp_path)
    train(
        run,
        tmp_path,
        models.mlp(features=3, classes=2),
        path,
        "cross_entropy",
        "label",
        "--one-hot",
        "--inputs",
        "kind",
    )
    frame.loc[3, "kind"] = "z"
    frame.to_csv(path, index=False)
    result = run("predict", tmp_path / "run" / "trained.onnx", "--data", path, "-o", tmp_path / "p.csv")
    assert (
        "column 'kind', row 4 (counted from 1, without the header): 'z' is not a category of the training data: a, b, c"
        in result.err
    )
    arrays = run("predict", tmp_path / "run" / "trained.onnx", "--data", tmp_path / "net.onnx")
    assert arrays.code == 1


def test_training_the_exported_file_says_what_to_train(run: Any, tmp_path: Path) -> None:
    path, _ = table(tmp_path)
    train_on_one_column(run, tmp_path, path)
    file = tmp_path / "run" / "trained.onnx"
    again = (
        "--data",
        path,
        "--target",
        "label",
        "--inputs",
        "w1",
        "--loss",
        "cross_entropy",
        "-o",
        tmp_path / "b",
    )
    refused = run("train", file, *again)
    assert "takes the unencoded columns of a table" in refused.err
    assert run("export", tmp_path / "run", "-o", tmp_path / "network.onnx", "--network").code == 0
    result = run("train", tmp_path / "network.onnx", *again, "--scale")
    assert result.code == 0, result.err
    shown = run("inspect", file, "--json").json()
    assert {"role": "input", "name": "w1", "dtype": "double", "shape": "[batch]"} in shown["values"]
