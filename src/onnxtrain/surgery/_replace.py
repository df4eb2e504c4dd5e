"""Replaces a model's head, its last linear layer, to change the number of outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from onnxtrain._printable import get_logger
from onnxtrain.errors import InputError, ModelError
from onnxtrain.passes import (
    ModelSource,
    TorchSignature,
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
from onnxtrain.selection import is_generated_name
from onnxtrain.surgery._linear import DOING, Linear, find_head, op_name
from onnxtrain.surgery._tail import PROBABILITIES, Refusal, follow

_log = get_logger()


# A typo would otherwise use up all memory.
_MOST_CLASSES = 10_000_000


@same_kind
def replace_head(
    model: ModelSource,
    classes: int,
    *,
    seed: int = 0,
    output: str | None = None,
    head: str | None = None,
    bias: bool | None = None,
    logits: bool = True,
) -> onnx.ModelProto | ir.Model:
    """Returns a copy of the model in which a new layer with `classes` outputs replaces the last linear layer.

    The layer is a Gemm, a MatMul (with an Add) or a 1x1 Conv, with any layout of the weight. Softmax, Sigmoid,
    LogSoftmax, Relu, pooling, Reshape and similar ops may follow it. Weight and bias are initialized as in PyTorch's
    `nn.Linear` and `nn.Conv2d`: uniform in `[-1 / sqrt(fan_in), 1 / sqrt(fan_in)]`, drawn with
    `numpy.random.default_rng(seed)`, the weight first, in the layout `[classes, ...]`. They keep their names, unless an
    exporter generated the name or another layer shares the weight, in which case they are named `head.weight` and
    `head.bias`. Dtype, batch size and names of inputs and output are kept.

    Args:
        model: path of a `.onnx` file, `ModelProto` or `onnx_ir.Model`; not modified.
        classes: number of outputs of the new layer, e.g. 10.
        seed: seed of the initial values.
        output: name of the output that the head computes, for a model with several outputs.
        head: name of the layer's node, weight or module, e.g. "fc". Default: the last linear layer.
        bias: True for a layer with a bias, False for a layer without bias. Default: as in the old layer; a bias of
            zeros that an exporter's optimizer dropped is included if the file has metadata about it.
        logits: True to remove a Softmax or Sigmoid after the layer, because losses expect logits.

    Returns:
        The model in canonical form (opset 21 or newer): an `onnx_ir.Model` if `model` is one, else a `ModelProto`,
        which `onnx.save` accepts. Other outputs computed from the head are removed.

    Raises:
        ModelError: there is no such layer, or the class axis cannot be followed from it to the output; the message
            names the last ops.
        InputError: `classes` is not a positive integer, or is more than 10 million.

    Example:
        >>> import onnx
        >>> model = onnx.parser.parse_model('''
        ...   <ir_version: 10, opset_import: ["": 21]>
        ...   net (float[n, 2] x) => (float[n, 3] y) <float[2, 3] w = {1., 2., 3., 4., 5., 6.}>
        ...   { y = MatMul(x, w) }''')
        >>> new = replace_head(model, 5)
        >>> list(new.graph.initializer[0].dims), new.graph.output[0].type.tensor_type.shape.dim[1].dim_value
        ([2, 5], 5)
    """
    check_count(classes, DOING, "classes")
    result = canonicalize(load_model(model))
    layer = find_head(result, output, head)
    assert layer.output is not None
    name = str(layer.output.name)
    _resize(result, layer, int(classes), name)
    weight, initial_bias = draw_parameters(layer, classes, seed)
    old = layer.weight
    # A tied weight, e.g. a language model's embedding, must keep its values for its other readers.
    shared = any(len(value.uses()) > 1 for value in (old, *(node.outputs[0] for node in layer.through)))
    new_weight = _replacement(result, old, weight if layer.rows else weight.T, "head.weight", shared=shared)
    _rewire(layer, old, new_weight)
    if bias is None:
        # PyTorch's Dynamo exporter drops a bias of zeros, as in a new layer, but records the operands of each node.
        read_in_pytorch = TorchSignature(result).read(layer.node)
        bias = layer.bias is not None or any(name.endswith("bias") for name in read_in_pytorch)
    if bias:
        _set_bias(result, layer, initial_bias)
    elif layer.bias is not None:
        _drop_bias(layer)
    if logits:
        drop_probabilities(layer, name)
    # Last, because the steps above may replace the output value.
    remove_head_outputs(result, layer, name)
    remove_unread_nodes(result.graph)
    remove_unread_initializers(result.graph, [old, layer.bias])
    for node in (layer.node, *layer.through, *([layer.add] if layer.add else [])):
        # The exporter's metadata refers to removed parameters, and passes read it when the model is loaded again.
        node.metadata_props.clear()
    return as_given(result, model)


def draw_parameters(
    layer: Linear, classes: int, seed: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Draws the parameters of a new layer that reads the input of another one, as PyTorch initializes them.

    Args:
        layer: the other layer.
        classes: number of outputs of the new layer.
        seed: seed of the values.

    Returns:
        The weight, [classes, ...] whatever the layout in the file, so that a seed determines the layer; and the bias,
        [classes], which is drawn after the weight.
    """
    rng = np.random.default_rng(seed)
    bound = 1 / math.sqrt(layer.fan_in)
    shape = layer.shape if layer.rows else layer.shape[::-1]
    return rng.uniform(-bound, bound, (classes, *shape[1:])), rng.uniform(-bound, bound, classes)


def check_count(count: object, doing: str, name: str) -> None:
    """Raises InputError if a number of classes is not a positive integer, or is too large."""
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or not 1 <= count <= _MOST_CLASSES:
        raise InputError(
            f"{doing}: {name} must be a positive integer up to {_MOST_CLASSES:,}, received {count!r}."
        )


def _resize(model: ir.Model, layer: Linear, classes: int, name: str) -> None:
    """Updates the shapes between the layer and the output `name` for a new number of classes.

    Constants in between that contain the old number, such as the target of a Reshape, are replaced.

    Raises:
        ModelError: a node in between requires the old number of classes, or its effect on the class axis is unknown.
    """
    # For the same number of classes, no shape changes, and ops that cannot be followed do no harm.
    if layer.classes != classes:
        resize_from(model, layer, [layer.node.outputs[0], layer.last], layer.classes, classes, name, DOING)


def resize_from(
    model: ir.Model, layer: Linear, first: Sequence[ir.Value], old: int, classes: int, name: str, doing: str
) -> None:
    """Updates the shapes of the values `first`, of the layer's output, and of all values in the tail of the layer.

    Args:
        model: model that contains the layer.
        layer: the layer.
        first: values with the class axis of the layer's output.
        old: the old number of classes.
        classes: the new number of classes.
        name: name of the output, for error messages.
        doing: beginning of error messages.

    Raises:
        ModelError: see :func:`_resize`.
    """
    axis, at = layer.axis, layer.node
    try:
        if axis < 0:
            raise Refusal("the rank of its output is unknown")
        for value in dict.fromkeys(first):
            _set_size(value, axis, classes)
        for at in layer.tail:
            axis = follow(model, at, axis, old, classes)
            _set_size(at.outputs[0], axis, classes)
    except Refusal as refusal:
        raise ModelError(
            f"{doing}: {op_name(at)}, between {op_name(layer.node)} and the output '{name}', "
            f"does not support another number of classes: {refusal}. Export the model without it."
        ) from None


def _set_size(value: ir.Value, axis: int, size: int) -> None:
    """Sets the size of an axis in a value's shape, if the shape is known."""
    if value.shape is not None:
        value.shape = ir.Shape([size if index == axis else dim for index, dim in enumerate(value.shape)])


def _replacement(
    model: ir.Model, like: ir.Value, array: npt.NDArray[np.float64], made_up: str, *, shared: bool
) -> ir.Value:
    """Creates an initializer that replaces the initializer `like`.

    Args:
        model: the model.
        like: the old initializer, which determines dtype and name.
        array: the new values.
        made_up: name to use if the old name was generated by an exporter, or if `shared` is True, e.g. "head.weight".
        shared: True if other nodes read the old initializer, which is then kept.
    """
    assert like.dtype is not None
    name = fresh_name(model, made_up) if shared or is_generated_name(str(like.name)) else str(like.name)
    tensor = ir.Tensor(np.ascontiguousarray(array.astype(like.dtype.numpy())), dtype=like.dtype, name=name)
    if name != like.name:
        return add_initializer(model.graph, tensor)
    # At the same position, because parameters become inputs in the order of the initializers.
    order = list(model.graph.initializers.values())
    model.graph.initializers.clear()
    for initializer in order:
        if initializer is like:
            add_initializer(model.graph, tensor)
        else:
            model.graph.initializers.add(initializer)
    return model.graph.initializers[name]


def _rewire(layer: Linear, old: ir.Value, new: ir.Value) -> None:
    """Makes the layer read a new weight, through copies of the Cast and Transpose nodes in between."""
    # Copies, because other readers of a shared weight may use the same nodes.
    value = new
    for node in layer.through:
        shape = None if node.op_type == "Transpose" and value.shape is None else value.shape
        if node.op_type == "Transpose" and shape is not None:
            shape = ir.Shape(list(shape)[::-1])
        copy = ir.node(node.op_type, [value], dict(node.attributes), name=None)
        copy.outputs[0].type, copy.outputs[0].shape = node.outputs[0].type, shape
        copy.outputs[0].name = f"{layer.node.outputs[0].name}.{new.name}.{node.op_type}"
        layer.node.prepend(copy)
        value = copy.outputs[0]
    layer.node.replace_input_with(1, value)
    layer.weight = new


def _set_bias(model: ir.Model, layer: Linear, array: npt.NDArray[np.float64]) -> None:
    """Replaces the bias of a layer, or adds one to a layer without bias.

    An added bias is an input of a Gemm or Conv; after a MatMul, an Add is appended.
    """
    old = layer.bias
    if old is not None:
        # A bias of shape [1, classes], as written by some exporters, keeps its leading axes.
        rank = len(old.shape) if old.shape is not None else 1
        column = array.reshape((1,) * (rank - 1) + array.shape)
        new = _replacement(model, old, column, "head.bias", shared=len(old.uses()) > 1)
        reader = layer.add or layer.node
        reader.replace_input_with(list(reader.inputs).index(old), new)
        return
    new = _new_bias(model, layer, array)
    # MatMul has no third input.
    if layer.node.op_type in ("Gemm", "Conv"):
        layer.node.resize_inputs(3)
        layer.node.replace_input_with(2, new)
        return
    product = layer.node.outputs[0]
    # The sum takes over the product's name and all of its readers.
    total = successor(product)
    layer.node.append(ir.node("Add", [product, new], outputs=[total]))
    if layer.output is product:
        layer.output = total
    layer.add = total.producer()


def _new_bias(model: ir.Model, layer: Linear, array: npt.NDArray[np.float64]) -> ir.Value:
    """Creates the bias of a layer that has none, as an initializer named after the weight."""
    weight = str(layer.weight.name)
    name = f"{weight.removesuffix('.weight')}.bias" if weight.endswith(".weight") else "head.bias"
    # The dtype of the computation, because the weight may be cast.
    dtype = layer.node.outputs[0].dtype or layer.weight.dtype
    assert dtype is not None
    tensor = ir.Tensor(array.astype(dtype.numpy()), dtype=dtype, name=fresh_name(model, name))
    return add_initializer(model.graph, tensor)


def _drop_bias(layer: Linear) -> None:
    """Removes the bias of a layer, and its Add node if there is one; a graph output keeps its name."""
    if layer.add is None:
        layer.node.resize_inputs(2)
        return
    product, total = layer.node.outputs[0], layer.add.outputs[0]
    _replace_value(total, product)
    if layer.output is total:
        layer.output = product
    layer.add = None


def drop_probabilities(layer: Linear, name: str) -> None:
    """Removes Softmax and Sigmoid from the tail of a layer; the output keeps its name."""
    for node in [node for node in layer.tail if node.op_type in PROBABILITIES]:
        logits, probabilities = node.inputs[0], node.outputs[0]
        assert logits is not None
        _replace_value(probabilities, logits)
        layer.tail.remove(node)
        if probabilities is layer.output:
            layer.output = logits
        _log.warning(
            "The %s at the end of the model is removed: its output '%s' now contains the logits, which "
            "losses expect. Pass logits=False to keep it.",
            op_name(node),
            name,
        )


def drop_final_probabilities(model: ir.Model) -> None:
    """Removes a Softmax or Sigmoid that computes an output, in place; the output keeps its name and returns logits."""
    for value in list(model.graph.outputs):
        node = value.producer()
        if node is None or node.op_type not in PROBABILITIES or node.inputs[0] is None:
            continue
        name = value.name
        _replace_value(value, node.inputs[0])
        _log.warning(
            "The %s at the end of the model is left out: its output '%s' now contains the logits, which losses expect.",
            op_name(node),
            name,
        )
    remove_unread_nodes(model.graph)


def _replace_value(old: ir.Value, new: ir.Value) -> None:
    """Replaces all uses of `old` with `new`. If `old` is a graph output, `new` takes over its name."""
    name, is_output = old.name, old.is_graph_output()
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    if is_output:
        old.name, new.name = f"{name}.replaced", name


def remove_head_outputs(model: ir.Model, layer: Linear, name: str) -> None:
    """Removes outputs computed from the replaced layer, e.g. by ArgMax over the old classes, except its own output.

    Logs a warning if there are any.

    Args:
        model: the model; modified in place.
        layer: the replaced layer.
        name: name of the layer's output.
    """
    # E.g. the label computed by an ArgMax over the old classes, which would not match the new number.
    from_head: set[ir.Value] = {layer.node.outputs[0]}
    for node in model.graph:
        if any(value in from_head for value in node.inputs if value is not None):
            from_head.update(node.outputs)
    kept: list[ir.Value] = []
    dropped: list[ir.Value] = []
    for value in dict.fromkeys(model.graph.outputs):
        (kept if value is layer.output or value not in from_head else dropped).append(value)
    if dropped:
        _log.warning(
            "The outputs %s are removed: they were computed from the replaced head.",
            ", ".join(f"'{value.name}'" for value in dropped),
        )
    model.graph.outputs.clear()
    model.graph.outputs.extend(kept)
