"""Cuts a model down to its forward graph: the part that computes the scalar loss."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain._words import argument
from onnxtrain.emitter import Emitter, find_value, static_dims
from onnxtrain.errors import GraphBuildError
from onnxtrain.losses import mark_labels
from onnxtrain.passes import (
    CleanupPass,
    FloatProductsPass,
    ReluAfterMaxPoolPass,
    infer_shapes,
    remove_unread_nodes,
    why_untyped,
)
from onnxtrain.recipe import Recipe
from onnxtrain.selection import float_initializers, is_float
from onnxtrain.training.grouped_inputs import group_inputs
from onnxtrain.training.key_value_cache import DropCachePass, find_cache
from onnxtrain.training.layer_modes import Unchosen, set_modes


def build_forward_graph(model: ir.Model, loss: str, recipe: Recipe) -> tuple[ir.Model, Unchosen]:
    """Copies the part of a model that computes the loss and the additional outputs of a recipe.

    Returns:
        The copy, whose first output is the scalar loss and whose layers are in the recipe's modes, and the layers whose
        mode the recipe does not choose.

    Raises:
        GraphBuildError: the loss is not a scalar, a value would be returned twice, a pattern matches no layer, or a
            layer cannot run in training mode.
    """
    as_deployed = recipe.activations == "deployed"
    forward = model.clone()
    _set_outputs(forward, [loss, *(recipe.additional_output_names or ())])
    _make_scalar(forward)
    # Training has no earlier tokens, so it needs no cache; the inference model keeps its cache.
    cache = find_cache(model.graph)
    DropCachePass(cache, as_deployed=as_deployed)(forward)
    group_inputs(forward, cached=bool(cache))
    # Before the cleanup, which removes the Identity that an exporter left in place of a Dropout.
    remove_unread_nodes(forward.graph)
    unchosen = set_modes(forward, recipe.batch_norm, recipe.dropout)
    # Unused initializers stay: if a user asks for one, the error of the parameter selection names it.
    CleanupPass(keep={*(name for name, _ in float_initializers(forward)), *(recipe.frozen_params or ())})(
        forward
    )
    # ONNX Runtime cannot bind strings together with parameters. Only the inference model keeps the string inputs that
    # the loss does not read.
    for value in [v for v in forward.graph.inputs if v.dtype == ir.DataType.STRING and not v.uses()]:
        if not value.is_graph_output():
            forward.graph.inputs.remove(value)
    mark_labels(forward.graph)
    # Before differentiation, so that the gradient of Relu has the smaller, pooled shape as well.
    ReluAfterMaxPoolPass()(forward)
    # In the training and the eval model alike: a mix of integer and float matrix products would match neither the
    # results of the file nor those of the float weights.
    if not as_deployed:
        FloatProductsPass()(forward)
    return forward, unchosen


def _set_outputs(model: ir.Model, names: Sequence[str]) -> None:
    """Makes the named values the only outputs of a model, in order."""
    # ONNX Runtime mishandles a graph that returns one value twice.
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise GraphBuildError(
            f"building the training graph: {', '.join(repeated)} would be returned more than once; the "
            f"first output is always the loss, {names[0]!r}: name each other value once in "
            "additional_output_names"
        )
    values = [named(model, name) for name in names]
    model.graph.outputs.clear()
    model.graph.outputs.extend(values)


def _make_scalar(model: ir.Model) -> None:
    """Squeezes the loss, the model's first output, to rank 0; the scalar keeps the name of the loss."""
    loss = model.graph.outputs[0]
    # A user's own loss class may append nodes without shapes.
    if loss.shape is None or loss.dtype is None:
        infer_shapes(model)
    dims = static_dims(loss)
    if not is_float(loss) or dims is None or any(dim != 1 for dim in dims):
        raise GraphBuildError(
            f"building the training graph: the loss {loss.name!r} is {loss.dtype} of shape {loss.shape}, "
            "which is not a scalar floating-point value. Choose a loss with reduction 'mean' or 'sum', or name "
            f"a scalar of the model in {argument('loss_input_names')}.{why_untyped(loss) if dims is None else ''}"
        )
    # A loss of shape [1] or [1, 1] is squeezed: the manifest promises hosts a scalar of rank 0.
    if dims:
        writer = Emitter(model.graph)
        name = str(loss.name)
        scalar = writer.Squeeze(loss)
        loss.name = writer.unique_name(f"{name}_unsqueezed")
        scalar.name, scalar.shape, scalar.type = name, ir.Shape([]), loss.type
        model.graph.outputs[0] = scalar


def named(model: ir.Model, name: str) -> ir.Value:
    """Returns the value called `name`.

    Raises:
        GraphBuildError: the model has no value of this name.
    """
    value = find_value(model.graph, name)
    if value is not None:
        return value
    outputs = ", ".join(str(v.name) for v in model.graph.outputs)
    raise GraphBuildError(
        f"building the training graph: the model has no value {name!r} to return; its outputs are {outputs}"
    )
