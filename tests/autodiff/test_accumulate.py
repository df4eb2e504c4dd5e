"""Contributions to one cotangent: joined where they are the pieces of a value, added up where they are not."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from onnxtrain.autodiff import differentiate


def gradient(body: str, x: np.ndarray) -> tuple[np.ndarray, Counter[str]]:
    """The gradient of y in x, and how often each op occurs once the runtime has removed dead code."""
    model = differentiate(
        onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {body}'), "y", ["x"]
    )
    live = onnx.utils.Extractor(model).extract_model(["x"], ["x_grad"])
    session = ort.InferenceSession(live.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["x_grad"], {"x": x})[0], Counter(node.op_type for node in live.graph.node)


ATTENTION = """(float[n, 3, 2] x) => (float y)
    <int64 zero = {0}, int64 one = {1}, int64 two = {2}>
    { q = Gather<axis=1>(x, zero)  k = Gather<axis=1>(x, one)  v = Gather<axis=1>(x, two)
      %s  p = Mul(q, k)  s = Mul(p, v)  y = ReduceSum<keepdims=0>(%s) }"""


def attention(x: torch.Tensor) -> torch.Tensor:
    return x[:, 0] * x[:, 1] * x[:, 2]


def reference(function, x: np.ndarray) -> np.ndarray:
    leaf = torch.from_numpy(x).requires_grad_()
    function(leaf).sum().backward()
    return leaf.grad.numpy()


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_pieces_that_fill_a_value_are_joined() -> None:
    x = normal(4, 3, 2)
    result, ops = gradient(ATTENTION % ("", "s"), x)
    np.testing.assert_allclose(result, reference(attention, x), rtol=1e-6)
    assert (ops["Concat"], ops["Pad"], ops["Add"]) == (1, 0, 0)


def test_another_use_of_the_value_is_added_to_the_pieces() -> None:
    x = normal(4, 3, 2)
    body = ATTENTION % ("e = Exp(x)  r = ReduceSum<keepdims=0>(e)", "t")
    result, ops = gradient(body.replace("s = Mul(p, v)", "s = Mul(p, v)  t = Add(s, r)"), x)

    def function(leaf: torch.Tensor) -> torch.Tensor:
        return attention(leaf) + leaf.exp().sum()

    np.testing.assert_allclose(result, reference(function, x), rtol=1e-5)
    assert ops["Pad"] == 0


SLICES = {
    "overlap": ([0, 5], [2, 8]),
    "gap": ([0, 3], [4, 8]),
    "unordered": ([4, 8], [0, 4]),
    "short end": ([0, 4], [4, 7]),
    "late start": ([1, 4], [4, 8]),
}


@pytest.mark.parametrize("name", SLICES)
def test_any_two_slices(name: str) -> None:
    """Also where sizes and paddings agree by chance: only slices that touch and fill the axis may be joined."""
    (a, b), (c, d) = SLICES[name]
    body = f"""(float[n, 8] x) => (float y)
        <int64[1] a = {{{a}}}, int64[1] b = {{{b}}}, int64[1] c = {{{c}}}, int64[1] d = {{{d}}}, int64[1] axis = {{1}}>
        {{ l = Slice(x, a, b, axis)  m = Slice(x, c, d, axis)  e = Exp(l)  f = Sin(m)
           g = ReduceSum<keepdims=0>(e)  h = ReduceSum<keepdims=0>(f)  y = Add(g, h) }}"""
    x = normal(3, 8)
    result, ops = gradient(body, x)
    expected = reference(lambda leaf: leaf[:, a:b].exp().sum() + leaf[:, c:d].sin().sum(), x)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    assert ops["Pad"] == (0 if name == "unordered" else 2)


def test_slices_of_several_axes_are_not_joined() -> None:
    body = """(float[4, 4] x) => (float y)
        <int64[2] a = {0, 0}, int64[2] b = {2, 2}, int64[2] c = {2, 2}, int64[2] d = {4, 4}>
        { l = Slice(x, a, b)  m = Slice(x, c, d)  p = Mul(l, m)  y = ReduceSum<keepdims=0>(p) }"""
    x = normal(4, 4)
    result, ops = gradient(body, x)
    expected = reference(lambda leaf: leaf[:2, :2] * leaf[2:, 2:], x)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    assert ops["Pad"] == 2
