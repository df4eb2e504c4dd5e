"""Rewrites matrix products as functions with native kernels, where ONNX Runtime's own product is slow."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.functions import linear, linear_relu, matrix_product
from onnxtrain.fusion._pass import KeepingPass, become, take_over
from onnxtrain.op_facts import PRODUCTS
from onnxtrain.passes import read_once, remove_unread_chains

_LONG_ROW = 4096
"""Rows of this many elements start at addresses that map to the same few cache lines."""

_MANY_ROWS, _MANY_COLUMNS = 1024, 64
"""Of fewer, ONNX Runtime's product with a bias is as fast, unless the layer is wide."""

_LARGE = 1 << 18
"""Of a smaller second factor, and of fewer rows, ONNX Runtime's product is as fast."""

_WIDE_ROWS, _WIDE_COLUMNS = 64, 512
"""The least rows and columns of a wide layer, which has no fewer outputs than inputs: its bias takes long to write."""


@dataclass(frozen=True)
class _Factor:
    """A factor of a matrix product.

    Attributes:
        value: a matrix.
        transposed: True if the factor is the transpose of `value`.
    """

    value: ir.Value
    transposed: bool

    @property
    def source(self) -> _Factor:
        """The same factor without the Transpose nodes that compute `value`; each of them flips `transposed`."""
        node = self.value.producer()
        if node is None or (node.op_type, node.domain) != ("Transpose", "") or node.inputs[0] is None:
            return self
        # A Transpose of more axes may move batch axes.
        matrix = self.value.shape is None or self.value.shape.rank() == 2
        swaps = tuple(node.attributes.get_ints("perm") or (1, 0)) == (1, 0)
        return _Factor(node.inputs[0], not self.transposed).source if matrix and swaps else self


class ProductPass(KeepingPass):
    """Replaces slow float32 matrix products with functions that have native kernels.

    A product is slow in ONNX Runtime if its first factor is transposed, as in weight gradients, or has rows of at least
    4096 elements, as in the input gradient of a layer with a large vocabulary, or has many rows and the second factor
    is large. It becomes `MatrixProduct`.

    A linear layer with a bias and many rows, or a wide one, becomes `Linear` or, with a Relu that follows,
    `LinearRelu`: ONNX Runtime writes the bias to all rows first, on one thread, and adds the product to them.

    Run this pass last: other passes don't recognize the functions.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the main graph in place; subgraphs are not modified."""
        op = Emitter(model.graph, functions=model.functions)
        modified = False
        for node in tuple(model.graph):
            if self.keeps(node) or node.graph is not model.graph:
                continue
            producers = [value.producer() for value in node.inputs if value is not None]
            factors = _factors(node)
            if _is_linear_layer(node):
                self._rewrite_layer(op, node)
            elif factors is not None and _is_slow(*factors):
                a, b = factors
                become(op, node, matrix_product, {"transA": int(a.transposed), "transB": int(b.transposed)})
                node.resize_inputs(2)
                node.replace_input_with(0, a.value)
                node.replace_input_with(1, b.value)
            else:
                continue
            modified = True
            remove_unread_chains(op.graph, producers)
        return ir.passes.PassResult(model, modified)

    def _rewrite_layer(self, op: Emitter, node: ir.Node) -> None:
        """Turns a linear layer, and a Relu that alone reads its result, into a call."""
        y, stored = node.outputs[0], node.inputs[1]
        assert stored is not None
        relu = next(iter(y.uses())).node if read_once(y) else None
        if relu is not None and ((relu.op_type, relu.domain) != ("Relu", "") or self.keeps(relu)):
            relu = None
        weight = _Factor(stored, _transposes(node, "transB")).source
        become(op, node, linear if relu is None else linear_relu, {"transB": int(weight.transposed)})
        node.replace_input_with(1, weight.value)
        if relu is not None:
            take_over(y, relu)


def _is_linear_layer(node: ir.Node) -> bool:
    """True if a node is a float32 linear layer with a bias for which the native kernel is faster."""
    if (node.op_type, node.domain) != ("Gemm", "") or len(node.inputs) < 3 or node.inputs[0] is None:
        return False
    attributes = node.attributes
    scales = attributes.get_float("alpha", 1.0), attributes.get_float("beta", 1.0)
    bias, dims = node.inputs[2], static_dims(node.outputs[0])
    if bias is None or dims is None or scales != (1, 1) or _transposes(node, "transA"):
        return False
    rows, columns = dims
    if node.inputs[0].dtype != ir.DataType.FLOAT or rows is None or columns is None:
        return False
    depth = (static_dims(node.inputs[0]) or [None])[-1]
    has_many_rows = rows >= _MANY_ROWS and columns >= _MANY_COLUMNS
    is_wide = rows >= _WIDE_ROWS and columns >= _WIDE_COLUMNS and depth is not None and columns >= depth
    return (has_many_rows or is_wide) and static_dims(bias) == (columns,)


def _factors(node: ir.Node) -> tuple[_Factor, _Factor] | None:
    """Returns the two factors if a node is a plain product of two float32 matrices; None otherwise."""
    if node.domain != "" or node.op_type not in PRODUCTS:
        return None
    a, b = node.inputs[:2]
    # A Gemm with a summand would need another op.
    if a is None or b is None or any(summand is not None for summand in node.inputs[2:]):
        return None
    attributes = node.attributes
    # The function computes only the product; scaling would need an additional node.
    if attributes.get_float("alpha", 1.0) != 1:
        return None
    factors = (
        _Factor(a, _transposes(node, "transA")).source,
        _Factor(b, _transposes(node, "transB")).source,
    )
    for value in (factor.value for factor in factors):
        if value.dtype != ir.DataType.FLOAT or value.shape is None or value.shape.rank() != 2:
            return None
    return factors


def _transposes(node: ir.Node, attribute: str) -> bool:
    return bool(node.attributes.get_int(attribute, 0))


def _is_slow(first: _Factor, second: _Factor) -> bool:
    # Products with symbolic sizes are left to ONNX Runtime.
    rows, depth = static_dims(first.value) or (None, None)
    sizes = [size or 0 for size in static_dims(second.value) or ()]
    has_long_rows = depth is not None and depth >= _LONG_ROW
    is_large = rows is not None and rows >= _MANY_ROWS and math.prod(sizes) >= _LARGE
    return first.transposed or has_long_rows or is_large
