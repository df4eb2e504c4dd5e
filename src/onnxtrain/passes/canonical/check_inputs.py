"""Check that ops on integers have their required inputs: onnx's checker does not know those of ONNX Runtime."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from onnxtrain.errors import ModelError

_MS = "com.microsoft"


def check_inputs(model: ir.Model) -> None:
    """Check that no QLinear op or QGemm of com.microsoft lacks a required input, e.g. a zero point.

    Ops that the installed ONNX Runtime does not have are not checked. Changes nothing.

    Raises:
        ModelError: a node leaves a required input out; ONNX Runtime would refuse the model, and what is made of it.
    """
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.domain != _MS:
            continue
        for index, name in enumerate(_required().get(node.op_type, ())):
            if name and (index >= len(node.inputs) or node.inputs[index] is None):
                where = f"'{node.name}'" if node.name else f"that computes '{node.outputs[0].name}'"
                raise ModelError(
                    f"The model is not valid: the {node.op_type} node {where} leaves out its input {index}, '{name}', "
                    "which ONNX Runtime requires. Give it a value (a zero point: 0 of the dtype of the integers), or "
                    "quantize the model again."
                )


@functools.cache
def _required() -> Mapping[str, Sequence[str]]:
    """Return, by op, the name of each required input, and "" for one that may be left out."""
    # Asked of the runtime: which inputs an op requires changes from version to version. Builds may leave the list out.
    schemas: list[Any] = getattr(ort_state, "get_all_operator_schema", list)()
    return {
        schema.name: [formal.name if formal.option.name == "Single" else "" for formal in schema.inputs]
        for schema in schemas
        if schema.domain == _MS and schema.name.startswith(("QLinear", "QGemm"))
    }
