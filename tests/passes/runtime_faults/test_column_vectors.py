"""A transposed matrix times a vector, which ONNX Runtime multiplies by the matrix itself."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import helper

from onnxtrain.passes import canonicalize, load_model, to_proto
from passes._models import build, info, normal


def transpose(source: str, target: str, perm=(1, 0)):
    return helper.make_node("Transpose", [source], [target], perm=list(perm))


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("output", [False, True], ids=["read on", "graph output"])
def test_a_transposed_matrix_times_a_vector_is_right_in_onnxruntime(rank, cast, output):
    shape = (2, 3, 3)[3 - rank :]
    perm = (*range(rank - 2), rank - 1, rank - 2)
    nodes = [transpose("a", "at", perm)]
    if cast:
        nodes.append(helper.make_node("Cast", ["at"], ["ac"], to=1))
    nodes.append(helper.make_node("MatMul", ["ac" if cast else "at", "v"], ["y" if output else "p"]))
    if not output:
        nodes.append(helper.make_node("Neg", ["p"], ["y"]))
    proto = build(nodes, [info("a", shape), info("v", (3,))], [info("y", [None] * (rank - 1))])
    a, v = normal(*shape), normal(3, seed=1)
    want = a.transpose(perm) @ v * (1 if output else -1)
    model = to_proto(canonicalize(load_model(proto)))
    before, after = (
        onnxruntime.InferenceSession(m.SerializeToString()).run(None, {"a": a, "v": v})[0]
        for m in (proto, model)
    )
    np.testing.assert_allclose(after, want, rtol=1e-5, atol=1e-6)
    assert not np.allclose(before, want)  # if that is right some day, the pass may go
    assert [output.name for output in model.graph.output] == ["y"]


def test_other_products_with_vectors_stay():
    nodes = [transpose("a", "at"), helper.make_node("MatMul", ["v", "at"], ["p"])]
    nodes.append(helper.make_node("MatMul", ["a", "p"], ["y"]))
    proto = build(nodes, [info("a", (3, 3)), info("v", (3,))], [info("y", (3,))])
    model = canonicalize(load_model(proto))
    assert [node.op_type for node in model.graph] == ["Transpose", "MatMul", "MatMul"]
