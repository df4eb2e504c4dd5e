"""Fuses attention as exporters emit it: matrix products, scales, an optional mask, and a softmax."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnxtrain.emitter import Emitter, known_array, static_dims
from onnxtrain.functions import CompositeOp, attention, causal_attention, masked_attention
from onnxtrain.fusion._pass import set_inputs
from onnxtrain.fusion._patterns import constant
from onnxtrain.passes import broadcasts_to, read_once, remove_unread_chains, same_size

_SWAP = [0, 1, 3, 2]
_MASKED = -1e30
"""Keys with a mask value of at most this number get a float32 attention probability of zero."""


@dataclass(frozen=True)
class _Scores:
    """The operands of attention scores, scale * (q @ keys) + the sum of all masks.

    Attributes:
        q: queries, [batch, heads, queries, size].
        keys: transposed keys, [batch, heads, size, keys].
        scale: factor, e.g. 1 / sqrt(size).
        masks: additive masks.
    """

    q: ir.Value
    keys: ir.Value
    scale: float
    masks: tuple[_Mask, ...] = ()


@dataclass(frozen=True)
class _Mask:
    """An additive mask.

    Attributes:
        value: a value that broadcasts to the scores, or to [batch / windows, windows, heads, queries, keys] where the
            scores are reshaped for the mask.
        windows: 0 if the scores are not reshaped. Swin transformers have one mask for each of the windows of an image,
            and the windows of all images are one batch.
    """

    value: ir.Value
    windows: int = 0


class AttentionPass(ir.passes.InPlacePass):
    """Rewrites softmax(scale q kᵀ + masks) v in float32 as one composite op, which stores no probabilities.

    q, k and v have the shape `[batch, heads, positions, size]`; batch and heads must be known to be the same in all
    three. A mask may be added to scores of the shape `[batch / windows, windows, heads, queries, keys]`. Not rewritten:
    attention whose probabilities have other readers or dropout, and masks applied with Where instead of Add.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the main graph in place; subgraphs are not modified."""
        op = Emitter(model.graph, functions=model.functions)
        modified = [_rewrite(op, node) for node in tuple(model.graph) if node.graph is model.graph]
        return ir.passes.PassResult(model, any(modified))


def _rewrite(op: Emitter, node: ir.Node) -> bool:
    """Turns the product of attention probabilities and values into a call to the composite attention op.

    Returns:
        True if `node` is such a product and was rewritten.
    """
    softmax = _producer(node.inputs[0], "Softmax") if _is(node, "MatMul") else None
    # Attention normalizes over the keys, the last axis.
    if softmax is None or softmax.attributes.get_int("axis", -1) not in (-1, 3):
        return False
    scores, v = _scores(softmax.inputs[0]), node.inputs[1]
    # Unknown sizes don't fit: a call that is valid only for some sizes would fail at run time.
    if scores is None or v is None or not _is_supported(scores, v):
        return False
    composite, inputs = _composite_for(op, node, scores)
    inputs = [scores.q, _transposed_keys(op.graph, node, scores.keys), v, *inputs]
    node.domain, node.op_type, _ = op.function(composite, ir.DataType.FLOAT)
    node.attributes.add(ir.AttrFloat32("scale", scores.scale))
    set_inputs(node, inputs)
    # The second output is the residual for the backward pass.
    node.resize_outputs(2)
    log_sum = node.outputs[1]
    log_sum.name = op.unique_name(f"{node.outputs[0].name}_log_sum")
    assert scores.q.shape is not None
    log_sum.shape, log_sum.type = ir.Shape(scores.q.shape[:3]), ir.TensorType(ir.DataType.FLOAT)
    remove_unread_chains(op.graph, [softmax])
    return True


def _is(node: ir.Node | None, op_type: str) -> bool:
    return node is not None and (node.op_type, node.domain) == (op_type, "")


def _producer(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """Returns the node that computes a value if its op is in `op_types` and the value has one reader, else None."""
    node = value.producer() if value is not None and read_once(value) else None
    return node if node is not None and any(_is(node, op_type) for op_type in op_types) else None


def _scores(value: ir.Value | None) -> _Scores | None:
    add = _producer(value, "Add")
    if add is not None:
        return _with_mask(*add.inputs)
    joined = _producer(value, "Reshape")
    if joined is not None:
        return _scores_of_windows(joined)
    value, scale = _unscaled(value)
    product = _producer(value, "MatMul")
    if product is None:
        return None
    (q, by_q), (keys, by_keys) = map(_unscaled, product.inputs)
    assert q is not None
    assert keys is not None
    return _Scores(q, keys, scale * by_q * by_keys)


def _with_mask(first: ir.Value | None, second: ir.Value | None) -> _Scores | None:
    """Returns the scores that are one operand of an Add; the other one is a mask."""
    for value, mask in ((first, second), (second, first)):
        scores = _scores(value)
        if scores is not None and mask is not None:
            return replace(scores, masks=(*scores.masks, _Mask(mask)))
    return None


def _scores_of_windows(joined: ir.Node) -> _Scores | None:
    """Returns the scores before they are reshaped for a mask of windows, `joined` being the Reshape after the Add."""
    add = _producer(joined.inputs[0], "Add")
    if add is None:
        return None
    for value, mask in (add.inputs, add.inputs[::-1]):
        split = _producer(value, "Reshape")
        whole = split.inputs[0] if split is not None else None
        before, between, after = map(_dims, (whole, value, joined.outputs[0]))
        if whole is None or mask is None or [len(before), len(between), len(after)] != [4, 5, 4]:
            continue
        # Only the first axis is split, and joined again.
        if not all(map(same_size, before[1:] * 2, between[2:] + after[1:])):
            continue
        scores, windows = _scores(whole), between[1]
        if scores is not None and isinstance(windows, int):
            return replace(scores, masks=(*scores.masks, _Mask(mask, windows)))
    return None


def _dims(value: ir.Value | None) -> list[int | ir.SymbolicDim]:
    """Returns the sizes of a value; none if its rank is unknown."""
    return list(value.shape or ()) if value is not None else []


def _unscaled(value: ir.Value | None) -> tuple[ir.Value | None, float]:
    """Strips multiplications and divisions by constants from a value.

    Returns:
        The value before these ops, and their combined factor.
    """
    scale = 1.0
    while (node := _producer(value, "Mul", "Div")) is not None:
        first, second = node.inputs
        factor = constant(second)
        if factor is None and node.op_type == "Mul":
            first, factor = second, constant(first)
        # A factor of a different shape could broadcast the value.
        if factor is None or first is None or value is None or first.shape != value.shape:
            break
        value, scale = first, scale * (factor if node.op_type == "Mul" else 1 / factor)
    return value, scale


def _is_supported(scores: _Scores, v: ir.Value) -> bool:
    """True if the composite op supports the sizes and dtypes of the scores' operands and of `v`."""
    q, keys = scores.q, scores.keys
    if any(x.dtype != ir.DataType.FLOAT or x.shape is None or x.shape.rank() != 4 for x in (q, keys, v)):
        return False
    assert q.shape is not None
    assert keys.shape is not None
    assert v.shape is not None
    # MatMul broadcasts batch and heads; the composite op doesn't.
    if not all(same_size(q.shape[i], x.shape[i]) for x in (keys, v) for i in (0, 1) if x.shape is not None):
        return False
    sizes = [*q.shape[1:3], keys.shape[3]]
    return all(
        _broadcasts(mask, [1, mask.windows, *sizes] if mask.windows else [q.shape[0], *sizes])
        for mask in scores.masks
    )


def _broadcasts(mask: _Mask, sizes: list[int | ir.SymbolicDim]) -> bool:
    """True if a mask is float32 and its shape broadcasts to some sizes."""
    value = mask.value
    dims = None if value.shape is None or value.dtype != ir.DataType.FLOAT else list(value.shape)
    if dims is None:
        return False
    # A mask of windows is expanded to these sizes.
    if mask.windows and not all(isinstance(dim, int) for dim in dims):
        return False
    return broadcasts_to(dims, sizes)


def _composite_for(op: Emitter, node: ir.Node, scores: _Scores) -> tuple[CompositeOp, list[ir.Value]]:
    """Returns the composite op that computes attention with these scores, and its inputs after q, k and v.

    Nodes that compute the mask are inserted before `node`.
    """
    if not scores.masks:
        return attention, []
    assert scores.q.shape is not None
    assert scores.keys.shape is not None
    sizes = [*scores.q.shape[:3], scores.keys.shape[3]]
    # The causal op skips the keys after each query, which saves half of the work.
    if len(scores.masks) == 1 and _is_causal(scores.masks[0].value, *sizes[2:]):
        return causal_attention, []
    with op.placing(before=node):
        total, *others = (
            _of_each_window(op, mask, scores.q) if mask.windows else mask.value for mask in scores.masks
        )
        for mask in others:
            total = op.Add(total, mask)
    return masked_attention, [total]


def _of_each_window(op: Emitter, mask: _Mask, q: ir.Value) -> ir.Value:
    """Emits a mask of windows with the batch of the queries as its first axis."""
    assert mask.value.shape is not None
    rest = [dim for dim in (1, 1, *mask.value.shape) if isinstance(dim, int)][-3:]
    count = op.Shape(q, start=0, end=1)
    images = op.Concat(op.Div(count, [mask.windows]), [mask.windows, 1, 1, 1], axis=0)
    return op.Reshape(op.Expand(mask.value, images), op.Concat(count, rest, axis=0))


def _is_causal(mask: ir.Value, queries: int | ir.SymbolicDim, keys: int | ir.SymbolicDim) -> bool:
    """True if an additive mask is causal: 0 up to each query's own position, and -1e30 or less, e.g. -inf, after it.

    Args:
        mask: mask of the shape [1, ..., 1, queries, keys].
        queries: number of queries.
        keys: number of keys.
    """
    shape = mask.shape
    if shape is None or shape.rank() < 2 or any(dim != 1 for dim in shape[:-2]):
        return False
    if not (same_size(shape[-2], queries) and same_size(shape[-1], keys)):
        return False
    constant_mask = known_array(mask)
    if constant_mask is not None:
        return _is_triangle(constant_mask.reshape(constant_mask.shape[-2:]))
    where = mask.producer()
    if where is None or not _is(where, "Where"):
        return False
    condition, *numbers = where.inputs
    attended, other = map(constant, numbers)
    node = condition.producer() if condition is not None else None
    # Where(mask == 0, -inf, 0): exporters compare a triangle of ones with 0.
    if _is(node, "Equal"):
        assert node is not None
        condition, zero = node.inputs
        attended, other = other, attended
        node = condition.producer() if condition is not None and constant(zero) == 0 else None
    if attended != 0 or other is None or other > _MASKED:
        return False
    return node is not None and _is_lower_triangle_of_ones(node)


def _is_triangle(mask: np.ndarray) -> bool:
    attended = np.tri(*mask.shape) == 1
    return bool((mask[attended] == 0).all() and (mask[~attended] <= _MASKED).all())


def _is_lower_triangle_of_ones(node: ir.Node) -> bool:
    if not _is(node, "Trilu") or node.attributes.get_int("upper", 1) != 0:
        return False
    if len(node.inputs) > 1 and node.inputs[1] is not None and constant(node.inputs[1]) != 0:
        return False
    constant_ones = known_array(node.inputs[0])
    if constant_ones is not None:
        return bool((constant_ones == 1).all())
    ones = node.inputs[0].producer() if node.inputs[0] is not None else None
    return ones is not None and _is(ones, "Expand") and constant(ones.inputs[0]) == 1


def _transposed_keys(graph: ir.Graph, before: ir.Node, keys: ir.Value) -> ir.Value:
    """Returns the keys as [batch, heads, keys, size], given `keys` as [batch, heads, size, keys].

    If the graph has no such value, a Transpose is inserted before the node `before`.
    """
    source = _source_of_swap(keys)
    if source is not None:
        return source
    assert keys.shape is not None
    output = ir.Value(
        name=f"{before.outputs[0].name}_keys", type=keys.type, shape=ir.Shape([keys.shape[i] for i in _SWAP])
    )
    node = ir.Node(
        "", "Transpose", [keys], [ir.AttrInt64s("perm", _SWAP)], outputs=[output], name=f"{before.name}_keys"
    )
    graph.insert_before(before, node)
    return output


def _source_of_swap(keys: ir.Value) -> ir.Value | None:
    """Returns the value whose transpose is `keys`; None if there is none."""
    node = keys.producer()
    if node is not None and _is(node, "Transpose"):
        return node.inputs[0] if list(node.attributes.get_ints("perm") or []) == _SWAP else None
    # Exporters may flatten batch and heads into one axis around the Transpose.
    if node is None or not _is(node, "Reshape") or node.inputs[0] is None:
        return None
    swap = node.inputs[0].producer()
    if swap is None or not _is(swap, "Transpose") or swap.attributes.get_ints("perm") != (0, 2, 1):
        return None
    merge = swap.inputs[0].producer() if swap.inputs[0] is not None else None
    source = merge.inputs[0] if merge is not None and _is(merge, "Reshape") else None
    if merge is None or source is None or source.shape is None or keys.shape is None:
        return None
    last = static_dims(merge.outputs[0])
    wanted = [keys.shape[i] for i in _SWAP]
    source_dims = list(source.shape)
    kept = last is not None and len(last) == 3 and list(last[1:]) == [*(static_dims(source) or ())][2:]
    same_dims = len(source_dims) == 4 and all(
        same_size(a, b) for a, b in zip(source_dims, wanted, strict=True)
    )
    return source if kept and same_dims and None not in (last or ())[1:] else None
