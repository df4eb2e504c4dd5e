"""Pads with axes, of which ONNX Runtime 1.32 pads other axes, or reads beyond the pads, behind a Transpose."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import onnxtrain
from onnxtrain.passes import apply_workarounds, canonicalize
from onnxtrain.passes.runtime_faults.pad_axes import PadAxesPass
from passes._models import normal

Arrays = dict[str, np.ndarray]
PAD = """<ir_version: 10, opset_import: ["": 21]> net (float[a, b, c] x{inputs}) => (float[d, e, f] y)
    {{ {constants} t = Transpose<perm = [2, 0, 1]>(x) s = Sin(t) p = Pad<mode = "{mode}">(s, pads, {value}, axes)
       y = Transpose<perm = [1, 2, 0]>(p) }}"""
VALUE = "fill = Constant<value_float = 2.5>()"


def padded(
    axes: list[int], pads: list[int], *, known: str, mode: str = "constant", filled: bool = False
) -> tuple[onnx.ModelProto, Arrays]:
    """Return a model that pads a transposed value, and its inputs.

    `known` names what is a constant, e.g. "axes"; the rest are inputs of the model.
    """
    numbers = {"axes": np.array(axes, np.int64), "pads": np.array(pads, np.int64)}
    constants = [f"{name} = Constant<value_ints = {numbers[name].tolist()}>()" for name in known.split()]
    given = {name: array for name, array in numbers.items() if name not in known}
    text = PAD.format(
        inputs="".join(f", int64[{len(array)}] {name}" for name, array in given.items()),
        constants=" ".join([*constants, VALUE] if filled else constants),
        mode=mode,
        value="fill" if filled else '""',
    )
    return onnx.parser.parse_model(text), {"x": normal(2, 3, 4), **given}


def expected(x: np.ndarray, axes: list[int], pads: list[int], mode: str, filled: bool) -> np.ndarray:
    y = np.sin(x.transpose(2, 0, 1))
    kind = {"constant_values": 2.5 if filled else 0} if mode == "constant" else {}
    for axis, before, after in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        kept = range(y.shape[axis])[max(-before, 0) : y.shape[axis] - max(-after, 0)]
        room = [(0, 0)] * 3
        room[axis] = (max(before, 0), max(after, 0))
        y = np.pad(y.take(kept, axis), room, mode, **kind)
    return y.transpose(1, 2, 0)


def run(model: onnx.ModelProto, feeds: Arrays, *names: str) -> list[np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(list(names), feeds)


@pytest.mark.parametrize("known", ["axes pads", "axes", "pads", ""])
@pytest.mark.parametrize(
    ("axes", "pads", "mode", "filled"),
    [
        ([1], [2, 1], "constant", False),
        ([-1], [0, 3], "constant", True),
        ([2, 0], [1, 0, 2, 3], "constant", False),
        ([0, -1], [-1, 1, 2, -2], "constant", True),
        ([1, 2, 0], [1, 1, 0, 0, 1, 2], "edge", False),
        ([2], [1, 2], "reflect", False),
        ([], [], "constant", False),
    ],
)
def test_pads_of_some_axes(axes: list[int], pads: list[int], mode: str, filled: bool, known: str) -> None:
    if not axes and known:
        pytest.skip("the parser reads no empty list")
    model, feeds = padded(axes, pads, known=known, mode=mode, filled=filled)
    written = ir.to_proto(apply_workarounds(canonicalize(ir.from_proto(model))))
    assert all(len(node.input) < 4 for node in written.graph.node if node.op_type == "Pad")
    (y,) = run(written, feeds, "y")
    np.testing.assert_allclose(y, expected(feeds["x"], axes, pads, mode, filled), rtol=1e-6)


@pytest.mark.parametrize("known", ["axes pads", ""])
def test_gradient_of_pads_of_some_axes(known: str) -> None:
    axes, pads = [2, 0], [1, -1, 2, 3]
    model, feeds = padded(axes, pads, known=known)
    x = feeds["x"]
    ct = normal(*expected(x, axes, pads, "constant", False).shape)
    (ct_x,) = run(onnxtrain.vjp(model, ["y"], ["x"]), {**feeds, "y_cotangent": ct}, "x_grad")
    # Axes [2, 0] of the transposed value are axes 1 and 2 of x; the first element along axis 2 is cropped.
    want = np.cos(x)
    want[:, :, 0] = 0
    want[:, :, 1:] *= ct[:, 1:-2, :-3]
    np.testing.assert_allclose(ct_x, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("known", ["axes pads", ""])
def test_onnxruntime_reads_beyond_pads(known: str) -> None:
    """If this fails, a new ONNX Runtime permutes the axes, too: PadAxesPass may go if the test below fails as well."""
    model, feeds = padded([1], [2, 1], known=known)
    with pytest.raises(Exception, match="out of data bounds"):
        run(model, feeds, "y")


def test_onnxruntime_pads_other_axes() -> None:
    """If this fails, a new ONNX Runtime permutes the axes, too: PadAxesPass may go if the test above fails as well."""
    axes, pads = [1, 0, 2], [1, 1, 0, 0, 1, 2]
    model, feeds = padded(axes, pads, known="axes pads")
    (y,) = run(model, feeds, "y")
    assert y.shape != expected(feeds["x"], axes, pads, "constant", False).shape


def test_pads_without_axes_and_of_unknown_rank_stay_as_they_are() -> None:
    model = ir.from_proto(padded([1], [2, 1], known="axes pads")[0])
    assert not PadAxesPass()(model).modified, "no shapes are inferred"
    model = apply_workarounds(canonicalize(model))
    assert not PadAxesPass()(model).modified
