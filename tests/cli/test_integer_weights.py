"""`--straight-through` on a quantized model: its integer weights are trained, too."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from cli.files import arrays_in
from onnxtrain import Trainer, qat

SETTINGS = ("--loss", "cross_entropy", "--epochs", 2, "--lr", 0.05, "--seed", 3, "--straight-through")


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    """A network with two int8 layers and one float bias."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[n, 4] x) => (float[n, 3] scores)
        <float s = {0.05}, int8 z = {0}> {
            a = DequantizeLinear(fc1_quantized, s, z)  h = MatMul(x, a)  r = Relu(h)
            q = QuantizeLinear(r, s, z)  d = DequantizeLinear(q, s, z)
            b = DequantizeLinear(fc2_quantized, s, z)  y = MatMul(d, b)  scores = Add(y, bias) }"""
    )
    rng = np.random.default_rng(0)
    arrays = {
        "fc1_quantized": rng.integers(-20, 20, (4, 8)).astype(np.int8),
        "fc2_quantized": rng.integers(-20, 20, (8, 3)).astype(np.int8),
        "bias": np.zeros(3, np.float32),
    }
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    onnx.save(model, tmp_path / "int8.onnx")
    return tmp_path / "int8.onnx"


def integers(path: Path | onnx.ModelProto) -> dict[tuple[int, ...], bytes]:
    """The int8 weights by shape: converting gives them other names."""
    model = onnx.load(path) if isinstance(path, Path) else path
    arrays = map(numpy_helper.to_array, model.graph.initializer)
    return {array.shape: array.tobytes() for array in arrays if array.dtype == np.int8 and array.ndim == 2}


def test_train_is_preparing_training_and_converting_in_python(
    run: Any, quantized: Path, data: Path, tmp_path: Path
) -> None:
    result = run("train", quantized, "--data", data, *SETTINGS, "-o", tmp_path / "run")
    assert result.code == 0, result.err
    assert "56 are trained" in result.err
    arrays = arrays_in(data)
    trainer = Trainer(
        qat.prepare(quantized), "cross_entropy", learning_rate=0.05, seed=3, straight_through=True
    )
    trainer.fit(arrays["x"], arrays["y"], epochs=2, verbose=False)
    trainer.export(tmp_path / "python.onnx")
    found = integers(tmp_path / "run" / "trained.onnx")
    assert found == integers(qat.convert(onnx.load(tmp_path / "python.onnx")))
    assert all(found[shape] != before for shape, before in integers(quantized).items())
    # A later command exports the same, also from a run that was resumed.
    again = run("train", tmp_path / "run", "--epochs", 3)
    assert again.code == 0, again.err
    assert run("export", tmp_path / "run", "-o", tmp_path / "again.onnx").code == 0
    assert integers(tmp_path / "again.onnx") == integers(tmp_path / "run" / "trained.onnx")
    assert integers(tmp_path / "again.onnx") != found
    # The trained model computes what the run does.
    values = [
        run("evaluate", source, "--data", data, "--json", *loss).json()["loss"]
        for source, loss in (
            (tmp_path / "run", ()),
            (tmp_path / "again.onnx", ("--loss", "cross_entropy")),
        )
    ]
    assert values[0] == pytest.approx(values[1], rel=0.05)
    # Without weights to round, a part of the network is exported as it is.
    early = run("export", tmp_path / "run", "--outputs", "r", "-o", tmp_path / "early.onnx")
    assert early.code == 0, early.err


def test_adapters_leave_the_integers_as_they_are(
    run: Any, quantized: Path, data: Path, tmp_path: Path
) -> None:
    result = run("train", quantized, "--data", data, *SETTINGS, "--lora-rank", 2, "-o", tmp_path / "run")
    assert result.code == 0, result.err
    assert "are trained" not in result.err
    names = {name for name, _ in Trainer.resume(tmp_path / "run").parameters}
    assert names
    assert all(".lora_" in name for name in names)


@pytest.mark.parametrize(
    ("chosen", "warns"),
    [({}, True), ({"requires_grad": "bias"}, False), ({"straight_through": False}, False)],
)
def test_python_warns_of_integers_that_are_not_trained(
    quantized: Path, caplog: pytest.LogCaptureFixture, chosen: dict[str, Any], warns: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        Trainer(quantized, "cross_entropy", **{"straight_through": True, **chosen})
    messages: Sequence[str] = [record.getMessage() for record in caplog.records]
    found = [m for m in messages if "the 3 floating-point parameters" in m and "its 56 integer weights" in m]
    assert bool(found) == warns
    assert all("onnxtrain.qat.prepare(model)" in message for message in found)
