"""Undoes the reshapes around products whose batch axes were merged into one."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.shapes.dims import Dims, dims_of
from onnxtrain.passes.tidy.unused import remove_unread_chains


class MergedBatchesPass(ir.passes.InPlacePass):
    """Rewrites batched products of reshaped factors as products of the factors themselves.

    PyTorch computes `q @ k.mT` of `[batch, heads, n, size]` as a `bmm` of `[batch * heads, n, size]`. Without the
    reshapes, the product is one that the fusion of attention finds. Needs inferred shapes.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the main graph in place."""
        modified = False
        for node in tuple(model.graph):
            factors = _factors(node)
            if factors is None:
                continue
            product = node.inputs[0]
            node.op_type = "MatMul"
            node.attributes.clear()
            for index, factor in enumerate(factors):
                node.replace_input_with(index, factor)
            remove_unread_chains(model.graph, [product.producer() if product is not None else None])
            modified = True
        return ir.passes.PassResult(model, modified)


def _factors(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Returns the factors before their batch axes were merged, if `node` splits the batch of their product again."""
    product = _reshaped(node)
    matmul = product.producer() if product is not None and len(product.uses()) == 1 else None
    if product is None or product.is_graph_output() or matmul is None:
        return None
    if (matmul.op_type, matmul.domain) != ("MatMul", ""):
        return None
    if not _merges_batch(dims_of(node.outputs[0]), dims_of(product)):
        return None
    factors = []
    for value in matmul.inputs:
        reshape = value.producer() if value is not None else None
        factor = _reshaped(reshape) if reshape is not None else None
        if factor is None or value is None or not _merges_batch(dims_of(factor), dims_of(value)):
            return None
        factors.append(factor)
    first, second = factors
    batches = [(dims_of(value) or ())[:-2] for value in (first, second, node.outputs[0])]
    return (first, second) if batches[0] == batches[1] == batches[2] else None


def _reshaped(node: ir.Node) -> ir.Value | None:
    return node.inputs[0] if (node.op_type, node.domain) == ("Reshape", "") else None


def _merges_batch(before: Dims | None, after: Dims | None) -> bool:
    """True if a Reshape between these sizes merges all axes before the last two into one."""
    if before is None or after is None:
        return False
    return len(after) == 3 and len(before) > 3 and before[-2:] == after[-2:]
