"""Shapes of loop states that no iteration changes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxtrain.passes import canonicalize
from passes._models import run

# The body computes `next` from `state`, which starts as x [n, 3].
MODEL = """<ir_version: 10, opset_import: ["": 21]> net (float[n, 3] x, int64 count) => (float[a, b] y)
  {{ go = Constant<value = bool {{1}}>()
     y = Loop<
       body = body (int64 i, bool c, float state) => (bool d, float next) {{ d = Identity(c) {body} }}
     >(count, go, x) }}"""


def loop(body: str) -> ir.Model:
    model = onnx.parser.parse_model(MODEL.format(body=body))
    # The parser gives states the shape []; exporters leave it out.
    attribute = model.graph.node[1].attribute[0].g
    for value in (attribute.input[2], attribute.output[1], model.graph.output[0]):
        value.type.tensor_type.ClearField("shape")
    return ir.from_proto(model)


@pytest.mark.parametrize(
    ("body", "dims"),
    [
        ("next = Add(state, x)", ["n", 3]),
        ("one = Constant<value_ints = [3]>() next = Reshape(state, one)", None),
        ("next = Concat<axis = 0>(state, x)", [None, 3]),
        ("t = Transpose<perm = [1, 0]>(state) next = Identity(t)", [None, None]),
        ("s = Sin(state) next = Slice(s, zero, two, zero)", [None, 3]),
    ],
)
def test_dimensions_that_no_iteration_changes(body: str, dims: list[int | str | None] | None) -> None:
    if "zero" in body:
        body = "zero = Constant<value_ints = [0]>() two = Constant<value_ints = [2]>() " + body
    model = canonicalize(loop(body))
    (node,) = (node for node in model.graph if node.op_type == "Loop")
    state = node.attributes["body"].as_graph().inputs[2]
    for value in (state, node.outputs[0]):
        found = None if value.shape is None else [getattr(dim, "value", dim) for dim in value.shape]
        known = found and [None if isinstance(dim, str) and dim != "n" else dim for dim in found]
        assert known == dims


def test_shapes_are_those_of_runs() -> None:
    """A wrong shape would make ONNX Runtime warn or fail, and gradients wrong."""
    model = canonicalize(loop("next = Concat<axis = 0>(state, x)"))
    for count in (0, 1, 3):
        x = np.ones((2, 3), np.float32)
        (y,) = run(ir.to_proto(model), {"x": x, "count": np.array(count)})
        assert y.shape == (2 * (count + 1), 3)
