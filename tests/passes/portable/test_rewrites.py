"""The ops that `make_portable` writes give equal values, and the op that they replace is gone."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from models import parse_nodes
from onnxtrain.passes.portable import InfinitiesPass, make_portable

X = np.random.default_rng(1).normal(0, 1, (2, 3, 7, 6)).astype(np.float32)
# Equal numbers in one window: the first one counts.
X[0, 0] = np.round(X[0, 0])


def build(text: str, outputs: dict[str, int], *, static: bool, **inputs: np.ndarray) -> onnx.ModelProto:
    """Parse a graph; shapes of inputs are symbolic unless `static`."""
    infos = [
        helper.make_tensor_value_info(
            name,
            helper.np_dtype_to_tensor_dtype(value.dtype),
            value.shape if static else [f"{name}{axis}" for axis in range(value.ndim)],
        )
        for name, value in inputs.items()
    ]
    results = [helper.make_tensor_value_info(name, dtype, None) for name, dtype in outputs.items()]
    graph = helper.make_graph(parse_nodes(text), "test", infos, results)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def run(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    # As it is written: an optimizer of ONNX Runtime could write it otherwise again.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    results: list[np.ndarray] = ort.InferenceSession(model.SerializeToString(), options).run(None, inputs)
    return results


def rewritten(model: onnx.ModelProto) -> onnx.ModelProto:
    proto = ir.to_proto(make_portable(ir.from_proto(model)))
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True)
    assert [value.name for value in proto.graph.output] == [value.name for value in model.graph.output]
    return proto


def stays(model: onnx.ModelProto, op: str, **attributes: object) -> bool:
    """Say if the model has a node of this op with these attributes."""
    for node in model.graph.node:
        values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == op and attributes.items() <= values.items():
            return True
    return False


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("shape", [(4, 5, 3), (1, 1, 1), (2, 0, 3), (0, 0, 0)])
def test_cum_sum(axis: int, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).normal(0, 1, shape).astype(np.float32)
    text = f"a = Constant<value_int={axis}>()  y = CumSum<reverse=1, exclusive=1>(x, a)"
    model = build(text, {"y": TensorProto.FLOAT}, static=False, x=x)
    new = rewritten(model)
    assert stays(model, "CumSum", exclusive=1)
    assert not stays(new, "CumSum", exclusive=1)
    np.testing.assert_array_equal(run(new, {"x": x})[0], run(model, {"x": x})[0])
    # By numpy, which has no such sum: behind each element, from the end.
    expected = np.flip(np.cumsum(np.flip(x, axis), axis), axis) - x
    np.testing.assert_allclose(run(new, {"x": x})[0], expected, atol=1e-5)


def test_cum_sum_of_integers() -> None:
    x = np.arange(12).reshape(3, 4)
    text = "a = Constant<value_int=1>()  y = CumSum<reverse=1, exclusive=1>(x, a)"
    model = build(text, {"y": TensorProto.INT64}, static=True, x=x)
    np.testing.assert_array_equal(
        run(rewritten(model), {"x": x})[0], [[6, 5, 3, 0], [18, 13, 7, 0], [30, 21, 11, 0]]
    )


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)]),
        ("ij,jk,kl", [(2, 3), (3, 4), (4, 5)]),
        ("bij,bjk,bik->b", [(2, 3, 4), (2, 4, 5), (2, 3, 5)]),
        ("ii,ij,j->i", [(3, 3), (3, 4), (4,)]),
        ("i,j,k->kji", [(2,), (3,), (4,)]),
        ("...ij,...jk,kl->...il", [(2, 3, 4), (2, 4, 5), (5, 6)]),
        ("a,b,a,b->", [(3,), (4,), (3,), (4,)]),
        ("bij , bjk , k -> b i", [(2, 3, 4), (2, 4, 5), (5,)]),
    ],
)
def test_einsum(equation: str, shapes: list[tuple[int, ...]]) -> None:
    rng = np.random.default_rng(0)
    inputs = {f"x{i}": rng.normal(0, 1, shape).astype(np.float32) for i, shape in enumerate(shapes)}
    text = f'y = Einsum<equation="{equation}">({", ".join(inputs)})'
    model = build(text, {"y": TensorProto.FLOAT}, static=True, **inputs)
    new = rewritten(model)
    assert all(len(node.input) <= 2 for node in new.graph.node if node.op_type == "Einsum")
    expected = np.einsum(equation.replace(" ", ""), *inputs.values())
    np.testing.assert_allclose(run(new, inputs)[0], expected, atol=1e-5)


@pytest.mark.parametrize(
    "slices",
    [
        (slice(None, None, -1),),
        (slice(5, 1, -2), slice(0, 3, 2)),
        (slice(1, 4), slice(-1, -9, -1)),
        (slice(-2, None, -3),),
        (slice(2, 5, -1),),
        (slice(100, -100, -1), slice(100, 0, -1), slice(None)),
    ],
)
@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_slices_with_negative_steps(slices: tuple[slice, ...], computed: bool, dtype: type) -> None:
    x = np.arange(7 * 6 * 2, dtype=np.float32).reshape(7, 6, 2)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    starts, ends, steps = [], [], []
    for part in slices:
        step = part.step or 1
        starts.append(part.start if part.start is not None else 0 if step > 0 else high)
        ends.append(part.stop if part.stop is not None else high if step > 0 else low + 1)
        steps.append(step)
    kind = "int64" if dtype is np.int64 else "int32"
    constants = {"starts": starts, "ends": ends, "axes": list(range(len(slices))), "steps": steps}
    text = "".join(
        f"{name} = Constant<value={kind}[{len(values)}] {{{', '.join(map(str, values))}}}>()  "
        for name, values in constants.items()
        if not (computed and name in ("starts", "ends"))
    )
    inputs = {"x": x}
    if computed:
        inputs |= {"starts": np.array(starts, dtype), "ends": np.array(ends, dtype)}
    model = build(
        text + "y = Slice(x, starts, ends, axes, steps)", {"y": TensorProto.FLOAT}, static=False, **inputs
    )
    new = rewritten(model)
    assert sum(node.op_type == "Slice" for node in new.graph.node) == sum(step > 0 for step in steps)
    np.testing.assert_array_equal(run(new, inputs)[0], x[slices])


@pytest.mark.parametrize("pads", [(0, 0, 0, 0), (2, 1, 0, 3), (4, 0, 9, 0), (-1, 2, -1, 0), (0, -2, 5, 3)])
def test_pads_that_wrap(pads: tuple[int, ...]) -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    text = f'p = Constant<value_ints=[{", ".join(map(str, pads))}]>()  y = Pad<mode="wrap">(x, p)'
    model = build(text, {"y": TensorProto.FLOAT}, static=False, x=x)
    new = rewritten(model)
    assert not stays(new, "Pad")
    rows, columns = (
        np.arange(-pads[axis], size + pads[axis + 2]) % size for axis, size in enumerate(x.shape)
    )
    np.testing.assert_array_equal(run(new, {"x": x})[0], x[rows][:, columns])


def test_pads_that_wrap_some_axes() -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    text = """p = Constant<value_ints=[1, 2]>()  a = Constant<value_ints=[-1]>()
    y = Pad<mode="wrap">(x, p, , a)"""
    model = build(text.replace(", ,", ', "",'), {"y": TensorProto.FLOAT}, static=False, x=x)
    np.testing.assert_array_equal(
        run(rewritten(model), {"x": x})[0], np.pad(x, ((0, 0), (1, 2)), mode="wrap")
    )


def test_convolutions_get_their_attributes() -> None:
    w = np.ones((4, 3, 2, 3), np.float32)
    text = "y = Conv(x, w)  z = ConvTranspose(y, w)"
    model = build(text, dict.fromkeys("yz", TensorProto.FLOAT), static=True, x=X, w=w)
    new = rewritten(model)
    for op in ("Conv", "ConvTranspose"):
        assert stays(
            new, op, dilations=[1, 1], group=1, kernel_shape=[2, 3], pads=[0, 0, 0, 0], strides=[1, 1]
        )
    for value, expected in zip(run(new, {"x": X, "w": w}), run(model, {"x": X, "w": w}), strict=True):
        np.testing.assert_array_equal(value, expected)


def test_convolutions_keep_the_pads_that_they_compute() -> None:
    w = np.ones((4, 3, 2, 3), np.float32)
    model = build('y = Conv<auto_pad="SAME_UPPER">(x, w)', {"y": TensorProto.FLOAT}, static=True, x=X, w=w)
    new = rewritten(model)
    assert not any(a.name == "pads" for a in new.graph.node[0].attribute)
    np.testing.assert_array_equal(run(new, {"x": X, "w": w})[0], run(model, {"x": X, "w": w})[0])


@pytest.mark.parametrize(
    "windows",
    [
        "kernel_shape=[2,2], strides=[2,2]",
        "kernel_shape=[3,2]",
        "kernel_shape=[3,3], strides=[2,1], pads=[1,1,1,0]",
        "kernel_shape=[2,3], strides=[3,2], ceil_mode=1",
        "kernel_shape=[7,6]",
    ],
)
@pytest.mark.parametrize("static", [False, True])
def test_indices_of_max_pool(windows: str, static: bool) -> None:
    outputs = {"y": TensorProto.FLOAT, "i": TensorProto.INT64}
    model = build(f"y, i = MaxPool<{windows}>(x)", outputs, static=static, x=X)
    new = rewritten(model)
    assert all(len(node.output) == 1 for node in new.graph.node)
    for value, expected in zip(run(new, {"x": X}), run(model, {"x": X}), strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("x", [X[:, :, 0], np.stack([X, X + 1, -X], 2)], ids=["1d", "3d"])
def test_indices_of_max_pool_over_other_axes(x: np.ndarray) -> None:
    rank = x.ndim - 2
    windows = (
        f"kernel_shape={[2] * rank}, strides={[2] + [1] * (rank - 1)}, pads={[1, *[0] * (2 * rank - 1)]}"
    )
    outputs = {"y": TensorProto.FLOAT, "i": TensorProto.INT64}
    model = build(f"y, i = MaxPool<{windows}>(x)", outputs, static=False, x=x)
    for value, expected in zip(run(rewritten(model), {"x": x}), run(model, {"x": x}), strict=True):
        np.testing.assert_array_equal(value, expected)


def test_indices_of_windows_of_infinities() -> None:
    x = np.full((1, 1, 2, 2), -np.inf, np.float32)
    outputs = {"y": TensorProto.FLOAT, "i": TensorProto.INT64}
    model = build("y, i = MaxPool<kernel_shape=[2,2], pads=[1,1,1,1]>(x)", outputs, static=True, x=x)
    indices = run(rewritten(model), {"x": x})[1]
    assert ((indices >= 0) & (indices < 4)).all()


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (2, 3, 7, 6)])
@pytest.mark.parametrize("settings", ["", ", epsilon=0.01, momentum=0.7"])
def test_batch_normalization(shape: tuple[int, ...], settings: str) -> None:
    rng = np.random.default_rng(0)
    # A large mean, of which the square would lose the digits of the variance.
    inputs = {"x": (rng.normal(0, 1, shape) + 100).astype(np.float32)}
    inputs |= {name: rng.uniform(0.5, 2, 3).astype(np.float32) for name in ("s", "b", "m", "v")}
    text = f"y, nm, nv = BatchNormalization<training_mode=1{settings}>(x, s, b, m, v)"
    model = build(text, dict.fromkeys(("y", "nm", "nv"), TensorProto.FLOAT), static=True, **inputs)
    new = rewritten(model)
    assert not stays(new, "BatchNormalization")
    for value, expected in zip(run(new, inputs), run(model, inputs), strict=True):
        np.testing.assert_allclose(value, expected, atol=2e-5)


def test_batch_normalization_in_inference_stays() -> None:
    vectors = {name: np.ones(3, np.float32) for name in ("s", "b", "m", "v")}
    model = build(
        "y = BatchNormalization(x, s, b, m, v)", {"y": TensorProto.FLOAT}, static=True, x=X, **vectors
    )
    assert stays(rewritten(model), "BatchNormalization")


def test_dropout_in_inference() -> None:
    text = "y, mask = Dropout(x)  z = Dropout(y)"
    outputs = {"y": TensorProto.FLOAT, "mask": TensorProto.BOOL, "z": TensorProto.FLOAT}
    new = rewritten(build(text, outputs, static=False, x=X))
    assert not stays(new, "Dropout")
    y, mask, z = run(new, {"x": X})
    np.testing.assert_array_equal(y, X)
    np.testing.assert_array_equal(z, X)
    assert mask.shape == X.shape
    assert mask.all()


# A maximum over no elements is an error.
@pytest.mark.parametrize(
    ("op", "batch"),
    [("ReduceSum", 2), ("ReduceSum", 0), ("ReduceMean", 2), ("ReduceMax", 2), ("ReduceLogSumExp", 2)],
)
@pytest.mark.parametrize("axes", [[0, 2, 3], [-1, -2], [3, 1, 2], [-1, 0, -2]])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_reductions_over_the_last_axes(op: str, axes: list[int], keepdims: int, batch: int) -> None:
    x = X[:batch]
    text = f"a = Constant<value_ints={axes}>()  y = {op}<keepdims={keepdims}>(x, a)"
    model = build(text, {"y": TensorProto.FLOAT}, static=True, x=x)
    new = rewritten(model)
    assert any(node.op_type == "Reshape" for node in new.graph.node)
    value, expected = run(new, {"x": x})[0], run(model, {"x": x})[0]
    assert value.shape == expected.shape
    np.testing.assert_allclose(value, expected, atol=1e-5)


@pytest.mark.parametrize("axes", [[0, 3], [1, 2], [0, 1, 2, 3], [2]])
def test_other_reductions_stay(axes: list[int]) -> None:
    text = f"a = Constant<value_ints={axes}>()  y = ReduceSum(x, a)"
    new = rewritten(build(text, {"y": TensorProto.FLOAT}, static=False, x=X))
    assert [node.op_type for node in new.graph.node] == ["Constant", "ReduceSum"]


INFINITE = np.array(
    [[np.inf, 1, -np.inf], [3, 3, 3], [-np.inf] * 3, [np.inf] * 3, [-3.4e38, -np.inf, 3.4e38]]
)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("axis", "largest"), [(0, 1), (1, 0), (-1, 1)])
def test_infinities_are_sorted(axis: int, largest: int, dtype: type) -> None:
    x = INFINITE.astype(dtype)
    text = f"k = Constant<value_ints=[3]>()  v, i = TopK<axis={axis}, largest={largest}>(x, k)"
    model = build(text, {"v": x.dtype.num, "i": TensorProto.INT64}, static=False, x=x)
    model.graph.output[0].type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(x.dtype)
    new = rewritten(model)
    # What is sorted has no infinity: the input of TopK is a graph output of a copy.
    keys = next(node.input[0] for node in new.graph.node if node.op_type == "TopK")
    shown = onnx.ModelProto()
    shown.CopyFrom(new)
    shown.graph.output.append(
        helper.make_tensor_value_info(keys, model.graph.input[0].type.tensor_type.elem_type, None)
    )
    values, indices, sorted_ = run(shown, {"x": x})
    # CUDA's TopK fills up with the largest finite number.
    assert (abs(sorted_) < np.finfo(dtype).max).all()
    want = np.take(np.argsort(-x if largest else x, axis=axis, kind="stable"), range(3), axis=axis)
    np.testing.assert_array_equal(indices, want)
    np.testing.assert_array_equal(values, np.take_along_axis(x, want, axis=axis))


def test_integers_are_sorted_as_they_are() -> None:
    x = np.array([[3, 1, 2]])
    model = build(
        "k = Constant<value_ints=[2]>()  v, i = TopK(x, k)", {"v": TensorProto.INT64}, static=True, x=x
    )
    assert not stays(rewritten(model), "GatherElements")


@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin"])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_extrema_of_infinities(op: str, keepdims: int) -> None:
    x = INFINITE.astype(np.float32)
    text = f"a = Constant<value_ints=[1]>()  y = {op}<keepdims={keepdims}>(x, a)"
    model = build(text, {"y": TensorProto.FLOAT}, static=False, x=x)
    same = ir.from_proto(model)
    assert not InfinitiesPass(compared_only=True)(same).modified
    new = ir.to_proto(InfinitiesPass()(same).model)
    # As CUDA computes it: infinities are lost on the way, and put back where a row has no other number.
    lossy = onnx.ModelProto()
    lossy.CopyFrom(new)
    most = np.finfo(np.float32).max
    for node in [*lossy.graph.node]:
        if node.op_type == op and node.input[0] == "x":
            node.input[0] = "finite"
    clip = parse_nodes(f"low = Constant<value_float={-most}>()  high = Constant<value_float={most}>()")
    lossy.graph.node.insert(0, helper.make_node("Clip", ["x", "low", "high"], ["finite"]))
    for node in reversed(clip):
        lossy.graph.node.insert(0, node)
    want = (x.max if op == "ReduceMax" else x.min)(axis=1, keepdims=bool(keepdims))
    np.testing.assert_array_equal(run(new, {"x": x})[0], want)
    lost = {"ReduceMax": np.inf, "ReduceMin": -np.inf}[op]
    np.testing.assert_array_equal(run(lossy, {"x": x})[0], np.where(want == lost, np.sign(want) * most, want))


def test_extrema_that_are_compared() -> None:
    x = INFINITE.astype(np.float32)
    text = "a = Constant<value_ints=[1]>()  low = Constant<value_float=-inf>()  m = ReduceMax(x, a)  y = Equal(m, low)"
    model = build(text, {"y": TensorProto.BOOL}, static=False, x=x)
    new = rewritten(model)
    assert stays(new, "ReduceMin")
    np.testing.assert_array_equal(run(new, {"x": x})[0], x.max(1, keepdims=True) == -np.inf)
