"""`onnxtrain calibrate`."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from PIL import Image
from sklearn.metrics import f1_score, log_loss

import models
from onnxtrain import Trainer

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 4)).astype(np.float32)


@pytest.fixture
def yes_or_no(run: Any, tmp_path: Path) -> tuple[Path, Path]:
    """A run of a model with one logit, on data with few positives, and the data."""
    onnx.save(models.mlp(classes=1), tmp_path / "one.onnx")
    y = (X[:, 0] + RNG.normal(size=200) > 1.3).astype(np.float32)[:, None]
    np.savez(tmp_path / "data.npz", x=X, y=y)
    options = ("--loss", "bce_with_logits", "--epochs", 4, "--learning-rate", 0.02, "-o", tmp_path / "run")
    trained = run("train", tmp_path / "one.onnx", "--data", tmp_path / "data.npz", *options)
    assert trained.code == 0, trained.err
    return tmp_path / "run", tmp_path / "data.npz"


def read(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as content:
        return dict(content)


def test_the_command_does_what_the_method_does(run: Any, mlp: Path, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run("train", mlp, "--data", data, "--loss", "cross_entropy", "--epochs", 2, "-o", folder).code == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    output = tmp_path / "calibrated.onnx"
    options = ("--data", data, "--output", output, "--batch-size", 64)
    document = run("calibrate", folder, *options, "--json").json()
    arrays = read(data)
    trainer = Trainer.resume(folder)
    raw = trainer.predict_proba(arrays["x"])
    found = trainer.calibrate(arrays["x"], arrays["y"])
    assert document["temperature"] == found.temperature != 1
    assert document["nll_before"] == pytest.approx(log_loss(arrays["y"], raw), rel=1e-5)
    trainer.export(tmp_path / "same.onnx")
    assert output.read_bytes() == (tmp_path / "same.onnx").read_bytes()
    # The run is not changed.
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    shown = run("calibrate", folder, *options).out
    assert f"{found.nll:.6g}" in shown
    assert f"{found.ece:.6g}" in shown
    # predict needs no loss: the file says how its scores become probabilities.
    predicted = run("predict", output, "--data", data, "-o", tmp_path / "out.npz")
    assert predicted.code == 0, predicted.err
    values = read(tmp_path / "out.npz")
    np.testing.assert_allclose(values["probability"], trainer.predict_proba(arrays["x"]), rtol=1e-5)
    assert log_loss(arrays["y"], values["probability"]) == pytest.approx(found.nll, rel=1e-4)
    np.testing.assert_array_equal(values["class"], values["logits"].argmax(axis=1))


def test_the_threshold_decides_in_predictions(run: Any, yes_or_no: tuple[Path, Path], tmp_path: Path) -> None:
    folder, data = yes_or_no
    output = tmp_path / "calibrated.onnx"
    document = run("calibrate", folder, "--data", data, "-o", output, "--threshold", "f1", "--json").json()
    truth = read(data)["y"].reshape(-1)
    for more in ((), ("--loss", "bce_with_logits")):
        assert run("predict", output, "--data", data, "-o", tmp_path / "out.npz", *more).code == 0
        values = read(tmp_path / "out.npz")
        assert f1_score(truth, values["class"]) == pytest.approx(document["metric_value"])
        chance = values["probability"].reshape(-1)
        np.testing.assert_array_equal(values["class"], chance > document["threshold"])
    assert document["metric_value"] > document["metric_before"]
    assert f1_score(truth, chance > 0.5, zero_division=0) == pytest.approx(document["metric_before"])
    assert (
        "decision threshold"
        in run("calibrate", folder, "--data", data, "-o", output, "--threshold", "f1").out
    )
    # A calibrated run that was saved decides so, too.
    trainer = Trainer.resume(folder)
    trainer.calibrate(X, truth[:, None], threshold="f1")
    trainer.save(tmp_path / "saved")
    assert run("predict", tmp_path / "saved", "--data", data, "-o", tmp_path / "of_run.npz").code == 0
    np.testing.assert_array_equal(read(tmp_path / "of_run.npz")["class"], values["class"])


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("loss", ["cross_entropy", "bce_with_logits"])
def test_a_model_of_a_table_decides_by_the_threshold(run: Any, tmp_path: Path, loss: str) -> None:
    rng = np.random.default_rng(1)
    numbers = rng.normal(size=150)
    rare = numbers + rng.normal(size=150) > 1.2
    names = ("no", "yes") if loss == "cross_entropy" else ("0", "1")
    lines = [f"{number:.4f},{names[int(flag)]}" for number, flag in zip(numbers, rare, strict=True)]
    (tmp_path / "t.csv").write_text("\n".join(["x,y", *lines]) + "\n")
    options = ("--network", "mlp", "--hidden", "6", "--target", "y", "--epochs", 8, "--loss", loss)
    trained = run("train", "--data", tmp_path / "t.csv", *options, "-o", tmp_path / "run")
    assert trained.code == 0, trained.err
    output = tmp_path / "calibrated.onnx"
    how = ("--data", tmp_path / "t.csv", "--threshold", "f1", "--json")
    result = run("calibrate", tmp_path / "run", *how, "-o", output)
    assert result.code == 0, result.err
    document = result.json()
    assert run("predict", output, "--data", tmp_path / "t.csv", "-o", tmp_path / "out.csv").code == 0
    with open(tmp_path / "out.csv") as file:
        predicted = [row["class"] == names[1] for row in csv.DictReader(file)]
    assert f1_score(rare, predicted) == pytest.approx(document["metric_value"])
    session = ort.InferenceSession(str(output), providers=["CPUExecutionProvider"])
    of_file = session.run(["class"], {"x": numbers.round(4)})[0]
    np.testing.assert_array_equal(of_file.astype(str) == names[1], predicted)
    # The validation data may be in a file of another format.
    other = [line.replace(",", ";").replace(".", ",") for line in ("x,y", *lines)]
    (tmp_path / "other.csv").write_text("\n".join(other) + "\n", encoding="utf-16")
    text = ("--separator", ";", "--decimal", ",", "--encoding", "utf-16")
    how = ("--data", tmp_path / "other.csv", *how[2:], *text)
    same = run("calibrate", tmp_path / "run", *how, "-o", output)
    assert same.code == 0, same.err
    assert same.json() == document | {"data": str(tmp_path / "other.csv")}


@pytest.mark.thorough
def test_images_are_decided_by_the_threshold(run: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, light in (("a", 90), ("b", 140)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(20 if name == "a" else 6):
            pixels = rng.integers(light - 80, light + 80, (6, 6, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{index}.png")
    nodes = models.parse_nodes("f = Flatten(x)  y = Gemm(f, w, b)")
    values = {
        "w": rng.normal(0, 0.05, (108, 2)).astype(np.float32),
        "b": np.zeros(2, np.float32),
    }
    onnx.save(models.make_model(nodes, {"x": ["n", 3, 6, 6]}, {"y": ["n", 2]}, values), tmp_path / "m.onnx")
    options = (
        "--loss",
        "cross_entropy",
        "--mean",
        "0.5",
        "--std",
        "0.5",
        "--epochs",
        2,
        "-o",
        tmp_path / "run",
    )
    assert run("train", tmp_path / "m.onnx", "--data", tmp_path / "photos", *options).code == 0
    how = ("--data", tmp_path / "photos", "-o", tmp_path / "c.onnx", "--threshold", "f1", "--json")
    document = run("calibrate", tmp_path / "run", *how).json()
    assert (
        run("predict", tmp_path / "c.onnx", "--data", tmp_path / "photos", "-o", tmp_path / "out.csv").code
        == 0
    )
    with open(tmp_path / "out.csv") as file:
        rows = list(csv.DictReader(file))
    truth = [Path(row["path"]).parent.name == "b" for row in rows]
    assert f1_score(truth, [row["class"] == "b" for row in rows]) == pytest.approx(document["metric_value"])


def test_other_losses_are_refused(run: Any, mlp: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "r.npz", x=X, y=X[:, :3])
    run("train", mlp, "--data", tmp_path / "r.npz", "--loss", "mse", "--epochs", 1, "-o", tmp_path / "run")
    refused = run("calibrate", tmp_path / "run", "--data", tmp_path / "r.npz", "-o", tmp_path / "c.onnx")
    assert refused.code == 1
    assert "does not define the probability of one class" in " ".join(refused.err.split())
    assert not (tmp_path / "c.onnx").exists()
