"""Replaces sequences that a Loop builds, one tensor per iteration, with scan outputs of the Loop."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.passes.tidy.constants import lift_constants
from onnxtrain.passes.tidy.replace_value import replace_node, write_before
from onnxtrain.passes.tidy.unused import is_read, remove_unread_chains

_READERS = frozenset({"ConcatFromSequence", "SequenceAt", "SequenceLength"})


class AppendedSequencesPass(ir.passes.InPlacePass):
    """Replaces sequences that a Loop builds, one tensor per iteration, with scan outputs of the Loop.

    PyTorch's exporters emit such a sequence for `outputs.append(y)` in a scripted loop that is followed by
    `torch.stack(outputs)`, and the Dynamo exporter also for `EmbeddingBag`. The sequence must be empty before the Loop.

    A scan output stacks its tensors, so all of them must have the same shape. Whether this is certain depends on the
    ops that read the sequence; if any of them is not supported, the sequence is not replaced:

    - ConcatFromSequence with `new_axis=1`: always supported, because stacking requires equal shapes.
    - ConcatFromSequence with `new_axis=0`: supported if the tensor's size along the axis is static.
    - SequenceAt, SequenceLength: supported if all sizes of the tensor are static or named symbolic dimensions.

    Expects inferred shapes: the rank of the tensor must be known.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites nodes of the main graph and its subgraphs in place."""
        modified = False
        for node in tuple(ir.traversal.RecursiveGraphIterator(model.graph)):
            if node.op_type == "Loop" and node.domain == "":
                state = next((k for k in range(len(node.inputs) - 2) if _is_appended_to(node, k)), None)
                if state is not None:
                    _rewrite(node, state)
                    modified = True
        if modified:
            lift_constants(model)
        return ir.passes.PassResult(model, modified)


def _is_appended_to(node: ir.Node, state: int) -> bool:
    """True if the Loop state with index `state` is a sequence that starts empty and gets one tensor per iteration."""
    start, result = node.inputs[2 + state], node.outputs[state]
    maker = start.producer() if start is not None else None
    if maker is None or maker.op_type != "SequenceEmpty" or result.is_graph_output():
        return False
    body = node.attributes["body"].as_graph()
    before, after = body.inputs[2 + state], body.outputs[1 + state]
    insert = after.producer()
    return (
        insert is not None
        and insert.op_type == "SequenceInsert"
        and insert.graph is body
        and [value for value in insert.inputs if value is not None] == [before, insert.inputs[1]]
        and [use.node for use in before.uses()] == [insert]
        and not after.uses()
        and all(_is_rewritten(use.node, insert.inputs[1]) for use in result.uses())
    )


def _is_rewritten(reader: ir.Node, element: ir.Value | None) -> bool:
    """True if a consumer of the sequence can be rewritten to read a scan output.

    Args:
        reader: the consumer, e.g. a ConcatFromSequence.
        element: the tensor that each iteration appends to the sequence.
    """
    if reader.op_type not in _READERS or reader.domain != "" or element is None or element.shape is None:
        return False
    if reader.op_type == "ConcatFromSequence" and reader.attributes.get_int("new_axis", 0) == 1:
        return True
    if reader.op_type == "ConcatFromSequence":
        return isinstance(element.shape[reader.attributes["axis"].as_int()], int)
    return all(isinstance(size, int) or size.value is not None for size in element.shape)


def _rewrite(node: ir.Node, state: int) -> None:
    """Replaces the sequence at index `state` of a Loop's states with a scan output, and rewrites its readers."""
    body, sequence = node.attributes["body"].as_graph(), node.outputs[state]
    insert = body.outputs[1 + state].producer()
    assert insert is not None
    element = insert.inputs[1]
    assert element is not None
    assert element.shape is not None
    # A scan output must be computed in the body and not be another output of it; the tensor may violate both.
    copy = ir.node("Identity", [element])
    copy.outputs[0].name = f"{sequence.name}/appended"
    copy.outputs[0].type, copy.outputs[0].shape = element.type, element.shape
    insert.prepend(copy)
    del body.outputs[1 + state]
    body.outputs.append(copy.outputs[0])
    body.remove(insert, safe=True)
    del body.inputs[2 + state]
    inputs = [value for index, value in enumerate(node.inputs) if index != 2 + state]
    start = node.inputs[2 + state]
    # Scan outputs follow the states, so the order of outputs changes and a new Loop replaces the old one.
    loop = ir.Node(
        "", "Loop", inputs, node.attributes.values(), num_outputs=len(node.outputs), name=node.name
    )
    node.prepend(loop)
    kept = [value for value in node.outputs if value is not sequence]
    for old, new in zip(kept, loop.outputs[:-1], strict=True):
        name, old.name = old.name, None
        new.name, new.type, new.shape = name, old.type, old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    scanned = loop.outputs[-1]
    scanned.name, scanned.type = f"{sequence.name}/scanned", element.type
    scanned.shape = ir.Shape([None, *element.shape])
    for reader in [use.node for use in sequence.uses()]:
        replace_node(reader, _read(reader, scanned))
    assert node.graph is not None
    node.graph.remove(node, safe=True)
    maker = start.producer() if start is not None and not is_read(start) else None
    if maker is not None and maker.graph is not None:
        remove_unread_chains(maker.graph, [maker])


def _read(reader: ir.Node, scanned: ir.Value) -> ir.Value:
    """Emits the tensor equivalent of a sequence op, applied to the scan output that replaces the sequence.

    SequenceAt becomes a Gather, for example.

    Args:
        reader: the SequenceAt, SequenceLength or ConcatFromSequence. New nodes are inserted before it.
        scanned: the scan output, `[iterations, *shape of an element]`.
    """
    numbers = itertools.count()

    def write(op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        return write_before(reader, f"{op_type}_{next(numbers)}", op_type, *inputs, **attributes)

    if reader.op_type == "SequenceAt":
        return write("Gather", scanned, reader.inputs[1], axis=0)
    if reader.op_type == "SequenceLength":
        return write("Squeeze", write("Shape", scanned, start=0, end=1))
    assert scanned.shape is not None
    rank, axis = len(scanned.shape) - 1, reader.attributes["axis"].as_int()
    stacks = bool(reader.attributes.get_int("new_axis", 0))
    axis += (rank + stacks) * (axis < 0)
    others = list(range(1, rank + 1))
    # Stacking or concatenating along `axis` moves the iterations to that position.
    moved = write("Transpose", scanned, perm=[*others[:axis], 0, *others[axis:]]) if axis else scanned
    if stacks:
        return moved
    # Concatenating also merges the iterations with the axis that follows: [..., n, size, ...] to [..., n·size, ...].
    size = write("Constant", value=ir.tensor(np.array([scanned.shape[1 + axis]], np.int64)))
    joined = write("Mul", write("Shape", moved, start=axis, end=axis + 1), size)
    before = write("Shape", moved, start=0, end=axis)
    shape = write("Concat", before, joined, write("Shape", moved, start=axis + 2), axis=0)
    return write("Reshape", moved, shape, allowzero=1)
