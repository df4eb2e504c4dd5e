"""Checks that ONNX Runtime's quantized ops have their required inputs. onnx's checker does not know these ops."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from onnxtrain.errors import ModelError

_MS = "com.microsoft"


def check_inputs(model: ir.Model) -> None:
    """Raises an error if a `com.microsoft` QLinear op or QGemm lacks a required input, e.g. a zero point.

    Ops that the installed ONNX Runtime does not know are not checked.

    Raises:
        ModelError: a node omits a required input. ONNX Runtime would reject the model, and every model derived from it.
    """
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.domain != _MS:
            continue
        for index, name in enumerate(_required().get(node.op_type, ())):
            if name and (index >= len(node.inputs) or node.inputs[index] is None):
                where = f"'{node.name}'" if node.name else f"that computes '{node.outputs[0].name}'"
                raise ModelError(
                    f"The model is not valid: the {node.op_type} node {where} is missing its input "
                    f"{index}, '{name}', which ONNX Runtime requires. Provide it (a zero point is 0 in the "
                    "dtype of the integers), or quantize the model again."
                )


@functools.cache
def _required() -> Mapping[str, Sequence[str]]:
    """Maps each checked op to the names of its inputs, with "" for optional inputs."""
    # Read from the installed runtime, because required inputs differ between versions. Some builds omit the schemas.
    schemas: list[Any] = getattr(ort_state, "get_all_operator_schema", list)()
    return {
        schema.name: [formal.name if formal.option.name == "Single" else "" for formal in schema.inputs]
        for schema in schemas
        if schema.domain == _MS and schema.name.startswith(("QLinear", "QGemm"))
    }
