"""Replaces the Loop that PyTorch exports for EmbeddingBag, with one iteration per bag, with a single ScatterND."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.passes.tidy.constants import known_array
from onnxtrain.passes.tidy.replace_value import WriterBefore, stand_in


class EmbeddingBagLoopPass(ir.passes.InPlacePass):
    """Replaces the Loop that PyTorch exports for `EmbeddingBag` with a single ScatterND.

    torch.onnx.export (PyTorch 2.13, `dynamo=True`) writes this loop for the modes "sum", "mean" and "max". Iteration b
    reduces bag b, `rows[offsets[b] : offsets[b + 1]]`, to one row, which is zero if the bag is empty.

    The loop's gradient adds a cotangent of all rows in every iteration, which takes time quadratic in the number of
    bags. For "mean", ONNX Runtime (1.32) also crashes when it loads this gradient.

    The offsets must be in ascending order, as PyTorch requires. Shapes must be inferred, and the loop must return its
    rows as a scan output, not as a sequence.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites nodes of the model in place."""
        modified = False
        for node in tuple(model.graph):
            bags = _match(node) if node.op_type == "Loop" and node.domain == "" else None
            if bags is not None:
                _rewrite(node, bags)
                modified = True
        return ir.passes.PassResult(model, modified)


@dataclass(frozen=True)
class _Bags:
    """Inputs and reduction of a Loop that PyTorch exported for `EmbeddingBag`.

    Attributes:
        rows: the rows of all bags, concatenated: [rows, width].
        offsets: index of the first row of each bag, then the end of the last bag: int64 [bags + 1].
        count: number of bags, int64 []; a constant may be in the loop's body.
        mode: "sum", "mean" or "max".
        size: number of embedding indices, or the 1-D tensor of these indices. The exported loop takes it as the end of
            the last bag to compute a maximum or the divisor of a mean, even if the last offset is another number. None
            for "sum", and if the number is the last offset.
    """

    rows: ir.Value
    offsets: ir.Value
    count: ir.Value
    mode: str
    size: int | ir.Value | None


def _match(loop: ir.Node) -> _Bags | None:
    """Matches a Loop that PyTorch exported for `EmbeddingBag`.

    Returns:
        The loop's inputs and reduction; None for other loops.
    """
    body = loop.attributes["body"].as_graph()
    if len(loop.inputs) != 3 or len(loop.outputs) != 2 or loop.inputs[0] is not None:
        return None
    if loop.outputs[0].uses() or any(output.is_graph_output() for output in loop.outputs):
        return None
    _, first, start = loop.inputs
    _, _, index = body.inputs
    go_on, following, appended = body.outputs
    # The state counts the iterations from 0 on, while it is less than the number of bags.
    less = _producer(go_on, "Less")
    if less is None or _number(start) != 0 or _offset(following) != (index, 1):
        return None
    count = less.inputs[1]
    if count is None or _through(less.inputs[0]) is not following or not _is_positive(first, count):
        return None
    # Empty bags are zeros.
    choice = _producer(appended, "If")
    equal = _producer(choice.inputs[0], "Equal") if choice is not None else None
    if choice is None or equal is None or not _is_zero(_branch(choice, "then_branch")):
        return None
    bounds = [_element(value) for value in equal.inputs]
    if None in bounds:
        return None
    (offsets, *begin), (same, *end) = (bound for bound in bounds if bound is not None)
    if offsets is not same or (begin, end) != ([index, 0], [index, 1]):
        return None
    result = _branch(choice, "else_branch")
    found: dict[str, tuple[ir.Value | None, ir.Value | None]] = {
        "sum": (_reduced_slice(result, "ReduceSum", equal.inputs), None),
        "mean": _averaged_slice(result, index, count, equal.inputs),
        "max": _largest_of_slice(result, index, count, equal.inputs),
    }
    matches = [(mode, rows, stop) for mode, (rows, stop) in found.items() if rows is not None]
    if not matches:
        return None
    mode, rows, stop = matches[0]
    size = _length(stop)
    if mode != "sum" and size is None:
        return None
    # PyTorch appends the number of indices to the offsets, unless they include the end of the last bag.
    joined = _producer(offsets, "Concat")
    if joined is not None and size == _length(joined.inputs[-1]):
        size = None
    read = [rows, *([size] if isinstance(size, ir.Value) else [])]
    if any(value.graph is not loop.graph and not value.is_graph_input() for value in read):
        return None
    return _Bags(rows, offsets, count, mode, size)


def _rewrite(loop: ir.Node, bags: _Bags) -> None:
    """Replaces the loop, whose result is [bags, 1, width], with a ScatterND."""
    write = WriterBefore(loop)
    number = _number(bags.count)
    size, count = write.size(bags.rows, 0), write("Reshape", bags.count if number is None else number, [1])
    # The number of offsets up to each row is the index of its bag, counted from 1. Rows before the first offset are
    # reduced into row 0 of the result, rows after the last offset into its last row; both are sliced off.
    is_max = bags.mode == "max"
    # Without a mark at the last offset, the rows after it belong to the last bag.
    marked = count if is_max and bags.size is not None else write("Add", count, 1)
    marks = write("Slice", bags.offsets, [0], marked, [0])
    zeros = write("Expand", 0, write("Add", size, 1))
    ones = write("Expand", 1, write("Shape", marks))
    numbers = write("CumSum", write("ScatterElements", zeros, marks, ones, axis=0, reduction="add"), 0)
    numbers = write("Unsqueeze", write("Slice", numbers, [0], [-1], [0]), [1])
    assert bags.rows.dtype is not None
    shape = write("Concat", write("Add", count, 2), write("Shape", bags.rows, start=1), axis=0)
    start = write.number(-math.inf if is_max else 0, bags.rows.dtype)
    reduced = write(
        "ScatterND", write("Expand", start, shape), numbers, bags.rows, reduction="max" if is_max else "add"
    )
    reduced = write("Slice", reduced, [1], [-1], [0])
    if bags.mode != "sum":
        starts = write("Slice", bags.offsets, [0], count, [0])
        if is_max or bags.size is None:
            ends = write("Slice", bags.offsets, [1], write("Add", count, 1), [0])
        else:
            end = write.size(bags.size, 0) if isinstance(bags.size, ir.Value) else [bags.size]
            ends = write("Concat", write("Slice", bags.offsets, [1], count, [0]), end, axis=0)
    if bags.mode == "mean":
        counts = write("Cast", write("Max", write("Sub", ends, starts), 1), to=bags.rows.dtype)
        reduced = write("Div", reduced, write("Unsqueeze", counts, [1]))
    elif is_max:
        has_rows = write("Unsqueeze", write("Greater", ends, starts), [1])
        reduced = write("Where", has_rows, reduced, write.number(0, bags.rows.dtype))
    result = write("Unsqueeze", reduced, [1])
    result.type, result.shape = loop.outputs[1].type, loop.outputs[1].shape
    stand_in(loop.outputs[1], result, loop)
    assert loop.graph is not None
    loop.graph.remove(loop, safe=True)


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Returns the `op_type` node that computes a value, looking through copies and casts, or None if there is none."""
    node = _through(value).producer() if value is not None else None
    return node if node is not None and node.op_type == op_type and node.domain == "" else None


def _through(value: ir.Value | None) -> ir.Value:
    """Follows a value back through Identity, Cast, CastLike, Reshape and Squeeze, and returns the original value."""
    assert value is not None
    while True:
        node = value.producer()
        if (
            node is None
            or node.domain
            or node.op_type not in ("Identity", "Cast", "CastLike", "Reshape", "Squeeze")
        ):
            return value
        assert node.inputs[0] is not None
        value = node.inputs[0]


def _number(value: ir.Value | None) -> int | None:
    """Returns the only element of a constant, or None for other values."""
    array = None if value is None else known_array(_through(value))
    return None if array is None or array.size != 1 else int(array.item())


def _offset(value: ir.Value | None) -> tuple[ir.Value, int] | None:
    """Returns (base, number) such that a value equals `base + number`. The number is 0 if the value is not a sum.

    Returns None for an omitted value.
    """
    if value is None:
        return None
    value = _through(value)
    node = _producer(value, "Add")
    if node is None:
        return value, 0
    for operand, other in (node.inputs, node.inputs[::-1]):
        number = _number(other)
        if number is not None:
            return _through(operand), number
    return value, 0


def _element(value: ir.Value | None) -> tuple[ir.Value, ir.Value, int] | None:
    """Returns (vector, base, number) if a value is `vector[base + number : base + number + 1]`, else None."""
    node = _producer(value, "Slice")
    if node is None or len([entry for entry in node.inputs if entry is not None]) != 3:
        return None
    vector, (start, end) = node.inputs[0], (_offset(entry) for entry in node.inputs[1:3])
    if vector is None or start is None or end is None or end != (start[0], start[1] + 1):
        return None
    return vector, *start


def _same(first: ir.Value | None, second: ir.Value | None) -> bool:
    """True if two values are copies of the same value, or the same number."""
    if first is None or second is None:
        return False
    number = _number(first)
    return _through(first) is _through(second) or (number is not None and number == _number(second))


def _is_positive(value: ir.Value | None, count: ir.Value) -> bool:
    """True if a value is `0 < count`, or a constant that is true and `count` is a positive constant."""
    node, number = _producer(value, "Less"), _number(count)
    if node is not None:
        return _number(node.inputs[0]) == 0 and _same(node.inputs[1], count)
    return number is not None and number > 0 and _number(value) == 1


def _branch(choice: ir.Node, name: str) -> ir.Value:
    """Returns the result of a branch of an If.

    If the branch returns the result of another If that compares two constants, the taken branch of that If is followed.

    Args:
        choice: the If.
        name: name of the branch, "then_branch" or "else_branch".
    """
    value = choice.attributes[name].as_graph().outputs[0]
    while (node := _producer(value, "If")) is not None:
        equal = _producer(node.inputs[0], "Equal")
        numbers = [_number(entry) for entry in equal.inputs] if equal is not None else [None]
        if None in numbers:
            break
        taken = "then_branch" if numbers[0] == numbers[1] else "else_branch"
        value = node.attributes[taken].as_graph().outputs[0]
    return value


def _is_zero(value: ir.Value) -> bool:
    """True if a value is known to be all zeros."""
    node = _producer(value, "Expand")
    source = value if node is None else node.inputs[0]
    array = None if source is None else known_array(_through(source))
    return array is not None and not array.any()


def _reduced_slice(
    value: ir.Value | None, op_type: str, bounds: Sequence[ir.Value | None]
) -> ir.Value | None:
    """Returns `x` if a value is the reduction `op_type` of `x[start:end]` over axis 0, else None.

    Args:
        value: the value.
        op_type: the reduction, e.g. "ReduceSum".
        bounds: the values `start` and `end`.
    """
    total = _producer(value, op_type)
    if total is None or total.attributes.get_int("keepdims", 1) != 1 or len(total.inputs) != 2:
        return None
    part = _producer(total.inputs[0], "Slice")
    if _number(total.inputs[1]) != 0 or part is None or tuple(part.inputs[1:]) != tuple(bounds):
        return None
    return part.inputs[0]


def _averaged_slice(
    value: ir.Value, index: ir.Value, count: ir.Value, bounds: Sequence[ir.Value | None]
) -> tuple[ir.Value | None, ir.Value | None]:
    """Returns `x` if a value is the mean of `x[start:end]` over axis 0, and the number that ends the last bag.

    PyTorch exports a separate branch for the last bag: the sum divided by the number of remaining rows. For other
    values, both results are None.

    Args:
        value: the value, in the loop's body.
        index: number of the iteration, which selects the bag.
        count: number of bags.
        bounds: (start, end).
    """
    choice = _producer(value, "If")
    if choice is None or not _is_last(choice, index, count):
        return None, None
    rows = _reduced_slice(_branch(choice, "else_branch"), "ReduceMean", bounds)
    guard = _producer(_branch(choice, "then_branch"), "If")
    positive = _producer(guard.inputs[0], "Greater") if guard is not None else None
    if rows is None or guard is None or positive is None or _number(positive.inputs[1]) != 0:
        return None, None
    quotient = _producer(_branch(guard, "then_branch"), "Div")
    left = _producer(positive.inputs[0], "Sub")
    if quotient is None or left is None or _through(quotient.inputs[1]) is not _through(positive.inputs[0]):
        return None, None
    if _reduced_slice(quotient.inputs[0], "ReduceSum", bounds) is not rows or left.inputs[1] not in bounds:
        return None, None
    return rows, left.inputs[0]


def _largest_of_slice(
    value: ir.Value, index: ir.Value, count: ir.Value, bounds: Sequence[ir.Value | None]
) -> tuple[ir.Value | None, ir.Value | None]:
    """Returns `x` if a value is the maximum of `x[start:end]` over axis 0, and the number that ends the last bag.

    PyTorch exports a separate branch for the last bag: a slice that ends at the number of embedding indices. For other
    values, both results are None.

    Args:
        value: the value, in the loop's body.
        index: number of the iteration, which selects the bag.
        count: number of bags.
        bounds: (start, end).
    """
    largest = _producer(value, "ReduceMax")
    choice = _producer(largest.inputs[0], "If") if largest is not None else None
    if largest is None or choice is None or largest.attributes.get_int("keepdims", 1) != 1:
        return None, None
    if len(largest.inputs) != 2 or _number(largest.inputs[1]) != 0 or not _is_last(choice, index, count):
        return None, None
    part, last = (_producer(_branch(choice, f"{name}_branch"), "Slice") for name in ("else", "then"))
    if part is None or last is None or tuple(part.inputs[1:]) != tuple(bounds):
        return None, None
    if len(last.inputs) != 3 or last.inputs[:2] != part.inputs[:2]:
        return None, None
    return part.inputs[0], last.inputs[2]


def _is_last(choice: ir.Node, index: ir.Value, count: ir.Value) -> bool:
    """True if an If tests whether the iteration is the last one: `index == count - 1`."""
    equal = _producer(choice.inputs[0], "Equal")
    if equal is None or _through(equal.inputs[0]) is not index:
        return False
    bags, last = _number(count), _number(equal.inputs[1])
    if bags is not None and last is not None:
        return last == bags - 1
    before = _producer(equal.inputs[1], "Sub")
    return before is not None and _same(before.inputs[0], count) and _number(before.inputs[1]) == 1


def _length(value: ir.Value | None) -> int | ir.Value | None:
    """Returns a known number, or the 1-D tensor whose Shape a value is; None for other values."""
    shape = _producer(value, "Shape")
    if shape is None:
        return _number(value)
    tensor = shape.inputs[0]
    if tensor is None or tensor.shape is None or len(tensor.shape) != 1:
        return None
    size = tensor.shape[0]
    return size if isinstance(size, int) else _through(tensor)
