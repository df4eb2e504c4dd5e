"""Rewrites Einsums of two operands as matrix products."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxtrain.passes.canonical.einsum_pairs import ellipsis_letters, split_equation
from onnxtrain.passes.shapes.dims import same_size
from onnxtrain.passes.tidy.replace_value import WriterBefore, replace_node

Dim = int | ir.SymbolicDim

_UNKNOWN = 64
"""Size assumed for axes of unknown size when layouts are compared."""

_SCATTERED = 8
"""Cost of a transpose that copies single elements in no order, relative to other transposes."""


class EinsumProductsPass(ir.passes.InPlacePass):
    """Rewrites Einsums of two floating-point operands as MatMul, with as few transposed elements as possible.

    ONNX Runtime (1.32) transposes both operands and the result of an Einsum, also where a MatMul could read the
    operands as they are. Exchanging the last two axes of an operand costs nothing, because ONNX Runtime fuses this
    Transpose into the MatMul, unless it has to join it to another Transpose.

    Run this pass after differentiation: gradients of Einsum need fewer transposes than gradients of its parts. An
    Einsum is not modified if ranks are unknown, or if a label occurs twice in an operand, is summed in one operand
    only, or may have size one in only one of the operands. Inferred shapes are needed, and set for new values.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the main graph in place; subgraphs are not modified."""
        modified = False
        for node in tuple(model.graph):
            if (node.op_type, node.domain) == ("Einsum", "") and len(node.inputs) == 2:
                modified |= _rewrite(node)
        return ir.passes.PassResult(model, modified)


@dataclass(frozen=True)
class _Labels:
    """The labels of an Einsum by their place in the matrix product.

    Attributes:
        batch: in both operands and in the output.
        rows: in the left operand and in the output.
        columns: in the right operand and in the output.
        summed: in both operands only.
    """

    batch: str
    rows: str
    columns: str
    summed: str

    @property
    def result(self) -> str:
        """Labels of the product's axes."""
        return self.batch + self.rows + self.columns


def _rewrite(node: ir.Node) -> bool:
    """Replaces an Einsum with a product. Returns False if it is not modified."""
    operands = [value for value in node.inputs if value is not None and value.shape is not None]
    found = _terms(node, operands) if len(operands) == 2 else None
    if found is None:
        return False
    terms, output = found
    sizes: dict[str, Dim] = {}
    for term, value in zip(terms, operands, strict=True):
        for label, size in zip(term, value.shape or (), strict=True):
            if label not in sizes:
                sizes[label] = size
            # An axis of size one is broadcast, which MatMul does for batch axes only.
            elif not same_size(size, sizes[label]):
                return False
    if any(size == 0 for size in sizes.values()):
        return False
    if not set(terms[0]) ^ set(terms[1]) <= set(output) or set(output) == {*terms[0], *terms[1]}:
        return False
    swapped, labels = _best_labels(terms, output, sizes)
    parts = list(zip(terms, operands, strict=True))
    left, right = parts[::-1] if swapped else parts
    replace_node(node, _Writer(node, sizes, labels.batch).product(left, right, labels, output))
    return True


def _terms(node: ir.Node, operands: Sequence[ir.Value]) -> tuple[list[str], str] | None:
    """Returns the labels of the operands and of the output; None if MatMul cannot compute the Einsum."""
    equation = node.attributes["equation"].as_string().replace(" ", "")
    terms, output = split_equation(equation)
    if "..." in equation:
        letters = ellipsis_letters(terms, operands, equation)
        if letters is None:
            return None
        terms, output = [term.replace("...", letters) for term in terms], output.replace("...", letters)
    if any(
        len(set(term)) < len(term)
        or len(term) != len(value.shape or ())
        or value.dtype is None
        or not value.dtype.is_floating_point()
        for term, value in zip(terms, operands, strict=True)
    ):
        return None
    return None if len(set(output)) < len(output) else (terms, output)


def _best_labels(terms: Sequence[str], output: str, sizes: Mapping[str, Dim]) -> tuple[bool, _Labels]:
    """Returns the product whose transposes move the fewest elements, and True if its left operand is the second."""
    options: list[tuple[int, int, bool, _Labels]] = []
    for swapped, (left, right) in enumerate((terms, terms[::-1])):
        both = set(left) & set(right)
        groups = (
            (both & set(output), (left, right, output)),
            (set(left) - both, (left, output)),
            (set(right) - both, (right, output)),
            (both - set(output), (left, right)),
        )
        orders = [dict.fromkeys(_only(source, group) for source in sources) for group, sources in groups]
        for order in itertools.product(*orders):
            labels = _Labels(*order)
            cost = _moved(labels.result, output, sizes)
            if left != labels.batch + labels.summed + labels.rows:
                cost += _moved(left, labels.batch + labels.rows + labels.summed, sizes)
            if right != labels.batch + labels.columns + labels.summed:
                cost += _moved(right, labels.batch + labels.summed + labels.columns, sizes)
            options.append((cost, len(options), bool(swapped), labels))
    _, _, best, labels = min(options)
    return best, labels


def _only(labels: str, kept: Iterable[str]) -> str:
    return "".join(label for label in labels if label in kept)


def _moved(term: str, target: str, sizes: Mapping[str, Dim]) -> int:
    """Returns the cost of transposing a tensor from the labels `term` to `target`."""
    if term == target:
        return 0
    elements = math.prod(size if isinstance(size := sizes[label], int) else _UNKNOWN for label in term)
    # ONNX Runtime copies rows if the last axis stays, and has a loop of its own for a single axis that moves.
    is_fast = term[-1] == target[-1] or any(
        term.replace(label, "") == target.replace(label, "") for label in term
    )
    return elements if is_fast else _SCATTERED * elements


class _Writer:
    """Writes the nodes of one product.

    Args:
        node: the Einsum; new nodes are inserted before it.
        sizes: the size of each label.
        batch: labels of batch axes.
    """

    def __init__(self, node: ir.Node, sizes: Mapping[str, Dim], batch: str) -> None:
        self._write, self._sizes, self._batch = WriterBefore(node), sizes, batch
        self._type = node.inputs[0].type if node.inputs[0] is not None else None
        self._sources: dict[str, tuple[ir.Value, int]] = {}

    def product(
        self, left: tuple[str, ir.Value], right: tuple[str, ir.Value], labels: _Labels, output: str
    ) -> ir.Value:
        """Writes the product of two operands, given as labels and value, and returns the result."""
        for term, value in (right, left):
            self._sources |= {label: (value, axis) for axis, label in enumerate(term)}
        if not labels.rows and not labels.columns:
            order = labels.batch + labels.summed
            factors = [self._transposed(value, term, order) for term, value in (left, right)]
            count = len(labels.batch)
            axes = list(range(count, count + len(labels.summed)))
            product = self._node("Mul", order, *factors)
            result = self._node("ReduceSum", labels.batch, product, axes, keepdims=0)
        else:
            a = self._matrix(*left, labels.rows, labels.summed)
            b = self._matrix(*right, labels.summed, labels.columns)
            groups = [*labels.batch, labels.rows, labels.columns]
            result = self._write("MatMul", a, b)
            self._describe(result, groups)
            result = self._reshaped(result, groups, list(labels.result))
        return self._transposed(result, labels.result, output)

    def _node(self, op_type: str, labels: Iterable[str], *inputs: Any, **attributes: Any) -> ir.Value:
        value = self._write(op_type, *inputs, **attributes)
        self._describe(value, labels)
        return value

    def _describe(self, value: ir.Value, groups: Iterable[str]) -> None:
        """Sets dtype and shape of a value with one axis for each group of labels."""
        value.type = self._type
        value.shape = ir.Shape([self._merged(group) for group in groups])

    def _merged(self, group: str) -> Dim | None:
        """Returns the size of an axis that merges the axes of labels; None if it is unknown."""
        if len(group) == 1:
            return self._sizes[group]
        factors = [self._sizes[label] for label in group]
        known = [size for size in factors if isinstance(size, int)]
        return math.prod(known) if len(known) == len(factors) else None

    def _matrix(self, term: str, value: ir.Value, rows: str, columns: str) -> ir.Value:
        """Returns a stack of matrices: batch axes, then an axis for the labels `rows`, and one for `columns`."""
        if term != self._batch + columns + rows:
            target = self._batch + rows + columns
            return self._reshaped(
                self._transposed(value, term, target), list(target), [*self._batch, rows, columns]
            )
        groups = [*self._batch, columns, rows]
        value = self._reshaped(value, list(term), groups)
        count = len(groups)
        perm = [*range(count - 2), count - 1, count - 2]
        return self._node("Transpose", [*self._batch, rows, columns], value, perm=perm)

    def _transposed(self, value: ir.Value, term: str, target: str) -> ir.Value:
        if term == target:
            return value
        return self._node("Transpose", target, value, perm=[term.index(label) for label in target])

    def _reshaped(self, value: ir.Value, groups: Sequence[str], target: Sequence[str]) -> ir.Value:
        """Reshapes a value with one axis for each group of labels to the groups `target`, in the same order."""
        if list(groups) == list(target):
            return value
        sizes = [self._merged(group) for group in target]
        # A zero copies the size of the input's axis with the same index.
        copied = [
            0 if index < len(groups) and groups[index] == group else size
            for index, (group, size) in enumerate(zip(target, sizes, strict=True))
        ]
        if all(isinstance(size, int) for size in copied):
            return self._node("Reshape", target, value, copied)
        shape = self._write("Concat", *map(self._group_size, target), axis=0)
        return self._node("Reshape", target, value, shape, allowzero=1)

    def _group_size(self, group: str) -> ir.Value | list[int]:
        """Returns the size of a merged axis, int64 [1]."""
        size = self._merged(group)
        if isinstance(size, int):
            return [size]
        factors = [self._write.size(*self._sources[label]) for label in group]
        return functools.reduce(functools.partial(self._write, "Mul"), factors)
