"""Replaces sequences and optionals with their elements if the elements are known statically."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnxtrain.passes.tidy.constants import known_array, lift_constants
from onnxtrain.passes.tidy.replace_value import replace_node, write_before
from onnxtrain.passes.tidy.unused import is_read

_Elements = list[ir.Value]

# Maximum number of outputs of a Split. Sequences that PyTorch unbinds have a few thousand steps at most.
_MOST_PARTS = 10_000


class KnownSequencesPass(ir.passes.InPlacePass):
    """Replaces ops that read a sequence, e.g. SequenceAt, with the sequence's elements if these are known statically.

    PyTorch's Dynamo exporter writes `chunk`, `split` and `unbind` as SplitToSequence and SequenceAt, at every opset.
    Elements are known after SequenceConstruct and SequenceEmpty, after SequenceInsert and SequenceErase at constant
    positions, and after a SplitToSequence into static sizes, which becomes a Split. An Optional is treated as a
    sequence of zero or one elements. Sequences with unknown elements are not modified. Expects inferred shapes.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites nodes of the main graph and its subgraphs in place. Graph outputs keep their names."""
        # Elements of each sequence, in order; None if they are unknown.
        elements_of: dict[ir.Value, _Elements | None] = {}
        modified = False
        for node in tuple(ir.traversal.RecursiveGraphIterator(model.graph)):
            if node.domain != "":
                continue
            if node.op_type in _MAKERS:
                elements_of[node.outputs[0]] = _MAKERS[node.op_type](node, elements_of)
            elif node.op_type in _READERS:
                elements = _elements(node, elements_of)
                result = None if elements is None else _READERS[node.op_type](node, elements)
                if result is not None:
                    replace_node(node, result)
                    modified = True
        if modified:
            # In reverse order, because a SequenceInsert reads the preceding sequence.
            for value in reversed(elements_of):
                maker = value.producer()
                if maker is not None and maker.graph is not None and not is_read(value):
                    maker.graph.remove(maker, safe=True)
            lift_constants(model)
        return ir.passes.PassResult(model, modified)


def _elements(node: ir.Node, elements_of: dict[ir.Value, _Elements | None]) -> _Elements | None:
    """Returns the elements of the sequence or optional that `node` reads, or None if they are unknown.

    Args:
        node: a node that reads a sequence or optional.
        elements_of: elements of each sequence and optional that an earlier node returns; None if they are unknown.
    """
    read = node.inputs[0] if node.inputs else None
    if node.op_type in _OPTIONAL:
        if read is None:
            return []
        # ONNX also accepts a tensor or sequence where an optional is expected.
        if isinstance(read.type, ir.TensorType | ir.SequenceType):
            return [read]
    return None if read is None else elements_of.get(read)


def _inserted(node: ir.Node, elements_of: dict[ir.Value, _Elements | None]) -> _Elements | None:
    """Returns the elements after a SequenceInsert, or None if the sequence or the position is unknown.

    Args:
        node: the SequenceInsert.
        elements_of: elements of each sequence that an earlier node returns; None if they are unknown.
    """
    sequence, element, *position = node.inputs
    before = elements_of.get(sequence) if sequence is not None else None
    if before is None or element is None:
        return None
    # The default position is the end.
    place = len(before) if not position or position[0] is None else _number(position[0])
    if place is None:
        return None
    # Negative positions count from the end.
    place += len(before) if place < 0 else 0
    return [*before[:place], element, *before[place:]]


def _erased(node: ir.Node, elements_of: dict[ir.Value, _Elements | None]) -> _Elements | None:
    """Returns the elements after a SequenceErase, or None if the sequence or the position is unknown.

    Args:
        node: the SequenceErase.
        elements_of: elements of each sequence that an earlier node returns; None if they are unknown.
    """
    sequence, *position = node.inputs
    before = elements_of.get(sequence) if sequence is not None else None
    if not before:
        return None
    place = -1 if not position or position[0] is None else _number(position[0])
    if place is None:
        return None
    return [value for index, value in enumerate(before) if index != place % len(before)]


def _split(node: ir.Node, elements_of: dict[ir.Value, _Elements | None]) -> _Elements | None:
    """Inserts a Split before the SplitToSequence `node`, and returns the outputs of the Split.

    Without an input `split`, all parts have size 1. A scalar `split` is the size of every part but the last.

    Returns:
        The outputs. None if the number of parts is unknown, 0 or very large, or if no op would read the outputs.
    """
    source = node.inputs[0]
    if source is None or not source.shape or not _is_wanted(node.outputs[0]):
        return None
    axis = node.attributes.get_int("axis", 0) % source.shape.rank()
    size = source.shape[axis]
    sizes = node.inputs[1] if len(node.inputs) > 1 else None
    lengths = known_array(sizes)
    # A vector gives the size of each part, so the axis need not be static.
    if sizes is not None and lengths is not None and lengths.ndim == 1:
        parts = [int(length) for length in lengths]
    elif not isinstance(size, int) or (sizes is not None and lengths is None):
        return None
    else:
        step = 1 if lengths is None else int(lengths.item())
        starts = range(0, size, step) if step > 0 else range(0)
        # The declared size of an axis may be huge.
        parts = [min(step, size - start) for start in starts] if len(starts) <= _MOST_PARTS else []
    if not parts:
        return None
    split = ir.node(
        "Split", [source, _constant(node, parts)], attributes={"axis": axis}, num_outputs=len(parts)
    )
    node.prepend([split])
    for part, length in zip(split.outputs, parts, strict=True):
        dims = [length if place == axis else dim for place, dim in enumerate(source.shape)]
        part.type, part.shape = source.type, ir.Shape(dims)
    # According to the specification, keepdims applies only without an input `split`.
    if sizes is None and node.attributes.get_int("keepdims", 1) == 0:
        return [_without_axis(node, part, axis) for part in split.outputs]
    return list(split.outputs)


# Ops that return a sequence or optional, with functions that return its elements, or None if they are unknown.
_MAKERS: dict[str, Callable[[ir.Node, dict[ir.Value, _Elements | None]], _Elements | None]] = {
    "Optional": lambda node, elements_of: [value for value in node.inputs if value is not None],
    "Identity": lambda node, elements_of: (
        elements_of.get(node.inputs[0]) if node.inputs[0] is not None else None
    ),
    "SequenceConstruct": lambda node, elements_of: [value for value in node.inputs if value is not None],
    "SequenceEmpty": lambda node, elements_of: [],
    "SequenceErase": _erased,
    "SequenceInsert": _inserted,
    "SplitToSequence": _split,
}


def _element(node: ir.Node, elements: _Elements) -> ir.Value | None:
    """Returns the element that a SequenceAt reads, or None if its position is unknown or out of range."""
    place = _number(node.inputs[1])
    if place is None or not -len(elements) <= place < len(elements):
        return None
    return elements[place]


def _joined(node: ir.Node, elements: _Elements) -> ir.Value | None:
    """Inserts the Concat that replaces a ConcatFromSequence and returns its output, or None for an empty sequence."""
    if not elements or "axis" not in node.attributes:
        return None
    axis = node.attributes.get_int("axis")
    parts = elements
    if node.attributes.get_int("new_axis", 0):
        if axis < 0 and any(part.shape is None for part in parts):
            return None
        # A negative new axis counts from the end of the output, which has one more axis than the elements.
        places = [axis if axis >= 0 or part.shape is None else axis + part.shape.rank() + 1 for part in parts]
        parts = [
            write_before(node, None, "Unsqueeze", part, _constant(node, [place]))
            for part, place in zip(parts, places, strict=True)
        ]
        axis = places[0]
    joined = write_before(node, None, "Concat", *parts, axis=axis)
    joined.type = elements[0].type
    return joined


# Ops that read a sequence or optional, with functions that return the replacement value, or None.
_READERS: dict[str, Callable[[ir.Node, _Elements], ir.Value | None]] = {
    "SequenceAt": _element,
    "SequenceLength": lambda node, elements: _constant(node, len(elements)),
    "ConcatFromSequence": _joined,
    "OptionalGetElement": lambda node, elements: elements[0] if elements else None,
    "OptionalHasElement": lambda node, elements: _constant(node, bool(elements)),
}
_OPTIONAL = frozenset({"OptionalGetElement", "OptionalHasElement"})


def _number(value: ir.Value | None) -> int | None:
    """Returns the content of a constant with one element, or None for other values."""
    array = known_array(value)
    return None if array is None or array.size != 1 else int(array.item())


def _constant(node: ir.Node, number: int | list[int] | bool) -> ir.Value:
    """Inserts a Constant before `node` and returns its output."""
    return write_before(node, None, "Constant", value=ir.tensor(np.asarray(number)))


def _without_axis(node: ir.Node, part: ir.Value, axis: int) -> ir.Value:
    """Inserts a Squeeze of one axis before `node` and returns its output."""
    squeezed = write_before(node, None, "Squeeze", part, _constant(node, [axis]))
    squeezed.type = part.type
    if part.shape is not None:
        squeezed.shape = ir.Shape([dim for place, dim in enumerate(part.shape) if place != axis])
    return squeezed


def _is_wanted(sequence: ir.Value) -> bool:
    """True if an op that reads a sequence, or a sequence derived from it, could be replaced with elements.

    Otherwise a SplitToSequence is not split, because each round of shape inference would insert another unused Split.
    """
    for use in sequence.uses():
        if use.node.op_type in _MAKERS or use.node.op_type == "OptionalGetElement":
            if _is_wanted(use.node.outputs[0]):
                return True
        elif use.node.op_type in _READERS.keys() - _OPTIONAL and (
            use.node.op_type != "SequenceAt" or _number(use.node.inputs[1]) is not None
        ):
            return True
    return False
