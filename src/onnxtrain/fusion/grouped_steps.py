"""Merges the steps of several parameters into one call, because each call costs a runtime about a microsecond."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.functions import COMPOSITES, DOMAIN, CompositeOp
from onnxtrain.functions.optimizer import ELEMENTWISE_STEPS, steps
from onnxtrain.passes.tidy.replace_value import successor

# More would save little time, and a stock runtime's copy of the function body grows with the number.
MOST_PARAMETERS = 16

_STEP = re.compile(r"(\w+Step)_float")
_STEPS = re.compile(r"(\w+Step)s\d+_float")


class GroupStepsPass(ir.passes.InPlacePass):
    """Merges float32 calls of the same step with the same scalars into calls for up to 16 parameters."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the main graph in place."""
        op, modified = Emitter(model.graph, functions=model.functions), False
        groups: dict[tuple[object, ...], list[ir.Node]] = {}
        for node, level in _with_levels(model.graph):
            if (step := _step(node, _STEP)) is not None:
                key = level, step.name, node.inputs[step.outputs + 1 :]
                groups.setdefault(key, []).append(node)
        for group in groups.values():
            for first in range(0, len(group), MOST_PARAMETERS):
                if len(nodes := group[first : first + MOST_PARAMETERS]) > 1:
                    _merge(op, nodes)
                    modified = True
        if modified:
            model.graph.sort()
            _drop_uncalled(model)
        return ir.passes.PassResult(model, modified)


class SplitStepsPass(ir.passes.InPlacePass):
    """Splits calls for several parameters into one call per parameter, which :class:`GroupStepsPass` merges again."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the main graph in place."""
        op, modified = Emitter(model.graph, functions=model.functions), False
        for node in tuple(model.graph):
            if (step := _step(node, _STEPS)) is not None:
                _split(op, node, step)
                modified = True
        if modified:
            model.graph.sort()
            _drop_uncalled(model)
        return ir.passes.PassResult(model, modified)


def _step(node: ir.Node, pattern: re.Pattern[str]) -> CompositeOp | None:
    """Returns the step that a node computes if its op type matches `pattern`, else None."""
    match = pattern.fullmatch(node.op_type) if node.domain == DOMAIN else None
    return COMPOSITES[match[1]] if match and match[1] in ELEMENTWISE_STEPS else None


def _with_levels(graph: ir.Graph) -> Iterator[tuple[ir.Node, int]]:
    """Yields each node with the largest number of steps on a path to it; steps of one level don't depend on another."""
    levels: dict[ir.Value, int] = {}
    highest = 0
    for node in graph:
        # A subgraph may read any earlier value.
        has_subgraph = any(attribute.type == ir.AttributeType.GRAPH for attribute in node.attributes.values())
        level = highest if has_subgraph else max((levels.get(v, 0) for v in node.inputs if v), default=0)
        yield node, level
        behind = level + (_step(node, _STEP) is not None)
        highest = max(highest, behind)
        levels.update(dict.fromkeys(node.outputs, behind))


def _merge(op: Emitter, nodes: Sequence[ir.Node]) -> None:
    """Replaces calls of one step with equal scalars by one call."""
    step = _step(nodes[0], _STEP)
    assert step is not None
    tensors = step.outputs + 1
    inputs = [*nodes[0].inputs[tensors:], *(value for node in nodes for value in node.inputs[:tensors])]
    outputs = [successor(output) for node in nodes for output in node.outputs]
    _, name, _ = op.function(steps(step, len(nodes)), ir.DataType.FLOAT)
    op.graph.append(ir.Node(DOMAIN, name, inputs, outputs=outputs, name=op.unique_name(name)))
    op.graph.remove(nodes, safe=True)


def _split(op: Emitter, node: ir.Node, step: CompositeOp) -> None:
    """Replaces a call for several parameters by a call for each."""
    tensors = step.outputs + 1
    count = len(node.outputs) // step.outputs
    scalars = node.inputs[: len(node.inputs) - count * tensors]
    _, name, _ = op.function(step, ir.DataType.FLOAT)
    for index in range(count):
        first = len(scalars) + index * tensors
        inputs = [*node.inputs[first : first + tensors], *scalars]
        outputs = node.outputs[index * step.outputs : (index + 1) * step.outputs]
        new = ir.Node(
            DOMAIN, name, inputs, outputs=[successor(output) for output in outputs], name=op.unique_name(name)
        )
        op.graph.append(new)
    op.graph.remove(node, safe=True)


def _drop_uncalled(model: ir.Model) -> None:
    """Removes the functions of steps that no node of the main graph calls."""
    called = {node.op_identifier() for node in model.graph}
    for key in [key for key in model.functions if key not in called]:
        if _STEP.fullmatch(key[1]) or _STEPS.fullmatch(key[1]):
            del model.functions[key]
