"""Corrects declared shapes of computed values that shape inference contradicts."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.shapes.infer import GENERATED, infer_shapes
from onnxtrain.passes.shapes.vector_inputs import VectorsPass


def correct_declared_shapes(model: ir.Model) -> bool:
    """Replaces declared shapes of computed values that contradict the inferred shapes, in place.

    onnx's shape inference keeps a declared shape even if its own result differs, and gradients would then be built for
    the wrong shape. ONNX Runtime warns and uses the inferred shape. Sizes that cannot be inferred remain as declared,
    except that the symbolic name of an input axis, e.g. "batch", replaces a declared number.

    Returns:
        True if every value now has its inferred shape, so that inferring again would change nothing. False if the
        caller must infer shapes, because the model declared none, or because it kept declared sizes, which may allow
        inference to find more shapes.
    """
    values = [value for node in model.graph.all_nodes() for value in node.outputs]
    declared = {value: value.shape for value in values if value.shape is not None}
    if not declared:
        return False
    for value in declared:
        value.shape = None
    # Restores the shapes of vectors, which have just been removed, because onnx needs them.
    VectorsPass()(model)
    infer_shapes(model, propagate=False)
    complete = True
    for value, shape in declared.items():
        merged = _merged(value.shape, shape)
        if merged != value.shape:
            value.shape, complete = merged, False
    return complete


def _merged(inferred: ir.Shape | None, declared: ir.Shape) -> ir.Shape:
    """Returns the inferred shape, with declared sizes for axes whose size could not be inferred.

    Returns `declared` if nothing was inferred, and `inferred` if the ranks differ.
    """
    if inferred is None or inferred.rank() != declared.rank():
        return declared if inferred is None else inferred
    return ir.Shape([_dim(found, given) for found, given in zip(inferred, declared, strict=True)])


def _dim(found: int | ir.SymbolicDim, given: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
    if isinstance(found, int) or (not isinstance(given, int) and given.value is None):
        return found
    # An inferred name comes from an input axis, such as the batch; the size in the file is an example input's.
    named = found.value is not None and not found.value.startswith(GENERATED)
    return found if named and isinstance(given, int) else given
