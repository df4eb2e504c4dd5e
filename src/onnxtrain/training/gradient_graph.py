"""Builds the training model: differentiates the forward graph, and rewrites the result for ONNX Runtime."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff import add_gradients, expand_path
from onnxtrain.emitter import computed_names
from onnxtrain.fusion import (
    DoubleSumPass,
    ElementwisePass,
    RecomputedChainsPass,
    RowsPass,
    TransposePass,
    fuse_exported,
    fuse_kernels,
)
from onnxtrain.passes import (
    CleanupPass,
    FloatDequantizedPass,
    FoldFrozenBatchNormPass,
    LongSumsPass,
    RacingScatterPass,
    SharedSizesPass,
    apply_workarounds,
    lift_constants,
    simplify_gradients,
)
from onnxtrain.passes.portable import draw_from_input
from onnxtrain.passes.profiles import PROFILES
from onnxtrain.recipe import Recipe
from onnxtrain.training.build_state import Build
from onnxtrain.training.file_ops import join_skip_norms, restore_file_ops
from onnxtrain.training.gradient_outputs import append_gradients
from onnxtrain.training.recompute import RecomputePass
from onnxtrain.training.running_statistics import chain_statistics


def build_training_model(build: Build, recipe: Recipe) -> ir.Model:
    """Returns the training model: the differentiated forward graph, rewritten for ONNX Runtime.

    The outputs of the training model are the loss and the additional outputs, the gradients of the parameters, the row
    indices of sparse gradients, the updated running statistics, and the gradients of inputs, in this order.
    """
    as_deployed = recipe.activations == "deployed"
    # Before differentiation, so that the gradient uses the same random numbers.
    build.random = draw_from_input(build.forward, PROFILES[recipe.profile].drawn)
    build.updated = chain_statistics(build.forward, list(build.statistics))
    # Folds only in a frozen backbone, whose parameters are constants of the graph.
    FoldFrozenBatchNormPass()(build.forward)
    # Fusion comes before differentiation, because fused ops have better gradients. With deployed activations it is
    # left out: a kernel that sums in a different order differs in the last bit, so that a value halfway between two
    # integers may be rounded differently. The loss of a small exported Llama was off by 2e-4.
    if as_deployed:
        join_skip_norms(build.forward)
    else:
        fuse_exported(build.forward)
    loss, wrt = str(build.forward.graph.outputs[0].name), [*build.trainable, *build.input_gradients]
    file_values = computed_names(build.forward.graph)
    # Function bodies replace ops without a rule before the forward names are recorded: afterwards, a graph's forward
    # nodes cannot be distinguished from its gradient nodes.
    forward = expand_path(build.forward, [loss], wrt, float_products=False)
    forward_values = computed_names(forward.graph)
    training, gradients = add_gradients(
        forward,
        loss,
        wrt,
        # `build_forward_graph` has already converted the products that run in floating point.
        float_products=False,
    )
    if as_deployed:
        restore_file_ops(training, build.forward)
    append_gradients(build, training, gradients)
    CleanupPass(keep=set())(training)
    training = apply_workarounds(training)
    simplify_gradients(training)
    SharedSizesPass()(training)
    FloatDequantizedPass(file_values if as_deployed else ())(training)
    # After the passes above: functions with native kernels hide the standard ops that these passes match.
    fuse_kernels(training, bfloat16=recipe.precision == "bf16", kept=file_values if as_deployed else ())
    # After every pass that merges equal nodes, which would undo the recomputation.
    if recipe.recompute:
        RecomputePass(forward_values, products=recipe.recompute is True)(training)
    # After every pass that matches reductions.
    LongSumsPass(file_values if as_deployed else ())(training)
    DoubleSumPass(file_values if as_deployed else ())(training)
    RowsPass(file_values if as_deployed else ())(training)
    if not as_deployed:
        RecomputedChainsPass(forward_values)(training)
    ElementwisePass(file_values if as_deployed else ())(training)
    TransposePass()(training)
    RacingScatterPass()(training)
    lift_constants(training)
    return training
