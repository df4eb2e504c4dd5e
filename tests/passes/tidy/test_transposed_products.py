from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from onnx import helper

from onnxtrain.passes import CleanupPass, TransposedProductPass, load_model, to_proto
from passes._models import build, info, normal, run


def transpose(source: str, target: str, perm=(1, 0)):
    return helper.make_node("Transpose", [source], [target], perm=list(perm))


def rewritten(nodes, shapes, outputs=("y",)) -> Counter[str]:
    """The ops of the rewritten model, having checked that it computes the same."""
    proto = build(
        nodes,
        [info(name, [f"{name}{axis}" for axis in range(len(shape))]) for name, shape in shapes.items()],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
    )
    feed = {name: normal(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    model = load_model(proto)
    TransposedProductPass()(model)
    CleanupPass()(model)
    for got, want in zip(run(to_proto(model), feed), run(proto, feed), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    return Counter(node.op_type for node in model.graph)


def test_the_gradient_of_a_linear_layer_is_one_product():
    nodes = [transpose("x", "xt"), helper.make_node("MatMul", ["xt", "ct"], ["p"]), transpose("p", "y")]
    assert rewritten(nodes, {"x": (5, 3), "ct": (5, 4)}) == {"Transpose": 1, "MatMul": 1}


def test_both_factors_transposed():
    nodes = [
        transpose("a", "at"),
        transpose("b", "bt"),
        helper.make_node("MatMul", ["at", "bt"], ["p"]),
        transpose("p", "y"),
    ]
    assert rewritten(nodes, {"a": (5, 3), "b": (4, 5)}) == {"MatMul": 1}


@pytest.mark.parametrize("b_shape", [(5, 4), (4, 5)], ids=["A", "A and B"])
def test_a_gemm_reads_its_factors_the_other_way(b_shape):
    gemm = helper.make_node("Gemm", ["a", "b"], ["p"], transA=1, transB=int(b_shape[1] == 5), alpha=0.5)
    assert rewritten([gemm, transpose("p", "y")], {"a": (5, 3), "b": b_shape}) == {"Gemm": 1}


def test_a_gemm_of_plain_factors():
    gemm = helper.make_node("Gemm", ["a", "b"], ["p"])
    assert rewritten([gemm, transpose("p", "y")], {"a": (3, 5), "b": (5, 4)}) == {"Gemm": 1}


def test_a_gemm_with_a_summand_stays():
    gemm = helper.make_node("Gemm", ["a", "b", "c"], ["p"])
    shapes = {"a": (3, 5), "b": (5, 4), "c": (3, 4)}
    assert rewritten([gemm, transpose("p", "y")], shapes) == {"Gemm": 1, "Transpose": 1}


def test_a_transposed_factor_that_others_read_stays():
    nodes = [
        transpose("x", "xt"),
        helper.make_node("MatMul", ["xt", "ct"], ["p"]),
        transpose("p", "y"),
        helper.make_node("Exp", ["xt"], ["z"]),
    ]
    assert rewritten(nodes, {"x": (5, 3), "ct": (5, 4)}, ("y", "z")) == {
        "Transpose": 2,
        "MatMul": 1,
        "Exp": 1,
    }


@pytest.mark.parametrize(
    ("nodes", "shapes", "outputs"),
    [
        (
            [helper.make_node("MatMul", ["a", "b"], ["p"]), transpose("p", "y")],
            {"a": (5, 3), "b": (3, 4)},
            "y",
        ),
        (
            [transpose("a", "at"), helper.make_node("MatMul", ["at", "b"], ["p"]), transpose("p", "y")],
            {"a": (5, 3), "b": (5, 4)},
            "yp",
        ),
        (
            [
                transpose("a", "at", (0, 2, 1)),
                helper.make_node("MatMul", ["at", "b"], ["p"]),
                transpose("p", "y", (0, 2, 1)),
            ],
            {"a": (2, 5, 3), "b": (2, 5, 4)},
            "y",
        ),
    ],
    ids=["no factor transposed", "product read elsewhere", "batch of products"],
)
def test_left_alone(nodes, shapes, outputs):
    assert rewritten(nodes, shapes, tuple(outputs)) == Counter(node.op_type for node in nodes)
