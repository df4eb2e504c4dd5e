"""Prepares a finished model for ONNX Runtime, before it is written or returned."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.op_bodies import has_own_gradient, ops_without_kernel
from onnxtrain.passes.canonical.inline_functions import inline_functions
from onnxtrain.passes.canonical.inline_op_bodies import inline_schema_functions
from onnxtrain.passes.runtime_faults.absent_inputs import AbsentInputsPass
from onnxtrain.passes.runtime_faults.empty_expand import EmptyExpandPass
from onnxtrain.passes.runtime_faults.narrow_floats import has_narrow_floats, widen_narrow_floats
from onnxtrain.passes.runtime_faults.packed_attention import unpack_attention
from onnxtrain.passes.runtime_faults.pad_axes import PadAxesPass
from onnxtrain.passes.runtime_faults.reduction_axes import NoAxesPass, PositiveAxesPass
from onnxtrain.passes.runtime_faults.running_statistics import IsolateStatisticsPass
from onnxtrain.passes.runtime_faults.scan_outputs import ScanOutputsPass
from onnxtrain.passes.runtime_faults.slice_axes import SliceAxesPass
from onnxtrain.passes.runtime_faults.swish import SwishPass
from onnxtrain.passes.runtime_faults.unread_masks import UnreadMasksPass
from onnxtrain.passes.shapes.infer import infer_shapes
from onnxtrain.passes.tidy.constants import lift_constants
from onnxtrain.passes.tidy.cross_entropy import CrossEntropyPass
from onnxtrain.passes.tidy.unique_names import name_apart
from onnxtrain.passes.tidy.unused import remove_unread_nodes


def apply_workarounds(model: ir.Model, *, keep_unread: bool = False) -> ir.Model:
    """Rewrites a model to avoid faults of ONNX Runtime, so that it runs as the ONNX standard specifies.

    Each pass documents the fault that it avoids. A test in tests/passes/runtime_faults fails when a version of ONNX
    Runtime no longer has the fault.

    Args:
        model: a canonical model, with or without gradients; may be modified.
        keep_unread: True to keep unused nodes, so that their results can become graph outputs later. By default, they
            are removed, so all graph outputs must have been added already.

    Returns:
        The rewritten model, with inferred shapes.
    """
    model = unpack_attention(_run_own_bodies(model))
    IsolateStatisticsPass()(model)
    # Passes emit Constant nodes; later passes look for initializers.
    if SwishPass()(model).modified:
        lift_constants(model)
    # Not float16, because the files also run on devices that have kernels for it.
    narrow = (ir.DataType.BFLOAT16,)
    model = widen_narrow_floats(model, narrow) if has_narrow_floats(model, narrow) else infer_shapes(model)
    # After inference, because the following passes need ranks.
    NoAxesPass()(model)
    CrossEntropyPass()(model)
    modified = [
        rewrite(model).modified
        for rewrite in (PositiveAxesPass(), SliceAxesPass(), PadAxesPass(), EmptyExpandPass())
    ]
    if any(modified):
        lift_constants(model)
    AbsentInputsPass()(model)
    ScanOutputsPass()(model)
    # ONNX Runtime rejects a model with a node that has no kernel, even if its output is unread, such as a float64 Atan
    # whose shape alone was read, and then folded. Subgraphs come first, because they read values of enclosing graphs.
    for graph in () if keep_unread else reversed([model.graph, *model.graph.subgraphs()]):
        remove_unread_nodes(graph)
    # After the removal: a removed node may have read a mask.
    if UnreadMasksPass()(model).modified:
        lift_constants(model)
    # Constants that were lifted from subgraphs may have the name of another value.
    name_apart(model)
    return model


def _run_own_bodies(model: ir.Model) -> ir.Model:
    """Returns `model` with the bodies of users' ops in place of these ops.

    These are ops that ONNX Runtime has no kernel for, and functions of the model with a gradient of their own, which
    have not been inlined before.
    """
    if any(has_own_gradient(key[:2]) for key in model.functions):
        lift_constants(
            inline_functions(model, lambda function: has_own_gradient((function.domain, function.name)))
        )
    missing = ops_without_kernel()
    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    if not missing or not any((node.domain, node.op_type) in missing for node in nodes):
        return model
    return inline_schema_functions(model, lambda node: (node.domain, node.op_type) not in missing)
