"""Merges the steps of several parameters into one call, because each call costs a runtime about a microsecond."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.functions import COMPOSITES, DOMAIN, CompositeOp
from onnxtrain.functions.optimizer import ELEMENTWISE_STEPS, steps

# More would save little time, and a stock runtime's copy of the function body grows with the number.
MOST_PARAMETERS = 16

_STEP = re.compile(r"(\w+Step)_float")
_STEPS = re.compile(r"(\w+Step)s\d+_float")


class GroupStepsPass(ir.passes.InPlacePass):
    """Merges float32 calls of the same step with the same scalars into calls for up to 16 parameters."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the main graph in place."""
        op = Emitter(model.graph, functions=model.functions)
        groups: dict[tuple[object, ...], list[ir.Node]] = {}
        for node, level in _with_levels(model.graph):
            if (step := _step(node, _STEP)) is not None:
                key = level, step.name, node.inputs[step.outputs + 1 :]
                groups.setdefault(key, []).append(node)
        calls = [
            _merged(op, nodes)
            for group in groups.values()
            for first in range(0, len(group), MOST_PARAMETERS)
            if len(nodes := group[first : first + MOST_PARAMETERS]) > 1
        ]
        return ir.passes.PassResult(model, _replace(model, calls))


class SplitStepsPass(ir.passes.InPlacePass):
    """Splits calls for several parameters into one call per parameter, which :class:`GroupStepsPass` merges again."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the main graph in place."""
        op = Emitter(model.graph, functions=model.functions)
        calls = [_split(op, node, step) for node in model.graph if (step := _step(node, _STEPS)) is not None]
        return ir.passes.PassResult(model, _replace(model, calls))


_Calls = tuple[Sequence[ir.Node], Sequence[ir.Node]]
"""Calls to remove and the new ones, whose outputs take the places of the old ones' outputs in order."""


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


def _merged(op: Emitter, nodes: Sequence[ir.Node]) -> _Calls:
    """Creates one call in place of calls of one step with equal scalars."""
    step = _step(nodes[0], _STEP)
    assert step is not None
    tensors = step.outputs + 1
    inputs = [*nodes[0].inputs[tensors:], *(value for node in nodes for value in node.inputs[:tensors])]
    return nodes, [_call(op, steps(step, len(nodes)), inputs, step.outputs * len(nodes))]


def _split(op: Emitter, node: ir.Node, step: CompositeOp) -> _Calls:
    """Creates a call for each parameter in place of a call for several."""
    tensors = step.outputs + 1
    count = len(node.outputs) // step.outputs
    scalars = node.inputs[: len(node.inputs) - count * tensors]
    rest = node.inputs[len(scalars) :]
    parts = [rest[first : first + tensors] for first in range(0, len(rest), tensors)]
    return [node], [_call(op, step, [*part, *scalars], step.outputs) for part in parts]


def _call(op: Emitter, composite: CompositeOp, inputs: Sequence[ir.Value | None], outputs: int) -> ir.Node:
    """Creates a call of a float32 composite op, which is in no graph yet."""
    _, name, _ = op.function(composite, ir.DataType.FLOAT)
    return ir.Node(DOMAIN, name, inputs, num_outputs=outputs, name=op.unique_name(name))


def _replace(model: ir.Model, calls: Sequence[_Calls]) -> bool:
    """Replaces calls by other calls, which take over names, readers and graph outputs; True if there are any."""
    graph = model.graph
    successors: dict[ir.Value, ir.Value] = {}
    for removed, added in calls:
        old = [output for node in removed for output in node.outputs]
        new = [output for node in added for output in node.outputs]
        for output, successor in zip(old, new, strict=True):
            successor.name, successor.type, successor.shape = output.name, output.type, output.shape
            output.name = None
            for reader, index in tuple(output.uses()):
                reader.replace_input_with(index, successor)
            successors[output] = successor
        graph.extend(added)
    # In one pass over the outputs, which are several per parameter.
    graph.outputs[:] = [successors.get(output, output) for output in graph.outputs]
    graph.remove([node for removed, _ in calls for node in removed], safe=True)
    if calls:
        graph.sort()
        _drop_uncalled(model)
    return bool(calls)


def _drop_uncalled(model: ir.Model) -> None:
    """Removes the functions of steps that no node of the main graph calls."""
    called = {node.op_identifier() for node in model.graph}
    for key in [key for key in model.functions if key not in called]:
        if _STEP.fullmatch(key[1]) or _STEPS.fullmatch(key[1]):
            del model.functions[key]
