"""Adapters beside the layers of old opsets, and beside float16 weights whose dtype the file does not note."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from lora.models import run
from onnxtrain import Trainer
from onnxtrain.lora import LoraConfig, adapter_model, add_lora, load_adapter, merge, save_adapter

CONFIG = LoraConfig(r=2, init_lora_weights=False)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 4)).astype(np.float32)


def quantized(opset: int) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": {opset}]> g (float[n, 4] x) => (float[n, 3] y)
        <float s = {{0.05}}, int8 z = {{0}}, float sx = {{0.02}}, uint8 zx = {{128}}> {{
          q = QuantizeLinear(x, sx, zx)  d = DequantizeLinear(q, sx, zx)
          w = DequantizeLinear(fc_quantized, s, z)  y = MatMul(d, w) }}""")
    codes = np.random.default_rng(0).integers(-20, 20, (4, 3)).astype(np.int8)
    model.graph.initializer.append(numpy_helper.from_array(codes, "fc_quantized"))
    return model


@pytest.mark.parametrize("opset", [10, 12, 13, 14])
def test_adapters_beside_quantized_layers_of_old_opsets(opset: int, tmp_path: Path) -> None:
    """Trained, saved, loaded and merged: what numpy computes of the adapter's matrices."""
    model = quantized(opset)
    config = LoraConfig(r=2, lora_dropout=0.25)
    trainer = Trainer(model, "mse", lora=config, directory=tmp_path / "run", straight_through=True)
    trainer.fit(X, np.ones((16, 3), np.float32), verbose=False)
    # Before opset 12 Dropout has no mode, and conversion would leave it switched off.
    graph = onnx.load(tmp_path / "run" / "training_model.onnx").graph
    values = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    (node,) = (n for n in graph.node if n.op_type == "Dropout")
    assert (float(values[node.input[1]]), bool(values[node.input[2]])) == (0.25, True)
    save_adapter(tmp_path / "run" / "checkpoint", tmp_path / "a.onnx_adapter")
    a, b = (trainer.parameters[f"fc.lora_{letter}.weight"].data for letter in "AB")
    codes = (np.clip(np.rint(X / np.float32(0.02)), -128, 127) * 0.02).astype(np.float64)
    weight = 0.05 * numpy_helper.to_array(model.graph.initializer[-1])
    delta = config.scaling("fc") * a.astype(np.float64) @ b
    assert np.abs(delta).max() > 1e-4
    for changed in (
        load_adapter(tmp_path / "a.onnx_adapter", model),
        merge(model, tmp_path / "a.onnx_adapter"),
    ):
        np.testing.assert_allclose(run(changed, x=X), codes @ (weight + delta), rtol=1e-4, atol=1e-5)
    merged = run(merge(model, tmp_path / "a.onnx_adapter", requantize=True), x=X)
    assert np.abs(merged - codes @ (weight + delta)).max() < 0.05
    np.testing.assert_array_equal(run(adapter_model(model, config), x=X), run(model, x=X))


@pytest.mark.parametrize(
    ("body", "stored"),
    [
        ("h = MatMul(x, fc)  t = Tanh(h)  y = MatMul(t, fc)", np.float16),
        ("w = Transpose(fc)  h = MatMul(x, w)  t = Tanh(h)  y = MatMul(t, w)", np.float16),
        ("h = Gemm<transB=1>(x, fc)  t = Tanh(h)  y = Gemm<transB=1>(t, fc)", np.float16),
        ("w = Cast<to=10>(fc)  h = MatMul(x, w)  t = Tanh(h)  y = MatMul(t, w)", np.float32),
        ("w = DequantizeLinear(q, s)  h = MatMul(x, w)  t = Tanh(h)  y = MatMul(t, w)", np.float16),
    ],
    ids=["plain", "Transpose", "transB", "Cast", "DequantizeLinear"],
)
def test_float16_files_keep_their_dtype(body: str, stored: type, tmp_path: Path) -> None:
    """Without notes of dtypes between nodes; merged weights have the dtype that the product reads."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float16[n, 4] x) => (float16[n, 4] y) {{ {body} }}'
    )
    if "q," in body:
        codes = np.arange(-8, 8).astype(np.int8).reshape(4, 4)
        model.graph.initializer.extend(
            [numpy_helper.from_array(codes, "q"), numpy_helper.from_array(np.float16(0.1), "s")]
        )
    else:
        array = np.linspace(-1, 1, 16).astype(stored).reshape(4, 4)
        model.graph.initializer.append(numpy_helper.from_array(array, "fc"))
    changed = add_lora(model, CONFIG)
    save_adapter(changed, tmp_path / "a.onnx_adapter")
    x = X.astype(np.float16)
    expected = run(changed, x=x).astype(np.float32)
    assert np.abs(expected - run(model, x=x)).max() > 0.05
    merged = merge(model, tmp_path / "a.onnx_adapter")
    new = [t for t in merged.graph.initializer if list(t.dims) == [4, 4]]
    assert [t.data_type for t in new] == [onnx.TensorProto.FLOAT16]
    results = [run(merged, x=x), run(load_adapter(tmp_path / "a.onnx_adapter", model), x=x)]
    deployed = adapter_model(model, CONFIG)
    inputs = {i.name: i.type.tensor_type.elem_type for i in deployed.graph.input}
    assert set(inputs.values()) == {onnx.TensorProto.FLOAT16}
    options, active = onnxruntime.RunOptions(), onnxruntime.LoraAdapter()
    active.Load(str(tmp_path / "a.onnx_adapter"))
    options.add_active_adapter(active)
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(deployed.SerializeToString(), settings)
    results.append(session.run(None, {"x": x}, options)[0])
    for got in results:
        np.testing.assert_allclose(got.astype(np.float32), expected, rtol=2e-2, atol=2e-2)
