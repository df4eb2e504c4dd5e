"""Compute bfloat16 and float16 in float32: ONNX Runtime's CPU provider lacks kernels, or roundings between them."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from onnxtrain.op_facts import EXACT_OPS
from onnxtrain.passes.canonical.inline_functions import inline_functions
from onnxtrain.passes.shapes.infer import infer_shapes
from onnxtrain.passes.tidy.unused import remove_unread_chains

_NARROW, _WIDE = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16), ir.DataType.FLOAT

_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def has_narrow_floats(model: ir.Model, dtypes: Collection[ir.DataType] = _NARROW) -> bool:
    """Return whether any value of the main graph is of one of `dtypes`."""
    inputs = (*model.graph.inputs, *model.graph.initializers.values())
    return any(value.dtype in dtypes for value in inputs) or any(
        value.dtype in dtypes for node in model.graph for value in node.outputs
    )


def widen_narrow_floats(model: ir.Model, dtypes: Collection[ir.DataType] = _NARROW) -> ir.Model:
    """Return a model in which every bfloat16 or float16 op computes in float32 and rounds its results.

    That is what PyTorch's CPU kernels do, op by op: products and sums are accumulated in float32, results rounded.
    Left to itself ONNX Runtime computes chains of float16 ops in float32 without the roundings between them, so that
    a result that overflows float16 is finite.
    Inputs, outputs and initializers of the graph keep their dtype; `model` is not changed. Subgraphs stay as they are,
    and so do functions that are given none of these dtypes and return none; others are inlined.

    Args:
        model: Any model.
        dtypes: What to widen: bfloat16 alone for models that also run where float16 has kernels of its own.
    """
    model = infer_shapes(_inlined(model.clone(), dtypes))
    wide: dict[ir.Value, ir.Value] = {}
    casts: list[ir.Node] = []
    for node in tuple(model.graph):
        if node.op_type == "Cast" and node.domain == "":
            _reuse(node, wide, dtypes)
            continue
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype in dtypes:
                if value not in wide:
                    wide[value] = _cast_before(node, value, _WIDE)
                node.replace_input_with(index, wide[value])
        if node.op_type == "ConstantOfShape":
            _widen_constant(node, dtypes)
        exact = node.domain == "" and node.op_type in EXACT_OPS
        for value in node.outputs:
            if value.name and value.dtype in dtypes:
                rounded, widened = _round_after(node, value, exact)
                wide[rounded] = widened
                casts += [cast for cast in (widened.producer(), rounded.producer()) if cast is not None]
    remove_unread_chains(model.graph, [cast for cast in casts if cast.op_type == "Cast"])
    return model


def _inlined(model: ir.Model, dtypes: Collection[ir.DataType]) -> ir.Model:
    """Returns the model without calls of functions over these dtypes, or over what has none; may change `model`."""
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
    while inner:  # what these call
        inner = {
            node.op_identifier() for key in inner if key in model.functions for node in model.functions[key]
        }
        inner -= narrow
        narrow |= inner
    subgraphs = any(
        attribute.type in _GRAPHS for node in model.graph for attribute in node.attributes.values()
    )
    return inline_functions(model, None if subgraphs else lambda function: function.identifier() in narrow)


def _reuse(cast: ir.Node, wide: dict[ir.Value, ir.Value], dtypes: Collection[ir.DataType]) -> None:
    """Lets one cast to float32 of a value of these dtypes serve all."""
    (source,), (result,) = cast.inputs, cast.outputs
    if source is None or source.dtype not in dtypes or result.dtype != _WIDE or result.is_graph_output():
        return
    if source in wide:
        result.replace_all_uses_with(wide[source])
        assert cast.graph is not None
        cast.graph.remove(cast, safe=True)
    else:
        wide[source] = result


def _cast_before(node: ir.Node, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    cast = ir.node("Cast", [value], {"to": int(dtype)})
    node.prepend(cast)
    cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(dtype), value.shape
    return cast.outputs[0]


def _round_after(node: ir.Node, value: ir.Value, exact: bool) -> tuple[ir.Value, ir.Value]:
    """Makes `node` produce float32; returns it rounded, under the name of `value`, in its own dtype and in float32."""
    dtype = value.dtype
    assert dtype is not None
    rounded = ir.Value(name=value.name, type=ir.TensorType(dtype), shape=value.shape)
    value.name = f"{value.name}_float"
    value.type = ir.TensorType(_WIDE)
    value.replace_all_uses_with(rounded, replace_graph_outputs=True)
    narrow = ir.node("Cast", [value], {"to": int(dtype)}, outputs=[rounded])
    node.append(narrow)
    if exact:
        return rounded, value
    widened = ir.node("Cast", [rounded], {"to": int(_WIDE)})
    narrow.append(widened)
    widened.outputs[0].type, widened.outputs[0].shape = ir.TensorType(_WIDE), value.shape
    return rounded, widened.outputs[0]


def _widen_constant(node: ir.Node, dtypes: Collection[ir.DataType]) -> None:
    attribute = node.attributes.get("value")
    if attribute is not None and attribute.as_tensor().dtype in dtypes:
        tensor = attribute.as_tensor().numpy().astype(_WIDE.numpy())
        node.attributes.add(ir.AttrTensor("value", ir.tensor(tensor)))
