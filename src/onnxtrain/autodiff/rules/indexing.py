"""Differentiates ops that read or write elements at given indices."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import Cotangents, vjp
from onnxtrain.autodiff.rules._composite import composite_vjp
from onnxtrain.autodiff.rules._scatter import add_rows, positions, scatter_elements, scatter_nd, scatter_to
from onnxtrain.emitter import Emitter
from onnxtrain.functions import extremum, extremum_gradient


@vjp("Gather", wrt=("data",))
def gather(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Gather: scatter-adds ct at the gathered entries."""
    if n.data.shape is None or n.indices.shape is None:
        return scatter_to(op, ct, op.Gather(positions(op, n.data), n.indices, axis=n.attr("axis")), n.data)
    axis = n.axis(n.data, n.attr("axis"))
    rank, index_rank = n.rank(n.data), n.rank(n.indices)
    # A scalar index reads a single entry.
    if index_rank == 0:
        return _single_entry_cotangent(op, n, ct, axis)
    # The axes of the indices come first.
    after = range(axis + index_rank, rank - 1 + index_rank)
    order = [*range(axis, axis + index_rank), *range(axis), *after]
    rows = op.Transpose(ct, perm=order) if axis else ct
    indices = op.Cast(n.indices, to=ir.DataType.INT64) if n.indices.dtype != ir.DataType.INT64 else n.indices
    return add_rows(op, n.data, axis, indices, rows)


def _single_entry_cotangent(op: Emitter, n: NodeView, ct: ir.Value, axis: int) -> ir.Value:
    """Returns the cotangent of data from which one entry along `axis` is read: ct, padded with zeros."""
    # A Pad instead of a scatter, because the driver concatenates Pads that tile the whole value (`_accumulate`).
    size, index = op.dim(n.data, axis), op.Reshape(op.Cast(n.indices, to=ir.DataType.INT64), [1])
    position, dims = n.constant(n.indices), n.constant(size)
    if position is not None and dims is not None:
        before = int(position) % int(dims[0])
        pads = op.const([before, int(dims[0]) - 1 - before])
    else:
        index = op.Where(op.Less(index, op.const(0)), op.Add(index, size), index)
        pads = op.Concat(index, op.Sub(op.Sub(size, index), op.const(1)), axis=0)
    return op.pad(op.Unsqueeze(ct, [axis]), pads, [axis], n.rank(n.data))


@vjp("GatherElements", wrt=("data",))
def gather_elements(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of GatherElements: scatter-adds ct at the gathered elements."""
    return scatter_elements(op, op.shape_of(n.data), n.indices, ct, n.attr("axis"))


@vjp("GatherND", wrt=("data",))
def gather_nd(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of GatherND: scatter-adds ct at the gathered slices."""
    batch_dims = n.attr("batch_dims")
    # ScatterND has no batch axes; with batch axes, flat indices are gathered and scattered to instead.
    if not batch_dims:
        return scatter_nd(op, op.shape_of(n.data), n.indices, ct)
    where = op.GatherND(positions(op, n.data), n.indices, batch_dims=batch_dims)
    return scatter_to(op, ct, where, n.data)


@vjp("Compress", wrt=("input",))
def compress(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Compress: ct at the elements that were kept, zeros elsewhere."""
    where = op.Compress(positions(op, n.input), n.condition, axis=n.attr("axis"))
    return scatter_to(op, ct, where, n.input)


@vjp("TopK", wrt=("X",), outputs=("Values",), saves=("Indices",))
def top_k(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of TopK: ct at the elements that were selected, zeros elsewhere."""
    return op.ScatterElements(op.zeros_like(n.X, ct.dtype), n.out.Indices, ct, axis=n.attr("axis"))


@composite_vjp(extremum, ("value", "index"), outputs=("value",), saves=("index",))
def extremum_with_index(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """VJP of Extremum: ct at the elements that were selected, zeros elsewhere."""
    return op.call(extremum_gradient, ct, n.out.index, op.shape_of(n.x), axis=n.attr("axis"))


@vjp("Unique", wrt=("X",), saves=("indices",))
def unique(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """VJP of Unique: ct at the first of equal elements (or slices along `axis`), zeros at the others.

    PyTorch has no gradient here. Any of the equal elements could get the cotangent: the sum over them is the same.
    """
    places, axis = positions(op, n.X), n.attr("axis")
    # Without an axis, Unique flattens the input.
    if axis is None:
        places, axis = op.Reshape(places, [-1]), 0
    return scatter_to(op, ct, op.Gather(places, n.out.indices, axis=axis), n.X)


@vjp("OneHot", wrt=("values",))
def one_hot(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of OneHot with respect to `values`: the sums of ct over the off elements and over the on elements."""
    # In the dtype of `values`, because ONNX Runtime lacks OneHot kernels for some combinations of dtypes.
    one = op.OneHot(n.indices, n.depth, op.const([0.0, 1.0], like=n.values), axis=n.attr("axis"))
    hot = op.Greater(one, 0.5)
    off, on = (op.ReduceSum(op.Where(hot, *branches), keepdims=0) for branches in ((0.0, ct), (ct, 0.0)))
    return op.Concat(op.Unsqueeze(off, [0]), op.Unsqueeze(on, [0]), axis=0)


@vjp("TensorScatter", wrt=("past_cache", "update"))
def tensor_scatter(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of TensorScatter: the update gets ct at the entries that were written, and the past cache gets the rest."""
    axis, mode = n.axis(n.past_cache, n.attr("axis")), n.attr("mode")
    attributes = {"axis": axis, "mode": mode}
    past = update = None
    if n.needs("past_cache"):
        past = op.TensorScatter(ct, op.zeros_like(n.update, ct.dtype), n.write_indices, **attributes)
    if n.needs("update"):
        place = op.Range(0, op.Squeeze(op.dim(n.update, axis)), 1)
        if n.write_indices is not None:
            # Shape [batch, sequence]. Not with Unsqueeze: onnx 1.23 then treats constant indices as a shape, and fails
            # to add it.
            place = op.Add(place, op.Reshape(n.write_indices, [-1, 1]))
            place = (
                op.Mod(place, op.Max(op.dim(n.past_cache, axis), op.const([1])))
                if mode == "circular"
                else place
            )
        rank = n.rank(n.past_cache)
        others = [i for i in range(rank) if i != axis and (i != 0 or n.write_indices is None)]
        place = op.Expand(op.Unsqueeze(place, others), op.shape_of(n.update))
        update = op.GatherElements(ct, place, axis=axis)
    return past, update


@vjp("ScatterElements", wrt=("data", "updates"))
def scatter_elements_rule(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of ScatterElements with respect to data and updates, for every reduction."""
    axis = n.attr("axis")
    return _scatter_cotangents(
        op,
        n,
        ct,
        read=lambda data: op.GatherElements(data, n.indices, axis=axis),
        write=lambda data, updates, how: op.ScatterElements(
            data, n.indices, updates, axis=axis, reduction=how
        ),
    )


@vjp("ScatterND", wrt=("data", "updates"))
def scatter_nd_rule(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of ScatterND with respect to data and updates, for every reduction."""
    return _scatter_cotangents(
        op,
        n,
        ct,
        read=lambda data: op.GatherND(data, n.indices),
        write=lambda data, updates, how: op.ScatterND(data, n.indices, updates, reduction=how),
    )


Read = Callable[[ir.Value], ir.Value]
Write = Callable[[ir.Value, ir.Value, str], ir.Value]


def _scatter_cotangents(op: Emitter, n: NodeView, ct: ir.Value, read: Read, write: Write) -> Cotangents:
    """VJP of a scatter op, whose output is `data` with `updates` reduced into it.

    Args:
        op: emitter.
        n: the scatter node.
        ct: cotangent of the output.
        read: gathers elements at the node's indices from a value with the shape of `data`.
        write: scatters updates at the node's indices into a value with the shape of `data`, with a given reduction.
    """
    reduction = n.attr("reduction")
    if reduction in ("max", "min"):
        return _extremum_cotangents(op, n, ct, read, write)
    data = updates = None
    if n.needs("data"):
        # Without a reduction, ONNX forbids repeated indices, so each overwritten element of `data` has a zero
        # cotangent.
        data = {
            "none": lambda: write(ct, op.zeros_like(n.updates, ct.dtype), "none"),
            "add": lambda: ct,
            "mul": lambda: write(ct, n.updates, "mul"),
        }[reduction]()
    if n.needs("updates"):
        updates = _multiplied_updates_cotangent(op, n, ct, read, write) if reduction == "mul" else read(ct)
    return data, updates


def _multiplied_updates_cotangent(
    op: Emitter, n: NodeView, ct: ir.Value, read: Read, write: Write
) -> ir.Value:
    """Returns the cotangent of updates that were multiplied into the data: ct times the product of all other factors.

    That product is output / update. For an update that is the only zero at its position, the product is recomputed with
    1 instead. If several updates at a position are zero, their cotangents are zero. `read` gathers the elements at the
    node's indices; `write` scatters updates there.
    """
    zero = op.Equal(n.updates, 0.0)
    none = op.Expand(op.const(0.0), op.shape_of(n.out.output))
    zeros = read(write(none, op.Cast(zero, to=ir.DataType.FLOAT), "add"))
    only = op.And(zero, op.Less(zeros, 1.5))
    others = write(n.data, op.Where(only, 1.0, n.updates), "mul")
    quotient = op.Div(read(op.Mul(ct, n.out.output)), op.Where(zero, 1.0, n.updates))
    return op.Where(only, read(op.Mul(ct, others)), quotient)


def _extremum_cotangents(op: Emitter, n: NodeView, ct: ir.Value, read: Read, write: Write) -> Cotangents:
    """VJP of a scatter with max or min: splits ct evenly among the elements that attain the extremum, as torch does.

    `read` gathers the elements at the node's indices; `write` scatters updates there.
    """
    kept, written = op.Equal(n.data, n.out.output), op.Equal(n.updates, read(n.out.output))
    # Counted in float32, because ONNX Runtime's CPU provider has no float16 scatter with reduction="add".
    counts = [op.Cast(mask, to=ir.DataType.FLOAT) for mask in (kept, written)]
    attain = write(counts[0], counts[1], "add")
    share = op.Div(ct, op.Cast(attain, to=ct.dtype))
    return op.Where(kept, share, 0.0), op.Where(written, read(share), 0.0)
