"""Rewrites transposed matrix products as products of transposed factors."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.op_facts import PRODUCTS
from onnxtrain.passes.tidy.replace_value import write_before

_SWAP = (1, 0)


class TransposedProductPass(ir.passes.InPlacePass):
    """Rewrites (A B)^T as B^T A^T if one of the factors is already a transposed matrix.

    Exporters write a linear layer as `x @ W.T`, so the gradient of W is (x^T ct)^T. Transposing this product would copy
    a matrix of the size of W in every step. Transposed factors cost nothing: runtimes fuse a Transpose into the MatMul
    that reads it, and a Gemm has attributes for them.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the model in place; transposes that are no longer read are not removed."""
        modified = False
        # Transposes that were inserted, by their input, because several products may read one factor.
        made: dict[ir.Value, ir.Value] = {}
        for node in tuple(model.graph):
            product = _product(node)
            if product is None:
                continue
            modified = True
            if product.op_type == "Gemm":
                _exchange_factors(node, product)
                continue
            factors = [_transposed(made, node, factor) for factor in reversed(product.inputs)]
            node.op_type = "MatMul"
            node.attributes.clear()
            node.resize_inputs(2)
            for index, factor in enumerate(factors):
                node.replace_input_with(index, factor)
        return ir.passes.PassResult(model, modified)


def _exchange_factors(node: ir.Node, gemm: ir.Node) -> None:
    """Turns a Transpose of a Gemm into a Gemm with exchanged factors."""
    node.op_type = "Gemm"
    node.attributes.clear()
    node.attributes.add(ir.AttrFloat32("alpha", gemm.attributes.get_float("alpha", 1.0)))
    # (op(A) op(B))^T = op(B)^T op(A)^T: the factors are swapped and each is transposed.
    for name, other in (("transA", "transB"), ("transB", "transA")):
        node.attributes.add(ir.AttrInt64(name, int(not gemm.attributes.get_int(other, 0))))
    node.resize_inputs(2)
    for index, factor in enumerate(reversed(gemm.inputs[:2])):
        node.replace_input_with(index, factor)


def _product(node: ir.Node) -> ir.Node | None:
    """Returns the matrix product that a Transpose reads, if the pair can be rewritten as (A B)^T = B^T A^T.

    Returns:
        A MatMul with at least one transposed factor, or a Gemm without bias. None if `node` is not a Transpose of such
        a product, or if anything else reads the product.
    """
    if not _is_transpose(node):
        return None
    value = node.inputs[0]
    product = value.producer() if value is not None else None
    if product is None or product.op_type not in PRODUCTS or product.domain != "":
        return None
    if len(product.outputs[0].uses()) != 1 or product.outputs[0].is_graph_output():
        return None
    # The bias of a Gemm would have to be transposed as well.
    if product.op_type == "Gemm":
        return product if all(summand is None for summand in product.inputs[2:]) else None
    # Product and transposed factor are matrices, so the other factor is a matrix, too.
    return product if any(_is_transpose(factor.producer()) for factor in product.inputs if factor) else None


def _is_transpose(node: ir.Node | None) -> bool:
    """True if `node` transposes a matrix."""
    if node is None or node.op_type != "Transpose" or node.domain != "":
        return False
    permutation = node.attributes.get("perm")
    return permutation is not None and tuple(permutation.as_ints()) == _SWAP


def _transposed(made: dict[ir.Value, ir.Value], before: ir.Node, factor: ir.Value | None) -> ir.Value:
    """Returns the transpose of a factor: the input of the Transpose that computes it, or a new Transpose's output.

    Args:
        made: maps each factor to its new transpose. Extended in place.
        before: the node before which a new Transpose is inserted.
        factor: the factor, a matrix.
    """
    assert factor is not None
    if factor in made:
        return made[factor]
    producer = factor.producer()
    if producer is not None and _is_transpose(producer):
        source = producer.inputs[0]
        assert source is not None
        return source
    made[factor] = write_before(before, "factor", "Transpose", factor, perm=_SWAP)
    made[factor].type = factor.type
    return made[factor]
