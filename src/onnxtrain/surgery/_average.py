"""Averages the parameters of several models of the same network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import InputError

# Metadata that describes how inputs are encoded, in which order the classes are, and how scores are calibrated.
_DESCRIPTIONS = ("onnxtrain.images", "onnxtrain.table", "onnxtrain.texts", "onnxtrain.calibration")
_DOING = "Averaging models"
# Characters of a difference in a message: an attribute may contain a tensor.
_SHOWN = 200


def average(models: Sequence[ir.Model], names: Sequence[str], weights: Sequence[float]) -> ir.Model:
    """Returns the first model with its floating-point initializers replaced by weighted means over all models.

    The means are computed in float64, one tensor at a time, and cast back. Equal tensors are kept.

    Args:
        models: models of the same structure; the first one is modified.
        names: descriptions of the models for error messages, e.g. their paths.
        weights: weight of each model.

    Raises:
        InputError: the models differ in more than the values of floating-point initializers, or such a value is NaN or
            infinite and not equal in all models.
    """
    for other, name in zip(models[1:], names[1:], strict=True):
        _require_same(models[0], other, names[0], name)
    for graphs in zip(*(model.graphs() for model in models), strict=True):
        for key in graphs[0].initializers:
            values = [graph.initializers[key] for graph in graphs]
            _average_tensor(key, values, names, weights)
    return models[0]


def _average_tensor(
    key: str, values: Sequence[ir.Value], names: Sequence[str], weights: Sequence[float]
) -> None:
    """Replaces the tensor of the first of several initializers called `key` with the weighted mean of all of them."""
    tensors = [value.const_value for value in values]
    first = tensors[0]
    if first is None:
        return
    content = _bytes(first)
    different = [
        name
        for tensor, name in zip(tensors[1:], names[1:], strict=True)
        if tensor is not None and _bytes(tensor) != content
    ]
    if not different:
        return
    # Codes of 8 bits and fewer, such as int8 or float8, are multiplied by scales: a mean of codes means nothing.
    if not first.dtype.is_floating_point() or first.dtype.bitwidth < 16:
        raise InputError(
            f"{_DOING}: the tensor '{key}' ({first.dtype.name.lower()}) has other values in '{different[0]}' than in "
            f"'{names[0]}'. Only tensors of 16 bits and more per floating-point number can be averaged. Average the "
            "models before they are quantized, and quantize the result."
        )
    total = np.zeros(first.shape.numpy(), np.float64)
    for tensor, name, weight in zip(tensors, names, weights, strict=True):
        assert tensor is not None
        array = tensor.numpy().astype(np.float64)
        if not np.isfinite(array).all():
            raise InputError(
                f"{_DOING}: the tensor '{key}' of '{name}' has NaN or infinite values. Leave this model out."
            )
        total += weight * array
    mean = (total / sum(weights)).astype(first.dtype.numpy())
    values[0].const_value = ir.Tensor(mean, dtype=first.dtype, name=key)


def _bytes(tensor: ir.TensorProtocol) -> bytes:
    # Strings have no bytes of their own in onnx_ir.
    return repr(tensor.numpy().tolist()).encode() if tensor.dtype == ir.DataType.STRING else tensor.tobytes()


def _require_same(first: ir.Model, other: ir.Model, name: str, other_name: str) -> None:
    """Raises InputError, which names the first difference, unless two models differ only in values of initializers."""
    for ours, theirs in zip_longest(_parts(first), _parts(other)):
        if ours == theirs:
            continue
        if ours is not None and theirs is not None and ours[0] == theirs[0]:
            difference = (
                f"{ours[0]} is {_short(ours[1])} in '{name}' and {_short(theirs[1])} in '{other_name}'"
            )
        else:
            difference = f"'{name}' has {_shown(ours)} where '{other_name}' has {_shown(theirs)}"
        raise InputError(
            f"{_DOING}: the models have different structures: {difference}. Pass models that were trained from the "
            "same .onnx file, or checkpoints of one run."
        )


def _shown(part: tuple[str, str] | None) -> str:
    return "nothing" if part is None else f"{part[0]}: {_short(part[1])}"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def _parts(model: ir.Model) -> Iterator[tuple[str, str]]:
    """Yields all parts of a model except the values of its initializers, as (name, content)."""
    for domain, version in sorted(model.opset_imports.items()):
        yield f"the opset of domain '{domain}'", str(version)
    for key in _DESCRIPTIONS:
        if key in model.metadata_props:
            yield f"the metadata '{key}'", model.metadata_props[key]
    for graph in model.graphs():
        for kind, values in (("input", graph.inputs), ("output", graph.outputs)):
            for index, value in enumerate(values):
                yield f"{kind} {index}", _described(value)
        for key in sorted(graph.initializers):
            yield f"the parameter '{key}'", _described(graph.initializers[key])
        yield from _nodes(graph)
    # Of functions, `all_nodes` includes those of subgraphs.
    for identifier, function in sorted(model.functions.items()):
        yield "a function", f"{identifier}"
        yield from _nodes(function.all_nodes())


def _nodes(nodes: Iterable[ir.Node]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        name = node.name or next((value.name for value in node.outputs), "") or "?"
        op = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        yield f"the node '{name}'", op
        for kind, values in (("inputs", node.inputs), ("outputs", node.outputs)):
            listed = ", ".join("" if value is None else str(value.name) for value in values)
            yield f"the list of {kind} of {op} '{name}'", f"({listed})"
        # `ir.Model.graphs` yields the subgraphs themselves.
        attributes = [
            " ".join(str(ir.to_proto(attribute)).split())
            for _, attribute in sorted(node.attributes.items())
            if attribute.type not in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
        ]
        yield f"the list of attributes of {op} '{name}'", f"({', '.join(attributes)})"


def _described(value: ir.Value) -> str:
    tensor = value.const_value
    dtype = tensor.dtype if tensor is not None else value.dtype
    shape = tensor.shape if tensor is not None else value.shape
    dims = "?" if shape is None else ", ".join(str(dim) for dim in shape)
    return f"'{value.name}' {dtype.name.lower() if dtype is not None else '?'}[{dims}]"
