"""Follows the class axis through the ops between a head and an output, and updates the number of classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.op_facts import ARITHMETIC

PROBABILITIES = ("Softmax", "Sigmoid")
"""Ops that convert logits, which losses expect, to probabilities."""

# The functions below, one per kind of op, have the arguments and result of `follow`.

Dims = Sequence[int | None]


class Refusal(Exception):
    """Raised if the class axis cannot be followed through a node; the message is the reason."""


def data_input(node: ir.Node) -> ir.Value | None:
    """Returns the input to follow when tracing the class axis of an output back to the head.

    For arithmetic ops, this is the only operand that is not a one-element constant such as a temperature; None if there
    are several or none. For other ops, it is the first input.
    """
    # A scalar operand, as in a division by a temperature, has no class axis. Any other operand may have one.
    if node.op_type not in ARITHMETIC:
        return node.inputs[0]
    numbers = [
        v for v in node.inputs if v is not None and v.const_value is not None and v.const_value.size == 1
    ]
    others = [v for v in node.inputs if v not in numbers]
    return others[0] if len(others) == 1 else None


def follow(model: ir.Model, node: ir.Node, axis: int, old: int, new: int) -> int:
    """Propagates the class axis through a node between the head and an output, for a new number of classes.

    If a constant of the node contains the number of classes, e.g. the target shape of a Reshape, the node gets a
    constant with the new number instead.

    Args:
        model: model that contains the node, changed in place.
        node: a node whose op is in `TAIL_OPS`, e.g. a Flatten.
        axis: class axis of the node's input, non-negative.
        old: the old number of classes, e.g. 1000.
        new: the new number of classes, e.g. 10.

    Returns:
        The class axis of the node's output.

    Raises:
        Refusal: the axis cannot be followed.
    """
    return TAIL_OPS[node.op_type](model, node, axis, old, new)


def _same(model: ir.Model, node: ir.Node, axis: int, old: int, new: int) -> int:
    return axis


def _pool(model: ir.Model, node: ir.Node, axis: int, old: int, new: int) -> int:
    # Pooling keeps batch and channels, axes 0 and 1, and reduces all others.
    if axis != 1:
        raise Refusal("it pools over the classes")
    return axis


def _resize(model: ir.Model, node: ir.Node, axis: int, old: int, new: int) -> int:
    # `sizes` without `axes` has an entry for every axis, including the classes.
    if len(node.inputs) > 3 and node.inputs[3] is not None and "axes" not in node.attributes:
        raise Refusal("its `sizes` contain the number of classes")
    return axis


def _mean(model: ir.Model, node: ir.Node, axis: int, old: int, new: int) -> int:
    # Without axes, the mean is over all axes.
    axes = _axes(node, _rank(node))
    if axes is None or axis in axes:
        raise Refusal("it takes the mean over the classes")
    keeps = node.attributes.get_int("keepdims", 1) == 1
    return axis if keeps else axis - sum(a < axis for a in axes)


def _squeeze(model: ir.Model, node: ir.Node, axis: int, old: int, new: int) -> int:
    axes = _axes(node, _rank(node))
    if axes is None or axis in axes:
        raise Refusal("it removes the class axis" + (" if its size is 1" if axes is None else ""))
    return axis - sum(a < axis for a in axes)


def _unsqueeze(model: ir.Model, node: ir.Node, axis: int, old: int, new: int) -> int:
    # The axes of an Unsqueeze refer to its output.
    added = _axes(node, _rank(node) + len(_constant(node.inputs[1]) or ()))
    if added is None:
        raise Refusal("its axes are computed at run time")
    for position in sorted(added):
        axis += position <= axis
    return axis


def _transpose(model: ir.Model, node: ir.Node, axis: int, old: int, new: int) -> int:
    # By default, Transpose reverses all axes.
    perm = node.attributes.get_ints("perm") or list(range(_rank(node)))[::-1]
    return list(perm).index(axis)


def _flatten(model: ir.Model, node: ir.Node, axis: int, old: int, new: int) -> int:
    """Returns the class axis after a Flatten; raises Refusal if the Flatten merges it with other axes."""
    dims = _dims(node.inputs[0])
    start = node.attributes.get_int("axis", 1) % max(1, len(dims))
    group = dims[:start] if axis < start else dims[start:]
    position = axis if axis < start else axis - start
    # Flattened with other axes, the classes have no axis of their own, unless the other axes have size one.
    if any(dim != 1 for index, dim in enumerate(group) if index != position):
        raise Refusal(f"it merges the classes with other axes of {list(dims)}")
    return 0 if axis < start else 1


def _reshape(model: ir.Model, node: ir.Node, axis: int, old: int, new: int) -> int:
    """Returns the class axis after a Reshape; raises Refusal if the Reshape merges it with other axes."""
    # With allowzero, a 0 in the target is a size and not a copy of the input's size: then the tensor is empty.
    dims, target = _dims(node.inputs[0]), _constant(node.inputs[1])
    if target is None or (0 in target and node.attributes.get_int("allowzero", 0) == 1):
        raise Refusal("its shape is computed at run time")
    sizes: list[int | None] = [
        (dims[i] if i < len(dims) else None) if size == 0 else int(size) for i, size in enumerate(target)
    ]
    elements_after = math.prod(dim or 0 for dim in dims[axis + 1 :])
    for position in reversed(range(len(target))):
        size = target[position]
        # 0 copies the size of the input's axis, and -1 is the size that remains.
        classes = size in (old, -1) or (size == 0 and position == axis)
        sizes_after = sizes[position + 1 :]
        if (
            not classes
            or -1 in sizes_after
            or math.prod(dim or 0 for dim in sizes_after) != elements_after
            or elements_after == 0
        ):
            continue
        sizes_before, input_sizes_before = sizes[:position], list(dims[:axis])
        if (size != -1 and -1 in sizes_before) or (
            sizes_before == input_sizes_before and None not in sizes_before
        ):
            is_classes = True
        else:
            # Symbolic sizes before the classes cannot be compared, but are equal if they are copied by zeros.
            is_classes = position == axis and all(number == 0 for number in target[:position])
        if is_classes:
            # 0 and -1 adapt to the new number without a change.
            if size == old and size > 0:
                _set_target_size(model, node, position, new)
            return position
    raise Refusal(
        f"it reshapes {list(dims)} to {list(target)}, where the {old} classes are not a separate axis"
    )


def _set_target_size(model: ir.Model, node: ir.Node, position: int, size: int) -> None:
    """Sets the entry at `position` in the target shape of a Reshape to `size`."""
    target = _constant(node.inputs[1])
    assert target is not None
    target[position] = size
    # In a new constant, because other nodes may read the old one.
    node.replace_input_with(1, Emitter(model.graph).const(target))


def _constant(value: ir.Value | None) -> list[int] | None:
    """Returns the integers of a constant; None for a computed value."""
    if value is None or value.const_value is None:
        return None
    return [int(number) for number in value.const_value.numpy().reshape(-1)]


def _axes(node: ir.Node, rank: int) -> set[int] | None:
    """Returns the non-negative axes in a node's second input; None if they are computed or omitted."""
    axes = _constant(node.inputs[1]) if len(node.inputs) > 1 else None
    return None if axes is None else {axis % rank for axis in axes}


def _dims(value: ir.Value | None) -> Dims:
    """Returns the sizes of a value; raises Refusal if its shape is unknown."""
    dims = static_dims(value) if value is not None else None
    if dims is None:
        raise Refusal("its shape is unknown")
    return dims


def _rank(node: ir.Node) -> int:
    return len(_dims(node.inputs[0]))


TAIL_OPS: dict[str, Callable[[ir.Model, ir.Node, int, int, int], int]] = {
    **dict.fromkeys(("Identity", "Dropout", "Cast", "Relu", "LogSoftmax", *PROBABILITIES), _same),
    **dict.fromkeys(ARITHMETIC, _same),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool", "AveragePool", "MaxPool"), _pool),
    "Resize": _resize,
    "ReduceMean": _mean,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Transpose": _transpose,
    "Flatten": _flatten,
    "Reshape": _reshape,
}
"""Maps each op that is supported between a head and an output to the function that follows the class axis."""
