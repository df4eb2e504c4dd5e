"""Masks of Dropout that integer ops compute: against the generator in Python's integers, and their statistics."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from models import parse_nodes
from onnxtrain.errors import GraphBuildError
from onnxtrain.passes.portable import draw_from_input
from onnxtrain.passes.portable._squares import _FACTORS, _KEY

WORD = 2**64


def swap(x: int) -> int:
    return (x >> 32 | x << 32) % WORD


def squares32(counter: int, key: int) -> int:
    """The function of this name in Widynski's paper, arXiv:2004.06278, figure 1."""
    x = y = counter * key % WORD
    z = (y + key) % WORD
    x = swap((x * x + y) % WORD)
    x = swap((x * x + z) % WORD)
    x = swap((x * x + y) % WORD)
    return (x * x + z) % WORD >> 32


def key_of(seed: int, step: int, run: int) -> int:
    """The odd key of a run: five rounds over a sum that differs for each seed, step and run."""
    y = sum(factor * value for factor, value in zip(_FACTORS, (seed, step, run), strict=True)) * _KEY % WORD
    z = (y + _KEY) % WORD
    x = y
    for term in (y, z, y, z):
        x = swap((x * x + term) % WORD)
    return (2 * (x * x + y) + 1) % WORD


def model(
    text: str, *, ratio: float | None = 0.3, dtype: int = TensorProto.FLOAT, inputs: tuple[str, ...] = ()
) -> ir.Model:
    nodes = parse_nodes(("" if ratio is None else f"ratio = Constant<value_float={ratio}>()  ") + text)
    values = [helper.make_tensor_value_info("x", dtype, ["n", "m"])]
    kinds = {"ratio": TensorProto.FLOAT, "yes": TensorProto.BOOL}
    values += [helper.make_tensor_value_info(name, kinds[name], []) for name in inputs]
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.BOOL if name == "mask" else dtype, ["n", "m"])
        for name in ("y", "z", "mask")
        if name in text.replace(",", " ").split()
    ]
    graph = helper.make_graph(nodes, "test", values, outputs)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return ir.from_proto(proto)


YES = "yes = Constant<value=bool {1}>()  "


def run(
    built: ir.Model, x: np.ndarray, numbers: tuple[int, int, int], **inputs: np.ndarray
) -> list[np.ndarray]:
    proto = ir.to_proto(built)
    onnx.checker.check_model(proto, full_check=True)
    assert not any(node.op_type == "Dropout" for node in proto.graph.node)
    assert proto.graph.input[-1].name == "onnxtrain.random"
    session = ort.InferenceSession(proto.SerializeToString())
    feeds = {"x": x, "onnxtrain.random": np.array(numbers)} | inputs
    results: list[np.ndarray] = session.run(None, feeds)
    return results


@pytest.mark.parametrize("numbers", [(0, 0, 0), (1, 2, 3), (-7, 10**12, 5), (2**63 - 1, 2**62, 0)])
def test_masks_are_those_of_the_generator(numbers: tuple[int, int, int]) -> None:
    built = model(YES + "y, mask = Dropout(x, ratio, yes)  z = Dropout(x, ratio, yes)")
    draw_from_input(built)
    x = np.random.default_rng(0).normal(1, 1, (5, 6)).astype(np.float32)
    y, z, mask = run(built, x, numbers)
    for number, value in enumerate((y, z)):
        key = key_of(*numbers)
        words = [squares32(number * 2**33 + i, key) for i in range(x.size)]
        kept = np.array([word >= round(0.3 * 2**32) for word in words]).reshape(x.shape)
        np.testing.assert_allclose(value, np.where(kept, x / 0.7, 0), rtol=1e-6)
        if number == 0:
            np.testing.assert_array_equal(mask, kept)


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("known", [True, False])
def test_as_many_elements_are_dropped_as_the_ratio_says(ratio: float, known: bool) -> None:
    text = YES + "y = Dropout(x, ratio, yes)"
    built = model(text, ratio=ratio) if known else model(text, ratio=None, inputs=("ratio",))
    draw_from_input(built)
    x = np.ones((400, 500), np.float32)
    feeds = {} if known else {"ratio": np.array(ratio, np.float32)}
    (y,) = run(built, x, (3, 4, 0), **feeds)
    kept = y != 0
    # Five standard deviations of a share of 200,000.
    assert abs(kept.mean() - (1 - ratio)) <= 5 * np.sqrt(ratio * (1 - ratio) / x.size) + 1e-9
    np.testing.assert_allclose(y[kept], 1 / (1 - ratio) if ratio < 1 else 1, rtol=1e-6)
    # No row and no column is dropped more often than chance allows.
    for axis in (0, 1):
        spread = kept.mean(axis).std() - np.sqrt(ratio * (1 - ratio) / x.shape[axis])
        assert abs(spread) < 0.005


def test_masks_of_nodes_seeds_steps_and_runs_are_independent() -> None:
    built = model(YES + "y = Dropout(x, ratio, yes)  z = Dropout(x, ratio, yes)", ratio=0.5)
    draw_from_input(built)
    x = np.ones((100, 200), np.float32)
    masks = [
        (value != 0).ravel()
        for numbers in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (-1, 0, 0))
        for value in run(built, x, numbers)
    ]
    correlations = np.corrcoef(masks) - np.eye(len(masks))
    assert abs(correlations).max() < 5 / np.sqrt(x.size)
    # The same mask one element later would be as bad.
    shifted = [np.corrcoef(masks[0][1:], mask[:-1])[0, 1] for mask in masks]
    assert max(map(abs, shifted)) < 5 / np.sqrt(x.size)


def test_a_mode_that_is_an_input() -> None:
    built = model("y, mask = Dropout(x, ratio, yes)", inputs=("yes",))
    draw_from_input(built)
    x = np.ones((20, 20), np.float32)
    y, mask = run(built, x, (0, 0, 0), yes=np.array(False))
    np.testing.assert_array_equal(y, x)
    assert mask.all()
    y, mask = run(built, x, (0, 0, 0), yes=np.array(True))
    assert 0 < mask.mean() < 1
    np.testing.assert_allclose(y, mask / 0.7, rtol=1e-6)


def test_float16_and_no_elements() -> None:
    built = model(YES + "y = Dropout(x, ratio, yes)", dtype=TensorProto.FLOAT16)
    draw_from_input(built)
    (y,) = run(built, np.ones((20, 20), np.float16), (0, 0, 0))
    assert y.dtype == np.float16
    assert 0 < (y != 0).mean() < 1
    assert run(built, np.ones((0, 20), np.float16), (0, 0, 0))[0].shape == (0, 20)


def test_models_without_dropout_in_training_stay() -> None:
    built = model("y = Dropout(x, ratio)")
    assert draw_from_input(built) is None
    assert [value.name for value in built.graph.inputs] == ["x"]


def test_dropout_in_a_loop_is_refused() -> None:
    built = model(
        YES
        + """count = Constant<value_int=3>()
        y = Loop<body = body (int64 i, bool c, float[n, m] a) => (bool d, float[n, m] b) {
            d = Identity(c)  b = Dropout(a, ratio, yes) }>(count, yes, x)"""
    )
    with pytest.raises(GraphBuildError, match="is in a subgraph"):
        draw_from_input(built)


def test_onnxruntime_still_adds_up_integers_in_floating_point() -> None:
    """If this fails, `Squares.key` may use ReduceSum with the version that is installed, but not with older ones."""
    graph = helper.make_graph(
        parse_nodes("y = ReduceSum<keepdims=0>(x)"),
        "sum",
        [helper.make_tensor_value_info("x", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.INT64, [])],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = ort.InferenceSession(proto.SerializeToString())
    version = tuple(map(int, ort.__version__.split(".")[:2]))
    # 1.20 adds up integers; 1.32 does so in float64.
    exact = version < (1, 32)
    assert session.run(None, {"x": np.array([2**53 + 1, 0])})[0] == 2**53 + exact
