"""Files with quantized weights: what is trained of them, and in which precision they compute."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import onnxruntime.capi.onnxruntime_pybind11_state as ort_state
import pytest
from onnx import numpy_helper
from onnxruntime.quantization import quantize_dynamic
from typer.testing import CliRunner

import models
from onnxtrain import Trainer, differentiate
from onnxtrain.cli._app import app
from onnxtrain.cli._command_options import InspectOptions
from onnxtrain.cli._inspect import run_command
from onnxtrain.cli._ops import model_ops
from onnxtrain.errors import GraphBuildError, NothingToTrain
from onnxtrain.passes.io import save
from onnxtrain.passes.parameters.op_settings import _QUANTIZATION, _ROTARY
from training_run import Run

_RNG = np.random.default_rng(26)
X = _RNG.normal(size=(6, 32)).astype(np.float32)
TARGET = _RNG.normal(size=(6, 32)).astype(np.float32)
CODES = {name: _RNG.integers(0, 256, (32, 2, 8)).astype(np.uint8) for name in ("w1", "w2")}
SCALES = {f"{name}_scales": _RNG.uniform(0.01, 0.05, (32, 2)).astype(np.float32) for name in CODES}
GAIN = _RNG.normal(size=32).astype(np.float32)


def int4_net() -> onnx.ModelProto:
    """Two layers of int4 weights with int8 activations, as onnxruntime-genai's builder writes them, a gain between."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        g (float[n, 32] x) => (float[n, 32] y) {
            a = com.microsoft.MatMulNBits<K=32, N=32, bits=4, block_size=16, accuracy_level=4>(x, w1, w1_scales)
            b = Tanh(a)
            c = Mul(b, gain)
            y = com.microsoft.MatMulNBits<K=32, N=32, bits=4, block_size=16, accuracy_level=4>(c, w2, w2_scales)
        }""")
    for name, array in {**CODES, **SCALES, "gain": GAIN}.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def weights(name: str) -> np.ndarray:
    """The weights of a layer in float64, `[32, 32]`: per byte two codes, the low half first, of which 8 means 0."""
    packed = CODES[name].astype(np.int64)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(32, 2, 16)
    return ((codes - 8) * SCALES[f"{name}_scales"].astype(np.float64)[..., None]).reshape(32, 32)


def reference() -> np.ndarray:
    """Compute the net with dequantized weights in float64."""
    return np.tanh(X.astype(np.float64) @ weights("w1").T) * GAIN @ weights("w2").T


def mean_square(y: np.ndarray) -> float:
    return float(((y - TARGET) ** 2).mean())


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray] | None = None) -> list[Any]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds or {"x": X})


def trained(model: onnx.ModelProto, **options: Any) -> set[str]:
    trainer = Trainer(model, "mse", "sgd", 0.1, **options)
    return {name for name, parameter in trainer.parameters if parameter.requires_grad}


def test_training_and_eval_graph_compute_with_dequantized_weights_and_the_export_as_the_file(
    tmp_path: Path,
) -> None:
    """The first layer lies off the gradient's path, the second on it."""
    run_ = Run.generate(tmp_path, int4_net(), loss="mse", optimizer="sgd")
    loss = run_.module(X, TARGET)
    gradient = dict(run_.state.parameters)["gain"].grad
    assert mean_square(reference()) == pytest.approx(float(loss), rel=1e-6)
    run_.module.eval()
    assert mean_square(reference()) == pytest.approx(float(run_.module(X, TARGET)), rel=1e-6)
    # With activations in int8 it differs by far more: the file's own numbers, which the inference model keeps.
    deployed = run(int4_net())[0]
    assert mean_square(deployed) != pytest.approx(float(loss), rel=1e-4)
    trainer = Trainer(int4_net(), "mse", "sgd")
    trainer.export(tmp_path / "out.onnx")
    np.testing.assert_array_equal(run(onnx.load(tmp_path / "out.onnx"))[0], deployed)

    hidden = np.tanh(X.astype(np.float64) @ weights("w1").T)
    expected = ((2 / TARGET.size * (reference() - TARGET)) @ weights("w2") * hidden).sum(0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7 * np.abs(expected).max())


def test_deployed_activations_train_on_the_numbers_of_the_file(tmp_path: Path) -> None:
    """On the path of the gradient and off it; the gradient passes the rounding as if there were none."""
    run_ = Run.generate(tmp_path, int4_net(), loss="mse", optimizer="sgd", activations="deployed")
    deployed = run(int4_net())[0]
    assert float(run_.module(X, TARGET)) == pytest.approx(mean_square(deployed), rel=1e-6)
    gradient = dict(run_.state.parameters)["gain"].grad
    model = int4_net()
    model.graph.output.append(onnx.helper.make_tensor_value_info("b", onnx.TensorProto.FLOAT, ["n", 32]))
    y, hidden = run(model)
    expected = ((2 / TARGET.size * (y - TARGET)) @ weights("w2") * hidden).sum(0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
    run_.module.eval()
    assert float(run_.module(X, TARGET)) == pytest.approx(mean_square(deployed), rel=1e-6)


def test_deployed_activations_keep_the_ops_of_the_file(tmp_path: Path) -> None:
    """A fused norm may differ in the last bit, and an activation half-way between two integers goes to the other."""
    model = int4_net()
    del model.graph.node[1]
    norm = onnx.parser.parse_graph("""
        g (float[n, 32] a) => (float[n, 32] b) <float two = {2}, float eps = {1e-6}, int64[1] axes = {-1}> {
            square = Pow(a, two)
            mean = ReduceMean<keepdims=1>(square, axes)
            shifted = Add(mean, eps)
            root = Sqrt(shifted)
            inverse = Reciprocal(root)
            b = Mul(a, inverse)
        }""")
    model.graph.node.extend(norm.node)
    model.graph.initializer.extend(norm.initializer)
    # Shape inference of ONNX does not know MatMulNBits; exporters write the shape.
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("a", onnx.TensorProto.FLOAT, ["n", 32]))
    model.graph.node.sort(
        key=lambda node: ["a", "square", "mean", "shifted", "root", "inverse", "b", "c", "y"].index(
            node.output[0]
        )
    )
    outputs, ops = {}, {}
    for activations in ("float", "deployed"):
        run_ = Run.generate(
            tmp_path / activations, model, loss="mse", optimizer="sgd", activations=activations, requires_grad=["gain"],
            additional_output_names=["y"],
        )  # fmt: skip
        outputs[activations] = run_.module(X, TARGET)[1]
        ops[activations] = {
            node.op_type for node in onnx.load(tmp_path / activations / "training_model.onnx").graph.node
        }
    assert "InverseRMSNormalization_float" in ops["float"]
    assert not any("Normalization" in name for name in ops["deployed"])
    np.testing.assert_array_equal(outputs["deployed"], run(model)[0])


@pytest.mark.parametrize("again", ["", "y = Add(z, s)"], ids=["once", "twice"])
def test_deployed_activations_keep_the_ops_that_onnxruntime_joins(tmp_path: Path, again: str) -> None:
    """It joins an Add and the LayerNormalization behind it, unless something else reads the sum."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        g (float[batch, n, 32] x) => (float[batch, n, 32] y) <float[batch, n, 32] a> {{
            a = com.microsoft.MatMulNBits<K=32, N=32, bits=4, block_size=16, accuracy_level=4>(x, w1, w1_scales)
            s = Add(a, x)
            c = LayerNormalization<axis=-1, epsilon=1e-3>(s, gain, shift)
            {"z" if again else "y"} = com.microsoft.MatMulNBits<
                K=32, N=32, bits=4, block_size=16, accuracy_level=4>(c, w2, w2_scales)
            {again}
        }}""")
    for name, array in {**CODES, **SCALES, "gain": GAIN, "shift": GAIN[::-1]}.items():
        model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
    x = _RNG.normal(size=(4, 300, 32)).astype(np.float32)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x})
    run_ = Run.generate(
        tmp_path, model, loss="mse", optimizer="sgd", activations="deployed", requires_grad=["gain"],
        additional_output_names=["y"],
    )  # fmt: skip
    np.testing.assert_array_equal(run_.module(x, np.zeros_like(x))[1], expected)
    # The gradient of one mode is the other's to rounding, as the rounding to int8 is passed over.
    gradients = [dict(run_.state.parameters)["gain"].grad.copy()]
    of_norm = Run.generate(tmp_path / "float", model, loss="mse", optimizer="sgd", requires_grad=["gain"])
    of_norm.module(x, np.zeros_like(x))
    gradients.append(dict(of_norm.state.parameters)["gain"].grad)
    np.testing.assert_allclose(*gradients, rtol=2e-2, atol=2e-2 * np.abs(gradients[1]).max())


def test_scales_that_are_named_get_the_gradient_of_the_weights(tmp_path: Path) -> None:
    run_ = Run.generate(tmp_path, int4_net(), loss="mse", requires_grad=["w1_scales"])
    run_.module(X, TARGET)
    inside = (2 / TARGET.size * (reference() - TARGET)) @ weights("w2") * GAIN
    ct = inside * (1 - np.tanh(X.astype(np.float64) @ weights("w1").T) ** 2)
    codes = weights("w1").reshape(32, 2, 16) / SCALES["w1_scales"].astype(np.float64)[..., None]
    expected = ((ct.T @ X).reshape(32, 2, 16) * codes).sum(-1)
    gradient = dict(run_.state.parameters)["w1_scales"].grad
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.filterwarnings("ignore")  # of the quantizer
def test_deployed_activations_pass_the_rounding_of_dynamic_quantization(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Native kernels would fuse different parts of the two graphs, and a program rounds differently than separate ops.
    monkeypatch.setenv("ONNXTRAIN_KERNELS", "off")
    onnx.save(models.mlp(), tmp_path / "net.onnx")
    quantize_dynamic(tmp_path / "net.onnx", tmp_path / "q.onnx", op_types_to_quantize=["Gemm", "MatMul"])
    gradients = []
    for options in ({"activations": "deployed"}, {"straight_through": True}):
        run_ = Run.generate(tmp_path / "run", onnx.load(tmp_path / "q.onnx"), loss="mse", **options)
        y = run_.module(X[:, :4], np.zeros((len(X), 3), np.float32))
        gradients.append(
            [np.array(p.grad) for _, p in run_.state.parameters if p.requires_grad] + [np.array(y)]
        )
    assert all(gradient.any() for gradient in gradients[0])
    for first, second in zip(*gradients, strict=True):
        np.testing.assert_array_equal(first, second)


def test_the_shell_takes_activations(tmp_path: Path) -> None:
    onnx.save(int4_net(), tmp_path / "net.onnx")
    options = ["--loss", "mse", "--activations", "deployed", "-o", str(tmp_path / "run")]
    result = CliRunner().invoke(app, ["artifacts", str(tmp_path / "net.onnx"), *options])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["activations"] == "deployed"


def test_what_differentiate_returns_has_one_precision() -> None:
    gradients = differentiate(int4_net(), of="y", wrt=["gain"], cotangent="ct")
    np.testing.assert_allclose(run(gradients, {"x": X, "ct": TARGET})[0], reference(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"gain"}),
        ({"requires_grad": ["*"]}, {"gain"}),
        ({"requires_grad": ["gain", "w2_scales"]}, {"gain", "w2_scales"}),
        ({"requires_grad": ["w?_scales"]}, {"w1_scales", "w2_scales"}),
        ({"requires_grad": ["*", "w?_scales"], "frozen_params": ["w1*"]}, {"gain", "w2_scales"}),
    ],
)
def test_scales_train_only_where_they_are_named(options: dict[str, Any], expected: set[str]) -> None:
    assert trained(int4_net(), **options) == expected


def test_a_pattern_that_matches_nothing_is_still_an_error() -> None:
    with pytest.raises(GraphBuildError, match=r"no parameter matches '\*.lora'"):
        trained(int4_net(), requires_grad=["*.lora"])


def test_where_only_scales_are_left_the_error_says_so() -> None:
    model = int4_net()
    model.graph.node[2].op_type, model.graph.node[2].input[1] = "Add", "b"
    model.graph.initializer.pop()
    with pytest.raises(NothingToTrain, match="quantization scales, rotary caches"):
        trained(model)


def test_the_shell_counts_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(int4_net(), tmp_path / "net.onnx")
    model_ops(tmp_path / "net.onnx", json=False)
    assert "(1 parameters)" in capsys.readouterr().out
    run_command(InspectOptions(tmp_path / "net.onnx", json=True))
    initializers = json.loads(capsys.readouterr().out)["parameters"]
    assert [row["name"] for row in initializers if row["trained"]] == ["gain"]


ROTARY = {
    "contrib": "y = com.microsoft.RotaryEmbedding<num_heads=2>(h, positions, cos_cache, sin_cache)",
    "standard": "y = RotaryEmbedding<num_heads=2>(h, cos_cache, sin_cache, positions)",
    "rows of the positions": """cos_rows = Gather(cos_cache, positions)
        cos = Cast<to=1>(cos_rows)
        sin = Gather(sin_cache, positions)
        y = RotaryEmbedding<num_heads=2>(h, cos, sin)""",
    "attention": """y, k, v = com.microsoft.GroupQueryAttention<num_heads=2, kv_num_heads=2, do_rotary=1>
        (h, h, h, , , lengths, total, cos_cache, sin_cache)""",
}


@pytest.mark.parametrize("kind", ROTARY)
def test_rotary_caches_are_no_parameters(kind: str) -> None:
    text = f"""
        <ir_version: 11, opset_import: ["": 23, "com.microsoft": 1]>
        g (float[2, 5, 8] x, int64[2, 5] positions, int32[2] lengths, int32 total) => (float[2, 5, 8] y) {{
            h = MatMul(x, w)
            {ROTARY[kind]}
        }}"""
    model = onnx.parser.parse_model(text)
    for name, shape in {"w": (8, 8), "cos_cache": (10, 2), "sin_cache": (10, 2)}.items():
        model.graph.initializer.append(
            numpy_helper.from_array(_RNG.normal(size=shape).astype(np.float32), name)
        )
    assert trained(model) == {"w"}
    assert trained(model, requires_grad=["*_cache"]) == {"cos_cache", "sin_cache"}


@pytest.mark.filterwarnings("ignore")  # of the quantizer
def test_scales_of_dynamic_quantization_are_no_parameters(tmp_path: Path) -> None:
    """onnxruntime multiplies the scale of the weights by that of the activations."""
    onnx.save(models.mlp(), tmp_path / "net.onnx")
    quantize_dynamic(tmp_path / "net.onnx", tmp_path / "q.onnx", op_types_to_quantize=["Gemm", "MatMul"])
    model = onnx.load(tmp_path / "q.onnx")
    assert {"w1_scale", "w2_scale"} <= {tensor.name for tensor in model.graph.initializer}
    names = trained(model, straight_through=True)
    assert names
    assert not any("scale" in name for name in names)


def test_the_scale_of_a_weight_and_of_a_constant_are_no_parameters() -> None:
    """Nor is a value that is read otherwise, too, a scale."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17]>
        main (float[n, 3] x) => (float[n, 2] y)
        <int8[3, 2] w_quantized = {9, 8, 7, 6, 5, 4}, float w_scale = {0.1}, uint8 val_18_quantized = {255},
         float val_18_scale = {0.004}, float both = {0.2}> {
            w = DequantizeLinear(w_quantized, w_scale)
            one = DequantizeLinear(val_18_quantized, val_18_scale)
            two = DequantizeLinear(val_18_quantized, both)
            rest = Sub(one, x)
            more = Mul(rest, both)
            shifted = Add(more, two)
            y = MatMul(shifted, w)
        }""")
    assert trained(model) == {"both"}


def test_the_tables_name_every_scale_and_cache_of_the_schemas() -> None:
    """By the names of the inputs, beside what has such a name and is a weight or no constant."""
    weights_or_data = {
        "BranchwiseRMSNorm", "EngramGate", "GatedRMSNorm", "HyperConnectionLowRankMix", "LinearAttentionGate",
        "PackedSparseAttentionIndexerMerge", "QLinearConcat", "ScaledSiLU", "TorchEmbedding",
        "BatchNormalization", "GroupNormalization", "InstanceNormalization", "RMSNormalization", "Resize",
        "SimplifiedLayerNormalization", "Upsample",
    }  # fmt: skip
    integers = {"ConvInteger", "MatMulInteger", "MulInteger"}
    one_input = {
        ("QOrderedLayerNormalization", 2),
        ("MatMulNBitsMlp", 2),
        ("MatMulNBitsQkv", 2),
        ("RMSNormRotary", 1),
    }
    schemas = [*ort_state.get_all_operator_schema(), *onnx.defs.get_all_schemas()]
    missing = [
        (schema.domain, schema.name, index, parameter.name)
        for schema in schemas
        if schema.name not in weights_or_data | integers
        for index, parameter in enumerate(schema.inputs)
        if re.search("scale|zero_point|absmax|cos_cache|sin_cache|cosine|^sine", parameter.name)
        and (schema.name, index) not in one_input
        and not any(
            index in table.get((schema.domain, schema.name), ()) for table in (_QUANTIZATION, _ROTARY)
        )
    ]
    assert not missing


def test_packed_weights_are_stored_once_and_unpacked_by_no_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward product read the same bytes; a session folds nothing to float."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        g (float[n, 32] x) => (float[n, 32] y) {
            a = Mul(x, gain)
            b = com.microsoft.MatMulNBits<K=32, N=256, bits=4, block_size=16>(a, w1, w1_scales)
            c = Tanh(b)
            y = com.microsoft.MatMulNBits<K=256, N=32, bits=8, block_size=32>(c, w2, w2_scales, w2_zeros)
        }""")
    arrays = {
        "w1": rng.integers(0, 256, (256, 2, 8)).astype(np.uint8),
        "w2": rng.integers(0, 256, (32, 8, 32)).astype(np.uint8),
        "w1_scales": rng.uniform(0.01, 0.05, (256, 2)).astype(np.float32),
        "w2_scales": rng.uniform(0.001, 0.005, (32, 8)).astype(np.float32),
        "w2_zeros": rng.integers(0, 256, (32, 8)).astype(np.uint8),
        "gain": GAIN,
    }
    for name, array in arrays.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    packed = arrays["w1"].nbytes + arrays["w2"].nbytes
    onnx.save(model, tmp_path / "net.onnx", save_as_external_data=True, size_threshold=1000)
    monkeypatch.setattr(save.write_models, "__defaults__", (1000,))
    run_ = Run.generate(tmp_path / "run", tmp_path / "net.onnx", loss="mse", optimizer="sgd")
    (data,) = (tmp_path / "run").glob("*.data")
    # Two tensors, each from the beginning of a page, and the second one's scales.
    assert packed <= data.stat().st_size < packed + 3 * 4096
    written = onnx.load(tmp_path / "run" / "training_model.onnx", load_external_data=False)
    quantized = sorted(
        node.op_type for node in written.graph.node if "MatMul" in node.op_type or "Uint" in node.op_type
    )
    # The weight of 4 bits goes forward by the kernel of ONNX Runtime.
    assert quantized == ["MatMulNBits", "PackedMatMul_float", "Uint4Product_float", "Uint8Product_float"]
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "run" / "optimised.onnx")
    ort.InferenceSession(tmp_path / "run" / "training_model.onnx", options)
    held = onnx.load(tmp_path / "run" / "optimised.onnx").graph
    assert max(numpy_helper.to_array(i).nbytes for i in held.initializer if i.data_type == 1) < packed
    assert [node.op_type for node in held.node].count("DequantizeLinear") == 2

    loss = run_.module(X, TARGET)
    codes = [
        np.stack([arrays["w1"] & 15, arrays["w1"] >> 4], -1).reshape(256, 32).astype(np.float64) - 8,
        arrays["w2"].reshape(32, 256).astype(np.float64) - np.repeat(arrays["w2_zeros"], 32, 1),
    ]
    scales = [np.repeat(arrays[f"w{n}_scales"].astype(np.float64), size, 1) for n, size in ((1, 16), (2, 32))]
    first, second = (a * b for a, b in zip(codes, scales, strict=True))
    hidden = np.tanh(X * GAIN @ first.T)
    y = hidden @ second.T
    assert float(loss) == pytest.approx(((y - TARGET) ** 2).mean(), rel=1e-5)
    expected = (((2 / TARGET.size * (y - TARGET)) @ second * (1 - hidden**2)) @ first * X).sum(0)
    gradient = dict(run_.state.parameters)["gain"].grad
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("kernels", ["off", "auto"])
@pytest.mark.parametrize("columns", [32, 24])
def test_gradients_of_weights_with_float_zero_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int, kernels: str
) -> None:
    """With 24 columns the last block of a row ends within a block."""
    monkeypatch.setenv("ONNXTRAIN_KERNELS", kernels)
    rng = np.random.default_rng(1)
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        g (float[n, {columns}] x) => (float[n, 32] y) {{
            a = Mul(x, gain)
            y = com.microsoft.MatMulNBits<K={columns}, N=32, bits=4, block_size=16>(a, w1, w1_scales, zeros)
        }}""")
    zeros, gain = rng.uniform(0, 15, (32, 2)).astype(np.float32), GAIN[:columns]
    arrays = {"w1": CODES["w1"], "w1_scales": SCALES["w1_scales"], "zeros": zeros, "gain": gain}
    for name, array in arrays.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    run_ = Run.generate(tmp_path, model, loss="mse")
    x = X[:, :columns]
    loss = run_.module(x, TARGET)
    shift = np.repeat((zeros.astype(np.float64) - 8) * SCALES["w1_scales"].astype(np.float64), 16, 1)
    matrix = (weights("w1") - shift)[:, :columns]
    y = (x * gain).astype(np.float64) @ matrix.T
    assert float(loss) == pytest.approx(mean_square(y), rel=1e-5)
    expected = ((2 / TARGET.size * (y - TARGET)) @ matrix * x).sum(0)
    gradient = dict(run_.state.parameters)["gain"].grad
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6 * np.abs(expected).max())
    written = onnx.load(tmp_path / "training_model.onnx")
    assert {"PackedMatMulFloatZeros_float", "Uint4ProductFloatZeros_float"} <= {
        node.op_type for node in written.graph.node
    }
