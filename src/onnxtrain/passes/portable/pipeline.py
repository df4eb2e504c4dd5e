"""Rewrites a finished model so that every stock build of ONNX Runtime computes it correctly."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.canonical.einsum_pairs import EinsumPairsPass
from onnxtrain.passes.canonical.inline_functions import inline_functions
from onnxtrain.passes.portable.batch_norm import TrainingBatchNormPass
from onnxtrain.passes.portable.convolution import ConvolutionAttributesPass
from onnxtrain.passes.portable.cum_sum import CumSumPass
from onnxtrain.passes.portable.dropout import remove_idle_dropout
from onnxtrain.passes.portable.infinities import InfinitiesPass
from onnxtrain.passes.portable.max_pool import MaxPoolIndicesPass
from onnxtrain.passes.portable.reductions import Float32SumsPass, ReductionRankPass
from onnxtrain.passes.portable.slices import NegativeStepsPass, WrappingPadPass
from onnxtrain.passes.runtime_faults.absent_inputs import AbsentInputsPass
from onnxtrain.passes.shapes.infer import infer_shapes
from onnxtrain.passes.tidy.unused import remove_unread_initializers, remove_unread_nodes


def make_portable(model: ir.Model) -> ir.Model:
    """Returns `model` without constructs that builds for browsers and phones lack or get wrong; may modify `model`.

    Each pass documents the affected build and its fault. `find_obstacles` lists the nodes that remain unsupported.
    Values keep their names. Expects a training, eval, inference or optimizer model that is otherwise finished.
    """
    # In a function, shapes are unknown and attributes refer to those of the call. If a call omits an input, the body
    # has an empty name, for which a Conv of onnxruntime-web's default bundle (JSEP) fails. Without calls, no host uses
    # native kernels, and all compute the same.
    model = inline_functions(model)
    Float32SumsPass()(model)
    model = infer_shapes(model)
    AbsentInputsPass()(model)
    remove_idle_dropout(model)
    for rewrite in (
        TrainingBatchNormPass(),
        MaxPoolIndicesPass(),
        CumSumPass(),
        EinsumPairsPass(),
        NegativeStepsPass(),
        WrappingPadPass(),
        ConvolutionAttributesPass(),
        InfinitiesPass(compared_only=True),
        ReductionRankPass(),
    ):
        rewrite(model)
    # ONNX Runtime would warn about unread initializers, such as ratios of Dropout.
    remove_unread_nodes(model.graph)
    remove_unread_initializers(model.graph, list(model.graph.initializers.values()))
    return model
