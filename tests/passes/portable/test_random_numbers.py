"""Random numbers of ops other than Dropout, drawn from an input: their distributions, dtypes and shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper

from models import parse_nodes
from onnxtrain.passes.portable import draw_from_input

COUNT = 200_000


def draw(text: str, numbers: tuple[int, int, int] = (0, 0, 0), *, dtype: int = 1, **feeds: Any) -> np.ndarray:
    inputs = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(array.dtype), [f"d{i}" for i in range(array.ndim)]
        )
        for name, array in feeds.items()
    ]
    graph = helper.make_graph(
        parse_nodes(text), "test", inputs, [helper.make_tensor_value_info("y", dtype, None)]
    )
    model = ir.from_proto(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    )
    source = draw_from_input(model)
    assert source is not None
    proto = ir.to_proto(model)
    session = ort.InferenceSession(proto.SerializeToString())
    result: np.ndarray = session.run(None, {**feeds, "onnxtrain.random": np.array(numbers)})[0]
    return result


def distance(drawn: np.ndarray, distribution: torch.distributions.Distribution) -> float:
    """Computes Kolmogorov and Smirnov's statistic, times the root of the number of values: about 0.87 on average."""
    values = np.sort(drawn.astype(np.float64).ravel())
    expected = distribution.cdf(torch.tensor(values)).numpy()
    steps = np.arange(len(values) + 1) / len(values)
    gap = max(np.abs(expected - steps[1:]).max(), np.abs(expected - steps[:-1]).max())
    return float(gap * np.sqrt(len(values)))


# A distance above 2.2 has a probability of 1e-4.
@pytest.mark.parametrize("numbers", [(0, 0, 0), (3, 1, 4), (-1, 10**9, 0)])
@pytest.mark.parametrize("like", [False, True])
def test_normal_and_uniform_numbers(like: bool, numbers: tuple[int, int, int]) -> None:
    feeds = {"x": np.zeros((400, 500), np.float32)} if like else {}
    op, inputs, shape = ("Like", "x", "") if like else ("", "", f"shape = [400, {COUNT // 400}], ")
    normal = draw(f"y = RandomNormal{op}<{shape}mean = -1.5, scale = 2.0>({inputs})", numbers, **feeds)
    assert (normal.shape, normal.dtype) == ((400, 500), np.float32)
    assert distance(normal, torch.distributions.Normal(-1.5, 2.0)) < 2.2
    uniform = draw(f"y = RandomUniform{op}<{shape}low = -1.0, high = 3.0>({inputs})", numbers, **feeds)
    assert distance(uniform, torch.distributions.Uniform(-1.0, 3.0, validate_args=False)) < 2.2
    assert uniform.min() >= -1
    assert uniform.max() < 3
    for drawn in (normal, uniform):
        # Neighbours in a row and in a column are independent.
        centred = drawn - drawn.mean()
        for a, b in ((centred[:, 1:], centred[:, :-1]), (centred[1:], centred[:-1])):
            assert abs((a * b).mean() / centred.var()) < 5 / np.sqrt(COUNT)


def test_two_nodes_and_two_runs_are_independent() -> None:
    text = "a = RandomNormal<shape = [200000]>()  b = RandomNormal<shape = [200000]>()  y = Mul(a, b)"
    assert abs(draw(text).mean()) < 5 / np.sqrt(COUNT)
    one, other = (draw("y = RandomNormal<shape = [200000]>()", (0, 0, run)) for run in (0, 1))
    assert abs((one * other).mean()) < 5 / np.sqrt(COUNT)
    np.testing.assert_array_equal(one, draw("y = RandomNormal<shape = [200000], seed = 9.0>()"))


def test_bernoulli() -> None:
    p = np.repeat(np.array([0, 0.1, 0.5, 1], np.float32)[:, None], 50_000, 1)
    drawn = draw("y = Bernoulli(x)", x=p)
    assert (drawn.dtype, set(np.unique(drawn))) == (np.float32, {0, 1})
    shares = drawn.mean(1)
    assert (shares[0], shares[3]) == (0, 1)
    np.testing.assert_allclose(shares[1:3], [0.1, 0.5], atol=5 * 0.5 / np.sqrt(50_000))
    assert draw(f"y = Bernoulli<dtype = {TensorProto.BOOL}>(x)", dtype=TensorProto.BOOL, x=p).dtype == bool


def test_multinomial() -> None:
    """Shares of softmax(x), with a class that is never drawn."""
    logits = np.array([[0, 1, -np.inf, 2], [-np.inf, 3, 3, -np.inf], [5, 5, 5, 5]], np.float32)
    drawn = draw("y = Multinomial<sample_size = 40000>(x)", dtype=TensorProto.INT32, x=logits)
    assert (drawn.shape, drawn.dtype) == ((3, 40_000), np.int32)
    shares = np.stack([(drawn == k).mean(1) for k in range(4)], 1)
    expected = torch.softmax(torch.tensor(logits), 1).numpy()
    np.testing.assert_allclose(shares, expected, atol=5 * 0.5 / np.sqrt(40_000))
    assert (shares[expected == 0] == 0).all()


@pytest.mark.parametrize(("dtype", "expected"), [(10, np.float16), (1, np.float32), (11, np.float64)])
def test_dtypes_and_no_elements(dtype: int, expected: type) -> None:
    for op in ("RandomNormal", "RandomUniform"):
        assert draw(f"y = {op}<shape = [3], dtype = {dtype}>()", dtype=dtype).dtype == expected
        x = np.ones((0, 4), expected)
        drawn = draw(f"y = {op}Like(x)", dtype=dtype, x=x)
        assert (drawn.dtype, drawn.shape) == (expected, (0, 4))
    assert draw("y = RandomNormal<shape: ints = []>()").shape == ()
