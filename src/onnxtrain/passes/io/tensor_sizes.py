"""Checks that tensors of a proto have as much data as their shapes require."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

import onnx
from onnx import TensorProto

from onnxtrain.runtime.external_data import bits_of

# Fields of a TensorProto with the elements if there is no `raw_data`; each dtype uses one of them.
_LISTS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
_COMPLEX = (TensorProto.COMPLEX64, TensorProto.COMPLEX128)


def check_tensors(model: onnx.ModelProto) -> None:
    """Raises an error if a tensor of a model has more or less data than its shape requires.

    Tensors in attributes, subgraphs and functions are checked as well. The size of external data is not checked. Later
    code trusts shapes and allocates memory for them, so a corrupt file could ask for terabytes.

    Raises:
        ValueError: a tensor has a negative size, no dtype, too much or too little data for its shape, or contains
            strings in an external file. The message names the tensor.
    """
    for tensor in _tensors(model):
        if any(size < 0 for size in tensor.dims):
            raise ValueError(f"'{tensor.name}' has a negative size in its shape {list(tensor.dims)}")
        if tensor.data_type == TensorProto.UNDEFINED:
            raise ValueError(f"'{tensor.name}' has no dtype")
        if tensor.data_type == TensorProto.STRING and tensor.data_location == TensorProto.EXTERNAL:
            raise ValueError(f"'{tensor.name}' contains strings, which cannot be stored as external data")
        if tensor.data_location != TensorProto.EXTERNAL:
            _check_data(tensor)


def _check_data(tensor: TensorProto) -> None:
    """Raises ValueError if a tensor without external data has too much or too little data for its shape."""
    elements = prod(tensor.dims)
    bits = bits_of(tensor.data_type)
    if tensor.HasField("raw_data"):
        needed = None if bits is None else (elements * bits + 7) // 8
        held, unit = len(tensor.raw_data), "bytes"
    else:
        # Complex numbers are stored as pairs of real numbers.
        needed = elements * (2 if tensor.data_type in _COMPLEX else 1)
        held, unit = sum(len(getattr(tensor, name)) for name in _LISTS), "elements"
        # For int4 and the like, an int32 may contain one element or several; both forms are in use.
        if bits is not None and bits < 8:
            needed = min(needed, max(held, (elements * bits + 31) // 32))
    if needed is not None and held != needed:
        raise ValueError(
            f"'{tensor.name}' of shape {list(tensor.dims)} needs {needed} {unit} of data, but has {held}"
        )


def _tensors(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """Yields all tensors of a model."""
    yield from _graph_tensors(model.graph)
    for function in model.functions:
        yield from _attribute_tensors(attribute for node in function.node for attribute in node.attribute)
        yield from _attribute_tensors(function.attribute_proto)


def _graph_tensors(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    """Yields the tensors of a graph and its subgraphs."""
    yield from graph.initializer
    yield from _attribute_tensors(attribute for node in graph.node for attribute in node.attribute)


def _attribute_tensors(attributes: Iterable[onnx.AttributeProto]) -> Iterator[TensorProto]:
    """Yields the tensors of attributes and of their subgraphs."""
    for attribute in attributes:
        if attribute.type == onnx.AttributeProto.TENSOR:
            yield attribute.t
        yield from attribute.tensors
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield from _graph_tensors(attribute.g)
        for graph in attribute.graphs:
            yield from _graph_tensors(graph)
