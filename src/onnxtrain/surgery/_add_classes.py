"""Adds classes to a model's head, its last linear layer, and keeps the scores of the old classes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from onnxtrain.passes import (
    ModelSource,
    as_given,
    canonicalize,
    load_model,
    remove_unread_initializers,
    remove_unread_nodes,
    same_kind,
)
from onnxtrain.passes.tidy.constants import add_initializer
from onnxtrain.passes.tidy.replace_value import successor
from onnxtrain.passes.tidy.unique_names import fresh_name
from onnxtrain.surgery._linear import Linear, find_head, read_linear
from onnxtrain.surgery._replace import (
    check_count,
    draw_parameters,
    drop_probabilities,
    remove_head_outputs,
    resize_from,
)
from onnxtrain.surgery._tail import TAIL_OPS, data_input

_DOING = "Adding classes"

ADDED = "added"
"""Module of the new layer, e.g. in the name "added.weight" of its weight."""


@same_kind
def add_classes(
    model: ModelSource,
    count: int,
    *,
    seed: int = 0,
    output: str | None = None,
    head: str | None = None,
    logits: bool = True,
) -> onnx.ModelProto | ir.Model:
    """Returns a copy of the model that scores `count` more classes, whose indices follow those of the old classes.

    A second linear layer with `count` outputs reads the same input as the last linear layer, and a Concat joins the
    scores of both. The old layer is not changed, so the scores of the old classes are bit-equal to those of the
    original model. The new parameters are `added.weight` and `added.bias`, initialized as in PyTorch's `nn.Linear`. To
    train only them, pass `requires_grad="added.*"` to `Trainer`: the scores of the old classes then stay bit-equal. To
    adapt the whole model, train all parameters on data of old and new classes instead.

    Args:
        model: path of a `.onnx` file, `ModelProto` or `onnx_ir.Model`; not modified. For the layers that are supported,
            see :func:`replace_head`.
        count: number of classes to add, e.g. 2.
        seed: seed of the initial values.
        output: name of the output that the head computes, for a model with several outputs.
        head: name of the layer's node, weight or module, e.g. "fc". Default: the last linear layer.
        logits: True to remove a Softmax or Sigmoid after the layer, because losses expect logits.

    Returns:
        The model in canonical form (opset 21 or newer): an `onnx_ir.Model` if `model` is one, else a `ModelProto`.
        Other outputs computed from the head are removed.

    Raises:
        ModelError: there is no such layer, or the class axis cannot be followed from it to the output.
        InputError: `count` is not a positive integer, or is more than 10 million.

    Example:
        >>> import onnx
        >>> model = onnx.parser.parse_model('''
        ...   <ir_version: 10, opset_import: ["": 21]>
        ...   net (float[n, 2] x) => (float[n, 3] y) <float[2, 3] w = {1., 2., 3., 4., 5., 6.}>
        ...   { y = MatMul(x, w) }''')
        >>> new = add_classes(model, 2)
        >>> [(tensor.name, list(tensor.dims)) for tensor in new.graph.initializer]
        [('w', [2, 3]), ('added.weight', [2, 2])]
    """
    check_count(count, _DOING, "count")
    result = canonicalize(load_model(model))
    layer, joined = _find(result, output, head)
    assert layer.output is not None
    name = str(layer.output.name)
    weight, initial_bias = draw_parameters(layer, count, seed)
    bias = None if layer.bias is None else initial_bias
    old = layer.classes
    last = layer.last
    nodes = _new_layer(result, layer, weight, bias)
    scores = nodes[-1].outputs[0]
    # onnx_ir would name several unnamed values alike.
    for node in nodes:
        kind = "scores" if node is nodes[-1] else "product"
        node.name = node.outputs[0].name = fresh_name(result, f"{ADDED}.{kind}")
    if joined is None:
        # The joined scores take over the name and all readers of the old ones.
        total = successor(last)
        last.name = fresh_name(result, f"{total.name}.old")
        joined = ir.node(
            "Concat", [last, scores], {"axis": layer.axis}, outputs=[total], name=f"{ADDED}.join"
        )
        (layer.add or layer.node).append([*nodes, joined])
        if layer.output is last:
            layer.output = total
    else:
        old = sum(read.classes for read in map(_linear, joined.inputs) if read is not None)
        joined.prepend(nodes)
        joined.resize_inputs(len(joined.inputs) + 1)
        joined.replace_input_with(len(joined.inputs) - 1, scores)
    total = joined.outputs[0]
    resize_from(result, layer, [total], old, old + int(count), name, _DOING)
    if last.shape is not None:
        scores.type = last.type
        scores.shape = ir.Shape(
            [int(count) if at == layer.axis else dim for at, dim in enumerate(last.shape)]
        )
    if logits:
        drop_probabilities(layer, name)
    remove_head_outputs(result, layer, name)
    remove_unread_nodes(result.graph)
    remove_unread_initializers(result.graph, [])
    return as_given(result, model)


def _find(model: ir.Model, output: str | None, head: str | None) -> tuple[Linear, ir.Node | None]:
    """Returns the last linear layer, and the Concat that joins its scores with those of classes added before, if any.

    Raises:
        ModelError: there is no such layer.
    """
    outputs = [value for value in model.graph.outputs if output in (None, value.name)]
    tail: list[ir.Node] = []
    node = outputs[0].producer() if len(outputs) == 1 else None
    while node is not None and node.domain == "" and node.op_type in TAIL_OPS:
        source = data_input(node)
        tail.insert(0, node)
        node = None if source is None else source.producer()
    if node is not None and node.op_type == "Concat" and node.domain == "":
        layers = [_linear(value) for value in node.inputs]
        first, *others = layers
        # Another Concat, e.g. of two heads, is part of the network.
        added = [layer is not None and str(layer.weight.name).startswith(f"{ADDED}.") for layer in others]
        if first is not None and all(added) and added and (head is None or head in first.names):
            first.tail, first.output = tail, outputs[0]
            return first, node
    return find_head(model, output, head, _DOING), None


def _linear(value: ir.Value | None) -> Linear | None:
    producer = None if value is None else value.producer()
    layer = None if producer is None else read_linear(producer, any_kernel=True)
    return layer if isinstance(layer, Linear) else None


def _new_layer(
    model: ir.Model, layer: Linear, weight: npt.NDArray[np.float64], bias: npt.NDArray[np.float64] | None
) -> list[ir.Node]:
    """Creates a layer that reads the input of `layer`, with its attributes and dtypes.

    Args:
        model: model that gets the initializers.
        layer: the layer.
        weight: weight, [classes, ...].
        bias: bias, [classes]; None for a layer without bias.

    Returns:
        The nodes, which are not yet in the graph.
    """
    node = layer.node
    read = node.inputs[1]
    assert read is not None
    dtype = read.dtype or layer.weight.dtype
    assert dtype is not None
    # In the layout that the node reads: without the Cast and Transpose nodes of the old weight.
    rows = node.op_type == "Conv" or node.attributes.get_int("transB", 0) == 1
    new_weight = _parameter(model, "weight", weight if rows else weight.T, dtype)
    inputs: list[ir.Value | None] = [node.inputs[0], new_weight]
    if bias is None:
        return [_like(node, inputs)]
    new_bias = _parameter(model, "bias", bias, node.outputs[0].dtype or dtype)
    if node.op_type != "MatMul":
        return [_like(node, [*inputs, new_bias])]
    product = _like(node, inputs)
    product.outputs[0].type = layer.last.type
    return [product, ir.node("Add", [product.outputs[0], new_bias])]


def _like(node: ir.Node, inputs: list[ir.Value | None]) -> ir.Node:
    return ir.node(node.op_type, inputs, dict(node.attributes))


def _parameter(model: ir.Model, name: str, array: npt.NDArray[np.float64], dtype: ir.DataType) -> ir.Value:
    name = fresh_name(model, f"{ADDED}.{name}")
    content = np.ascontiguousarray(array.astype(dtype.numpy()))
    return add_initializer(model.graph, ir.Tensor(content, dtype=dtype, name=name))
