"""Generates random values for the inputs of a model; integers are valid indices."""

from __future__ import annotations

import onnxtrain._desk  # noqa: F401  # isort: skip

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxtrain.emitter import static_dims
from onnxtrain.errors import InputError

Array = npt.NDArray[Any]

_BATCH, _OTHER_DIM = 3, 8
# Ops with an integer input that indexes an axis of another input: (op, position of the indices) -> position of the
# other input.
_INDEXES = {("Gather", 1): 0, ("SoftmaxCrossEntropyLoss", 1): 0, ("NegativeLogLikelihoodLoss", 1): 0}


def random_inputs(model: ir.Model, rng: np.random.Generator, dims: Mapping[str, int]) -> dict[str, Array]:
    """Generates random values for all inputs: floats between -1 and 1, and integers that are valid indices.

    Args:
        model: canonical model.
        rng: random number generator.
        dims: sizes of symbolic dimensions. Default: 3 along the first axis, 8 elsewhere.

    Raises:
        InputError: an input's dtype or rank is unknown.
    """
    # Updated inside the loop, so that a symbol has the same size in all inputs.
    sizes = dict(dims)
    result: dict[str, Array] = {}
    for value in model.graph.inputs:
        if value.dtype is None or value.shape is None:
            raise InputError(
                f"Making random values for the input '{value.name}': its dtype or rank is unknown; pass a value."
            )
        shape: list[int] = []
        for axis, dim in enumerate(value.shape):
            default = _BATCH if axis == 0 else _OTHER_DIM
            symbol = None if isinstance(dim, int) else dim.value
            shape.append(
                dim if isinstance(dim, int) else sizes.setdefault(symbol, default) if symbol else default
            )
        dtype = value.dtype.numpy()
        if value.dtype.is_floating_point():
            result[str(value.name)] = rng.uniform(-1, 1, shape).astype(dtype)
        else:
            result[str(value.name)] = rng.integers(0, index_bound(value) or 2, shape).astype(dtype)
    return result


def index_bound(value: ir.Value) -> int | None:
    """Returns the size of the smallest axis that an integer input indexes; None if no known op uses it as an index."""
    bounds = []
    for node, index in value.uses():
        other = _INDEXES.get((node.op_type, index))
        source = node.inputs[other] if other is not None else None
        sizes = static_dims(source) if source is not None else None
        if sizes:
            # Class labels index axis 1 of the logits.
            axis = node.attributes.get_int("axis", 0) if node.op_type == "Gather" else 1
            bounds.append(sizes[axis] or 2)
    return min(bounds, default=None)
