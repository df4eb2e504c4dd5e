"""Looks up ONNX schemas, and infers the dtypes of outputs from them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.errors import GraphBuildError

# Types as spelled in schemas. Outputs of other types get their dtype from shape inference.
_TENSOR_TYPES = {
    "tensor(float)": ir.DataType.FLOAT,
    "tensor(double)": ir.DataType.DOUBLE,
    "tensor(float16)": ir.DataType.FLOAT16,
    "tensor(bfloat16)": ir.DataType.BFLOAT16,
    "tensor(int64)": ir.DataType.INT64,
    "tensor(int32)": ir.DataType.INT32,
    "tensor(bool)": ir.DataType.BOOL,
}


@functools.cache
def schema_of(op_type: str, opset: int, domain: str = "") -> onnx.defs.OpSchema:
    """Returns the ONNX schema of `op_type` at `opset`.

    Raises:
        GraphBuildError: the op does not exist at that opset.
    """
    try:
        return onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError as error:
        raise GraphBuildError(
            f"looking up the schema of {domain or 'ai.onnx'}::{op_type} at opset {opset}: no such op; "
            "check its spelling and the opset"
        ) from error


def output_dtype(
    formal: onnx.defs.OpSchema.FormalParameter,
    schema: onnx.defs.OpSchema,
    values: Sequence[ir.Value | None],
    attributes: Mapping[str, Any],
) -> ir.DataType | None:
    """Infers the dtype of a node's output from the op's schema.

    The schema fixes the dtype, an attribute sets it, or it is the dtype of an input with the same type parameter.

    Args:
        formal: the output's formal parameter in the schema.
        schema: the op's schema.
        values: inputs of the node.
        attributes: attributes of the node.

    Returns:
        The dtype, or None if it follows neither from the schema nor from the inputs.
    """
    if formal.type_str in _TENSOR_TYPES:
        return _TENSOR_TYPES[formal.type_str]
    # Cast names the attribute `to`; other ops name it `dtype`.
    if schema.name == "Cast":
        return ir.DataType(int(attributes["to"]))
    if "dtype" in attributes:
        return ir.DataType(int(attributes["dtype"]))
    # A type parameter may allow one type only, e.g. bool for the results of comparisons.
    allowed = {t: c.allowed_type_strs for c in schema.type_constraints for t in [c.type_param_str]}
    if len(allowed.get(formal.type_str, ())) == 1:
        return _TENSOR_TYPES.get(next(iter(allowed[formal.type_str])))
    for value, parameter in zip(values, _formal_inputs(schema), strict=False):
        if parameter.type_str == formal.type_str and value is not None:
            return value.dtype
    # The statistics of normalization ops have the dtype `stash_type`, float32 by default.
    if "stash_type" in schema.attributes:
        return ir.DataType(int(attributes.get("stash_type", ir.DataType.FLOAT)))
    return None


def _formal_inputs(schema: onnx.defs.OpSchema) -> Iterator[onnx.defs.OpSchema.FormalParameter]:
    """Yields the formal inputs of a schema; repeats the last one forever if it is variadic."""
    formals = list(schema.inputs)
    yield from formals
    while formals and formals[-1].option == onnx.defs.OpSchema.FormalParameterOption.Variadic:
        yield formals[-1]
