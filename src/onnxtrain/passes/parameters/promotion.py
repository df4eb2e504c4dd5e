"""Move parameters between initializers (inference) and graph inputs (training)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import ModelError
from onnxtrain.passes.shapes.outdated_sizes import forget_sizes_behind
from onnxtrain.passes.tidy.constants import unmark_constant


def promote_initializers(model: ir.Model, names: Iterable[str]) -> dict[str, ir.TensorProtocol]:
    """Turn initializers into graph inputs, in place, after the inputs there are and in the order of `names`.

    Shapes that follow from what is in them are forgotten; infer them again.

    Returns:
        The tensors that the graph no longer holds, by name and in the same order; external data
        stays on disk.

    Raises:
        ModelError: A name is no initializer of the main graph, or is given twice. The model is then
            unchanged.
    """
    names = list(names)
    initializers = model.graph.initializers
    missing = [name for name in names if name not in initializers]
    if missing:
        raise ModelError(
            f"Cannot make {', '.join(map(repr, missing))} inputs of the training graph: not among the "
            f"model's initializers ({_some(initializers)})."
        )
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ModelError(f"Cannot make {', '.join(map(repr, twice))} inputs of the training graph twice.")
    tensors = {name: _tensor_of(initializers[name]) for name in names}
    for name, tensor in tensors.items():
        value = initializers[name]
        del initializers[name]
        value.const_value = None
        value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
        model.graph.inputs.append(value)
    forget_sizes_behind(model.graph, model.graph.inputs[len(model.graph.inputs) - len(names) :])
    return tensors


@dataclass(frozen=True)
class Withheld:
    """Values of initializers that passes must not see.

    Attributes:
        tensors: the values by name; `order` the names of all initializers that there were.
    """

    tensors: dict[str, ir.TensorProtocol]
    order: list[str]


def withhold(model: ir.Model, names: Iterable[str]) -> Withheld:
    """Make those of the names that are initializers graph inputs for a while, in place: see :func:`give_back`.

    What is to be an input of the training model, or differentiated, has no value that passes may rely on: not to
    fold what is computed from it, nor to infer shapes. Constant nodes of these names are parameters from now on.
    """
    order = [str(name) for name in model.graph.initializers]
    present = [name for name in dict.fromkeys(names) if name in model.graph.initializers]
    for name in present:
        unmark_constant(model.graph.initializers[name])
    return Withheld(promote_initializers(model, present), order)


def give_back(model: ir.Model, withheld: Withheld) -> None:
    """Make what was withheld initializers again, in place and in the order that they had.

    Args:
        model: what became of the model.
        withheld: what :func:`withhold` returned.
    """
    embed_parameters(model, withheld.tensors)
    now = dict(model.graph.initializers)
    model.graph.initializers.clear()
    for name in dict.fromkeys((*withheld.order, *now)):
        if name in now:
            model.graph.initializers.add(now[name])


def embed_parameters(model: ir.Model, values: Mapping[str, np.ndarray | ir.TensorProtocol]) -> None:
    """Turn graph inputs into initializers with the given values, in place and in the order of `values`.

    The inverse of :func:`promote_initializers`. Arrays are not copied.

    Raises:
        ModelError: A name is no graph input, or dtype or shape differ from it. The model is then unchanged.
    """
    inputs = {value.name: value for value in model.graph.inputs}
    missing = [name for name in values if name not in inputs]
    if missing:
        raise ModelError(
            f"Cannot embed {', '.join(map(repr, missing))}: not among the graph's inputs ({_some(inputs)})."
        )
    tensors = {name: _tensor_for(inputs[name], value) for name, value in values.items()}
    kept = [value for value in model.graph.inputs if value.name not in tensors]
    model.graph.inputs.clear()
    model.graph.inputs.extend(kept)
    for name, tensor in tensors.items():
        inputs[name].const_value = tensor
        model.graph.register_initializer(inputs[name])


def _tensor_of(value: ir.Value) -> ir.TensorProtocol:
    if value.const_value is None:
        raise ModelError(f"The initializer '{value.name}' has no tensor; load the model with its data.")
    return value.const_value


def _tensor_for(target: ir.Value, value: np.ndarray | ir.TensorProtocol) -> ir.TensorProtocol:
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


def _some(names: Iterable[str | None], limit: int = 8) -> str:
    shown = [str(name) for name in names]
    if not shown:
        return "there are none"
    return ", ".join(shown[:limit]) + (f", ... ({len(shown)} in all)" if len(shown) > limit else "")
