"""Room for any number of different convolutions, each of which has a function of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from kernels.against_body import needs_kernels
from onnxtrain.autodiff import differentiate
from onnxtrain.fusion import NativeOpsPass
from onnxtrain.runtime.device import CPU
from onnxtrain.runtime.kernels import function_names, register_kernels
from onnxtrain.runtime.session import open_session

pytestmark = needs_kernels
SIZES = range(4, 74)


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    """The gradients of a sum of 70 convolutions of images of different sizes."""
    inputs = [
        helper.make_tensor_value_info(f"x{size}", TensorProto.FLOAT, [1, 1, size, size]) for size in SIZES
    ]
    weight = helper.make_tensor_value_info("w", TensorProto.FLOAT, [2, 1, 3, 3])
    nodes = [helper.make_node("Conv", [f"x{size}", "w"], [f"y{size}"]) for size in SIZES]
    nodes += [helper.make_node("ReduceSum", [f"y{size}"], [f"s{size}"], keepdims=0) for size in SIZES]
    nodes.append(helper.make_node("Sum", [f"s{size}" for size in SIZES], ["loss"]))
    loss = helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])
    graph = helper.make_graph(nodes, "convolutions", [*inputs, weight], [loss])
    forward = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    joint = ir.from_proto(differentiate(forward, of="loss", wrt=["w", *(f"x{size}" for size in SIZES)]))
    NativeOpsPass()(joint)
    return ir.to_proto(joint)


def _options() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return options


def _calls(model: bytes, options: ort.SessionOptions, folder: Path) -> set[str]:
    """Returns the convolution gradients that are nodes of the graph that ONNX Runtime runs: those with a kernel."""
    path = folder / "optimized.onnx"
    options.optimized_model_filepath = str(path)
    ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(path).graph.node
    return {node.op_type for node in nodes if node.op_type.startswith("ConvolutionGradient")}


def test_a_kernel_for_each_of_seventy_convolutions(model: onnx.ModelProto, tmp_path: Path) -> None:
    serialized = model.SerializeToString()
    (path := tmp_path / "model.onnx").write_bytes(serialized)
    names = function_names(str(path))
    assert names == function_names(serialized) == [function.name for function in model.functions]
    options = _options()
    register_kernels(options, names)
    called = _calls(serialized, options, tmp_path)
    assert called == {f"ConvolutionGradient{number}_float" for number in range(len(SIZES))}


@pytest.mark.parametrize("as_bytes", [False, True], ids=["path", "bytes"])
def test_sessions_of_the_runtime_ask_for_what_their_model_needs(
    model: onnx.ModelProto, tmp_path: Path, as_bytes: bool
) -> None:
    (path := tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    options = _options()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    source = path.read_bytes() if as_bytes else path
    open_session(source, "a model", CPU, options)
    nodes = onnx.load(tmp_path / "optimized.onnx").graph.node
    assert sum(node.op_type.startswith("ConvolutionGradient") for node in nodes) == len(SIZES)


def test_options_that_are_used_again_get_more(
    model: onnx.ModelProto, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    serialized = model.SerializeToString()
    options = _options()
    for names in ([], ["ConvolutionGradient2_float"], ["ConvolutionWeightGradient0_float"]):
        register_kernels(options, names)
    assert len(_calls(serialized, options, tmp_path)) == 3
    register_kernels(options, function_names(serialized))
    assert len(_calls(serialized, options, tmp_path)) == len(SIZES)
    defaults = _options()
    register_kernels(defaults)
    assert len(_calls(serialized, defaults, tmp_path)) == 64
    register_kernels(defaults, function_names(serialized))
    assert len(_calls(serialized, defaults, tmp_path)) == len(SIZES)
    assert capfd.readouterr().err == ""


def test_gradients_beyond_the_64th(model: onnx.ModelProto) -> None:
    """Of a sum of results, each input's gradient is the sum of the weights that see it."""
    rng = np.random.default_rng(0)
    feeds = {f"x{size}": rng.standard_normal((1, 1, size, size), np.float32) for size in SIZES}
    weights = rng.standard_normal((2, 1, 3, 3), np.float32)
    options = _options()
    register_kernels(options, function_names(model.SerializeToString()))
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    results = session.run(["w_grad", "x4_grad", "x73_grad"], {**feeds, "w": weights})
    windows = sum(
        np.lib.stride_tricks.sliding_window_view(x[0, 0].astype(np.float64), (3, 3)).sum((0, 1))
        for x in feeds.values()
    )
    np.testing.assert_allclose(results[0], np.broadcast_to(windows, (2, 1, 3, 3)), rtol=1e-4, atol=1e-4)
    for size, result in zip((4, 73), results[1:], strict=True):
        expected = np.zeros((size, size))
        for i, j in np.ndindex(3, 3):
            expected[i : size - 2 + i, j : size - 2 + j] += weights[:, 0, i, j].sum(dtype=np.float64)
        np.testing.assert_allclose(result[0, 0], expected, rtol=1e-5, atol=1e-6)


def test_no_more_names_than_are_needed() -> None:
    """ONNX Runtime makes a schema of each name for each session: those that nobody calls are not there."""
    options = _options()
    register_kernels(options, ["ConvolutionGradient1_float"])
    for number, there in ((1, True), (2, False)):
        node = helper.make_node(
            f"ConvolutionGradient{number}_float",
            ["ct", "x", "w"],
            ["dx", "dw"],
            domain="onnxtrain",
            strides=[1],
            dilations=[1],
            pads=[0, 0],
            group=1,
        )
        inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * 3) for name in node.input]
        outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.output]
        model = helper.make_model(
            helper.make_graph([node], "one", inputs, outputs),
            opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("onnxtrain", 1)],
            ir_version=10,
        )
        if there:
            ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        else:
            with pytest.raises(Exception, match="is not a registered function/op"):
                ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
