"""Write a finished model around what ONNX Runtime gets wrong or lacks: the last step of every way out."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.runtime_faults.absent_inputs import AbsentInputsPass
from onnxtrain.passes.runtime_faults.empty_expand import EmptyExpandPass
from onnxtrain.passes.runtime_faults.narrow_floats import has_narrow_floats, widen_narrow_floats
from onnxtrain.passes.runtime_faults.packed_attention import unpack_attention
from onnxtrain.passes.runtime_faults.reduction_axes import NoAxesPass, PositiveAxesPass
from onnxtrain.passes.runtime_faults.running_statistics import IsolateStatisticsPass
from onnxtrain.passes.runtime_faults.scan_outputs import ScanOutputsPass
from onnxtrain.passes.runtime_faults.slice_axes import SliceAxesPass
from onnxtrain.passes.runtime_faults.swish import SwishPass
from onnxtrain.passes.shapes.infer import infer_shapes
from onnxtrain.passes.tidy.constants import lift_constants
from onnxtrain.passes.tidy.cross_entropy import CrossEntropyPass
from onnxtrain.passes.tidy.unique_names import name_apart


def suit_runtime(model: ir.Model) -> ir.Model:
    """Return a model of known shapes that computes the same in ONNX Runtime; may change `model`.

    Running statistics are kept from being merged with weights, axes are counted from the front, lest reductions of
    an empty batch keep their shape, reductions over no axes are written elementwise, and bfloat16 is computed in
    float32, which the CPU provider has kernels for. Cross entropies are taken along the last axis. Swish, and attention
    of packed queries, keys and values, become what they are made of. Absent inputs at the end of a node are dropped.
    Bodies of Scan return copies of their inputs, not the inputs. Slices have axes beside steps of run time, and
    broadcasts to no elements cut what they broadcast.
    Values of subgraphs have names of their own.
    """
    model = unpack_attention(model)
    IsolateStatisticsPass()(model)
    if SwishPass()(model).modified:
        lift_constants(model)
    # Not float16: a model also runs where that has kernels of its own.
    narrow = (ir.DataType.BFLOAT16,)
    model = widen_narrow_floats(model, narrow) if has_narrow_floats(model, narrow) else infer_shapes(model)
    NoAxesPass()(model)
    CrossEntropyPass()(model)
    modified = [
        rewrite(model).modified for rewrite in (PositiveAxesPass(), SliceAxesPass(), EmptyExpandPass())
    ]
    if any(modified):
        lift_constants(model)
    AbsentInputsPass()(model)
    ScanOutputsPass()(model)
    name_apart(model)
    return model
