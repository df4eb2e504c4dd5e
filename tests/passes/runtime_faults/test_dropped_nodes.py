"""An Expand to no elements and a Slice with steps of run time, which graph optimizers of ONNX Runtime 1.32 drop."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import onnxtrain
from onnxtrain.passes import apply_workarounds, canonicalize
from onnxtrain.passes.runtime_faults.empty_expand import EmptyExpandPass
from onnxtrain.passes.runtime_faults.slice_axes import SliceAxesPass

HEAD = '<ir_version: 10, opset_import: ["": 21]>'
SLICE = f"""{HEAD} net (float[n] x, int64[m] steps) => (float[k] y)
    <int64[1] starts = {{0}}, int64[1] ends = {{9223372036854775807}}> {{
    a = Neg(x)  b = Slice(a, starts, ends, "", steps)  y = Mul(b, b) }}"""


def expand(x: str, shape: list[int]) -> str:
    sizes = ", ".join(map(str, shape))
    return f"""{HEAD} net (float[{x}] x) => (float y) <int64[{len(shape)}] shape = {{{sizes}}}> {{
        a = Neg(x)  b = Expand(a, shape)  y = Neg(b) }}"""


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray], *names: str) -> list[np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(list(names), feeds)


@pytest.mark.parametrize(
    ("declared", "size", "shape"),
    [
        ("3, 1", (3, 1), [3, 0]),
        ("1, 3", (1, 3), [0, 3]),
        ("n, 1, 1", (3, 1, 1), [3, 0, 0]),
        ("1, 1", (1, 1), [0, 2]),
        ("1, 3", (1, 3), [2, 0, 3]),
        ("0, 3", (0, 3), [0, 3]),
        ("1", (1,), [0, 1]),
    ],
)
def test_expands_to_no_elements(declared: str, size: tuple[int, ...], shape: list[int]) -> None:
    model = ir.to_proto(
        apply_workarounds(canonicalize(ir.from_proto(onnx.parser.parse_model(expand(declared, shape)))))
    )
    x = np.ones(size, np.float32)

    (y,) = run(model, {"x": x}, "y")
    assert y.shape == np.broadcast_to(x, np.broadcast_shapes(size, shape)).shape


@pytest.mark.parametrize(("size", "shape"), [((3, 1), [3, 0]), ((1, 3), [0, 3])])
def test_onnxruntime_drops_expands_to_no_elements(size: tuple[int, ...], shape: list[int]) -> None:
    """If this fails, a new ONNX Runtime keeps them: EmptyExpandPass may go."""
    model = onnx.parser.parse_model(expand(", ".join(map(str, size)), shape))
    (y,) = run(model, {"x": np.ones(size, np.float32)}, "y")
    assert y.shape == size


def test_expands_to_elements_stay_as_they_are() -> None:
    for declared, shape in [("3, 1", [3, 2]), ("1, 1", [1, 1]), ("0, 3", [0, 3])]:
        model = ir.from_proto(onnx.parser.parse_model(expand(declared, shape)))
        assert not EmptyExpandPass()(model).modified


def test_expands_are_cut_once() -> None:
    # The mean's size is symbolic, and stays so behind the cut. A second cut would get the names of the first.
    model = onnx.parser.parse_model(
        f"""{HEAD} net (float[2, 0] x, int64[1] axes, float z) => (float y)
        {{ s = Sin(z)  m = ReduceMean(x, axes)  p = Mul(m, s)  y = ReduceSum<keepdims = 0>(p) }}"""
    )
    once = onnxtrain.differentiate(model, "y", ["z", "x"])
    assert [n.op_type for n in once.graph.node].count("Slice") == 1
    twice = onnxtrain.differentiate(once, "z_grad", ["z", "x"])
    assert [n.op_type for n in twice.graph.node].count("Slice") == 2, "one for each gradient of x"
    feeds = {"x": np.ones((2, 0), np.float32), "axes": np.array([0]), "z": np.array(0.5, np.float32)}
    assert run(twice, feeds, "x_grad_1")[0].shape == (2, 0)


@pytest.mark.parametrize("step", [1, 2, 3, -1])
def test_a_slice_by_steps_of_run_time_and_its_gradient(step: int) -> None:
    model = onnx.parser.parse_model(SLICE)
    start = 0 if step > 0 else 3  # from the end backwards, an end before all
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.array([start]), "starts"))
    if step < 0:
        end = np.array([np.iinfo(np.int64).min])
        model.graph.initializer[1].CopyFrom(onnx.numpy_helper.from_array(end, "ends"))
    x = np.array([1, 2, -3, 4], np.float32)
    feeds = {"x": x, "steps": np.array([step])}
    picked = np.arange(4)[::step] if step > 0 else np.arange(4)[3::step]

    gradient = onnxtrain.vjp(model, ["y"], ["x"])
    (cotangent,) = {i.name for i in gradient.graph.input} - feeds.keys()
    names = [o.name for o in gradient.graph.output]
    y, ct_x = run(gradient, {**feeds, cotangent: np.ones(len(picked), np.float32)}, *names)

    np.testing.assert_allclose(y, x[picked] ** 2)
    expected = np.zeros(4, np.float32)
    expected[picked] = 2 * x[picked]
    np.testing.assert_allclose(ct_x, expected)


def test_onnxruntime_drops_slices_by_steps_of_run_time() -> None:
    """If this fails, a new ONNX Runtime keeps them: SliceAxesPass may go."""
    x = np.array([1, 2, -3, 4], np.float32)
    (y,) = run(onnx.parser.parse_model(SLICE), {"x": x, "steps": np.array([2])}, "y")
    np.testing.assert_array_equal(y, x**2)


def test_slices_with_axes_or_constant_steps_stay_as_they_are() -> None:
    for old, new in [('"", steps', "starts, steps"), ('"", steps', '"", starts'), (', "", steps', "")]:
        model = ir.from_proto(onnx.parser.parse_model(SLICE.replace(old, new)))
        assert not SliceAxesPass()(model).modified
    assert SliceAxesPass()(ir.from_proto(onnx.parser.parse_model(SLICE))).modified
