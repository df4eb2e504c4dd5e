"""Give vectors and scalars that set up an op the rank of the op's schema: ONNX Runtime accepts others."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onnxtrain.passes.tidy.replace_value import write_before

# Inputs by op, with the rank that the standard says: 1 for a vector, 0 for a scalar. ONNX Runtime (1.32) reads the
# elements of these and does not look at their shape.
_RANKS: Mapping[str, Mapping[int, int]] = {
    "ConstantOfShape": {0: 1},
    "Expand": {1: 1},
    "Pad": {1: 1},
    "Resize": {1: 1, 2: 1, 3: 1},
    "STFT": {1: 0},
    "Unsqueeze": {1: 1},
}


class InputRanksPass(ir.passes.InPlacePass):
    """Reshape axes, sizes and pads whose rank is not the one of the op's schema, e.g. the scalar axes of an Unsqueeze.

    `torch.onnx.export` writes such a scalar for `scaled_dot_product_attention(enable_gqa=True)`. Every later pass and
    rule relies on the schema.

    Args:
        unknown: True to reshape values of unknown rank, too. Shapes must have been inferred before.
    """

    def __init__(self, unknown: bool = False) -> None:
        self._unknown = unknown

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place, in subgraphs too."""
        modified = False
        for node in ir.traversal.RecursiveGraphIterator(model.graph):
            for index, rank in _RANKS.get(node.op_type, {}).items() if node.domain == "" else ():
                value = node.inputs[index] if index < len(node.inputs) else None
                # In Resize an empty tensor of any rank stands for an absent input.
                if value is None or (
                    value.shape is not None and (len(value.shape) == rank or 0 in value.shape)
                ):
                    continue
                if value.shape is not None or self._unknown:
                    node.replace_input_with(index, _reshaped(node, value, rank))
                    modified = True
        return ir.passes.PassResult(model, modified)


def _reshaped(node: ir.Node, value: ir.Value, rank: int) -> ir.Value:
    """Write a Reshape of a value to a scalar or a vector before a node; return its result."""
    sizes = np.array([-1] * rank, np.int64)
    target = write_before(node, None, "Constant", value=ir.tensor(sizes))
    result = write_before(node, None, "Reshape", value, target)
    result.shape, result.type = ir.Shape([None] * rank), value.type
    return result
