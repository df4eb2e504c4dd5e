"""Prepare a finished model for ONNX Runtime; the last step before a model is written or returned."""

from __future__ import annotations

import onnx_ir as ir

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
from onnxtrain.passes.shapes.infer import infer_shapes
from onnxtrain.passes.tidy.constants import lift_constants
from onnxtrain.passes.tidy.cross_entropy import CrossEntropyPass
from onnxtrain.passes.tidy.unique_names import name_apart
from onnxtrain.passes.tidy.unused import remove_unread_nodes


def suit_runtime(model: ir.Model) -> ir.Model:
    """Return a model with inferred shapes that computes in ONNX Runtime what the standard says; may change `model`.

    Expects a canonical model, with gradients or without, and with all its outputs: nodes that nothing reads are
    removed. The docstring of each pass names the fault that it avoids, and a test in tests/passes/runtime_faults tells
    when an ONNX Runtime no longer has it.
    """
    model = unpack_attention(model)
    IsolateStatisticsPass()(model)
    # Passes write small constants as Constant nodes; all others are initializers, where later passes look for them.
    if SwishPass()(model).modified:
        lift_constants(model)
    # Not float16: the files also run on devices with kernels of their own for it.
    narrow = (ir.DataType.BFLOAT16,)
    model = widen_narrow_floats(model, narrow) if has_narrow_floats(model, narrow) else infer_shapes(model)
    # After inference: the passes below need ranks.
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
    # ONNX Runtime refuses a model for a node without a kernel even if nothing reads the node, such as a float64 Atan of
    # which only the shape was read, which is folded by now. Subgraphs come first: they read values around them.
    for graph in reversed([model.graph, *model.graph.subgraphs()]):
        remove_unread_nodes(graph)
    # Constants that were lifted out of subgraphs may have the name of a value elsewhere.
    name_apart(model)
    return model
