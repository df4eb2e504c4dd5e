"""Builds the training model: differentiates the forward graph, and rewrites the result for ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.autodiff import add_gradients, append_outputs, expand_path
from onnxtrain.emitter import Emitter, values_by_name
from onnxtrain.fusion import fuse_exported, fuse_kernels
from onnxtrain.passes import (
    CleanupPass,
    FloatDequantizedPass,
    FoldFrozenBatchNormPass,
    LongSumsPass,
    apply_workarounds,
    lift_constants,
    simplify_gradients,
)
from onnxtrain.passes.portable import draw_from_input
from onnxtrain.passes.profiles import PROFILES
from onnxtrain.recipe import Recipe
from onnxtrain.selection import batch_norms
from onnxtrain.training.build_state import Build
from onnxtrain.training.file_ops import join_skip_norms, restore_file_ops
from onnxtrain.training.forward_graph import computed_names
from onnxtrain.training.recompute import RecomputePass
from onnxtrain.training.running_variance import update_unbiased
from onnxtrain.training.sparse_gradients import keep_rows


def build_training_model(build: Build, recipe: Recipe) -> ir.Model:
    """Returns the training model: the differentiated forward graph, rewritten for ONNX Runtime.

    The outputs of the training model are the loss and the additional outputs, the gradients of the parameters, the row
    indices of sparse gradients, the updated running statistics, and the gradients of inputs, in this order.
    """
    as_deployed = recipe.activations == "deployed"
    # Before differentiation, so that the gradient uses the same random numbers.
    build.random = draw_from_input(build.forward, PROFILES[recipe.profile].drawn)
    build.updated = _chain_statistics(build.forward, list(build.statistics))
    # Folds only in a frozen backbone, whose parameters are constants of the graph.
    FoldFrozenBatchNormPass()(build.forward)
    # Fusion comes before differentiation, because fused ops have better gradients. With deployed activations it is
    # left out: a kernel that sums in another order differs in the last bit, so that a value halfway between two
    # integers is rounded to the other one. The loss of a small exported Llama was off by 2e-4.
    if as_deployed:
        join_skip_norms(build.forward)
    else:
        fuse_exported(build.forward)
    loss, wrt = str(build.forward.graph.outputs[0].name), [*build.trainable, *build.input_gradients]
    file_values = computed_names(build.forward)
    # Function bodies replace ops without a rule before the forward names are recorded: afterwards nothing tells the
    # forward nodes of a graph from its gradient nodes.
    forward = expand_path(build.forward, [loss], wrt, float_products=False)
    forward_values = computed_names(forward)
    training, gradients = add_gradients(
        forward,
        loss,
        wrt,
        # `build_forward_graph` has already converted the products that run in floating point.
        float_products=False,
    )
    if as_deployed:
        restore_file_ops(training, build.forward)
    _append_gradients(build, training, gradients)
    CleanupPass(keep=set())(training)
    training = apply_workarounds(training)
    simplify_gradients(training)
    FloatDequantizedPass(file_values if as_deployed else ())(training)
    # After the passes above: functions with native kernels hide the standard ops that these passes match.
    fuse_kernels(training, bfloat16=recipe.precision == "bf16", kept=file_values if as_deployed else ())
    # After every pass that merges equal nodes, which would undo the recomputation.
    if recipe.recompute:
        RecomputePass(forward_values, products=recipe.recompute is True)(training)
    # After every pass that matches reductions.
    LongSumsPass(file_values if as_deployed else ())(training)
    lift_constants(training)
    return training


def _append_gradients(build: Build, training: ir.Model, gradients: Sequence[ir.Value]) -> None:
    """Appends gradients and updated statistics to the training model's outputs, in `describe_training`'s order."""
    count = len(build.trainable)
    append_outputs(training, build.trainable, gradients[:count])
    # Read from the outputs: parameters may share one gradient (as in x + y), of which `append_outputs` makes copies.
    tables = dict(zip(build.trainable, list(training.graph.outputs)[-count:], strict=True))
    parameters = {str(value.name): value for value in build.forward.graph.inputs}
    build.row_indices = keep_rows(training, {name: tables[name] for name in build.sparse}, parameters)
    values = values_by_name(training.graph)
    training.graph.outputs.extend(values[output] for output in build.updated.values())
    append_outputs(training, build.input_gradients, gradients[count:])


def _chain_statistics(model: ir.Model, names: Sequence[str]) -> dict[str, str]:
    """Makes each updated running statistic an output named `<statistic>_updated`.

    If several nodes share a statistic, each updates the result of the previous node, as in PyTorch, where the layers
    run in turn.

    Returns:
        The name of the output per statistic.
    """
    latest: dict[str, ir.Value] = {}
    writer = Emitter(model.graph)
    for node, training in batch_norms(model):
        if not training:
            continue
        # Outputs 1 and 2, the updated mean and variance, are optional and may be left out in the file.
        node.resize_outputs(3)
        for index in (3, 4):
            statistic = node.inputs[index]
            if statistic is None or statistic.name not in names:
                continue
            name = str(statistic.name)
            if name in latest:
                node.replace_input_with(index, latest[name])
            output = node.outputs[index - 2]
            output.shape, output.type = statistic.shape, statistic.type
            latest[name] = output if index == 3 else update_unbiased(writer, node)
    for name, value in latest.items():
        value.name = writer.unique_name(f"{name}_updated")
    return {name: str(latest[name].name) for name in names}
