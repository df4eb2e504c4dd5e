"""Contracts the operands of Einsum two at a time, in the order that takes the fewest operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_letters

import onnx_ir as ir

from onnxtrain.passes.canonical.repeated_axes import Write, repeated_axes, without_axes
from onnxtrain.passes.shapes.dims import same_size
from onnxtrain.passes.tidy.replace_value import WriterBefore, replace_node

_UNKNOWN = 64
"""Size assumed for axes of unknown size when contraction orders are compared."""

_EXHAUSTIVE = 8
"""Maximum number of operands for which all orders are compared, in 3^n steps."""


class EinsumPairsPass(ir.passes.InPlacePass):
    """Splits Einsums of three or more operands into pairwise Einsums, and turns Einsums that sum no axis into Mul.

    ONNX Runtime (1.32) contracts operands from left to right, so an intermediate result may have all labels of the
    equation. It computes an Einsum of two operands that sums no axis as a batch of 1x1 matrix products, about 50 times
    slower than Mul. The default bundle of onnxruntime-web (JSEP, 1.30) silently computes Einsum of three operands
    incorrectly on WebGPU.

    An ellipsis is kept if the operands' ranks are unknown. Nodes that Einsum's gradient rule doesn't support are not
    modified: ellipses of different lengths, and an axis of size one before a longer one with the same label, where onnx
    infers a wrong shape. Uses inferred shapes if there are any.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites Einsum nodes of the main graph, its subgraphs and the model's functions, in place."""
        modified = False
        for graph in (model.graph, *(function.graph for function in model.functions.values())):
            for node in tuple(ir.traversal.RecursiveGraphIterator(graph)):
                if node.op_type == "Einsum" and node.domain == "" and len(node.inputs) > 1:
                    modified |= _rewrite(node)
        return ir.passes.PassResult(model, modified)


def _rewrite(node: ir.Node) -> bool:
    """Replaces an Einsum with contractions of two operands at a time. Returns False if it is not modified."""
    equation = node.attributes["equation"].as_string().replace(" ", "")
    operands = [value for value in node.inputs if value is not None]
    terms, output = split_equation(equation)
    if "..." in equation:
        letters = ellipsis_letters(terms, operands, equation)
        if letters is None:
            if len(operands) == 2:
                return False
            free = next((letter for letter in ascii_letters if letter not in equation), None)
            if free is None:
                return False
            named, result = [term.replace("...", free) for term in terms], output.replace("...", free)
            write = _with_ellipsis(WriterBefore(node), free)
            replace_node(node, contract(write, operands, named, result, {}, products=False))
            return True
        terms, output = [term.replace("...", letters) for term in terms], output.replace("...", letters)
    if not _fits(terms, operands):
        return False
    write = WriterBefore(node)
    once = _read_once(write, terms, operands)
    if once is None and len(operands) == 2 and not _is_product(terms, output):
        return False
    terms, operands = once or (terms, operands)
    parts, sizes = _without_ones(write, terms, operands)
    replace_node(
        node, contract(write, [value for _, value in parts], [term for term, _ in parts], output, sizes)
    )
    return True


def split_equation(equation: str) -> tuple[list[str], str]:
    """Splits an equation without spaces into the labels of each operand and the labels of the output.

    >>> split_equation("ij,jk")
    (['ij', 'jk'], 'ik')
    """
    left, arrow, output = equation.partition("->")
    # Without an arrow, the output has the ellipsis and the labels that occur once, in alphabetical order.
    if not arrow:
        once = sorted(label for label in set(left) if label.isalpha() and left.count(label) == 1)
        output = ("..." if "..." in left else "") + "".join(once)
    return left.split(","), output


def ellipsis_letters(terms: Sequence[str], operands: Sequence[ir.Value], equation: str) -> str | None:
    """Returns unused letters to name the axes of an ellipsis in the equation, e.g. "ab" for two axes.

    Returns None if the number of these axes is unknown or differs between operands.
    """
    counts = set()
    for term, value in zip(terms, operands, strict=True):
        if "..." in term:
            counts.add(None if value.shape is None else len(value.shape) - len(term) + 3)
    free = [letter for letter in ascii_letters if letter not in equation]
    count = counts.pop()
    if counts or count is None or not 0 <= count <= len(free):
        return None
    return "".join(free[:count])


def _with_ellipsis(write: WriterBefore, letter: str) -> Write:
    """Returns a function like `write` that replaces `letter` in equations with an ellipsis."""

    def write_node(op_type: str, *inputs: ir.Value, equation: str) -> ir.Value:
        return write(op_type, *inputs, equation=equation.replace(letter, "..."))

    return write_node


def _fits(terms: Sequence[str], operands: Sequence[ir.Value]) -> bool:
    """True if operands have the ranks of their terms, and no label has size 1 in one operand and a larger size later.

    Operands of unknown rank are not checked.
    """
    first: dict[str, object] = {}
    for term, value in zip(terms, operands, strict=True):
        if value.shape is None:
            continue
        if len(value.shape) != len(term):
            return False
        if any(
            first.setdefault(label, size) == 1 and size != 1
            for label, size in zip(term, value.shape, strict=True)
        ):
            return False
    return True


def _read_once(
    write: Write, terms: Sequence[str], operands: Sequence[ir.Value]
) -> tuple[list[str], list[ir.Value]] | None:
    """Drops axes along which an Expand has repeated an operand, where another operand has the same label.

    Heads that share keys, for instance, are then multiplied as one matrix.

    Returns:
        The new terms and operands; None if they are unchanged.
    """
    repeated = [repeated_axes(value) for value in operands]
    # Sizes of the labels of axes that differ along their elements.
    sizes = {
        label: size
        for term, value, axes in zip(terms, operands, repeated, strict=True)
        for axis, (label, size) in enumerate(zip(term, value.shape or (), strict=False))
        if axis not in axes
    }
    found = False
    result = list(terms), list(operands)
    for index, (term, value, axes) in enumerate(zip(terms, operands, repeated, strict=True)):
        if value.shape is None or len(set(term)) < len(term) or not axes:
            continue
        if all(same_size(value.shape[axis], sizes.get(term[axis])) for axis in axes):
            narrow = without_axes(write, value, axes)
            if narrow is not None:
                found = True
                result[0][index] = "".join(label for axis, label in enumerate(term) if axis not in axes)
                result[1][index] = narrow
    return result if found else None


def _without_ones(
    write: Write, terms: Sequence[str], operands: Sequence[ir.Value]
) -> tuple[list[tuple[str, ir.Value]], dict[str, int]]:
    """Squeezes axes of size one that broadcast against longer axes.

    Some contraction orders would compute wrong results with these axes.

    Returns:
        The labels and value of each operand, and the known sizes of labels.
    """
    dims = [
        list(zip(term, value.shape or [None] * len(term), strict=True))
        for term, value in zip(terms, operands, strict=True)
    ]
    sizes = {label: size for axes in dims for label, size in axes if isinstance(size, int) and size != 1}
    long = {label for axes in dims for label, size in axes if size != 1}
    sizes |= dict.fromkeys(set().union(*terms) - long, 1)
    parts = []
    for axes, value in zip(dims, operands, strict=True):
        ones = [axis for axis, (label, size) in enumerate(axes) if size == 1 and label in long]
        kept = "".join(label for axis, (label, _) in enumerate(axes) if axis not in ones)
        parts.append((kept, write("Squeeze", value, ones) if ones else value))
    return parts, sizes


def contract(
    write: Write,
    operands: Sequence[ir.Value],
    terms: Sequence[str],
    output: str,
    sizes: Mapping[str, int],
    *,
    products: bool = True,
) -> ir.Value:
    """Emits nodes that compute an Einsum, two operands at a time, and returns the result.

    Args:
        write: writes a node and returns its output, e.g. `write("Einsum", a, equation="ij->i")`.
        operands: the operands.
        terms: labels of each operand, letters only, e.g. ["ij", "jk"].
        output: labels of the output, e.g. "ik".
        sizes: known sizes of labels, e.g. {"i": 8}.
        products: False to emit only Einsums, no ReduceSum or Mul. Needed if a label stands for several axes.
    """
    if len(terms) == 1:
        return write("Einsum", operands[0], equation=f"{terms[0]}->{output}")
    parts = list(zip(terms, operands, strict=True))
    # Diagonals, and sums over labels of a single operand, come first: they make operands smaller.
    for index, (term, operand) in enumerate(parts):
        others = set(output).union(*(other for k, other in enumerate(terms) if k != index))
        kept = "".join(dict.fromkeys(label for label in term if label in others))
        summed = [axis for axis, label in enumerate(term) if label not in others]
        if products and len(set(term)) == len(term):
            parts[index] = kept, write("ReduceSum", operand, summed, keepdims=0) if summed else operand
        elif kept != term:
            parts[index] = kept, write("Einsum", operand, equation=f"{term}->{kept}")
    labels = [frozenset(term) for term, _ in parts]
    for left, right in contraction_order(labels, frozenset(output), sizes):
        a, b = parts[left], parts[right]
        rest = [part for index, part in enumerate(parts) if index not in (left, right)]
        later = set(output).union(*(term for term, _ in rest))
        kept = _result_order(a[0], b[0], later) if rest else output
        parts = [*rest, (kept, _pair(write, a, b, kept, products))]
    return parts[0][1]


def _result_order(a: str, b: str, later: set[str]) -> str:
    """Returns the labels of the product of operands `a` and `b`, limited to the labels in `later`.

    The labels of both operands come first, then the labels of only `a`, then the labels of only `b`. If no label is
    summed over and one operand has all labels, its order is kept.
    """
    # A Mul writes the order of the operand that it need not broadcast.
    for term in (a, b):
        if set(term) == set(a + b) and set(term) <= later:
            return term
    # The order in which ONNX Runtime's batched matrix product leaves the axes, so that they need no transpose.
    both = [label for label in a if label in b]
    only = [label for label in a if label not in b], [label for label in b if label not in a]
    return "".join(label for label in (*both, *only[0], *only[1]) if label in later)


def _pair(
    write: Write, a: tuple[str, ir.Value], b: tuple[str, ir.Value], kept: str, products: bool
) -> ir.Value:
    """Multiplies two operands, and sums over all labels that are not in `kept`.

    Args:
        write: emits a node.
        a: labels and value of the first operand.
        b: labels and value of the second operand.
        kept: labels of the result.
        products: True to emit a Mul instead of an Einsum if no label is summed over.
    """
    if not products or not _is_product((a[0], b[0]), kept):
        return write("Einsum", a[1], b[1], equation=f"{a[0]},{b[0]}->{kept}")
    return write("Mul", *(_aligned(write, term, value, kept) for term, value in (a, b)))


def _is_product(terms: Sequence[str], output: str) -> bool:
    """True if an Einsum of two operands only multiplies elements: it sums no axis and takes no diagonal."""
    return all(len(set(term)) == len(term) and set(term) <= set(output) for term in (*terms, output))


def _aligned(write: Write, term: str, value: ir.Value, labels: str) -> ir.Value:
    """Transposes a value with the labels `term` so that its axes are in the order of `labels`.

    Inserts an axis of size one for each missing label, unless all labels before it are missing as well.
    """
    order = [term.index(label) for label in labels if label in term]
    if order != sorted(order):
        value = write("Transpose", value, perm=order)
    present = [label in term for label in labels]
    start = present.index(True) if any(present) else len(present)
    missing = [axis - start for axis in range(start, len(labels)) if not present[axis]]
    return write("Unsqueeze", value, missing) if missing else value


@dataclass(frozen=True, order=True)
class _Cost:
    """Cost of a contraction. Costs are compared by `operations`, and by `largest` if these are equal.

    Attributes:
        operations: number of multiplications.
        largest: number of elements of the largest intermediate result.
    """

    operations: int = 0
    largest: int = 0

    def __add__(self, other: _Cost) -> _Cost:
        return _Cost(self.operations + other.operations, max(self.largest, other.largest))


def contraction_order(
    terms: Sequence[frozenset[str]], output: frozenset[str], sizes: Mapping[str, int]
) -> list[tuple[int, int]]:
    """Returns the pairs to contract, as positions in the list of operands, in opt_einsum's notation.

    After each step, the pair is removed from the list and its result is appended. The order minimizes the number of
    operations, then the size of the largest intermediate result. With more than 8 operands, each step greedily
    contracts the pair whose result is smallest relative to its operands.

    Args:
        terms: labels of each operand.
        output: labels of the output.
        sizes: known sizes of labels. Unknown sizes are assumed to be equal.

    >>> contraction_order([frozenset("ij"), frozenset("jk"), frozenset("k")], frozenset("i"), {})
    [(1, 2), (0, 1)]
    """

    def elements(labels: Iterable[str]) -> int:
        return math.prod(sizes.get(label, _UNKNOWN) for label in labels)

    if len(terms) > _EXHAUSTIVE:
        return list(_greedy(terms, output, elements))
    everything = (1 << len(terms)) - 1
    # Labels that the product of a subset of the operands has after summing. Subsets are bit masks.
    present = [frozenset[str]()] * (everything + 1)
    for subset in range(1, everything + 1):
        inside, outside = frozenset[str](), output
        for index, term in enumerate(terms):
            inside, outside = (inside | term, outside) if subset >> index & 1 else (inside, outside | term)
        present[subset] = inside & outside
    best = {1 << index: (_Cost(), 0) for index in range(len(terms))}
    for subset in range(1, everything + 1):
        if subset in best:
            continue
        lowest, options = subset & -subset, []
        part = (subset - 1) & subset
        while part:
            if part & lowest:
                step = _Cost(elements(present[part] | present[subset ^ part]), elements(present[subset]))
                options.append((best[part][0] + best[subset ^ part][0] + step, part))
            part = (part - 1) & subset
        best[subset] = min(options)
    return _as_pairs(best, everything, len(terms))


def _as_pairs(best: Mapping[int, tuple[_Cost, int]], everything: int, count: int) -> list[tuple[int, int]]:
    """Converts a contraction tree to a list of pairwise contractions, given as positions of operands.

    The result of a contraction is appended to the operands, and its two operands are removed.

    Args:
        best: for each subset of the operands (a bit mask), its cost and one of its two parts in the contraction.
        everything: the bit mask of all operands.
        count: number of operands.
    """
    current, pairs = [1 << index for index in range(count)], []

    def visit(subset: int) -> None:
        part = best[subset][1]
        if part:
            visit(part)
            visit(subset ^ part)
            left, right = sorted((current.index(part), current.index(subset ^ part)))
            pairs.append((left, right))
            current[:] = [entry for k, entry in enumerate(current) if k not in (left, right)] + [subset]

    visit(everything)
    return pairs


def _greedy(
    terms: Sequence[frozenset[str]], output: frozenset[str], elements: Callable[[Iterable[str]], int]
) -> Iterator[tuple[int, int]]:
    """Yields the pairs to contract, as positions of operands, in opt_einsum's greedy order.

    Each pair is the one whose result is smallest relative to its operands. The result is appended to the operands, and
    the two operands are removed.

    Args:
        terms: labels of each operand.
        output: labels of the output.
        elements: returns the number of elements of a tensor with the given labels.
    """
    current = list(terms)
    while len(current) > 1:
        options = []
        for right in range(len(current)):
            for left in range(right):
                others = (term for index, term in enumerate(current) if index not in (left, right))
                union = current[left] | current[right]
                result = union & output.union(*others)
                growth = elements(result) - elements(current[left]) - elements(current[right])
                options.append((growth, elements(union), left, right, result))
        *_, left, right, result = min(options, key=lambda option: option[:4])
        yield left, right
        current = [term for index, term in enumerate(current) if index not in (left, right)] + [result]
