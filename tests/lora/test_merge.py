"""Merged weights compute what the model with the adapter computes, and rounded ones what their rounding allows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

from lora.models import exported, in_bits, net, products, run
from onnxtrain.errors import GraphBuildError
from onnxtrain.lora import LoraConfig, add_lora, merge, save_adapter, target_names

LAYERS = {"fc1": (48, 32), "fc2": (32, 16)}
CONFIG = LoraConfig(r=4, lora_alpha=2, init_lora_weights=False)
X = np.random.default_rng(1).normal(size=(5, 48)).astype(np.float32)


def adapter_for(
    base: onnx.ModelProto, directory: Path, config: LoraConfig = CONFIG
) -> tuple[Path, onnx.ModelProto]:
    """A saved adapter, and the model with it."""
    model = add_lora(base, config)
    save_adapter(model, directory / "adapter", format="peft")
    return directory / "adapter", model


def ops(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def test_float_weights_take_the_adapter_in(tmp_path: Path) -> None:
    base = products(LAYERS)
    path, model = adapter_for(base, tmp_path)
    merged = merge(base, path)
    assert np.allclose(run(merged, x=X), run(model, x=X), atol=1e-6)
    assert ops(merged) == ops(base)
    # The old weights are gone.
    assert len(merged.graph.initializer) == len(base.graph.initializer)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantized_weights_become_float_or_are_rounded_again(
    bits: int, symmetric: bool, tmp_path: Path
) -> None:
    # Of accuracy level 0: the float activations of the merged product are those of the quantized one.
    base = in_bits(products(LAYERS), bits, 16, symmetric)
    path, model = adapter_for(base, tmp_path)
    merged = merge(base, path)
    assert "MatMulNBits" not in ops(merged)
    assert np.allclose(run(merged, x=X), run(model, x=X), atol=1e-5)
    rounded = merge(base, path, requantize=True)
    assert ops(rounded) == ops(base)
    # What rounding the sum loses: nearer to the model with the adapter than the base for 4 bits and 8.
    distance = np.abs(run(rounded, x=X) - run(model, x=X)).mean()
    assert distance < {2: 0.5, 4: 0.1, 8: 0.01}[bits]
    if bits > 2:
        assert distance < np.abs(run(base, x=X) - run(model, x=X)).mean() / 2
    sizes = [[len(i.raw_data) for i in m.graph.initializer] for m in (base, rounded)]
    assert sorted(sizes[1]) == sorted(sizes[0])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("axis", [None, 1])
def test_weights_behind_dequantize_linear(dtype: type, axis: int | None, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, (48, 16)).astype(dtype)
    scale = np.float32(0.002) if axis is None else rng.uniform(0.001, 0.003, 16).astype(np.float32)
    zero = np.full(np.shape(scale), 0 if dtype == np.int8 else 128, dtype)
    nodes = [
        onnx.helper.make_node("DequantizeLinear", ["w", "scale", "zero"], ["weight"], axis=axis or 0),
        onnx.helper.make_node("Gemm", ["x", "weight", "b"], ["y"], name="/fc/Gemm", alpha=0.5),
    ]
    arrays = {"w": codes, "scale": scale, "zero": zero, "b": rng.normal(size=16).astype(np.float32)}
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 48])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 16])],
        [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    base = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    path, model = adapter_for(base, tmp_path)
    assert np.allclose(run(merge(base, path), x=X), run(model, x=X), atol=1e-5)
    rounded = merge(base, path, requantize=True)
    assert ops(rounded) == ops(base)
    codes_before, codes_after = (
        next(i.raw_data for i in m.graph.initializer if i.name == "w") for m in (base, rounded)
    )
    assert codes_after != codes_before
    difference = np.abs(run(rounded, x=X) - run(model, x=X)).max()
    # 48 products of half a step each, halved by alpha.
    largest = max(
        np.abs(onnx.numpy_helper.to_array(i)).max() for i in rounded.graph.initializer if "scale" in i.name
    )
    assert difference <= 0.5 * 0.5 * largest * np.abs(X).sum(1).max() + 1e-5


@pytest.mark.torch
def test_a_tied_head_is_merged_without_its_embedding(tmp_path: Path) -> None:
    tokens = torch.tensor([[1, 2, 3]])
    base = exported(net(), tokens)
    path, model = adapter_for(
        base, tmp_path, LoraConfig(r=2, target_modules=["lm_head", "up"], init_lora_weights=False)
    )
    merged = merge(base, path)
    assert np.allclose(run(merged, tokens=tokens.numpy()), run(model, tokens=tokens.numpy()), atol=1e-5)


@pytest.mark.torch
def test_convolutions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 1, stride=2), torch.nn.ReLU())
    x = torch.randn(2, 3, 9, 9)
    base = exported(layers, x)
    path, model = adapter_for(base, tmp_path, LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    assert np.allclose(run(merge(base, path), tokens=x.numpy()), run(model, tokens=x.numpy()), atol=1e-5)


def test_losses_before_and_after_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = in_bits(products(LAYERS), 4)
    path, model = adapter_for(base, tmp_path)
    target = np.zeros((5, 16), np.float32)

    def loss(candidate: onnx.ModelProto) -> float:
        return float(((run(candidate, x=X) - target) ** 2).mean())

    with caplog.at_level("INFO", "onnxtrain"):
        merged = merge(base, path, requantize=True, evaluate=loss)
    report = {p.key: p.value for p in merged.metadata_props}["onnxtrain.merge"]
    assert json.loads(report) == {"before": loss(model), "after": loss(merged)}
    assert loss(model) != loss(merged)
    assert f"loss {loss(model):.6g} before, {loss(merged):.6g} after" in caplog.text


def test_a_transposed_quantized_weight_cannot_be_rounded_again(tmp_path: Path) -> None:
    base = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[n, 3] x) => (float[n, 2] y)
        <int8[2, 3] w = {1, 2, 3, 4, 5, 6}, float s = {0.5}> {
            d = DequantizeLinear(w, s)  t = Transpose(d)  y = MatMul(x, t) }"""
    )
    path, model = adapter_for(base, tmp_path, LoraConfig(r=1, init_lora_weights=False))
    x = np.eye(3, dtype=np.float32)
    assert np.allclose(run(merge(base, path), x=x), run(model, x=x), atol=1e-6)
    with pytest.raises(GraphBuildError, match="then transposed"):
        merge(base, path, requantize=True)


def test_alpha_of_an_integer_product_is_no_factor_of_the_adapter(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    base = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> g (float[n, 6] x) => (float[n, 4] y)
        <float s = {0.02}, int8 z = {0}, float w = {0.01}, int32[4] b = {100, -200, 300, 0}> {
            q = QuantizeLinear(x, s, z)
            y = com.microsoft.QGemm<alpha = 0.25>(q, s, z, fc_quantized, w, z, b) }"""
    )
    codes = rng.integers(-100, 100, (6, 4)).astype(np.int8)
    base.graph.initializer.append(onnx.numpy_helper.from_array(codes, "fc_quantized"))
    path, model = adapter_for(base, tmp_path, LoraConfig(r=2, lora_alpha=1, init_lora_weights=False))
    x = rng.normal(size=(50, 6)).astype(np.float32)
    expected, without = run(model, x=x), run(base, x=x)
    error = np.abs(run(merge(base, path, requantize=True), x=x) - expected).mean()
    assert error < 0.02 * np.abs(expected - without).mean()


class Random(CalibrationDataReader):
    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.batches = iter([{"x": rng.normal(size=(4, 6, 3, 3)).astype(np.float32)} for _ in range(20)])

    def get_next(self) -> dict[str, np.ndarray] | None:  # type: ignore[override]
        return next(self.batches, None)


@pytest.mark.filterwarnings("ignore")  # of the quantizer
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("form", list(QuantFormat))
def test_integer_layers_with_large_biases(form: QuantFormat, per_channel: bool, tmp_path: Path) -> None:
    """The scale of a bias in int32 is that of the products, which a merged weight changes."""
    rng = np.random.default_rng(1)
    base = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[n, 6, 3, 3] x) => (float[n, 5] y) {
            c = Conv<kernel_shape=[1, 1]>(x, conv, conv_bias)
            f = Flatten(c)
            y = Gemm<transB=1>(f, fc, fc_bias)
        }""")
    for name, shape, size in (
        *(("conv", (4, 6, 1, 1), 0.4), ("conv_bias", (4,), 3)),
        *(("fc", (5, 36), 0.1), ("fc_bias", (5,), 20)),
    ):
        array = rng.normal(size=shape).astype(np.float32) * np.float32(size)
        base.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(base, tmp_path / "float.onnx")
    quantize_static(
        tmp_path / "float.onnx", tmp_path / "int8.onnx", Random(), quant_format=form, per_channel=per_channel
    )
    config = LoraConfig(r=2, lora_alpha=1, target_modules=["conv", "fc"], init_lora_weights=False)
    assert {target.rpartition(".")[2] for target in target_names(tmp_path / "int8.onnx")} == {"conv", "fc"}
    path, model = adapter_for(onnx.load(tmp_path / "int8.onnx"), tmp_path, config)
    merged = merge(tmp_path / "int8.onnx", path, requantize=True)
    assert sorted(ops(merged)) == sorted(ops(onnx.load(tmp_path / "int8.onnx")))
    x = rng.normal(size=(50, 6, 3, 3)).astype(np.float32)
    (step,) = {float(onnx.numpy_helper.to_array(i)) for i in merged.graph.initializer if i.name == "y_scale"}
    expected, results = run(model, x=x), run(merged, x=x)
    # The adapter and the rounding of the weights move a score by some steps, a wrong bias by tens.
    assert np.abs(results - expected).mean() < 2 * step
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    written = onnxruntime.InferenceSession(merged.SerializeToString(), options).run(None, {"x": x})[0]
    assert np.abs(results - written).max() <= 1.01 * step


@pytest.mark.parametrize("requantize", [False, True])
def test_layers_keep_their_names(requantize: bool, tmp_path: Path) -> None:
    """By its name the output layer gets no adapter, and the next adapter of PEFT fits."""
    base = in_bits(products({"model.layers.0.mlp.fc1": (48, 32), "lm_head": (32, 16)}), 4)
    names = ["fc1", "lm_head"]
    path, _ = adapter_for(base, tmp_path, LoraConfig(r=2, target_modules=names, init_lora_weights=False))
    merged = merge(base, path, requantize=requantize)
    assert target_names(merged) == names
    again = add_lora(merged, LoraConfig(r=1))
    assert [i.name for i in again.graph.initializer if ".lora_A" in i.name] == [
        "model.layers.0.mlp.fc1.lora_A.weight"
    ]
