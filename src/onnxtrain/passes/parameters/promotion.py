"""Turns parameters from initializers (inference) into graph inputs (training), and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import ModelError
from onnxtrain.passes.shapes.outdated_sizes import forget_content_dependent_sizes
from onnxtrain.passes.tidy.constants import sort_initializers, unmark_constant


def promote_initializers(model: ir.Model, names: Iterable[str]) -> dict[str, ir.TensorProtocol]:
    """Turns initializers into graph inputs, in place; appends the inputs in the order of `names`.

    Removes shapes that were inferred from the elements of these initializers, e.g. the output shape of a Reshape whose
    target shape is promoted. Infer shapes again afterwards.

    Returns:
        The former values by name, in the same order; external data is not read.

    Raises:
        ModelError: a name is not an initializer of the main graph, or occurs twice. The model is not modified.
    """
    names = list(names)
    initializers = model.graph.initializers
    missing = [name for name in names if name not in initializers]
    if missing:
        raise ModelError(
            f"Cannot turn {', '.join(map(repr, missing))} into inputs of the training graph: not among the "
            f"model's initializers ({_list_names(initializers)})."
        )
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ModelError(
            "Cannot turn parameters into inputs of the training graph: "
            f"{', '.join(map(repr, twice))} is named more than once."
        )
    # All checks come before the first change.
    tensors = {name: _tensor_of(initializers[name]) for name in names}
    for name, tensor in tensors.items():
        value = initializers[name]
        del initializers[name]
        value.const_value = None
        # A graph input must declare both; for an initializer, they may only be known from its tensor.
        value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
        model.graph.inputs.append(value)
    forget_content_dependent_sizes(model.graph, model.graph.inputs[len(model.graph.inputs) - len(names) :])
    return tensors


@dataclass(frozen=True)
class Withheld:
    """Initializers that :func:`withhold` has turned into inputs.

    Attributes:
        tensors: former value of each withheld initializer by name, e.g. {"fc.weight": ...}.
        order: original order of all initializers of the model, e.g. ["fc.weight", "axes"].
    """

    tensors: dict[str, ir.TensorProtocol]
    order: list[str]


def withhold(model: ir.Model, names: Iterable[str]) -> Withheld:
    """Hides initializers' values from passes by turning them into graph inputs; :func:`give_back` restores them.

    Used for initializers whose values may change, e.g. parameters: passes must not fold or infer anything from them. A
    Constant node among `names` becomes a parameter. Names without an initializer are ignored.
    """
    order = [str(name) for name in model.graph.initializers]
    present = [name for name in dict.fromkeys(names) if name in model.graph.initializers]
    for name in present:
        unmark_constant(model.graph.initializers[name])
    return Withheld(promote_initializers(model, present), order)


def give_back(model: ir.Model, withheld: Withheld) -> None:
    """Turns withheld inputs back into initializers, in place and in their original order.

    Args:
        model: the model that :func:`withhold` has modified, or a rewritten copy.
        withheld: result of :func:`withhold`.
    """
    embed_parameters(model, withheld.tensors)
    # Initializers that passes have added since then follow the original ones.
    sort_initializers(model.graph, withheld.order)


def embed_parameters(model: ir.Model, values: Mapping[str, np.ndarray | ir.TensorProtocol]) -> None:
    """Turns graph inputs into initializers with these values, in place and in the order of `values`.

    The inverse of :func:`promote_initializers`. Arrays are not copied.

    Raises:
        ModelError: a name is not a graph input, or a value's dtype or shape does not match the input. The model is not
            modified.
    """
    inputs = {value.name: value for value in model.graph.inputs}
    missing = [name for name in values if name not in inputs]
    if missing:
        raise ModelError(
            f"Cannot embed {', '.join(map(repr, missing))}: not among the graph's inputs ({_list_names(inputs)})."
        )
    # All checks come before the first change.
    tensors = {name: _tensor_for(inputs[name], value) for name, value in values.items()}
    kept = [value for value in model.graph.inputs if value.name not in tensors]
    model.graph.inputs.clear()
    model.graph.inputs.extend(kept)
    for name, tensor in tensors.items():
        inputs[name].const_value = tensor
        model.graph.register_initializer(inputs[name])


def _tensor_of(value: ir.Value) -> ir.TensorProtocol:
    """Returns the content of an initializer. Raises ModelError if it has none."""
    if value.const_value is None:
        raise ModelError(f"The initializer '{value.name}' has no tensor; load the model with its data.")
    return value.const_value


def _tensor_for(target: ir.Value, value: np.ndarray | ir.TensorProtocol) -> ir.TensorProtocol:
    """Returns `value` as a tensor, after checking it against the dtype and static sizes of the input `target`."""
    name = target.name
    tensor = ir.tensor(value, name=name) if isinstance(value, np.ndarray) else value
    if target.dtype is not None and tensor.dtype != target.dtype:
        raise ModelError(f"Cannot embed '{name}': the graph expects {target.dtype}, got {tensor.dtype}.")
    shape = tuple(tensor.shape.numpy())
    expected = None if target.shape is None else tuple(target.shape)
    if expected is not None and (
        len(expected) != len(shape)
        or any(isinstance(want, int) and want != got for want, got in zip(expected, shape, strict=True))
    ):
        raise ModelError(
            f"Cannot embed '{name}': the graph expects shape {list(expected)}, got {list(shape)}."
        )
    return tensor


def _list_names(names: Iterable[str | None], limit: int = 8) -> str:
    """Formats at most `limit` names for an error message, e.g. "a, b, ... (12 in all)"."""
    shown = [str(name) for name in names]
    if not shown:
        return "there are none"
    return ", ".join(shown[:limit]) + (f", ... ({len(shown)} in all)" if len(shown) > limit else "")
