"""Computes long sums as sums of block sums, so that rounding errors do not accumulate."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.op_facts import CASTS, ELEMENTWISE
from onnxtrain.passes.runtime_faults.label_losses import is_reduced, separate_reduction
from onnxtrain.passes.tidy.constants import known_array
from onnxtrain.passes.tidy.replace_value import write_before
from onnxtrain.passes.tidy.unique_names import name_apart

LONG_SUM_KEY = "onnxtrain.long_sum"
"""Metadata key of the Cast to float64 between the two levels of a sum."""

# The op of each level. A mean of means of equally long blocks is the mean.
_LEVELS = {
    "ReduceL1": ("ReduceL1", "ReduceSum"),
    "ReduceL2": ("ReduceL2", "ReduceL2"),
    "ReduceLogSum": ("ReduceSum", "ReduceLogSum"),
    "ReduceLogSumExp": ("ReduceLogSumExp", "ReduceLogSumExp"),
    "ReduceMean": ("ReduceMean", "ReduceMean"),
    "ReduceProd": ("ReduceProd", "ReduceProd"),
    "ReduceSum": ("ReduceSum", "ReduceSum"),
    "ReduceSumSquare": ("ReduceSumSquare", "ReduceSum"),
}

# Maximum block lengths, and lengths up to which a reduction is left unchanged. For sums and means, ONNX Runtime adds
# contiguous elements in at least 8 lanes, and strided elements in 4. All other ops reduce a block sequentially. If a
# block fills all lanes, twice as many elements give the same error.
_IN_LANES = frozenset({"ReduceLogSum", "ReduceLogSumExp", "ReduceMean", "ReduceSum"})
_LANES = 16
_BLOCK, _BLOCK_OF_LANES, _OTHER_BLOCK = 64, 128, 32
_SHORT_ROW, _SHORT_COLUMN, _SHORT_OTHER = 512, 256, 64
# Running sums over up to this many elements are left unchanged.
_SHORT_RUNNING = 16
# With shorter blocks, converting the many partial sums to float64 takes longer than the sum itself.
_LEAST_BLOCK = 8
# Samples with up to this many elements are converted entirely: computing the block length at run time would take
# longer.
_SMALL_SAMPLE = 16
# Sums over only the batch axis, e.g. gradients of biases [batch, width], are rewritten from this width on. In narrow
# layers of small networks, the additional nodes would take several percent of a step.
_WIDE_SAMPLE = 512

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
Dim = int | ir.SymbolicDim


class LongSumsPass(ir.passes.InPlacePass):
    """Splits long float32 and float16 reductions into two levels: float32 within blocks, float64 across blocks.

    Running sums (CumSum) are computed in float64, as in PyTorch.

    ONNX Runtime (1.20 to 1.32) adds float32 numbers sequentially, in a few lanes: the sum of ten million equal numbers
    is off by 1%. PyTorch uses pairwise summation and is accurate to 1e-6. A block usually has up to 128
    elements. The first level is as fast as the original reduction, and converting the few partial sums takes little
    time. If symbolic sizes leave no suitable constant block length, it is computed at run time: the largest divisor of
    the number of elements that is at most 64 (32 for products, norms and sums of squares).

    Expects inferred ranks. A reduction is left unchanged in these cases:

    - Its rank is unknown, or its axes are not constant.
    - It reduces few elements: at most 64 to 512, depending on the op and the axes.
    - It only reduces one axis of symbolic size, e.g. the batch, and the product of the later sizes is less than 512 or
      unknown. In small networks, the additional nodes would cost more time than they are worth.

    Args:
        kept: output names of nodes that must not be rewritten, e.g. to keep results bit-equal to the original model's.
    """

    def __init__(self, kept: Collection[str] = ()) -> None:
        super().__init__()
        self._kept = frozenset(kept)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the model in place, including subgraphs and functions."""
        modified = False
        for graph in (model.graph, *(function.graph for function in model.functions.values())):
            blocks: dict[tuple[object, ...], ir.Value] = {}
            for node in self._nodes(graph):
                if is_reduced(node):
                    separate_reduction(node)
                    modified = True
                elif _is_running(node):
                    _write_running(node)
                    modified = True
            # In graph order, because later sums reuse the block length that an earlier one has computed.
            for reduction in filter(None, map(_long_reduction, self._nodes(graph))):
                _write(reduction, blocks)
                modified = True
        # onnx_ir numbers new values separately in each subgraph.
        if modified:
            name_apart(model)
        return ir.passes.PassResult(model, modified)

    def _nodes(self, graph: ir.Graph) -> list[ir.Node]:
        """Returns the nodes of a graph and its subgraphs, except those whose first output is named in `self._kept`."""
        # An absent output has no name.
        return [n for n in ir.traversal.RecursiveGraphIterator(graph) if n.outputs[0].name not in self._kept]


def mark_long_sum(wide: ir.Value) -> None:
    """Marks the Cast to float64 that computes `wide` as optional: only the accuracy of a sum depends on it."""
    cast = wide.producer()
    assert cast is not None
    cast.metadata_props[LONG_SUM_KEY] = "true"


def is_long_sum(cast: ir.Node) -> bool:
    """True if a node is a Cast to float64 that :func:`mark_long_sum` has marked."""
    return LONG_SUM_KEY in cast.metadata_props


@dataclass(frozen=True)
class _Reduction:
    """A reduction over many elements.

    Attributes:
        node: the node.
        x: its input.
        axes: the reduced axes, sorted.
        start: first axis of the run, i.e. of the adjacent reduced axes that are divided into blocks. The run ends with
            the last reduced axis whose size is not 1.
        end: the axis after the run.
        in_rows: True if the elements of a block are adjacent in memory.
    """

    node: ir.Node
    x: ir.Value
    axes: tuple[int, ...]
    start: int
    end: int
    in_rows: bool

    @property
    def dims(self) -> list[Dim]:
        """Sizes of the input."""
        assert self.x.shape is not None
        return list(self.x.shape)

    @property
    def run(self) -> list[Dim]:
        """Sizes of the run's axes, which are divided into blocks."""
        return self.dims[self.start : self.end]

    @property
    def most(self) -> int:
        """Preferred maximum block length, e.g. 64. Constant block lengths may be greater, see :attr:`block`."""
        return _BLOCK if self.node.op_type in _IN_LANES else _OTHER_BLOCK

    @property
    def short(self) -> int:
        """Number of reduced elements up to which the reduction is left unchanged, e.g. 512."""
        # If all axes are reduced, ONNX Runtime adds squares in lanes as well.
        if len(self.axes) == len(self.dims):
            return _SHORT_ROW
        if self.node.op_type not in _IN_LANES:
            return _SHORT_OTHER
        return _SHORT_ROW if self.in_rows else _SHORT_COLUMN

    @property
    def block(self) -> int | None:
        """Block length, or None to compute it at run time. Length 1 means that the whole reduction is in float64."""
        whole, all_reduced = _product(self.run), _product([self.dims[axis] for axis in self.axes])
        # These axes are one block if further axes remain to be reduced.
        if whole is not None and whole != all_reduced and whole <= self.most:
            return whole
        known = 1
        for dim in reversed(self.run):
            if not isinstance(dim, int):
                break
            known *= dim
        longest = known // 2 if known == all_reduced else known
        if self.in_rows and self.node.op_type in _IN_LANES and known % _LANES == 0:
            block = _LANES * _divisor(known // _LANES, min(longest, _BLOCK_OF_LANES) // _LANES)
            if block > _BLOCK // 2:
                return block
        for most in (self.most, 4 * self.most):
            if (block := _divisor(known, min(most, longest))) >= _LEAST_BLOCK:
                return block
        if whole is not None:
            return 1
        sizes = [dim for dim in self.dims if isinstance(dim, int)]
        return 1 if len(sizes) == len(self.dims) - 1 and math.prod(sizes) <= _SMALL_SAMPLE else None


def _is_running(node: ir.Node) -> bool:
    """True if a node is a running sum to compute in float64: a float32 or float16 CumSum.

    False if the axis is known to have at most `_SHORT_RUNNING` elements, which need no rewriting.
    """
    if node.domain != "" or node.op_type != "CumSum":
        return False
    x, axis = node.inputs
    if x is None or x.dtype not in _FLOATS:
        return False
    known = None if axis is None else known_array(axis)
    size = x.shape[int(known.reshape(()))] if x.shape is not None and known is not None else None
    return not isinstance(size, int) or size > _SHORT_RUNNING


def _write_running(node: ir.Node) -> None:
    """Computes a CumSum in float64. The node becomes the final Cast, so that its output keeps its name."""
    x, axis = node.inputs
    assert x is not None
    assert x.dtype is not None
    wide = write_before(node, None, "Cast", x, to=ir.DataType.DOUBLE)
    wide.shape = x.shape
    mark_long_sum(wide)
    flags = {name: node.attributes.get_int(name, 0) for name in ("exclusive", "reverse")}
    total = write_before(node, None, "CumSum", wide, axis, **flags)
    node.op_type = "Cast"
    node.attributes.clear()
    node.attributes["to"] = ir.AttrInt64("to", x.dtype)
    node.resize_inputs(1)
    node.replace_input_with(0, total)


def _long_reduction(node: ir.Node) -> _Reduction | None:
    """Returns a description of a node that is a long reduction, or None for other nodes."""
    if node.domain != "" or node.op_type not in _LEVELS:
        return None
    x = node.inputs[0]
    if x is None or x.dtype not in _FLOATS:
        return None
    if x.shape is None:
        x.shape = _broadcast_shape(x)
    if x.shape is None:
        return None
    dims: list[Dim] = list(x.shape)
    axes = _axes(node, len(dims))
    longer = [axis for axis in axes if dims[axis] != 1]
    if not longer or 0 in dims:
        return None
    start, end = longer[-1], longer[-1] + 1
    while start - 1 in axes:
        start -= 1
    in_rows = all(dim == 1 for dim in dims[end:])
    count = _product([dims[axis] for axis in axes])
    reduction = _Reduction(node, x, axes, start, end, in_rows)
    if count is None and len(longer) == 1 and not in_rows and (_product(dims[end:]) or 0) < _WIDE_SAMPLE:
        return None
    return reduction if count is None or count > reduction.short else None


def _broadcast_shape(value: ir.Value) -> ir.Shape | None:
    """Returns the output shape of an elementwise op if all inputs broadcast to the shape of one of them, else None.

    Gradients contain such nodes without inferred shapes.
    """
    node = value.producer()
    if node is None or node.domain != "" or node.op_type not in ELEMENTWISE | CASTS:
        return None
    shapes = [x.shape for x in node.inputs if x is not None]
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes):
        return None
    highest = max(known, key=lambda shape: (shape.rank(), math.prod(d for d in shape if isinstance(d, int))))
    for shape in known:
        lead = highest.rank() - shape.rank()
        if any(mine not in (1, theirs) for mine, theirs in zip(shape, list(highest)[lead:], strict=True)):
            return None
    return highest


def _axes(node: ir.Node, rank: int) -> tuple[int, ...]:
    """Returns the reduced axes, sorted, or () if there are none or they are unknown."""
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    if axes is None:
        return () if node.attributes.get_int("noop_with_empty_axes", 0) else tuple(range(rank))
    known = known_array(axes)
    return () if known is None else tuple(sorted({int(axis) % rank for axis in known.ravel().tolist()}))


def _write(reduction: _Reduction, blocks: dict[tuple[object, ...], ir.Value]) -> None:
    """Replaces a reduction with reductions of blocks, and a float64 reduction of their results.

    The node becomes the final Cast, so that its output keeps its name.

    Args:
        reduction: the reduction.
        blocks: block lengths emitted so far, keyed by graph, `reduction.most` and the sizes of the divided axes;
            extended in place.
    """
    node, axes, x = reduction.node, reduction.axes, reduction.x
    first, second = _LEVELS[node.op_type]
    block, whole = reduction.block, _product(reduction.run)
    if x.dtype == ir.DataType.FLOAT16 and block != 1:
        # ONNX Runtime does the same, but here the partial sums are not rounded.
        x = write_before(node, None, "Cast", x, to=ir.DataType.FLOAT)
    if block == 1:
        second, left = node.op_type, list(axes)
    elif block is not None and block == whole:
        x = _reduced(node, first, x, list(range(reduction.start, reduction.end)))
        left = [axis for axis in axes if axis < reduction.start]
        left += [axis - (reduction.end - reduction.start) for axis in axes if axis >= reduction.end]
    else:
        x = _reduced(node, first, _in_blocks(reduction, x, block, blocks), [reduction.start + 1])
        left = [axis for axis in axes if axis <= reduction.start]
        left += [axis - (reduction.end - reduction.start) + 1 for axis in axes if axis >= reduction.end]
    wide = write_before(node, None, "Cast", x, to=ir.DataType.DOUBLE)
    mark_long_sum(wide)
    total = _reduced(node, second, wide, left)
    if node.attributes.get_int("keepdims", 1):
        total = write_before(node, None, "Unsqueeze", total, _ints(node, axes))
    node.op_type = "Cast"
    node.attributes.clear()
    assert reduction.x.dtype is not None
    node.attributes["to"] = ir.AttrInt64("to", reduction.x.dtype)
    node.resize_inputs(1)
    node.replace_input_with(0, total)


def _in_blocks(
    reduction: _Reduction, x: ir.Value, block: int | None, blocks: dict[tuple[object, ...], ir.Value]
) -> ir.Value:
    """Emits `x` reshaped so that the axes of the run become two axes: [number of blocks, block length].

    Args:
        reduction: the reduction.
        x: its input, or a Cast of the input to float32.
        block: block length, or None to compute it at run time.
        blocks: block lengths emitted so far, keyed by graph, `reduction.most` and the sizes of the divided axes;
            extended in place.
    """
    node, start, end = reduction.node, reduction.start, reduction.end
    lead, behind = reduction.dims[:start], reduction.dims[end:]
    whole = _product(reduction.run)
    # In a Reshape, 0 copies the size of the axis at the same position.
    aligned = end - start == 2
    fits = all(isinstance(dim, int) for dim in behind) or aligned
    kept = [dim if isinstance(dim, int) else 0 for dim in behind]
    if block is not None and fits and whole is not None:
        return write_before(
            node, None, "Reshape", x, _ints(node, [*[0] * start, whole // block, block, *kept])
        )
    others_known = all(isinstance(dim, int) for dim in (*lead, *behind))
    length = _ints(node, [block]) if block is not None else _length(reduction, blocks)
    if others_known:
        # -1 is well-defined, because no other size can be zero.
        if block is not None:
            return write_before(node, None, "Reshape", x, _ints(node, [*[0] * start, -1, block, *kept]))
        parts = [_ints(node, [*[0] * start, -1]), length, *([_ints(node, kept)] if kept else [])]
        return write_before(node, None, "Reshape", x, write_before(node, None, "Concat", *parts, axis=0))
    count = write_before(node, None, "Div", _size(reduction), length)
    parts = [count, length]
    if start:
        parts.insert(0, write_before(node, None, "Shape", reduction.x, end=start))
    if behind:
        parts.append(write_before(node, None, "Shape", reduction.x, start=end))
    shape = write_before(node, None, "Concat", *parts, axis=0)
    return write_before(node, None, "Reshape", x, shape, allowzero=1)


def _length(reduction: _Reduction, blocks: dict[tuple[object, ...], ir.Value]) -> ir.Value:
    """Emits the block length for symbolic sizes: the largest divisor of the run's element count up to `reduction.most`.

    Args:
        reduction: the reduction. Its `run` has the sizes of the axes that are divided into blocks.
        blocks: block lengths emitted so far, keyed by graph, `reduction.most` and the sizes of the divided axes;
            extended in place.

    Returns:
        The block length, int64 [1]. Reductions over equal sizes in the same graph share it.
    """
    node = reduction.node
    names = tuple(dim if isinstance(dim, int) else dim.value for dim in reduction.run)
    # Sizes with the same name are equal, so that e.g. the gradients of all biases share these nodes.
    key = (node.graph, reduction.most, *names)
    if key not in blocks or None in names:
        remainders = write_before(
            node, None, "Mod", _size(reduction), _ints(node, [1, *range(1, reduction.most + 1)])
        )
        # The index of the last zero remainder, which equals the divisor.
        blocks[key] = write_before(node, None, "ArgMin", remainders, axis=0, keepdims=1, select_last_index=1)
    return blocks[key]


def _size(reduction: _Reduction) -> ir.Value:
    """Emits the product of the sizes in `reduction.run`, the axes that are divided into blocks, as int64 [1]."""
    node, start, end = reduction.node, reduction.start, reduction.end
    sizes = write_before(node, None, "Shape", reduction.x, start=start, end=end)
    return sizes if end - start == 1 else write_before(node, None, "ReduceProd", sizes, keepdims=1)


def _reduced(node: ir.Node, op_type: str, x: ir.Value, axes: Sequence[int]) -> ir.Value:
    return write_before(node, None, op_type, x, _ints(node, axes), keepdims=0)


def _ints(node: ir.Node, numbers: Sequence[int]) -> ir.Value:
    # Constant nodes, because function bodies have no initializers.
    return write_before(node, None, "Constant", value_ints=list(numbers))


def _product(dims: Sequence[Dim]) -> int | None:
    """Returns the product of sizes, or None if one is symbolic."""
    known = [dim for dim in dims if isinstance(dim, int)]
    return math.prod(known) if len(known) == len(dims) else None


def _divisor(number: int, most: int) -> int:
    """Returns the largest divisor of the positive `number` up to `most`, or 1 if `most` is less than 1."""
    return next(divisor for divisor in range(min(number, max(most, 1)), 0, -1) if number % divisor == 0)
