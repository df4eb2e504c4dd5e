"""Differentiates Einsum: the cotangent of an operand is another Einsum."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import Cotangents, vjp
from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.errors import DifferentiationError
from onnxtrain.passes.canonical.einsum_pairs import contract, split_equation

Dim = int | ir.SymbolicDim


@vjp("Einsum", wrt=("Inputs",))
def einsum(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Einsum: for "ij,jk->ik", ct_A = Einsum("ik,jk->ij", ct, B), and likewise for any number of operands.

    If a label occurs in only one operand and not in the output, Einsum sums over it, so the operand's cotangent is
    broadcast along it. If a label occurs twice in an operand ("ii"), it selects a diagonal, so the cotangent is zero
    off the diagonal. Axes of size one that were broadcast are summed over.
    """
    terms, output = _terms(n)
    _check_broadcasting(n, terms)
    return [
        _operand_cotangent(op, n, ct, index, terms, output) if n.needs(value) else None
        for index, value in enumerate(n.inputs)
    ]


def _terms(n: NodeView) -> tuple[list[str], str]:
    """Returns the labels of each operand and of the output, with ellipses replaced by unused labels."""
    equation = n.attr("equation").replace(" ", "")
    terms, output = split_equation(equation)
    counts = {n.rank(v) - len(t) + 3 for t, v in zip(terms, n.inputs, strict=True) if v and "..." in t}
    if len(counts) > 1:
        raise DifferentiationError(
            f"differentiating Einsum {equation!r} (node {n.node.name!r}): its ellipsis stands for "
            f"{' and '.join(map(str, sorted(counts)))} dimensions; it must stand for the same number in "
            "every operand; unsqueeze the operands with fewer dimensions"
        )
    count = max(counts, default=0)
    free = [letter for letter in ascii_letters if letter not in equation]
    if count > len(free):
        raise DifferentiationError(
            f"differentiating Einsum {equation!r} (node {n.node.name!r}): the {count} dimensions of its "
            "ellipsis and its labels need more than 52 letters; reshape the operands to fewer dimensions"
        )
    dots = "".join(free[:count])
    return [term.replace("...", dots) for term in terms], output.replace("...", dots)


def _check_broadcasting(n: NodeView, terms: Sequence[str]) -> None:
    """Checks the ranks of the operands, and that ONNX shape inference gets the size of every label right.

    onnx infers the size of a label from the first operand that has it. If this size is one but a later operand has a
    larger size, the output has a wrong shape, on which other rules would rely.

    Raises:
        DifferentiationError: a label has size one in the first operand that has it, and a different or symbolic size in
            a later operand, or the rank of an operand differs from its number of labels.
    """
    first: dict[str, Dim] = {}
    for term, value in zip(terms, n.inputs, strict=True):
        dims = _dims(n, value)
        if len(dims) != len(term):
            raise DifferentiationError(
                f"differentiating Einsum {n.attr('equation')!r} (node {n.node.name!r}): "
                f"{value.name if value else ''!r} has {len(dims)} dimensions but {len(term)} labels; "
                "correct the equation"
            )
        for label, size in zip(term, dims, strict=True):
            if first.setdefault(label, size) == 1 and size != 1:
                raise DifferentiationError(
                    f"differentiating Einsum {n.attr('equation')!r} (node {n.node.name!r}): an axis of size "
                    f"one is broadcast to size {size} of {value.name if value else ''!r}, which ONNX shape "
                    "inference gets wrong; put the operand with size one last, or expand it first"
                )


def _operand_cotangent(
    op: Emitter, n: NodeView, ct: ir.Value, index: int, terms: Sequence[str], output: str
) -> ir.Value:
    """Returns the cotangent of operand `index`.

    Args:
        op: emitter.
        n: the node.
        ct: cotangent of the output.
        index: index of the operand.
        terms: labels of all operands, e.g. ["ij", "jk"].
        output: labels of the output, e.g. "ik".
    """
    operand, term = n.inputs[index], terms[index]
    assert operand is not None
    others = [(t, v) for i, (t, v) in enumerate(zip(terms, n.inputs, strict=True)) if i != index and v]
    labels = "".join(dict.fromkeys(term))
    # Labels that occur only in this operand cannot be in the output of an Einsum of ct and the other operands.
    present = "".join(c for c in labels if c in output or any(c in t for t, _ in others))
    sizes = {c: _dims(n, operand)[term.index(c)] for c in labels}
    other_sizes = {c: [_dims(n, v)[t.index(c)] for t, v in others if c in t] for c in labels}
    result = ct
    if others or present != output:
        factors = _without_broadcast_axes(op, n, [(output, ct), *others])
        static = {
            c: size
            for t, v in zip(terms, n.inputs, strict=True)
            for c, size in zip(t, _dims(n, v), strict=True)
            if isinstance(size, int) and size != 1
        }
        result = contract(op.emit, [v for _, v in factors], [t for t, _ in factors], present, static)
    # Summed labels become axes of size one again, for Expand.
    missing = [axis for axis, c in enumerate(labels) if c not in present]
    if missing:
        result = op.Unsqueeze(result, missing)

    def shape() -> ir.Value:
        operand_shape = op.shape_of(operand)
        return op.Gather(operand_shape, [term.index(c) for c in labels]) if labels != term else operand_shape

    # An axis of symbolic size may have size one: its size at run time then decides whether it was broadcast.
    summed = [axis for axis, c in enumerate(labels) if _may_be_broadcast(sizes[c], other_sizes[c])]
    if summed:
        known = all(isinstance(sizes[labels[axis]], int) for axis in summed)
        axes = summed if known else op.Squeeze(op.NonZero(op.Equal(shape(), [1])), [0])
        result = op.ReduceSum(result, axes, keepdims=1, noop_with_empty_axes=1)
    if missing or any(c not in output and _may_be_expanded(sizes[c], other_sizes[c]) for c in labels):
        result = op.Expand(result, shape())
    return _on_diagonals(op, operand, result, term)


def _without_broadcast_axes(
    op: Emitter, n: NodeView, factors: Sequence[tuple[str, ir.Value]]
) -> list[tuple[str, ir.Value]]:
    """Squeezes axes of size one that Einsum would broadcast, because ONNX infers wrong shapes from them.

    An axis is squeezed if its label has a different or symbolic size in another operand, so Einsum's result stays the
    same. onnx (1.23) and ONNX Runtime (1.32) infer the size of a label from the first operand that has it: for
    "ij,ij->ij" with operands of shapes (1, 2) and (3, 2), they would infer (1, 2), and onnx's checker would reject the
    model.

    Args:
        op: emitter.
        n: the node being differentiated.
        factors: labels and value of each operand, e.g. [("ij", a), ("jk", b)].

    Returns:
        Labels and value of each operand, without the squeezed axes.
    """
    long = {c for t, v in factors for c, size in zip(t, _dims(n, v), strict=True) if size != 1}
    result = []
    for term, value in factors:
        axes = [
            i
            for i, (c, size) in enumerate(zip(term, _dims(n, value), strict=True))
            if size == 1 and c in long
        ]
        kept = "".join(c for i, c in enumerate(term) if i not in axes)
        result.append((kept, op.Squeeze(value, axes) if axes else value))
    return result


def _dims(n: NodeView, value: ir.Value | None) -> Sequence[Dim]:
    assert value is not None
    # Raises ShapeRequired, with a message that names the value, if the rank is unknown.
    n.rank(value)
    return list(value.shape or ())


def _same(a: Dim, b: Dim) -> bool:
    """True if two sizes are known to be equal. Unnamed symbolic sizes never are."""
    if isinstance(a, ir.SymbolicDim) and isinstance(b, ir.SymbolicDim):
        return a.value is not None and a.value == b.value
    return a == b


def _may_be_broadcast(size: Dim, other_sizes: Sequence[Dim]) -> bool:
    """True if an axis may have size one while its label has a different size in another operand."""
    if isinstance(size, int) and size != 1:
        return False
    return any(other_size != 1 and not _same(size, other_size) for other_size in other_sizes)


def _may_be_expanded(size: Dim, other_sizes: Sequence[Dim]) -> bool:
    """True if a label may have size one in all other operands that contain it, but a different size in this operand."""
    return size != 1 and bool(other_sizes) and not any(_same(size, other_size) for other_size in other_sizes)


def _on_diagonals(op: Emitter, operand: ir.Value, value: ir.Value, term: str) -> ir.Value:
    """Expands `value` from one axis per distinct label to one axis per label of `term`; zero off the diagonals."""
    again = [axis for axis, c in enumerate(term) if c in term[:axis]]
    if not again:
        return value
    value = op.Unsqueeze(value, again)
    for axis in again:
        first = term.index(term[axis])
        size = (static_dims(operand) or ())[first]
        if size is not None:
            positions = op.const(np.arange(size, dtype=np.int64))
        else:
            positions = op.Range(op.const(0), op.Squeeze(op.dim(operand, first), [0]), op.const(1))
        along = [
            op.Unsqueeze(positions, [i for i in range(len(term)) if i != where]) for where in (first, axis)
        ]
        # Only elements with equal positions along both axes of the label were read.
        value = op.Where(op.Equal(*along), value, 0.0)
    return value
