"""Rewrites bfloat16 matrix products, convolutions, roundings and other composite ops for native kernels."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.functions import (
    COMPOSITES,
    DOMAIN,
    CompositeOp,
    convolution_bfloat16,
    gemm_bfloat16,
    matmul_bfloat16,
    of_rounded,
    round_to_bfloat16,
    widened,
)
from onnxtrain.fusion._pass import become
from onnxtrain.op_facts import EXACT_OPS, PRODUCTS, RESHAPES
from onnxtrain.passes import remove_unread_chains

_FLOAT, _NARROW = ir.DataType.FLOAT, ir.DataType.BFLOAT16
_SUFFIXES = {"bfloat16": _NARROW, "float16": ir.DataType.FLOAT16}


class Bfloat16ProductPass(ir.passes.InPlacePass):
    """Replaces float32 matrix products and convolutions with composite ops that round their factors to bfloat16.

    Rewrites MatMul, Gemm, and the composite ops for convolutions and their gradients, except depthwise convolutions.
    If a factor has already been rounded by casts to bfloat16 and back, the new op skips these casts, because it rounds
    anyway. In matrix products, a Transpose of a factor becomes an attribute of the new op if the last axis remains one
    of the last two.

    Run this pass after :class:`NativeOpsPass`, which emits the composite ops for convolutions. The new ops have no
    gradient rules, and passes that match MatMul or Gemm don't match them.

    Args:
        of_rounded: True to rewrite an op only if all its factors are bfloat16 numbers cast to float32, e.g. by
            :func:`widen_narrow_floats`. Rounding them does not change the result.
    """

    def __init__(self, *, of_rounded: bool = False) -> None:
        super().__init__()
        self._of_rounded = of_rounded

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the main graph and its subgraphs in place."""
        op = Emitter(model.graph, functions=model.functions)
        modified = False
        # Shared by all nodes, so that long chains of moves are followed only once.
        rounded: dict[ir.Value, bool] = {}
        for node in tuple(ir.traversal.RecursiveGraphIterator(model.graph)):
            factors = [node.inputs[place] for place in _factors(node)]
            if not factors or any(value is None or value.dtype != _FLOAT for value in factors):
                continue
            # Rounding the factors of any other product would change its result.
            if self._of_rounded and not all(_is_rounded(value, rounded) for value in factors):
                continue
            if node.op_type == "MatMul":
                _matmul(op, node)
            elif node.op_type == "Gemm":
                _gemm(op, node)
            else:
                _convolution(op, node, model)
            modified = True
            if node.graph is not None:
                maybe_dead = [value.producer() for value in factors if value is not None]
                remove_unread_chains(node.graph, maybe_dead)
        return ir.passes.PassResult(model, modified)


def _matmul(op: Emitter, node: ir.Node) -> None:
    sources, orders = [], []
    for value in node.inputs:
        assert value is not None
        source, order = _unrounded_factor(value, node)
        sources.append(source)
        orders.append(order)
    named = zip(("perm_a", "perm_b"), orders, strict=True)
    attributes = {name: list(order) for name, order in named if order is not None}
    composite = matmul_bfloat16[orders[0] is not None, orders[1] is not None]
    _turn_into_call(op, node, composite, sources, attributes)


def _gemm(op: Emitter, node: ir.Node) -> None:
    attributes = node.attributes
    scales = {name: attributes.get_float(name, 1.0) for name in ("alpha", "beta")}
    transposed = {name: bool(attributes.get_int(name, 0)) for name in ("transA", "transB")}
    inputs: list[ir.Value | None] = []
    for name, value in zip(transposed, node.inputs, strict=False):
        assert value is not None
        source, order = _unrounded_factor(value, node)
        inputs.append(source)
        transposed[name] ^= order is not None
    # The summand C is not a factor: it remains in float32.
    flags = {name: int(flag) for name, flag in transposed.items()}
    _turn_into_call(op, node, gemm_bfloat16, [*inputs, *node.inputs[2:]], {**scales, **flags})


_CONVOLUTIONS = {
    "Convolution": (0, 1),
    "ConvolutionGradient": (0, 1, 2),
    "ConvolutionInputGradient": (0, 2),
    "ConvolutionWeightGradient": (0, 1),
}
"""Maps each convolution function to the indices of the inputs that are factors.

The other inputs are a bias, or only provide a shape.
"""


def _factors(node: ir.Node) -> Sequence[int]:
    """Returns the indices of the inputs to round to bfloat16: the factors of a matrix product or convolution.

    Returns no indices for other nodes, and for convolutions that are depthwise or whose weight has an unknown rank.
    """
    if node.domain == "":
        return (0, 1) if node.op_type in PRODUCTS else ()
    stem = _stem(node)
    if node.domain != DOMAIN or stem not in _CONVOLUTIONS:
        return ()
    weight = node.inputs[1 if stem == "Convolution" else 2]
    dims = static_dims(weight) if weight is not None else None
    depthwise = dims is None or (dims[1] == 1 and node.attributes.get_int("group", 1) > 1)
    # Depthwise convolutions are memory-bound, so faster products don't help.
    return () if depthwise else _CONVOLUTIONS[stem]


def _convolution(op: Emitter, node: ir.Node, model: ir.Model) -> None:
    for place in _factors(node):
        value = node.inputs[place]
        assert value is not None
        node.replace_input_with(place, _before_rounding(value, node) or value)
    if _stem(node) == "Convolution":
        node.domain, node.op_type, _ = op.function(convolution_bfloat16, _FLOAT)
    else:
        name = f"{_stem(node)}_float".replace("Convolution", convolution_bfloat16.name)
        node.domain, node.op_type, _ = of_rounded(
            model.functions[node.op_identifier()], name, model.functions
        )


def _stem(node: ir.Node) -> str:
    """Strips the number and the dtype from a float32 function's name: "Convolution" for "Convolution2_float"."""
    return re.sub(r"\d*_float$", "", node.op_type)


def _turn_into_call(
    op: Emitter,
    node: ir.Node,
    composite: CompositeOp,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, int | float | list[int]],
) -> None:
    """Turns a node into a call to a composite op in float32, with the given inputs and attributes."""
    become(op, node, composite, attributes)
    for index, value in enumerate(inputs):
        node.replace_input_with(index, value)


def _unrounded_factor(value: ir.Value, product: ir.Node) -> tuple[ir.Value, tuple[int, ...] | None]:
    """Returns the float32 value from which a factor was computed by rounding and transposing.

    Returns:
        The value, and the permutation of its axes, or None if the axes are not permuted.
    """
    order: tuple[int, ...] | None = None
    while True:
        # Casts and transposes may alternate.
        inner = _before_rounding(value, product)
        if inner is None:
            inner, permutation = _transposed(value)
            if inner is None or permutation is None:
                break
            composed = permutation if order is None else tuple(permutation[axis] for axis in order)
            # If the last axis of the source were none of the last two, no two elements of a matrix would be adjacent in
            # memory.
            if len(composed) - 1 not in composed[-2:]:
                break
            order = composed
        value = inner
    return value, None if order == tuple(range(len(order or ()))) else order


def _is_rounded(value: ir.Value | None, decided: dict[ir.Value, bool]) -> bool:
    """True if each element of a value was a bfloat16 number before it was cast to float32.

    `decided` caches the results of this function.
    """
    if value is None:
        return False
    if value not in decided:
        node = value.producer()
        moved = node is not None and node.domain == "" and node.op_type in EXACT_OPS and _sources(node)
        decided[value] = all(_is_rounded(source, decided) for source in moved) if moved else _widens(value)
    return decided[value]


def _sources(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None and value.dtype == _FLOAT]


def _widens(value: ir.Value | None) -> bool:
    """True if a value is a bfloat16 value cast to float32."""
    cast = _producer(value, "Cast")
    return cast is not None and cast.inputs[0] is not None and cast.inputs[0].dtype == _NARROW


def _before_rounding(value: ir.Value, product: ir.Node) -> ir.Value | None:
    """Returns the unrounded float32 value if `value` was rounded by casts to bfloat16 and back, else None.

    If the rounded value was reshaped, copies of the reshaping nodes are applied to the unrounded value, and inserted
    before the node `product`.
    """
    node = value.producer()
    if node is not None and node.domain == "" and node.op_type in RESHAPES and node.inputs[0] is not None:
        inner = _before_rounding(node.inputs[0], product)
        if inner is None:
            return None
        # The old reshape remains for other readers of the rounded value.
        view = ir.node(node.op_type, [inner, *node.inputs[1:]])
        for attribute in node.attributes.values():
            view.attributes.add(attribute)
        view.outputs[0].type, view.outputs[0].shape = value.type, value.shape
        product.prepend(view)
        return view.outputs[0]
    widen = _producer(value, "Cast") if _widens(value) else None
    round_ = _producer(widen.inputs[0], "Cast") if widen is not None else None
    source = round_.inputs[0] if round_ is not None else None
    return source if source is not None and source.dtype == _FLOAT else None


def _transposed(value: ir.Value) -> tuple[ir.Value | None, tuple[int, ...] | None]:
    """Returns the input and the permutation of the Transpose that computes `value`; (None, None) if there is none."""
    node = _producer(value, "Transpose")
    permutation = node.attributes.get("perm") if node is not None else None
    if node is None or permutation is None:
        return None, None
    return node.inputs[0], tuple(int(axis) for axis in permutation.as_ints())


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and (node.op_type, node.domain) == (op_type, "") else None


class Bfloat16RoundingPass(ir.passes.InPlacePass):
    """Rewrites pairs of casts, float32 to bfloat16 and back, as one op, if nothing else reads the bfloat16 value."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the main graph in place; subgraphs are not modified."""
        op = Emitter(model.graph, functions=model.functions)
        modified = False
        for node in tuple(model.graph):
            result = node.outputs[0]
            source = node.inputs[0] if _widens(result) else None
            narrow = _producer(source, "Cast")
            if source is None or narrow is None or source.is_graph_output():
                continue
            # A bfloat16 value with another reader must be kept.
            readers = {use.node for use in source.uses()}
            if narrow.inputs[0] is None or narrow.inputs[0].dtype != _FLOAT or readers != {node}:
                continue
            _turn_into_call(op, node, round_to_bfloat16, narrow.inputs, {})
            remove_unread_chains(model.graph, [narrow])
            modified = True
        return ir.passes.PassResult(model, modified)


class WideCompositesPass(ir.passes.InPlacePass):
    """Computes bfloat16 and float16 composite ops in float32, and rounds their results once, as PyTorch does.

    This pass is for the CPU, where native kernels compute in float32.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the main graph in place; subgraphs are not modified."""
        op = Emitter(model.graph, functions=model.functions)
        modified = False
        for node in tuple(model.graph):
            suffix = node.op_type.rpartition("_")[2]
            if node.domain != DOMAIN or suffix not in _SUFFIXES or any(v.type is None for v in node.outputs):
                continue
            wide = _in_float32(op, node, model)
            if wide is not None:
                _widen(node, _SUFFIXES[suffix])
                node.domain, node.op_type, _ = wide
                modified = True
        return ir.passes.PassResult(model, modified)


def _in_float32(op: Emitter, node: ir.Node, model: ir.Model) -> ir.OperatorIdentifier | None:
    """Returns the float32 version of the bfloat16 or float16 function that a node calls; None if there is none."""
    # A SpecializedOp is not in the table: its function is derived from the narrow one.
    composite = COMPOSITES.get(node.op_type.rpartition("_")[0])
    if composite is not None:
        return op.function(composite, _FLOAT)
    function = model.functions.get(node.op_identifier())
    return None if function is None else widened(function, model.functions)


def _widen(node: ir.Node, dtype: ir.DataType) -> None:
    """Inserts casts around a node: to float32 before it, and back to `dtype` after it."""
    for index, value in enumerate(node.inputs):
        if value is not None and value.dtype == dtype:
            node.prepend(cast := _cast(value, _FLOAT))
            node.replace_input_with(index, cast.outputs[0])
    for value in node.outputs:
        if value.name and value.dtype == dtype:
            value.type = ir.TensorType(_FLOAT)
            node.append(cast := _cast(value, dtype))
            result = cast.outputs[0]
            value.replace_all_uses_with(result, replace_graph_outputs=True)
            cast.replace_input_with(0, value)
            # The rounded value takes over the name, so that graph outputs keep their names.
            result.name, value.name = value.name, f"{value.name}_float"


def _cast(value: ir.Value, dtype: ir.DataType) -> ir.Node:
    cast = ir.node("Cast", [value], {"to": int(dtype)})
    cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(dtype), value.shape
    return cast
