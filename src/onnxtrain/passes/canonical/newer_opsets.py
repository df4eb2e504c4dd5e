"""Lowers a model of opset 27 or 28 to opset 26, which more runtimes accept."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from onnxtrain.errors import UnsupportedOpsetError
from onnxtrain.passes.canonical.inline_op_bodies import inline_schema_functions
from onnxtrain.passes.io.load import MAX_OPSET
from onnxtrain.passes.shapes.infer import infer_shapes
from onnxtrain.passes.tidy.replace_value import replace_node, write_before

# Ops that were added after opset 26; they are replaced by their function bodies.
_NEW_OPS = frozenset({"CausalConvWithState", "LinearAttention", "SwiGLU"})

_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

# Ops whose newer versions only accept more dtypes. `_is_body` and `_rewrite` handle the other changes of these ops.
_SAME = frozenset(
    {
        "Cast", "Celu", "Compress", "DepthToSpace", "DequantizeLinear", "Einsum", "Mod", "OneHot", "Optional",
        "OptionalGetElement", "OptionalHasElement", "QuantizeLinear", "Range", "ReduceLogSum", "ReduceLogSumExp",
        "ReverseSequence", "SpaceToDepth", "Unique",
    }
)  # fmt: skip

# Dtypes that BitShift already accepts at opset 26.
_SHIFTED = frozenset({ir.DataType.UINT8, ir.DataType.UINT16, ir.DataType.UINT32, ir.DataType.UINT64})


def lower_opset(model: ir.Model) -> ir.Model:
    """Returns `model` converted to opset 26 if its opset is newer, else `model` itself; may modify `model`.

    Expects no model-local functions. Ops that opset 26 lacks (LinearAttention, CausalConvWithState, SwiGLU) are
    replaced by their function bodies.

    Raises:
        UnsupportedOpsetError: a node cannot be expressed in opset 26.
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
    """True if a node must be replaced by its function body: opset 26 lacks the op, or does not support these inputs."""
    if node.op_type in _NEW_OPS:
        return True
    dtype = node.inputs[0].dtype if node.inputs and node.inputs[0] is not None else None
    # With stash_type=0 (default: 1), half precision is not computed in float32, as `_wide_range` would do.
    if node.op_type == "Range":
        return dtype in _HALVES and not node.attributes.get_int("stash_type", 1)
    # Celu-12 supports only float32.
    if node.op_type == "Celu":
        return dtype not in (None, ir.DataType.FLOAT)
    return node.op_type == "SpaceToDepth" and node.attributes.get_string("mode", "DCR") == "CRD"


def _rewrite(node: ir.Node, opset: int) -> None:
    """Converts a node from `opset`, which is newer than 26, to opset 26, in place.

    Expects nodes for which `_is_body` is false.

    Raises:
        UnsupportedOpsetError: the node has no equivalent in opset 26.
    """
    op = node.op_type
    if op == "SpaceToDepth":
        # Opset 26 has no attribute mode and implements DCR; a node in mode CRD was replaced by its body.
        node.attributes.pop("mode", None)
    elif op == "Mod" and not node.attributes.get_int("fmod", 0) and _is_float(node.inputs[0]):
        _floor_mod(node)
    elif op == "Range":
        _wide_range(node)
    elif op == "BitShift" and node.inputs[0] is not None and node.inputs[0].dtype in _SHIFTED:
        return
    elif op not in _SAME and onnx.defs.get_schema(op, opset).since_version > MAX_OPSET:
        dtypes = ", ".join(str(value.dtype) for value in node.inputs if value is not None)
        raise UnsupportedOpsetError(
            f"Cannot convert the model from opset {opset} to {MAX_OPSET}, the newest that all supported "
            f"ONNX Runtime builds accept: node {node.name!r} ({op} of {dtypes}) has no equivalent there. "
            f"Export the model with an opset between 13 and {MAX_OPSET}."
        )


def _is_float(value: ir.Value | None) -> bool:
    """True if the dtype of a value is known and floating point."""
    return value is not None and value.dtype is not None and value.dtype.is_floating_point()


def _wide_range(node: ir.Node) -> None:
    """Rewrites a float16 or bfloat16 Range as a float32 Range and a Cast of the result, as `stash_type=1` specifies."""
    dtype = node.inputs[0].dtype if node.inputs[0] is not None else None
    node.attributes.pop("stash_type", None)
    if dtype not in _HALVES:
        return
    limits = [
        write_before(node, f"wide_{index}", "Cast", value, to=ir.DataType.FLOAT)
        for index, value in enumerate(node.inputs)
    ]
    wide = write_before(node, "wide", "Range", *limits)
    replace_node(node, write_before(node, "narrow", "Cast", wide, to=dtype))


def _floor_mod(node: ir.Node) -> None:
    """Rewrites a float Mod, A - floor(A / B)·B, as fmod(A, B), plus B where the remainder and B differ in sign.

    Mod of floats with fmod=0 is new in opset 27. With fmod=1 it is C's fmod, whose result has the sign of A.
    """
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
    replace_node(node, write_before(node, "floor_mod", "Where", moves, moved, rest))
