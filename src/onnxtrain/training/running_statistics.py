"""Updates the running statistics of BatchNormalization as PyTorch does."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.passes import is_training_batch_norm

UNBIASED_KEY = "onnxtrain.unbiased_running_variance"
"""Metadata key of a BatchNormalization node whose running variance is updated as in PyTorch, from the batch's unbiased
variance. Cloning and saving a model keep the key."""

# Index of the input and of the output in BatchNormalization-14.
_INPUT_VAR, _RUNNING_VAR = 4, 2


def chain_statistics(model: ir.Model, names: Sequence[str]) -> dict[str, str]:
    """Makes each updated running statistic an output named `<statistic>_updated`.

    If several nodes share a statistic, each updates the result of the previous node, as in PyTorch, where the layers
    run in turn.

    Returns:
        The output name for each statistic, e.g. {"bn.running_mean": "bn.running_mean_updated"}.
    """
    latest: dict[str, ir.Value] = {}
    writer = Emitter(model.graph)
    for node in filter(is_training_batch_norm, tuple(model.graph)):
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
            latest[name] = output if index == 3 else _update_unbiased(writer, node)
    for name, value in latest.items():
        value.name = writer.unique_name(f"{name}_updated")
    return {name: str(latest[name].name) for name in names}


def _update_unbiased(op: Emitter, node: ir.Node) -> ir.Value:
    """Makes a training BatchNormalization with the metadata `UNBIASED_KEY` update its running variance as PyTorch does.

    PyTorch: running' = momentum * running + (1 - momentum) * variance * n / (n - 1), for n values per channel. ONNX
    (BatchNormalization-15) has no factor b = n / (n - 1). The node therefore reads running / b instead of running, and
    its result is multiplied by b; the op and its native kernels need no change. With one value per channel, the result
    is NaN; PyTorch raises an error.

    Args:
        op: emitter of the node's graph.
        node: a BatchNormalization in training mode with three outputs; its input_var may be any value.

    Returns:
        The updated running variance: a new value if the node has the metadata, else the node's own output.
    """
    running, updated_biased = node.inputs[_INPUT_VAR], node.outputs[_RUNNING_VAR]
    x = node.inputs[0]
    if node.metadata_props.pop(UNBIASED_KEY, None) is None or running is None or x is None:
        return updated_biased
    with op.placing(before=node):
        factor = _bessel(op, x, running)
        node.replace_input_with(_INPUT_VAR, op.Div(running, factor))
    with op.placing(after=node):
        updated: ir.Value = op.Mul(updated_biased, factor)
    product = updated.producer()
    assert product is not None
    updated.shape, updated.type = running.shape, running.type
    # `replace_all_uses_with` also redirects the product itself, which must keep reading `updated_biased`.
    updated_biased.replace_all_uses_with(updated, replace_graph_outputs=True)
    product.replace_input_with(0, updated_biased)
    return updated


def _bessel(op: Emitter, x: ir.Value, like: ir.Value) -> ir.Value:
    """Returns n / (n - 1), with n = size(x) / channels, in the dtype of `like`; infinite for n = 1."""
    sizes = static_dims(x)
    # With static sizes the factor is a constant, so that no step computes it.
    if sizes is not None and None not in sizes:
        count = math.prod(size for axis, size in enumerate(sizes) if axis != 1 and size is not None)
        return op.const(count / (count - 1) if count > 1 else math.inf, like=like)
    # In float32 for every dtype of x, because the largest float16 is 65,504.
    size = op.Cast(op.Size(x), to=ir.DataType.FLOAT)
    static = None if sizes is None else sizes[1]
    channels = op.Cast(op.Squeeze(op.dim(x, 1)), to=ir.DataType.FLOAT) if static is None else float(static)
    factor: ir.Value = op.Div(size, op.Sub(size, channels))
    return factor if like.dtype == ir.DataType.FLOAT else op.Cast(factor, to=like.dtype)
