"""Gradients over values without elements, at sizes not declared, and of models without ranks; found by fuzzing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as fn

from onnxtrain.autodiff import differentiate
from onnxtrain.errors import OnnxTrainError
from runtimes import computes_float64, keeps_nothing, newest_opset

Arrays = dict[str, np.ndarray]


def _parse(text: str, opset: int | None = None) -> onnx.ModelProto:
    opset = opset or newest_opset(24)
    quoted = text.replace("'", '"')
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]>\n{quoted}')


def _without_ranks(text: str) -> onnx.ModelProto:
    model = _parse(text)
    for value in model.graph.input:
        value.type.tensor_type.ClearField("shape")
    return model


def _session(model: onnx.ModelProto) -> ort.InferenceSession:
    wide = any(value.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE for value in model.graph.input)
    if wide and any(node.op_type == "Cos" for node in model.graph.node) and not computes_float64("Cos"):
        pytest.skip(f"onnxruntime {ort.__version__} has no Cos of float64")
    options = ort.SessionOptions()
    options.log_severity_level = 4  # sizes that differ from what is inferred are what is tested
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _check(model: onnx.ModelProto, feeds: Arrays, wrt: list[str], twin: Callable[..., torch.Tensor]) -> None:
    """Compares gradients of `loss` with those that torch gives of the sum of the twin."""
    tensors = {k: torch.tensor(v, requires_grad=k in wrt) for k, v in feeds.items()}
    expected = torch.autograd.grad(twin(**tensors).sum(), [tensors[name] for name in wrt])
    got = _session(differentiate(model, "loss", wrt)).run([f"{name}_grad" for name in wrt], feeds)
    for value, want in zip(got, expected, strict=True):
        assert value.shape == tuple(want.shape)
        np.testing.assert_allclose(value, want.numpy(), rtol=1e-5, atol=1e-6)


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


UNRANKED = {
    "AveragePool": (
        "g (float[a] x) => (float loss) { p = AveragePool<kernel_shape=[2,2], strides=[2,1]>(x) "
        "s = Sin(p) loss = ReduceSum<keepdims=0>(s) }",
        {"x": _random(2, 3, 5, 4)},
        lambda x: fn.avg_pool2d(x, 2, (2, 1)).sin(),
    ),
    "AveragePool-same": (
        "g (float[a] x) => (float loss) { p = AveragePool<kernel_shape=[2], strides=[2], "
        "auto_pad='SAME_UPPER'>(x) s = Sin(p) loss = ReduceSum<keepdims=0>(s) }",
        {"x": _random(2, 3, 6)},
        lambda x: fn.avg_pool1d(x, 2, 2).sin(),
    ),
    "LpPool": (
        "g (float[a] x) => (float loss) { e = Exp(x) p = LpPool<kernel_shape=[2,2]>(e) s = Sin(p) "
        "loss = ReduceSum<keepdims=0>(s) }",
        {"x": _random(2, 1, 3, 4)},
        lambda x: (fn.avg_pool2d(x.exp() ** 2, 2, 1) * 4).sqrt().sin(),
    ),
    "Conv": (
        "g (float[a] x, float[a] b) => (float loss) <float[1,1,2] w = {0.5, -1.5}> "
        "{ r = Relu(x) c = Conv(r, w, b) s = Sin(c) loss = ReduceSum<keepdims=0>(s) }",
        {"x": _random(2, 1, 5), "b": _random(1)},
        lambda x, b: fn.conv1d(x.relu(), torch.tensor([[[0.5, -1.5]]]), b).sin(),
    ),
    "MatMul": (
        "g (float[a] x) => (float loss) <float[3,2] w = {1, 2, 3, 4, 5, 6}> "
        "{ y = MatMul(x, w) s = Sin(y) loss = ReduceSum<keepdims=0>(s) }",
        {"x": _random(2, 4, 3)},
        lambda x: (x @ torch.tensor([[1.0, 2], [3, 4], [5, 6]])).sin(),
    ),
    "LayerNormalization": (
        "g (float[a] x, float[a] w) => (float loss) { y = LayerNormalization(x, w) s = Sin(y) "
        "loss = ReduceSum<keepdims=0>(s) }",
        {"x": _random(2, 4, 3), "w": _random(3)},
        lambda x, w: fn.layer_norm(x, (3,), w).sin(),
    ),
    "Gather": (
        "g (float[a] x) => (float loss) <int64[3] i = {1, 0, 1}> { y = Gather<axis=-2>(x, i) s = Sin(y) "
        "loss = ReduceSum<keepdims=0>(s) }",
        {"x": _random(2, 4, 3)},
        lambda x: x[:, [1, 0, 1]].sin(),
    ),
    "Tile": (
        "g (float[a] x) => (float loss) <int64[2] r = {2, 3}> { y = Tile(x, r) s = Sin(y) "
        "loss = ReduceSum<keepdims=0>(s) }",
        {"x": _random(2, 3)},
        lambda x: x.tile(2, 3).sin(),
    ),
}


@pytest.mark.parametrize("name", UNRANKED)
def test_models_without_ranks(name: str) -> None:
    text, feeds, twin = UNRANKED[name]
    _check(_without_ranks(text), feeds, list(feeds), twin)


@pytest.mark.parametrize("op", ["RNN", "GRU", "LSTM"])
def test_recurrent_layer_without_ranks(op: str) -> None:
    gates, size, hidden = {"RNN": 1, "GRU": 3, "LSTM": 4}[op], 2, 3
    text = (
        f"g (float[a] x, float[a] w, float[a] r) => (float loss) "
        f"{{ y = {op}<hidden_size={hidden}>(x, w, r) s = Sin(y) loss = ReduceSum<keepdims=0>(s) }}"
    )
    feeds = {
        "x": _random(4, 2, size),
        "w": _random(1, gates * hidden, size),
        "r": _random(1, gates * hidden, hidden),
    }
    declared = _parse(text)
    for value in declared.graph.input:
        del value.type.tensor_type.shape.dim[:]
        for dim in feeds[value.name].shape:
            value.type.tensor_type.shape.dim.add(dim_value=dim)
    results = []
    for model in (_without_ranks(text), declared):  # the latter is compared with torch in the table of cases
        step = differentiate(model, "loss", ["x", "w", "r"])
        results.append(_session(step).run(["x_grad", "w_grad", "r_grad"], feeds))
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


EMPTY = {
    "MatMul-inner": (
        "g (float[a,b,c] x, float[c,d] w) => (float loss) { y = MatMul(x, w) s = Sin(y) "
        "loss = ReduceSum<keepdims=0>(s) }",
        {"x": _random(2, 3, 0), "w": _random(0, 2)},
        lambda x, w: (x @ w).sin(),
    ),
    "MatMul-inner-static": (
        "g (float[2,3,0] x, float[0,2] w) => (float loss) { y = MatMul(x, w) s = Sin(y) "
        "loss = ReduceSum<keepdims=0>(s) }",
        {"x": _random(2, 3, 0), "w": _random(0, 2)},
        lambda x, w: (x @ w).sin(),
    ),
    "GlobalMaxPool-batch": (
        "g (float[a,b,c] x) => (float loss) { y = GlobalMaxPool(x) s = Sin(y) loss = ReduceSum<keepdims=0>(s) }",
        {"x": _random(0, 3, 2)},
        lambda x: x.amax(2).sin(),
    ),
    "InstanceNormalization-batch": (
        "g (float[a,4,c] x, float[4] w, float[4] b) => (float loss) "
        "{ y = InstanceNormalization(x, w, b) s = Sin(y) loss = ReduceSum<keepdims=0>(s) }",
        {"x": _random(0, 4, 2), "w": _random(4), "b": _random(4)},
        lambda x, w, b: (x * w[:, None] + b[:, None]).sin(),  # of nothing
    ),
    "LayerNormalization-batch": (
        "g (float[a,b,4] x, float[4] w) => (float loss) { y = LayerNormalization(x, w) s = Sin(y) "
        "loss = ReduceSum<keepdims=0>(s) }",
        {"x": _random(2, 0, 4), "w": _random(4)},
        lambda x, w: (x * w).sin(),
    ),
    "DepthToSpace-crd": (
        "g (float[a,b,c,d] x) => (float loss) { y = DepthToSpace<blocksize=2, mode='CRD'>(x) s = Sin(y) "
        "loss = ReduceSum<keepdims=0>(s) }",
        {"x": _random(1, 8, 2, 0)},
        lambda x: x.sin(),
    ),
    "AveragePool-no-window": (
        "g (float[a,b,c,d] x) => (float loss) { y = AveragePool<kernel_shape=[2,2]>(x) s = Sin(y) "
        "loss = ReduceSum<keepdims=0>(s) }",
        {"x": _random(1, 2, 1, 3)},
        lambda x: 0 * x,
    ),
    "AveragePool-no-window-static": (
        "g (float[1,2,1,3] x) => (float loss) { y = AveragePool<kernel_shape=[2,2]>(x) s = Sin(y) "
        "loss = ReduceSum<keepdims=0>(s) }",
        {"x": _random(1, 2, 1, 3)},
        lambda x: 0 * x,
    ),
    "negative-axes": (
        "g (float[a,3,0,d] x) => (float loss) <int64[3] i = {3, 0, -3}> { y = ReduceSum<keepdims=0>(x, i) "
        "s = Sin(y) loss = ReduceSum<keepdims=0>(s) }",
        {"x": _random(2, 3, 0, 2)},
        lambda x: x.sum((3, 0, 1)).sin(),
    ),
}


@pytest.mark.parametrize("name", EMPTY)
def test_values_without_elements(name: str) -> None:
    if not keeps_nothing():
        pytest.skip(f"onnxruntime {ort.__version__} gives sums over no axes of no elements an element")
    text, feeds, twin = EMPTY[name]
    _check(_parse(text), feeds, list(feeds), twin)


def test_windows_that_lie_in_the_padding_pass_nothing_on() -> None:
    """torch gives them the index of no element, and writes there."""
    model = _parse(
        "g (float[n,c,h,w] x) => (float loss) { p = MaxPool<kernel_shape=[2,2], strides=[2,2], pads=[1,1,1,1], "
        "dilations=[2,1], ceil_mode=1>(x) s = Clip(p) loss = ReduceSum<keepdims=0>(s) }"
    )
    (got,) = _session(differentiate(model, "loss", ["x"])).run(["x_grad"], {"x": _random(2, 3, 1, 1)})
    np.testing.assert_array_equal(got, np.zeros((2, 3, 1, 1)))


@pytest.mark.parametrize("sizes", [(3, 3), (5, 3), (7, 2)])
def test_pooling_with_ceil_mode_and_dilations_at_sizes_not_declared(sizes: tuple[int, int]) -> None:
    text = (
        "g (float[n,c,h,w] x) => (float loss) { p = MaxPool<kernel_shape=[2,2], strides=[2,2], pads=[1,1,1,1], "
        "dilations=[2,1], ceil_mode=1>(x) s = Sin(p) loss = ReduceSum<keepdims=0>(s) }"
    )
    x = _random(2, 3, *sizes)
    _check(_parse(text), {"x": x}, ["x"], lambda x: fn.max_pool2d(x, 2, 2, 1, (2, 1), ceil_mode=True).sin())


@pytest.mark.parametrize("opset", [19, 21])
@pytest.mark.parametrize("steps", ["t", "u"])
def test_steps_of_a_slice_without_a_declared_shape_are_not_taken_for_one(steps: str, opset: int) -> None:
    """Shape inference of onnx (1.23) does: [3, 3] here, of which there are [2, 3]."""
    text = (
        "g (float[4,3] x, int64[a] t, float[b] w) => (float loss) <int64[2] s = {0, 0}, int64[2] e = {3, 3}> "
        f"{{ u = Abs(t) y = Slice(x, s, e, , {steps}) p = Mul(y, w) loss = ReduceSum<keepdims=0>(p) }}"
    )
    model = _parse(text, opset)
    for value in model.graph.input[1:]:
        value.type.tensor_type.ClearField("shape")
    feeds = {"x": _random(4, 3), "t": np.array([2, 1]), "w": _random(2, 3)}
    (got,) = _session(differentiate(model, "loss", ["x"])).run(["x_grad"], feeds)
    expected = np.zeros((4, 3))
    expected[0:3:2] = feeds["w"]
    np.testing.assert_allclose(got, expected)


@pytest.mark.parametrize(
    ("mode", "attributes"),
    [
        ("linear", "mode='linear'"),
        (
            "nearest",
            "mode='nearest', coordinate_transformation_mode='asymmetric', nearest_mode='floor'",
        ),
    ],
)
def test_sizes_of_a_resize_without_a_declared_shape_are_not_taken_for_none(
    mode: str, attributes: str
) -> None:
    model = _parse(
        f"g (float[1,2,3] x, int64[a] z) => (float loss) {{ p = Resize<{attributes}>(x, , , z) "
        "s = Sin(p) loss = ReduceSum<keepdims=0>(s) }"
    )
    model.graph.input[1].type.tensor_type.ClearField("shape")
    gradient = differentiate(model, "loss", ["x"])
    onnx.shape_inference.infer_shapes(gradient, check_type=True, strict_mode=True, data_prop=True)
    x = torch.tensor(_random(1, 2, 3), requires_grad=True)
    fn.interpolate(x, size=5, mode=mode).sin().sum().backward()
    feeds = {"x": x.detach().numpy(), "z": np.array([1, 2, 5])}
    (got,) = _session(gradient).run(["x_grad"], feeds)
    np.testing.assert_allclose(got, x.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [(5, 3), (2, 2), (1, 4)])
def test_resize_and_lrn_at_sizes_not_declared(sizes: tuple[int, int]) -> None:
    text = (
        "g (float[n,c,h,w] x) => (float loss) <float[4] f = {1, 1, 2, 3}> { p = Resize<mode='linear'>(x, , f) "
        "q = LRN<size=3>(p) s = Sin(q) loss = ReduceSum<keepdims=0>(s) }"
    )

    def twin(x: torch.Tensor) -> torch.Tensor:
        return fn.local_response_norm(fn.interpolate(x, scale_factor=(2, 3), mode="bilinear"), 3).sin()

    _check(_parse(text), {"x": _random(2, 4, *sizes)}, ["x"], twin)


def test_lrn_of_planes_without_elements() -> None:
    text = "g (float[2,3,h,w] x) => (float loss) { q = LRN<size=3>(x) loss = ReduceSum<keepdims=0>(q) }"
    (got,) = _session(differentiate(_parse(text), "loss", ["x"])).run(["x_grad"], {"x": _random(2, 3, 4, 0)})
    assert got.shape == (2, 3, 4, 0)


def test_constant_indices_are_not_taken_for_a_shape() -> None:
    """With them onnx's shape inference cannot add a column (1.23), whatever runtimes do."""
    if newest_opset(24) < 24:
        pytest.skip("TensorScatter came with opset 24")
    text = (
        "g (float[3,2,4] x, float[3,2,2] u) => (float loss) <int64[3] i = {0, 2, 1}> "
        "{ q = TensorScatter<axis=2>(x, u, i) s = Sin(q) loss = ReduceSum<keepdims=0>(s) }"
    )
    gradient = differentiate(_parse(text), "loss", ["x", "u"])
    onnx.shape_inference.infer_shapes(gradient, check_type=True, strict_mode=True, data_prop=True)


def test_second_derivative_in_running_statistics_that_are_parameters() -> None:
    """The first derivative reads them too; they were taken for statistics that an exporter had merged."""
    numbers = {name: [0.5, 1.5] for name in ("w", "b", "m", "v")}
    constants = ", ".join(f"double[2] {k} = {{{', '.join(map(str, v))}}}" for k, v in numbers.items())
    text = (
        f"g (double[3,2] x) => (double loss) <{constants}> {{ y = BatchNormalization(x, w, b, m, v) "
        "s = Sin(y) loss = ReduceSum<keepdims=0>(s) }"
    )
    second = differentiate(differentiate(_parse(text), "loss", ["x"]), "x_grad", ["m"], cotangent="u")
    x, u = _random(3, 2).astype(np.float64), np.ones((3, 2))
    (got,) = _session(second).run(["m_grad"], {"x": x, "u": u})

    leaf = torch.tensor(x, requires_grad=True)
    w, b, m, v = (
        torch.tensor(values, dtype=torch.float64, requires_grad=True) for values in numbers.values()
    )
    y = (leaf - m) / torch.sqrt(v + float(np.float32(1e-5))) * w + b
    (slope,) = torch.autograd.grad(y.sin().sum(), leaf, create_graph=True)
    np.testing.assert_allclose(got, torch.autograd.grad(slope.sum(), m)[0].numpy(), rtol=1e-9)


def test_float64_of_older_opsets_runs_behind_an_op_that_onnx_does_not_know() -> None:
    """Whose result has no dtype when the function bodies are looked for."""
    text = (
        '<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]> g (double[5] x) => (double loss) '
        "{ h = com.microsoft.FastGelu(x) y = ThresholdedRelu<alpha = 0.25>(h) loss = ReduceSum<keepdims=0>(y) }"
    )
    model = onnx.parser.parse_model(text)
    _session(model)
    x = np.linspace(-2, 2, 5)
    step = differentiate(model, "loss", ["x"])
    leaf = torch.tensor(x, requires_grad=True)
    gelu = fn.gelu(leaf, approximate="tanh")
    (want,) = torch.autograd.grad(gelu[gelu > 0.25].sum(), leaf)
    np.testing.assert_allclose(_session(step).run(["x_grad"], {"x": x})[0], want.numpy(), rtol=1e-6)


@pytest.mark.parametrize("op", ["Elu", "LeakyRelu", "Selu", "Softplus"])
def test_float64_of_older_opsets_runs_after_conversion(op: str) -> None:
    """ONNX Runtime computes these in float64 by their function bodies, at opset 18 only."""
    text = f"g (double[5] x) => (double loss) {{ y = {op}(x) loss = ReduceSum<keepdims=0>(y) }}"
    model = _parse(text, opset=18)
    _session(model)
    x = np.linspace(-2, 2, 5)
    x[2] = 0.3
    step = differentiate(model, "loss", ["x"])
    leaf = torch.tensor(x, requires_grad=True)
    twin = {"Elu": fn.elu, "LeakyRelu": fn.leaky_relu, "Selu": fn.selu, "Softplus": fn.softplus}[op]
    (want,) = torch.autograd.grad(twin(leaf).sum(), leaf)
    np.testing.assert_allclose(_session(step).run(["x_grad"], {"x": x})[0], want.numpy(), rtol=1e-6)


def test_a_resize_whose_result_has_no_known_rank_is_an_error() -> None:
    """Without scales and sizes onnx's shape inference does not tell the shape of the result."""
    text = "g (float[2,8] x, float[4] roi) => (float loss) { p = Resize(x, roi) loss = ReduceSum<keepdims=0>(p) }"
    with pytest.raises(OnnxTrainError, match="inputs without scales or sizes"):
        differentiate(_parse(text), "loss", ["x"])
