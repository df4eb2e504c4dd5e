"""Rewrites attention whose queries, keys and values are parts of one tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.emitter import Emitter, known_array
from onnxtrain.functions import (
    DOMAIN,
    attention,
    causal_attention,
    masked_attention,
    qkv_attention,
    qkv_causal_attention,
    qkv_masked_attention,
    qkv_safe_masked_attention,
    safe_masked_attention,
)
from onnxtrain.fusion._pass import become, set_inputs, sole_transpose, take_over
from onnxtrain.passes import inverse_permutation, permutation, remove_unread_chains, same_size, successor


class QkvAttentionPass(ir.passes.InPlacePass):
    """Replaces attention of three parts of a tensor with attention of the tensor.

    Many networks, and torch.nn.MultiheadAttention, compute queries, keys and values as one matrix product. Reshape,
    Transpose, and Split, Slice or Gather then make three tensors of the result, and a Transpose moves the heads of the
    output next to its last axis. A native kernel reads and writes the tensors as they are. Without kernels, the
    function takes no more ops than those that it replaces.

    Run this pass after `AttentionPass`.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the main graph in place; subgraphs are not modified."""
        op = Emitter(model.graph, functions=model.functions)
        nodes = [node for node in model.graph if node.domain == DOMAIN and node.op_type in _QKV]
        modified = [_rewrite(op, node) for node in nodes]
        return ir.passes.PassResult(model, any(modified))


_QKV = {
    plain.names_by_dtype[ir.DataType.FLOAT]: packed
    for plain, packed in (
        (attention, qkv_attention),
        (causal_attention, qkv_causal_attention),
        (masked_attention, qkv_masked_attention),
        (safe_masked_attention, qkv_safe_masked_attention),
    )
}

_DIVIDING = {"Gather", "Slice", "Split", "Transpose"}
_RESHAPING = {"Identity", "Reshape", "Squeeze", "Unsqueeze"}


@dataclass(frozen=True)
class _Part:
    """A part of an axis: `size` indices that are `step` apart, e.g. the heads in an axis of heads * size."""

    axis: int
    size: int | ir.SymbolicDim
    step: int = 1


@dataclass(frozen=True)
class _View:
    """A tensor made of the elements of another one.

    Attributes:
        axes: for each axis, the parts of the other tensor's axes of which it consists; none for an axis of size 1.
        chosen: the parts of which only one index is taken, and that index.
    """

    axes: list[list[_Part]]
    chosen: tuple[tuple[_Part, int], ...] = ()


def _rewrite(op: Emitter, node: ir.Node) -> bool:
    """Turns a call to a composite attention op into one whose q, k and v are one tensor, if they are its parts."""
    producers = [value.producer() for value in node.inputs[:3] if value is not None]
    roots = {_root(value) for value in node.inputs[:3]}
    root = roots.pop() if len(roots) == 1 else None
    views = [] if root is None else [_view(value, root) for value in node.inputs[:3]]
    parts = _common_parts(views)
    if root is None or parts is None:
        return False
    # An axis of size 1 has no part, and can be anywhere: a single head before the last axis, others in front.
    order = sorted(range(5), key=lambda i: (_place(parts[4 if i == 2 and parts[i] is None else i]), i))
    perm = [order.index(i) for i in range(5)]
    y_perm = [i - 1 for i in order if i > 0]
    # With an identity permutation, the function would copy x.
    if perm[4] != 4 or perm == sorted(perm):
        return False
    with op.placing(before=node):
        x = _with_axes(op, root, [parts[i] for i in order])
    _become(op, node, x, perm, y_perm)
    remove_unread_chains(op.graph, producers)
    return True


def _place(part: _Part | None) -> tuple[int, int]:
    """Returns a key that sorts parts by their order in the root."""
    return (-1, 0) if part is None else (part.axis, -part.step)


def _root(value: ir.Value | None) -> ir.Value | None:
    """Returns the tensor of whose elements a value is made by transposing, and by taking parts, of it."""
    root, node = None, value.producer() if value is not None else None
    while node is not None and node.domain == "" and node.op_type in _DIVIDING | _RESHAPING:
        value = node.inputs[0]
        if node.op_type in _DIVIDING:
            root = value
        node = value.producer() if value is not None else None
    return root


def _view(value: ir.Value | None, root: ir.Value) -> _View | None:
    """Returns a value as a view of the root from which it is made; None if an op between them can't be followed."""
    if value is None or value.shape is None:
        return None
    if value is root:
        # Without elements, a Reshape may have any sizes.
        if 0 in value.shape:
            return None
        return _View([[] if dim == 1 else [_Part(i, dim)] for i, dim in enumerate(value.shape)])
    node = value.producer()
    before = None if node is None else _view(node.inputs[0], root)
    if node is None or before is None:
        return None
    if node.op_type in _RESHAPING:
        axes = _regrouped([part for axis in before.axes for part in axis], list(value.shape))
        return None if axes is None else _View(axes, before.chosen)
    if node.op_type == "Transpose":
        return _View([before.axes[i] for i in permutation(node)], before.chosen)
    taken = _taken(node, value, before)
    return None if taken is None else _chosen(before, *taken, list(value.shape))


def _taken(node: ir.Node, value: ir.Value, before: _View) -> tuple[int, int, int] | None:
    """Returns which part of its input's view a Split, Gather or Slice returns.

    Returns:
        An axis, into how many parts it is divided, and which of them `value` is; None if the parts differ in size.
    """
    axis = node.attributes.get_int("axis", 0) % len(before.axes)
    if node.op_type == "Split":
        return axis, len(node.outputs), node.outputs.index(value)
    arrays = [None if given is None else known_array(given) for given in node.inputs[1:]]
    if any(array is None or array.size != 1 for array in arrays):
        return None
    first, *others = (int(array.item()) for array in arrays if array is not None)
    if node.op_type == "Slice" and len(others) > 1:
        axis = others[1] % len(before.axes)
    sizes = [part.size for part in before.axes[axis]]
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) < len(sizes):
        return None
    size = math.prod(known)
    if node.op_type == "Gather":
        return axis, size, first % size
    start, stop, step = slice(first, others[0], others[2] if len(others) > 2 else 1).indices(size)
    length = stop - start
    if step != 1 or length < 1 or size % length or start % length:
        return None
    return axis, size // length, start // length


def _chosen(view: _View, axis: int, count: int, index: int, dims: list[int | ir.SymbolicDim]) -> _View | None:
    """Returns a view of one of `count` equal parts of an axis; `dims` are the sizes of the result."""
    parts = list(view.axes[axis])
    taken = _take(parts, count, first=True)
    if taken is None or len(taken) != 1:
        return None
    rest = itertools.chain(*view.axes[:axis], parts, *view.axes[axis + 1 :])
    axes = _regrouped(list(rest), dims)
    return None if axes is None else _View(axes, (*view.chosen, (taken[0], index)))


def _regrouped(parts: list[_Part], dims: list[int | ir.SymbolicDim]) -> list[list[_Part]] | None:
    """Returns the parts, some of them divided, grouped into axes of the sizes `dims`; None if that isn't possible."""
    before: list[list[_Part]] = []
    after: list[list[_Part]] = []
    while dims and (taken := _take(parts, dims[0], first=True)) is not None:
        before.append(taken)
        dims = dims[1:]
    while dims and (taken := _take(parts, dims[-1], first=False)) is not None:
        after.insert(0, taken)
        dims = dims[:-1]
    # Both tensors have as many elements, so one remaining axis consists of the remaining parts.
    rest = [list(parts)] if len(dims) == 1 else []
    return None if len(dims) > 1 or (parts and not dims) else [*before, *rest, *after]


def _take(parts: list[_Part], size: int | ir.SymbolicDim, *, first: bool) -> list[_Part] | None:
    """Removes parts of the total size `size` from one end of a list, and returns them; None if that isn't possible."""
    taken: list[_Part] = []
    rest = list(parts)
    while size != 1:
        if not rest:
            return None
        part = rest.pop(0 if first else -1)
        if same_size(part.size, size):
            inside, size = part, 1
        elif not isinstance(part.size, int) or not isinstance(size, int) or 0 in (part.size, size):
            return None
        elif size % part.size == 0:
            inside, size = part, size // part.size
        elif part.size % size == 0:
            rest_size = part.size // size
            outer_size, inner_size = (size, rest_size) if first else (rest_size, size)
            outer = _Part(part.axis, outer_size, part.step * inner_size)
            inner = _Part(part.axis, inner_size, part.step)
            inside, outside = (outer, inner) if first else (inner, outer)
            rest.insert(0 if first else len(rest), outside)
            size = 1
        else:
            return None
        taken.insert(len(taken) if first else 0, inside)
    parts[:] = rest
    return taken


def _common_parts(views: Sequence[_View | None]) -> list[_Part | None] | None:
    """Returns the parts of the root for: which of the three, batch, heads, positions, size. None if these differ."""
    axes, chosen = None, []
    for view in views:
        if view is None or len(view.chosen) != 1 or any(len(axis) > 1 for axis in view.axes):
            return None
        if axes not in (None, view.axes):
            return None
        axes = view.axes
        chosen.append(view.chosen[0])
    if axes is None or len(axes) != 4:
        return None
    which = chosen[0][0]
    if which.size != 3 or chosen != [(which, 0), (which, 1), (which, 2)]:
        return None
    return [which, *(axis[0] if axis else None for axis in axes)]


def _with_axes(op: Emitter, root: ir.Value, parts: Sequence[_Part | None]) -> ir.Value:
    """Emits a tensor whose axes are parts of the root's axes, in their order; None is an axis of size 1."""
    dims = [1 if part is None else part.size for part in parts]
    if root.shape is not None and list(root.shape) == dims:
        return root
    sizes: list[ir.Value | list[int]] = []
    for part, dim in zip(parts, dims, strict=True):
        if isinstance(dim, int):
            sizes.append([dim])
        elif part is not None:
            # The size of a whole axis: only known sizes are divided.
            sizes.append(op.Shape(root, start=part.axis, end=part.axis + 1))
    x = op.Reshape(root, op.Concat(*sizes, axis=0))
    x.shape, x.type = ir.Shape(dims), root.type
    return x


def _become(op: Emitter, node: ir.Node, x: ir.Value, perm: list[int], y_perm: list[int]) -> None:
    """Turns an attention node into one of x, whose output includes the Transpose that follows or needs another one."""
    y, scale = node.outputs[0], node.attributes.get_float("scale")
    assert scale is not None
    become(op, node, _QKV[node.op_type], {"scale": scale, "perm": perm, "y_perm": y_perm})
    set_inputs(node, [x, *node.inputs[3:]])
    reader = sole_transpose(node)
    if reader is not None and permutation(reader) == y_perm:
        take_over(y, reader)
        return
    name, kept = op.unique_name(f"{y.name}_stored"), successor(y)
    y.name = name
    y.shape = None if kept.shape is None else ir.Shape([kept.shape[i] for i in y_perm])
    node.append(ir.node("Transpose", [y], {"perm": inverse_permutation(y_perm)}, outputs=[kept]))
