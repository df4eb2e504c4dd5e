"""Write a finished model in ops that every stock build of ONNX Runtime has and computes rightly."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.canonical.inline_functions import inline_functions
from onnxtrain.passes.portable.batch_norm import TrainingBatchNormPass
from onnxtrain.passes.portable.convolution import ConvolutionAttributesPass
from onnxtrain.passes.portable.cum_sum import CumSumPass
from onnxtrain.passes.portable.dropout import remove_idle_dropout
from onnxtrain.passes.portable.einsum import EinsumPass
from onnxtrain.passes.portable.infinities import InfinitiesPass
from onnxtrain.passes.portable.max_pool import MaxPoolIndicesPass
from onnxtrain.passes.portable.reductions import Float32SumsPass, ReductionRankPass
from onnxtrain.passes.portable.slices import NegativeStepsPass, WrappingPadPass
from onnxtrain.passes.runtime_faults.absent_inputs import AbsentInputsPass
from onnxtrain.passes.shapes.infer import infer_shapes
from onnxtrain.passes.tidy.unused import remove_unread_initializers, remove_unread_nodes


def suit_every_host(model: ir.Model) -> ir.Model:
    """Return `model` without what builds for browsers and phones lack or get wrong; may change `model`.

    The docstring of each pass names the build and the fault. `find_obstacles` lists what is left. Values keep their
    names. Expects a training, eval, inference or optimizer model that is otherwise finished.
    """
    # Inside a function, shapes are unknown and attributes are references to those of the call. A call that leaves out
    # an input leaves an empty name in the body, at which a Conv of onnxruntime-web's default bundle (JSEP) fails.
    # Without calls no host has native kernels to choose, and all compute the same.
    model = inline_functions(model)
    Float32SumsPass()(model)
    model = infer_shapes(model)
    AbsentInputsPass()(model)
    remove_idle_dropout(model)
    for rewrite in (
        TrainingBatchNormPass(),
        MaxPoolIndicesPass(),
        CumSumPass(),
        EinsumPass(),
        NegativeStepsPass(),
        WrappingPadPass(),
        ConvolutionAttributesPass(),
        InfinitiesPass(compared_only=True),
        ReductionRankPass(),
    ):
        rewrite(model)
    # ONNX Runtime would warn at each start of initializers that nothing reads, such as ratios of Dropout.
    remove_unread_nodes(model.graph)
    remove_unread_initializers(model.graph, list(model.graph.initializers.values()))
    return model
