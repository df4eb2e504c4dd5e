"""Checks that a node's inputs have the same dtype where the op's schema requires it."""

from __future__ import annotations

import functools

import onnx
import onnx_ir as ir

from onnxtrain.errors import ModelError


def check_types(model: ir.Model) -> None:
    """Raises an error if two inputs that the op's schema binds to one type variable have different known dtypes.

    Expects inferred types.

    Raises:
        ModelError: two inputs of a node must have the same dtype but differ, e.g. Add of float32 and float16.
    """
    opset = model.graph.opset_imports[""]
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.domain != "":
            continue
        # First input of each type variable of the schema, e.g. {"T": x}; later inputs of "T" must match its dtype.
        first_inputs: dict[str, ir.Value] = {}
        for value, variable in zip(
            node.inputs, _variables(node.op_type, opset, len(node.inputs)), strict=False
        ):
            if value is None or value.dtype is None or not variable:
                continue
            other = first_inputs.setdefault(variable, value)
            if other.dtype != value.dtype:
                where = f"'{node.name}'" if node.name else f"that computes '{node.outputs[0].name}'"
                raise ModelError(
                    f"The model is not valid ONNX: the inputs of the {node.op_type} node {where} must have "
                    f"the same dtype, but '{other.name}' is {other.dtype} and '{value.name}' is "
                    f"{value.dtype}. Convert one of them with a Cast node, or export the model in one "
                    "precision (in PyTorch: module.float())."
                )


@functools.cache
def _variables(op_type: str, opset: int, count: int) -> tuple[str, ...]:
    """Returns the schema's type of each input of an op: a type variable or a fixed type, e.g. ("T", "tensor(int64)").

    The type is "" for inputs that may each have a different dtype, e.g. the states of Loop. Returns () for an op
    without a schema.

    Args:
        op_type: a standard op.
        opset: its opset.
        count: number of inputs of the node. The type of a variadic input is repeated up to this number.
    """
    try:
        schema = onnx.defs.get_schema(op_type, opset, "")
    # ONNX Runtime defines further ops in the standard domain, such as SimplifiedLayerNormalization.
    except onnx.defs.SchemaError:
        return ()
    formals = list(schema.inputs)
    # Each element of a heterogeneous variadic input, such as the state of Loop, may have its own dtype.
    names = [formal.type_str if formal.is_homogeneous else "" for formal in formals]
    if formals and formals[-1].option == onnx.defs.OpSchema.FormalParameterOption.Variadic:
        names += names[-1:] * (count - len(names))
    return tuple(names)
