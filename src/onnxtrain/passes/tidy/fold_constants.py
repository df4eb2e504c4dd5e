"""Folds nodes with constant inputs, above all shape arithmetic.

TorchScript's exporter computes even static sizes with Shape, Gather and Div.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx import helper

from onnxtrain.op_facts import MOVES, SHAPE_READERS
from onnxtrain.passes.tidy.constants import add_constant, is_constant
from onnxtrain.passes.tidy.unused import remove_unread_initializers, remove_unread_nodes

Array = np.ndarray

# Maximum number of elements of a result. A larger constant would take more space in the file than computing it is
# worth.
_LIMIT = 4096
# Dtypes used by shape arithmetic.
_DTYPES = frozenset({ir.DataType.BOOL, ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64})
_FOLDABLE = frozenset(
    {
        "Abs", "Add", "And", "Cast", "Ceil", "Concat", "ConstantOfShape", "Div", "Equal", "Expand", "Floor",
        "Gather", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul",
        "Neg", "Not", "Or", "Range", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Slice",
        "Sqrt", "Squeeze", "Sub", "Tile", "Transpose", "Unsqueeze", "Where",
    }
)  # fmt: skip
# Marks a symbolic dimension in a partly static shape. Not the minimum integer, which exporters use as the start of a
# Slice.
_UNKNOWN = np.iinfo(np.int64).min + 4801


class FoldConstantsPass(ir.passes.InPlacePass):
    """Replaces small computations on constants with their results, in the main graph.

    Constants are initializers marked as constants, integer and Boolean initializers, and static dimensions. In a partly
    symbolic shape, the static dimensions are still folded: for `x: [n, 8]`, Gather(Shape(x), 1) is 8. Parameters are
    not folded. A CastLike becomes a Cast. Expects inferred shapes; folded sizes let onnx infer further shapes.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Folds nodes of the model in place."""
        modified = _resolve_cast_likes(model)
        # Contents by value, with `_UNKNOWN` for symbolic dimensions.
        contents = _constants(model)
        folded: list[ir.Node] = []
        for node in model.graph:
            value = _evaluate(node, contents, model.graph.opset_imports[""])
            if value is None:
                continue
            contents[node.outputs[0]] = value
            if not np.any(_is_unknown(value)) and not node.outputs[0].is_graph_output():
                folded.append(node)
        # Only results that are still read become initializers; intermediate ones are dropped.
        removable = set(folded)
        for node in folded:
            output = node.outputs[0]
            if any(use.node not in removable for use in output.uses()):
                _replace(model, output, contents[output])
                modified = True
        return ir.passes.PassResult(model, modified | _remove_unused(model, folded, contents))


def _resolve_cast_likes(model: ir.Model) -> bool:
    """Turns each CastLike with a known target dtype into a Cast. Returns True if there were any.

    A Cast can be folded even if the second input of the CastLike varies.
    """
    modified = False
    for node in model.graph:
        like = node.inputs[1] if node.op_type == "CastLike" and node.domain == "" else None
        if like is None or like.dtype is None:
            continue
        node.op_type = "Cast"
        node.attributes["to"] = ir.AttrInt64("to", int(like.dtype))
        node.resize_inputs(1)
        modified = True
    return modified


def _constants(model: ir.Model) -> dict[ir.Value, Array]:
    """Returns the contents of the initializers that may be folded."""
    return {
        value: value.const_value.numpy()
        for value in model.graph.initializers.values()
        if value.const_value is not None
        and value.const_value.dtype in _DTYPES
        and value.const_value.size <= _LIMIT
        # An initializer that is also an input is only a default value.
        and not value.is_graph_input()
        and (is_constant(value) or value.const_value.dtype != ir.DataType.FLOAT)
    }


def _is_unknown(value: Array) -> Array:
    return value == _UNKNOWN if value.dtype == np.int64 else np.zeros((), bool)


def _evaluate(node: ir.Node, contents: dict[ir.Value, Array], opset: int) -> Array | None:
    """Returns the content of a node's only output, or None if it is unknown.

    Symbolic dimensions in the content are `_UNKNOWN`.

    Args:
        node: the node.
        contents: known contents of values.
        opset: the model's opset.
    """
    if node.domain != "" or len(node.outputs) != 1:
        return None
    if node.op_type in SHAPE_READERS:
        return _shape_of(node)
    inputs = [None if value is None else contents.get(value) for value in node.inputs]
    if node.op_type not in _FOLDABLE or any(
        value is not None and array is None for value, array in zip(node.inputs, inputs, strict=True)
    ):
        return None
    partial = [array is not None and bool(np.any(_is_unknown(array))) for array in inputs]
    # Ops that move elements move `_UNKNOWN` with them, whereas arithmetic would turn it into some other number. Inputs
    # after the first are indices or sizes and must be known, except for Concat.
    if any(partial) and (node.op_type not in MOVES or (node.op_type != "Concat" and any(partial[1:]))):
        return None
    if _elements(node, inputs) > _LIMIT:
        return None
    # numpy's integer division rounds down, but runtimes round towards zero, so negative operands are not folded.
    # Neither are zero divisors, for which the runtime raises an error.
    if node.op_type in ("Div", "Mod") and any(
        array is not None and np.any(array < index) for index, array in enumerate(inputs)
    ):
        return None
    outputs = run_node(node, inputs, opset)
    dtype = node.outputs[0].dtype
    if outputs is None or dtype not in _DTYPES or outputs[0].dtype != dtype.numpy():
        return None
    return outputs[0] if outputs[0].size <= _LIMIT else None


def _elements(node: ir.Node, inputs: list[Array | None]) -> int:
    """Returns an upper bound on the number of elements of a node's result.

    The bound is checked before the result is computed, because a hostile file may ask for terabytes, e.g. with a
    ConstantOfShape.
    """
    shapes = [array.shape for array in inputs if array is not None]
    first = inputs[0] if inputs else None
    if first is None:
        return 0
    if node.op_type == "ConstantOfShape":
        return int(math.prod(first.tolist()))
    if node.op_type == "Range":
        start, limit, delta = (float(array.item()) for array in inputs if array is not None)
        return math.ceil(abs((limit - start) / delta)) if delta else 0
    if node.op_type in ("Expand", "Tile") and inputs[1] is not None:
        sizes: list[int] = inputs[1].ravel().tolist()
        return int(first.size) * math.prod(max(1, size) for size in sizes)
    if node.op_type == "Gather" and inputs[1] is not None:
        return int(first.size * inputs[1].size)
    if node.op_type == "Concat" or len(shapes) < 2:
        return sum(map(math.prod, shapes))
    # Elementwise ops broadcast; the output of any other op is no larger than its largest input.
    try:
        return int(math.prod(np.broadcast_shapes(*shapes)))
    except ValueError:
        return max(math.prod(shape) for shape in shapes)


def _shape_of(node: ir.Node) -> Array | None:
    """Returns the result of a Shape or Size, or None for a Size with a symbolic dimension."""
    shape = None if node.inputs[0] is None else node.inputs[0].shape
    if shape is None:
        return None
    dims = [dim if isinstance(dim, int) else _UNKNOWN for dim in shape]
    if node.op_type == "Size":
        return None if _UNKNOWN in dims else np.array(np.prod(dims, dtype=np.int64))
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(dims))
    return np.array(dims[start:end], np.int64)


def run_node(node: ir.Node, inputs: Sequence[Array | None], opset: int) -> list[Array] | None:
    """Runs a node in ONNX's reference evaluator.

    Args:
        node: the node.
        inputs: its inputs, with None for omitted ones.
        opset: version of the standard domain.

    Returns:
        The outputs; None if the evaluation fails.
    """
    # Imported here, because it takes longer than the rest of this package, and many models need no folding.
    from onnx.reference import ReferenceEvaluator

    # New names, because two inputs may be the same value, and values added by passes may not have names yet.
    names = ["" if array is None else f"x{index}" for index, array in enumerate(inputs)]
    proto = ir.serde.serialize_node(node)
    del proto.input[:], proto.output[:]
    proto.input.extend(names)
    proto.output.extend(f"y{index}" for index in range(len(node.outputs)))
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in zip(names, inputs, strict=True)
        if array is not None
    ]
    results = [helper.make_empty_tensor_value_info(name) for name in proto.output]
    graph = helper.make_graph([proto], "fold", infos, results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    feed = {name: array for name, array in zip(names, inputs, strict=True) if array is not None}
    try:
        with np.errstate(all="ignore"):
            return [np.asarray(result) for result in ReferenceEvaluator(model).run(None, feed)]
    # The reference evaluator lacks some ops and dtypes that runtimes support; the node is not folded.
    except Exception:
        return None


def _replace(model: ir.Model, output: ir.Value, array: Array) -> None:
    """Replaces `output` with an initializer of the same name, marked as a constant."""
    name, output.name = output.name, None
    output.replace_all_uses_with(add_constant(model.graph, ir.tensor(array, name=name)))


def _remove_unused(model: ir.Model, folded: list[ir.Node], contents: dict[ir.Value, Array]) -> bool:
    """Removes the nodes and constants that are no longer read after folding.

    Args:
        model: the model, modified in place.
        folded: the nodes that have been folded.
        contents: the computed arrays by value, including partly symbolic shapes, whose nodes are removed as well.

    Returns:
        True if nodes were removed.
    """
    candidates = set(folded) | {node for value in contents if (node := value.producer()) is not None}
    sources = {
        value for node in candidates for value in node.inputs if value is not None and value in contents
    }
    removed = remove_unread_nodes(model.graph, candidates)
    remove_unread_initializers(model.graph, [value for value in sources if is_constant(value)])
    return removed
