"""The emitter refuses wrong ops and attributes at the line that writes them; names and places of new nodes."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from onnxtrain.emitter import Emitter
from onnxtrain.errors import GraphBuildError


def test_an_attribute_that_the_op_does_not_have_is_refused() -> None:
    x = ir.Value(name="x", shape=ir.Shape([2, 3]), type=ir.TensorType(ir.DataType.FLOAT))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 21})
    op = Emitter(graph)
    with pytest.raises(
        GraphBuildError, match="no attribute keepdim; its attributes are keepdims, noop_with_empty_axes"
    ):
        op.ReduceSum(x, [0], keepdim=0)
    assert len(graph) == 0


def test_names_continue_where_they_ended() -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21})
    op = Emitter(graph)
    assert [op.unique_name(wish) for wish in ("a", "a", "a_1", "a", "a_1_1")] == [
        "a",
        "a_1",
        "a_1_1",
        "a_2",
        "a_1_1_1",
    ]


@pytest.mark.parametrize(("side", "order"), [("before", "b c a d"), ("after", "a b c d"), (None, "a d b c")])
def test_placing_moves_what_its_block_appends(side: str | None, order: str) -> None:
    x = ir.Value(name="x", shape=ir.Shape([2]), type=ir.TensorType(ir.DataType.FLOAT))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 21})
    op = Emitter(graph)
    first = op.Identity(x).producer()
    op.Neg(x)
    with op.placing(**({side: first} if side else {})):
        op.Abs(op.Exp(x))
    letters = {"Identity": "a", "Exp": "b", "Abs": "c", "Neg": "d"}
    assert [letters[node.op_type] for node in graph] == order.split()


def test_placing_in_a_graph_without_nodes() -> None:
    x = ir.Value(name="x", shape=ir.Shape([2]), type=ir.TensorType(ir.DataType.FLOAT))
    op = Emitter(ir.Graph([x], [], nodes=[], opset_imports={"": 21}))
    with op.placing():
        op.Abs(op.Exp(x))
    assert [node.op_type for node in op.graph] == ["Exp", "Abs"]
