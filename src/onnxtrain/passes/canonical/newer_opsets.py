"""Write a model of opset 27 or 28 in opset 26, which more hosts run."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from onnxtrain.errors import UnsupportedOpsetError
from onnxtrain.passes.canonical.inline_op_bodies import inline_schema_functions
from onnxtrain.passes.io.load import MAX_OPSET
from onnxtrain.passes.shapes.infer import infer_shapes
from onnxtrain.passes.tidy.replace_value import stand_in, write_before

_NEW_OPS = frozenset({"CausalConvWithState", "LinearAttention", "SwiGLU"})
"""Ops of which opset 26 has nothing: they become their function bodies."""

_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

_SAME = frozenset(
    {
        "Cast", "Celu", "Compress", "DepthToSpace", "DequantizeLinear", "Einsum", "Mod", "OneHot", "Optional",
        "OptionalGetElement", "OptionalHasElement", "QuantizeLinear", "Range", "ReduceLogSum", "ReduceLogSumExp",
        "ReverseSequence", "SpaceToDepth", "Unique",
    }
)  # fmt: skip
"""Ops whose newer versions take more dtypes and mean the same, but for what `_is_body` and `_rewrite` see to."""

_SHIFTED = frozenset({ir.DataType.UINT8, ir.DataType.UINT16, ir.DataType.UINT32, ir.DataType.UINT64})


def lower_opset(model: ir.Model) -> ir.Model:
    """Return a model above opset 26 in opset 26, else itself; may change `model`.

    Model-local functions must have been inlined. LinearAttention, CausalConvWithState and SwiGLU become what they are
    made of.

    Raises:
        UnsupportedOpsetError: A node has no equal in opset 26.
    """
    if model.graph.opset_imports[""] <= MAX_OPSET:
        return model
    infer_shapes(model)
    model = inline_schema_functions(model, lambda node: not _is_body(node))
    for node in tuple(ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.domain == "":
            _rewrite(node, model.graph.opset_imports[""])
    model.graph.opset_imports[""] = MAX_OPSET
    return model


def _is_body(node: ir.Node) -> bool:
    """Whether a node becomes its function body."""
    if node.op_type in _NEW_OPS:
        return True
    dtype = node.inputs[0].dtype if node.inputs and node.inputs[0] is not None else None
    if node.op_type == "Range":  # in half precision, where stash_type is not that of its inputs
        return dtype in _HALVES and not node.attributes.get_int("stash_type", 1)
    if node.op_type == "Celu":  # of float32 alone before
        return dtype not in (None, ir.DataType.FLOAT)
    return node.op_type == "SpaceToDepth" and node.attributes.get_string("mode", "DCR") == "CRD"


def _rewrite(node: ir.Node, opset: int) -> None:
    op = node.op_type
    if op == "SpaceToDepth":
        node.attributes.pop("mode", None)  # DCR, all that there was before
    elif op == "Mod" and not node.attributes.get_int("fmod", 0) and _is_float(node.inputs[0]):
        _floor_mod(node)
    elif op == "Range":
        _wide_range(node)
    elif op == "BitShift" and node.inputs[0] is not None and node.inputs[0].dtype in _SHIFTED:
        return
    elif op not in _SAME and onnx.defs.get_schema(op, opset).since_version > MAX_OPSET:
        dtypes = ", ".join(str(value.dtype) for value in node.inputs if value is not None)
        raise UnsupportedOpsetError(
            f"Writing a model of opset {opset} in opset {MAX_OPSET}, which stock ONNX Runtime builds accept: node "
            f"{node.name!r} ({op} of {dtypes}) has no equal there. Export the model with an opset between 13 and "
            f"{MAX_OPSET}."
        )


def _is_float(value: ir.Value | None) -> bool:
    return value is not None and value.dtype is not None and value.dtype.is_floating_point()


def _wide_range(node: ir.Node) -> None:
    """Compute a Range of float16 or bfloat16 in float32, as `stash_type` says that the newer op does."""
    dtype = node.inputs[0].dtype if node.inputs[0] is not None else None
    node.attributes.pop("stash_type", None)
    if dtype not in _HALVES:
        return
    limits = [
        write_before(node, f"wide_{index}", "Cast", value, to=ir.DataType.FLOAT)
        for index, value in enumerate(node.inputs)
    ]
    wide = write_before(node, "wide", "Range", *limits)
    _replace(node, write_before(node, "narrow", "Cast", wide, to=dtype))


def _floor_mod(node: ir.Node) -> None:
    """Write A - floor(A / B)·B by the fmod of C, to which B is added where the signs of both differ."""
    a, b = node.inputs
    assert a is not None
    rest = write_before(node, "fmod", "Mod", a, b, fmod=1)
    zero = write_before(node, "zero", "Constant", value_float=0.0)
    zero = write_before(node, "zero_like", "CastLike", zero, a)
    below = write_before(node, "below", "Less", rest, zero)
    divisor_below = write_before(node, "divisor_below", "Less", b, zero)
    differ = write_before(node, "differ", "Xor", below, divisor_below)
    is_zero = write_before(node, "is_zero", "Equal", rest, zero)
    is_rest = write_before(node, "is_rest", "Not", is_zero)
    moves = write_before(node, "moves", "And", differ, is_rest)
    moved = write_before(node, "moved", "Add", rest, b)
    _replace(node, write_before(node, "floor_mod", "Where", moves, moved, rest))


def _replace(node: ir.Node, result: ir.Value) -> None:
    output = node.outputs[0]
    result.type, result.shape = output.type, output.shape
    stand_in(output, result, node)
    assert node.graph is not None
    node.graph.remove(node, safe=True)
