"""`evaluate`, `predict` and `export`: the same numbers as those of the trainer and of a plain session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pandas as pd
import pytest
import scipy.special

import models
from cli.files import arrays_in
from onnxtrain import Trainer


@pytest.fixture
def trained(run: Any, mlp: Path, data: Path, tmp_path: Path) -> Path:
    result = run(
        "train", mlp, "--data", data, "--loss", "cross_entropy", "--epochs", 2, "-o", tmp_path / "run"
    )
    assert result.code == 0, result.err
    return tmp_path / "run"


def test_evaluate_is_trainer_evaluate(run: Any, trained: Path, data: Path) -> None:
    arrays = arrays_in(data)
    expected = Trainer.resume(trained).evaluate(arrays["x"], arrays["y"], batch_size=64)
    document = run("evaluate", trained, "--data", data, "--batch-size", 64, "--json").json()
    assert {key: document[key] for key in expected} == expected
    shown = run("evaluate", trained, "--data", data).out
    assert f"{expected['accuracy']:.6g}" in shown
    logits = ort.InferenceSession(trained / "trained.onnx").run(None, {"x": arrays["x"]})[0]
    assert expected["accuracy"] == pytest.approx((logits.argmax(1) == arrays["y"]).mean())


@pytest.mark.parametrize("suffix", ["npz", "csv", "parquet"])
@pytest.mark.parametrize("of", ["run", "model"])
def test_predictions_are_those_of_a_plain_session(
    run: Any, trained: Path, data: Path, tmp_path: Path, suffix: str, of: str
) -> None:
    source = trained if of == "run" else trained / "trained.onnx"
    output = tmp_path / f"predictions.{suffix}"
    result = run("predict", source, "--data", data, "-o", output, "--batch-size", 7, "--json")
    assert result.code == 0, result.err
    assert result.json()["samples"] == 200
    x = arrays_in(data)["x"]
    logits = ort.InferenceSession(trained / "trained.onnx").run(None, {"x": x})[0]
    if suffix == "npz":
        got = arrays_in(output)
        values, best = got["logits"], got.get("class")
    else:
        frame = pd.read_csv(output) if suffix == "csv" else pd.read_parquet(output)
        values = frame[["logits_0", "logits_1", "logits_2"]].to_numpy()
        best = frame.get("class")
    np.testing.assert_allclose(values, logits, rtol=1e-5, atol=1e-6)
    if of == "run":
        np.testing.assert_array_equal(best, logits.argmax(1))
    else:
        assert best is None


def test_predict_writes_probabilities_alone(run: Any, trained: Path, data: Path, tmp_path: Path) -> None:
    output = tmp_path / "probabilities.npz"
    assert run("predict", trained, "--data", data, "-o", output, "--probabilities").code == 0
    arrays = arrays_in(output)
    assert list(arrays) == ["probability"]
    logits = ort.InferenceSession(trained / "trained.onnx").run(None, {"x": arrays_in(data)["x"]})[0]
    np.testing.assert_allclose(arrays["probability"], scipy.special.softmax(logits, axis=1), rtol=1e-5)
    result = run("predict", trained / "trained.onnx", "--data", data, "-o", output, "--probabilities")
    assert result.code == 1
    assert "trained.onnx' returns logits, not probabilities. Pass the directory of a run" in " ".join(
        result.err.split()
    )


def test_samples_are_weighed_by_a_column_or_an_array(run: Any, mlp: Path, data: Path, tmp_path: Path) -> None:
    arrays = arrays_in(data)
    weights = np.random.default_rng(0).integers(0, 4, len(arrays["y"])).astype(np.float64)
    np.savez(tmp_path / "weighed.npz", **arrays, importance=weights)
    frame = pd.DataFrame(arrays["x"], columns=list("abcd")).assign(importance=weights, label=arrays["y"])
    frame.to_parquet(tmp_path / "weighed.parquet")
    trainer = Trainer(mlp, "cross_entropy")
    history = trainer.fit(arrays["x"], arrays["y"], epochs=2, sample_weight=weights, verbose=False)
    for name, options in (("weighed.npz", ()), ("weighed.parquet", ("--target", "label"))):
        command = (
            "train",
            mlp,
            "--data",
            tmp_path / name,
            *options,
            "--loss",
            "cross_entropy",
            "--epochs",
            2,
        )
        result = run(*command, "--sample-weight", "importance", "-o", tmp_path / f"{name}.run", "--json")
        assert result.json()["epochs"] == history.epochs
        assert "Not used" not in result.err
        evaluated = run("evaluate", tmp_path / f"{name}.run", "--data", tmp_path / name, "--json").json()
        expected = trainer.evaluate(arrays["x"], arrays["y"])
        assert evaluated["loss"] == pytest.approx(expected["loss"])
        # A finished run resumes with the class weights that it was started with.
        more = run(
            "train", tmp_path / f"{name}.run", "--data", tmp_path / name, "--epochs", 1, "--json"
        ).json()
        again = Trainer(mlp, "cross_entropy")
        for epochs in (2, 1):
            again.fit(arrays["x"], arrays["y"], epochs=epochs, sample_weight=weights, verbose=False)
        assert more["epochs"] == again.history.epochs
        wrong = run(*command, "--sample-weight", "weight", "-o", tmp_path / "wrong")
        assert wrong.code == 1
        assert "weight" in wrong.err
        assert not (tmp_path / "wrong").exists()


def test_classes_are_weighed_and_split_and_evaluated_between_epochs(
    run: Any, mlp: Path, data: Path, tmp_path: Path
) -> None:
    arrays = arrays_in(data)
    command = ("train", mlp, "--data", data, "--loss", "cross_entropy", "--epochs", 2, "--validation", 0.25)
    options = ("--class-weight", "0=3", "--class-weight", "2=0.5", "--stratify", "--evaluate-every", 4)
    document = run(*command, *options, "-o", tmp_path / "run", "--json").json()
    trainer = Trainer(mlp, "cross_entropy")
    history = trainer.fit(
        arrays["x"],
        arrays["y"],
        epochs=2,
        validation=0.25,
        class_weight={0: 3.0, 2: 0.5},
        stratify=True,
        evaluate_every=4,
        verbose=False,
    )
    assert document["epochs"] == history.epochs
    assert document["evaluations"] == history.evaluations
    assert [entry["step"] for entry in history.evaluations] == [4, 8]
    shown = run(*command, *options, "-o", tmp_path / "shown").err
    assert f"step 4  val_loss {history.evaluations[0]['val_loss']:.4f}" in shown
    balanced = run(*command, "--class-weight", "balanced", "-o", tmp_path / "balanced", "--json").json()
    expected = Trainer(mlp, "cross_entropy")
    expected.fit(arrays["x"], arrays["y"], epochs=2, validation=0.25, class_weight="balanced", verbose=False)
    assert balanced["epochs"] == expected.history.epochs
    plain = run(*command, "-o", tmp_path / "plain")
    assert plain.code == 0
    later = run("train", tmp_path / "plain", "--data", data, "--class-weight", "balanced")
    assert later.code == 1
    assert "Start a new run with --sample-weight or --class-weight." in " ".join(later.err.split())
    for value, message in (
        ("rose=2", "--class-weight is 'rose=2'; give balanced alone, or CLASS=WEIGHT such as 1=10."),
        ("1", "--class-weight is '1'; give balanced alone"),
        ("7=2", "names the classes [7], but the classes are 0 to 2"),
    ):
        result = run(*command, "--class-weight", value, "-o", tmp_path / "wrong")
        assert result.code == 1
        assert message in " ".join(result.err.split())
        assert not (tmp_path / "wrong").exists()


def test_predict_needs_no_targets(run: Any, trained: Path, data: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=arrays_in(data)["x"][:5])
    result = run("predict", trained, "--data", tmp_path / "x.npz", "-o", tmp_path / "p.npz")
    assert result.code == 0, result.err
    assert arrays_in(tmp_path / "p.npz")["logits"].shape == (5, 3)


def test_predict_fills_a_fixed_batch(run: Any, tmp_path: Path) -> None:
    model = models.mlp()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 4
    onnx.save(model, tmp_path / "fixed.onnx")
    x = np.random.default_rng(0).standard_normal((10, 4)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    arguments = ("predict", tmp_path / "fixed.onnx", "--data", tmp_path / "x.npz", "-o", tmp_path / "p.npz")
    assert run(*arguments).code == 0
    expected = ort.InferenceSession(models.mlp().SerializeToString()).run(None, {"x": x})[0]
    np.testing.assert_allclose(arrays_in(tmp_path / "p.npz")["logits"], expected, rtol=1e-5, atol=1e-6)
    refused = run(*arguments, "--batch-size", 3)
    assert (
        "--batch-size is 3, but the model has a fixed batch size of 4. Leave the option out." in refused.err
    )


def test_export_writes_the_trained_model(run: Any, trained: Path, data: Path, tmp_path: Path) -> None:
    document = run("export", trained, "-o", tmp_path / "out.onnx", "--json").json()
    assert document["outputs"] == ["logits"]
    x = arrays_in(data)["x"]
    got, expected = (
        ort.InferenceSession(path).run(None, {"x": x})[0]
        for path in (tmp_path / "out.onnx", trained / "trained.onnx")
    )
    np.testing.assert_array_equal(got, expected)
    run("export", trained, "-o", tmp_path / "hidden.onnx", "--outputs", "a")
    hidden = ort.InferenceSession(tmp_path / "hidden.onnx").run(None, {"x": x})[0]
    assert hidden.shape == (200, 8)


def test_what_cannot_be_used_is_one_message(run: Any, trained: Path, data: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (("evaluate", tmp_path / "none", "--data", data), "there is no such file"),
        (("predict", trained, "--data", data, "-o", "p.txt"), "choose an .npz, .csv or .parquet file"),
        (("predict", trained, "--data", tmp_path / "none.csv"), "there is no such file"),
    ):
        result = run(*arguments)
        assert result.code == 1
        assert message in result.err
        assert len(result.err.splitlines()) == 1


def test_replace_head(run: Any, mlp: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 4)).astype(np.float32)
    np.savez(tmp_path / "four.npz", x=x, y=x.argmax(axis=1))
    arguments = (
        "train",
        mlp,
        "--data",
        tmp_path / "four.npz",
        "--loss",
        "cross_entropy",
        "-o",
        tmp_path / "run",
    )
    assert "class labels must be 0 to 2" in run(*arguments).err
    result = run(*arguments, "--replace-head", 4, "--epochs", 15, "--lr", 0.02, "--json")
    assert result.code == 0, result.err
    document = result.json()
    assert document["epochs"][-1]["accuracy"] > 0.8
    assert ort.InferenceSession(document["model"]).run(None, {"x": x})[0].shape == (300, 4)
    again = run("train", tmp_path / "run", "--data", tmp_path / "four.npz", "--replace-head", 5)
    assert "--replace-head 5 (it was 4)" in again.err
