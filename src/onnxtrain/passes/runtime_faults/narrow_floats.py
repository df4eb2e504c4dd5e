"""Computes bfloat16 and float16 ops in float32 and rounds each result, as PyTorch's CPU kernels do."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from onnxtrain.op_facts import EXACT_OPS
from onnxtrain.passes.canonical.inline_functions import inline_functions
from onnxtrain.passes.shapes.infer import infer_shapes
from onnxtrain.passes.tidy.replace_value import successor, write_before
from onnxtrain.passes.tidy.unused import remove_unread_chains

# Dtypes that are computed in `_WIDE`, which can represent both exactly.
_NARROW, _WIDE = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16), ir.DataType.FLOAT

_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def has_narrow_floats(model: ir.Model, dtypes: Collection[ir.DataType] = _NARROW) -> bool:
    """True if any value of the main graph has one of `dtypes`."""
    inputs = (*model.graph.inputs, *model.graph.initializers.values())
    return any(value.dtype in dtypes for value in inputs) or any(
        value.dtype in dtypes for node in model.graph for value in node.outputs
    )


def widen_narrow_floats(model: ir.Model, dtypes: Collection[ir.DataType] = _NARROW) -> ir.Model:
    """Returns a copy of `model` in which bfloat16 and float16 ops compute in float32 and round their results.

    PyTorch's CPU kernels do the same op by op: they accumulate in float32 and round the results. ONNX Runtime's CPU
    provider lacks kernels for bfloat16. It computes chains of float16 ops in float32 without rounding in between, so
    that intermediate results beyond the range of float16 stay finite.

    Inputs, outputs and initializers of the graph keep their dtype. Functions that may take or return these dtypes are
    inlined; other functions and subgraphs are not modified.

    Args:
        model: any model.
        dtypes: dtypes to widen, e.g. only bfloat16 for models that also run on hosts with native float16 kernels.
    """
    model = infer_shapes(_inlined(model.clone(), dtypes))
    # By narrow value: its float32 form, which all its readers share.
    wide: dict[ir.Value, ir.Value] = {}
    casts: list[ir.Node] = []
    for node in tuple(model.graph):
        if node.op_type == "Cast" and node.domain == "":
            _reuse(node, wide, dtypes)
            continue
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype in dtypes:
                if value not in wide:
                    wide[value] = write_before(node, None, "Cast", value, to=int(_WIDE))
                    wide[value].type, wide[value].shape = ir.TensorType(_WIDE), value.shape
                node.replace_input_with(index, wide[value])
        if node.op_type == "ConstantOfShape":
            _widen_constant(node, dtypes)
        exact = node.domain == "" and node.op_type in EXACT_OPS
        for value in node.outputs:
            if value.name and value.dtype in dtypes:
                rounded, widened = _round_after(node, value, exact)
                wide[rounded] = widened
                casts += [cast for cast in (widened.producer(), rounded.producer()) if cast is not None]
    # A cast back does not undo rounding, so only unread casts are removed.
    remove_unread_chains(model.graph, [cast for cast in casts if cast.op_type == "Cast"])
    return model


def _inlined(model: ir.Model, dtypes: Collection[ir.DataType]) -> ir.Model:
    """Returns the model with functions inlined that may take or return these dtypes. May modify `model`."""
    # Functions don't declare dtypes: their nodes can only be widened where the function is called with known ones.
    if not model.functions:
        return model
    narrow = {
        node.op_identifier()
        for node in model.graph
        if any(
            value.dtype is None or value.dtype in dtypes for value in (*node.inputs, *node.outputs) if value
        )
    }
    inner = narrow
    # Functions that these call are inlined with them.
    while inner:
        inner = {
            node.op_identifier() for key in inner if key in model.functions for node in model.functions[key]
        }
        inner -= narrow
        narrow |= inner
    # `narrow` covers calls in the main graph; subgraphs may call any function.
    subgraphs = any(
        attribute.type in _GRAPHS for node in model.graph for attribute in node.attributes.values()
    )
    return inline_functions(model, None if subgraphs else lambda function: function.identifier() in narrow)


def _reuse(cast: ir.Node, wide: dict[ir.Value, ir.Value], dtypes: Collection[ir.DataType]) -> None:
    """Makes all readers of a narrow value share a single Cast to float32.

    The first Cast of a value is recorded in `wide`. A later Cast of the same value is removed, and its readers are
    redirected to the recorded result. Other Casts, and Casts that compute a graph output, are not modified.

    Args:
        cast: a Cast of any dtypes.
        wide: float32 form of each narrow value; extended in place.
        dtypes: the narrow dtypes, e.g. bfloat16.
    """
    (source,), (result,) = cast.inputs, cast.outputs
    if source is None or source.dtype not in dtypes or result.dtype != _WIDE or result.is_graph_output():
        return
    if source in wide:
        result.replace_all_uses_with(wide[source])
        assert cast.graph is not None
        cast.graph.remove(cast, safe=True)
    else:
        wide[source] = result


def _round_after(node: ir.Node, value: ir.Value, exact: bool) -> tuple[ir.Value, ir.Value]:
    """Makes `node` return float32, and appends a Cast that rounds to the original dtype.

    Args:
        node: the node.
        value: an output of the node that has a narrow dtype.
        exact: True for an op that does no arithmetic, such as Reshape.

    Returns:
        The rounded result with the dtype and name of `value`, and the rounded result in float32.
    """
    dtype = value.dtype
    assert dtype is not None
    rounded = successor(value)
    value.name, value.type = f"{rounded.name}_float", ir.TensorType(_WIDE)
    narrow = ir.node("Cast", [value], {"to": int(dtype)}, outputs=[rounded])
    node.append(narrow)
    # The inputs are rounded, and so is the float32 result of an exact op.
    if exact:
        return rounded, value
    widened = ir.node("Cast", [rounded], {"to": int(_WIDE)})
    narrow.append(widened)
    widened.outputs[0].type, widened.outputs[0].shape = ir.TensorType(_WIDE), value.shape
    return rounded, widened.outputs[0]


def _widen_constant(node: ir.Node, dtypes: Collection[ir.DataType]) -> None:
    """Makes a ConstantOfShape of a narrow dtype return float32 by converting its attribute `value`."""
    attribute = node.attributes.get("value")
    if attribute is not None and attribute.as_tensor().dtype in dtypes:
        tensor = attribute.as_tensor().numpy().astype(_WIDE.numpy())
        node.attributes.add(ir.AttrTensor("value", ir.tensor(tensor)))
