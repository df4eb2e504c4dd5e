"""Rewrites recurrent layers as composite ops, one per direction."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.functions import LAYERS
from onnxtrain.passes import stand_in

_ACTIVATIONS = {"LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"]}
"""For each op, the default activations of one direction, which the composite ops implement."""
_DIRECTIONS = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}


class RecurrentPass(ir.passes.InPlacePass):
    """Rewrites plain LSTMs and GRUs in float32 as composite ops that save residuals for the backward pass.

    Not rewritten: other activations, peepholes, clipping, layout=1, sequence_lens, GRUs with linear_before_reset=0.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the main graph in place."""
        layers = [node for node in model.graph if _is_plain(node)]
        if layers:
            op = Emitter(model.graph, functions=model.functions)
            for node in layers:
                _rewrite(op, node)
        return ir.passes.PassResult(model, bool(layers))


def _is_plain(node: ir.Node) -> bool:
    """True if the composite ops support this layer."""
    if node.domain != "" or node.op_type not in _ACTIVATIONS:
        return False
    x, *_ = inputs = _inputs(node)
    if any(value is None or value.dtype != ir.DataType.FLOAT for value in inputs[:3]) or x is None:
        return False
    # ONNX Runtime compares activation names case-insensitively.
    activations = [
        name.lower() for name in node.attributes.get_strings("activations", _ACTIVATIONS[node.op_type])
    ]
    plain = _ACTIVATIONS[node.op_type]
    return bool(
        activations == plain * (len(activations) // len(plain))
        and x.shape is not None
        and _hidden_size(node) is not None
        and inputs[4] is None  # sequence_lens
        and inputs[7] is None  # peepholes
        and "clip" not in node.attributes
        and not node.attributes.get_int("layout", 0)
        and not node.attributes.get_int("input_forget", 0)
        and (node.op_type != "GRU" or node.attributes.get_int("linear_before_reset", 0))
    )


def _inputs(node: ir.Node) -> list[ir.Value | None]:
    """Returns X, W, R, B, sequence_lens, initial_h, initial_c and P, with None for absent inputs."""
    return [*node.inputs, *[None] * (8 - len(node.inputs))]


def _hidden_size(node: ir.Node) -> int | None:
    # The attribute is optional; R [directions, gates * hidden, hidden] determines the size too.
    size = node.attributes.get_int("hidden_size", 0)
    dims = static_dims(node.inputs[2]) if node.inputs[2] is not None else None
    return size or (dims[-1] if dims else None)


def _rewrite(op: Emitter, node: ir.Node) -> None:
    with op.placing(before=node):
        outputs = _calls(op, node)
    for output, result in zip(node.outputs, outputs, strict=False):
        stand_in(output, result, before=node)
    op.graph.remove(node, safe=True)


def _calls(op: Emitter, node: ir.Node) -> list[ir.Value]:
    """Emits the composite ops, one per direction; returns the values that replace the node's outputs."""
    x, w, r, b, _, *states, _ = _inputs(node)
    lstm = node.op_type == "LSTM"
    hidden = _hidden_size(node)
    directions = _DIRECTIONS[node.attributes.get_string("direction", "forward")]
    count = len(directions)
    assert x is not None
    assert x.shape is not None
    assert w is not None
    assert hidden is not None
    time, batch = x.shape[0], x.shape[1]
    # The composite op requires initial states; ONNX's default is zeros.
    zeros = op.Expand(op.const(0, like=x), op.Concat([count], op.dim(x, 1), [hidden], axis=0))
    if b is None:
        b = op.Expand(op.const(0, like=x), op.Concat([count], op.Mul(op.dim(w, 1), [2]), axis=0))
    # Each direction has its own weights and states, along axis 0.
    operands = [w, r, b, *(state or zeros for state in states[: 1 + lstm])]
    parts = [[v] if count == 1 else list(op.Split(v, num_outputs=2, axis=0, _outputs=2)) for v in operands]
    results = []
    for index, reverse in enumerate(directions):
        layer, _, _ = LAYERS[node.op_type, reverse]
        outputs = op.call(layer, x, *(part[index] for part in parts), hidden_size=hidden, _outputs=4 + lstm)
        states_ = [ir.Shape([1, batch, hidden])] * (1 + lstm)
        saved = [ir.Shape([time, batch, (3 + lstm) * hidden]), ir.Shape([time, batch, hidden])]
        for value, shape in zip(outputs, [ir.Shape([time, 1, batch, hidden]), *states_, *saved], strict=True):
            value.shape = shape
        results.append(outputs)
    if count == 1:
        return list(results[0])
    # Y has the directions along axis 1, the states along axis 0.
    joined = [
        op.Concat(*both, axis=axis) for both, axis in zip(zip(*results, strict=True), (1, 0, 0), strict=False)
    ]
    for value, output in zip(joined, node.outputs, strict=False):
        value.shape = output.shape
    return joined
