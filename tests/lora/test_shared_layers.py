"""One layer that runs twice has one adapter, beside both products: as a module of PyTorch that is called twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from lora.models import in_bits, run
from onnxtrain import CheckpointState, Module, generate_artifacts
from onnxtrain.lora import LoraConfig, adapter_model, add_lora, load_adapter, merge, save_adapter

SIZE = 16
CONFIG = LoraConfig(r=2, lora_alpha=3, init_lora_weights=False)
X = np.random.default_rng(1).normal(size=(5, SIZE)).astype(np.float32)
# Bodies of the graph; x, fc [in, out], fct [out, in] and b are there.
BODIES = {
    "twice": "h = MatMul(x, fc)  t = Tanh(h)  y = MatMul(t, fc)",
    "with-bias": "h = MatMul(x, fc)  a = Add(h, b)  t = Tanh(a)  k = MatMul(t, fc)  y = Add(k, b)",
    "side-by-side": "t = Tanh(x)  h = MatMul(x, fc)  k = MatMul(t, fc)  y = Add(h, k)",
    "gemm": "h = Gemm<transB=1>(x, fc, b)  t = Tanh(h)  y = Gemm<transB=1>(t, fc, b)",
    "transposed": "w = Transpose(fc)  h = MatMul(x, w)  t = Tanh(h)  y = MatMul(t, w)",
    "tied-decoder": "h = MatMul(x, fc)  t = Tanh(h)  w = Transpose(fc)  y = MatMul(t, w)",
    "int8": "w = DequantizeLinear(q, s)  h = MatMul(x, w)  t = Tanh(h)  y = MatMul(t, w)",
}
STORED_TRANSPOSED = {"gemm", "transposed"}


def file(body: str, opset: int = 21) -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}]> g (float[n, {SIZE}] x) => (float[n, {SIZE}] y) {{ {body} }}'
    )
    rng = np.random.default_rng(0)
    for name, shape in (("fc", (SIZE, SIZE)), ("b", (SIZE,))):
        array = rng.normal(size=shape).astype(np.float32) / 4
        if f"{name})" in body or f"{name}," in body:
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    if "q," in body:
        codes = rng.integers(-100, 100, (SIZE, SIZE)).astype(np.int8)
        model.graph.initializer.append(onnx.numpy_helper.from_array(codes, "q"))
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.005), "s"))
    return model


def reference(
    kind: str, model: onnx.ModelProto, adapters: dict[str, torch.Tensor], x: np.ndarray
) -> torch.Tensor:
    """Computes the graph in float64, with the adapters beside their layers."""
    arrays = {t.name: torch.tensor(onnx.numpy_helper.to_array(t)).double() for t in model.graph.initializer}
    weight = arrays["q"] * arrays["s"] if kind == "int8" else arrays["fc"]
    first = weight.T if kind in STORED_TRANSPOSED else weight
    second = first.T if kind == "tied-decoder" else first
    bias = arrays.get("b", torch.zeros(1).double())
    pairs = list(adapters.values())
    deltas = [CONFIG.scaling("fc") * pairs[i] @ pairs[i + 1] for i in range(0, len(pairs), 2)]
    # Two layers have an adapter each, one layer has one.
    first, second = first + deltas[0], second + deltas[-1]
    value = torch.tensor(x).double()
    if kind == "side-by-side":
        return value @ first + torch.tanh(value) @ second
    return torch.tanh(value @ first + bias) @ second + bias


def adapters_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer if ".lora_" in t.name}


@pytest.mark.parametrize("kind", BODIES)
def test_an_adapter_stands_beside_both_products(kind: str, tmp_path: Path) -> None:
    """Added, as an optional input, from both formats, and merged: the same numbers, and one weight for one layer."""
    model = file(BODIES[kind])
    changed = add_lora(model, CONFIG)
    arrays = adapters_of(changed)
    assert len(arrays) == (4 if kind == "tied-decoder" else 2)
    weights = {name: torch.tensor(array).double() for name, array in arrays.items()}
    expected = reference(kind, model, weights, X).numpy()
    results = {"added": run(changed, x=X)}
    save_adapter(changed, tmp_path / "a.onnx_adapter")
    save_adapter(changed, tmp_path / "peft", "peft")
    results["onnx_adapter"] = run(load_adapter(tmp_path / "a.onnx_adapter", model), x=X)
    results["peft"] = run(load_adapter(tmp_path / "peft", model), x=X)
    merged = merge(model, tmp_path / "peft")
    results["merged"] = run(merged, x=X)
    options, active = onnxruntime.RunOptions(), onnxruntime.LoraAdapter()
    active.Load(str(tmp_path / "a.onnx_adapter"))
    options.add_active_adapter(active)
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    deployed = adapter_model(model, CONFIG)
    session = onnxruntime.InferenceSession(deployed.SerializeToString(), settings)
    results["active"] = session.run(None, {"x": X}, options)[0]
    for name, got in results.items():
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4, err_msg=name)
    np.testing.assert_array_equal(run(deployed, x=X), run(model, x=X))
    matrices = [t for t in merged.graph.initializer if len(t.dims) == 2]
    assert len(matrices) == (2 if kind == "tied-decoder" else 1)


@pytest.mark.parametrize("kind", ["with-bias", "gemm", "tied-decoder", "int8"])
def test_gradients_of_both_uses_add_up(kind: str, tmp_path: Path) -> None:
    model, target = file(BODIES[kind]), np.zeros_like(X)
    generate_artifacts(model, loss="mse", lora=CONFIG, artifact_directory=tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    loss = Module(tmp_path / "training_model.onnx", state)(X, target)
    weights = {
        name: torch.tensor(p.data).double().requires_grad_()
        for name, p in state.parameters
        if ".lora_" in name
    }
    wanted = reference(kind, model, weights, X).square().mean()
    wanted.backward()
    np.testing.assert_allclose(loss, wanted.detach(), rtol=1e-5)
    for name, weight in weights.items():
        assert weight.grad is not None
        got = state._store.gradients[name].read()
        np.testing.assert_allclose(got, weight.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("requantize", [False, True])
def test_packed_weights_that_run_twice_are_merged_once(requantize: bool, tmp_path: Path) -> None:
    model = in_bits(file(BODIES["twice"]), 4)
    # The quantizer has packed the weight for each product; one layer has one weight.
    nodes = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    for index in range(1, len(nodes[0].input)):
        nodes[1].input[index] = nodes[0].input[index]
    changed = add_lora(model, CONFIG)
    assert len(adapters_of(changed)) == 2
    save_adapter(changed, tmp_path / "peft", "peft")
    merged = merge(model, tmp_path / "peft", requantize)
    read = {name for node in merged.graph.node for name in node.input}
    kept = [t for t in merged.graph.initializer if t.name in read]
    assert len(kept) == (2 if requantize else 1)
    if not requantize:
        np.testing.assert_allclose(run(merged, x=X), run(changed, x=X), rtol=1e-3, atol=1e-3)
