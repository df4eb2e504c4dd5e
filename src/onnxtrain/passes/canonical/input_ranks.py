"""Reshapes inputs such as axes and sizes to the rank that the op's schema requires.

ONNX Runtime also accepts other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onnxtrain.passes.tidy.replace_value import write_before

# By op: indices of inputs, with the rank in the standard: 1 for a vector, 0 for a scalar. ONNX Runtime (1.32) reads
# their elements and ignores their shape.
_RANKS: Mapping[str, Mapping[int, int]] = {
    "ConstantOfShape": {0: 1},
    "Expand": {1: 1},
    "Pad": {1: 1},
    "Resize": {1: 1, 2: 1, 3: 1},
    "STFT": {1: 0},
    "Unsqueeze": {1: 1},
}


class InputRanksPass(ir.passes.InPlacePass):
    """Reshapes inputs such as axes, sizes and pads to the rank that the op's schema requires.

    E.g. scalar axes of an Unsqueeze become a vector. `torch.onnx.export` writes scalar axes for
    `scaled_dot_product_attention(enable_gqa=True)`. All later passes and gradient rules rely on the schema's ranks.

    Args:
        unknown: True to also reshape inputs of unknown rank. Shapes must have been inferred.
    """

    def __init__(self, unknown: bool = False) -> None:
        self._unknown = unknown

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites nodes of the main graph and its subgraphs in place."""
        modified = False
        for node in ir.traversal.RecursiveGraphIterator(model.graph):
            for index, rank in _RANKS.get(node.op_type, {}).items() if node.domain == "" else ():
                value = node.inputs[index] if index < len(node.inputs) else None
                # In Resize, an empty tensor of any rank means that the input is absent.
                if value is None or (
                    value.shape is not None and (len(value.shape) == rank or 0 in value.shape)
                ):
                    continue
                if value.shape is not None or self._unknown:
                    node.replace_input_with(index, _reshaped(node, value, rank))
                    modified = True
        return ir.passes.PassResult(model, modified)


def _reshaped(node: ir.Node, value: ir.Value, rank: int) -> ir.Value:
    """Inserts a Reshape of a value to a scalar or vector before a node, and returns its output."""
    sizes = np.array([-1] * rank, np.int64)
    target = write_before(node, None, "Constant", value=ir.tensor(sizes))
    result = write_before(node, None, "Reshape", value, target)
    result.shape, result.type = ir.Shape([None] * rank), value.type
    return result
