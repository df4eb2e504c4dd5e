"""Correct shapes that a file declares and that its nodes cannot have."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.shapes.infer import GENERATED, infer_shapes
from onnxtrain.passes.shapes.vector_inputs import VectorsPass


def correct_declared_shapes(model: ir.Model) -> None:
    """Replace declared shapes of computed values by inferred ones where the two contradict, in place.

    onnx's inference keeps a declaration that contradicts it, and gradients are then built of a wrong shape. ONNX
    Runtime, which runs such files with a warning, takes the inferred one. What inference cannot tell stays declared.
    """
    values = [value for node in model.graph.all_nodes() for value in node.outputs]
    declared = {value: value.shape for value in values if value.shape is not None}
    if not declared:
        return
    for value in declared:
        value.shape = None
    # Without its declarations onnx infers wrong shapes.
    VectorsPass()(model)
    infer_shapes(model, propagate=False)
    for value, shape in declared.items():
        value.shape = _merged(value.shape, shape)


def _merged(inferred: ir.Shape | None, declared: ir.Shape) -> ir.Shape:
    """Return the declared shape, with the inferred sizes where it contradicts them."""
    if inferred is None or inferred.rank() != declared.rank():
        return declared if inferred is None else inferred
    return ir.Shape([_dim(found, given) for found, given in zip(inferred, declared, strict=True)])


def _dim(found: int | ir.SymbolicDim, given: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
    if isinstance(found, int):
        return found
    is_known = found.value is not None and not found.value.startswith(GENERATED)
    # A dimension of an input, such as the batch, for which the file declares the size of an example.
    return found if is_known and (isinstance(given, int) or given.value is None) else given
