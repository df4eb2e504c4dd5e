"""Finds a model's head, i.e. its last linear layer, by walking backwards from an output."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxtrain.emitter import static_dims
from onnxtrain.errors import ModelError
from onnxtrain.op_facts import PRODUCTS
from onnxtrain.passes import is_float_parameter
from onnxtrain.surgery._tail import TAIL_OPS, data_input

DOING = "Replacing the head"
"""Default beginning of error messages."""

# Ops that exporters insert between a weight and its layer: Cast for half precision, Transpose for `x @ weight.T`.
_PASSED_ON = ("Cast", "Identity", "Transpose")
# Maximum number of ops in messages.
_SHOWN = 6
# Ops of quantized models, in ONNX (QLinearMatMul) and ONNX Runtime (MatMulNBits, QGemm).
_QUANTIZED = re.compile("[Qq]uantize|QLinear|Integer|NBits|QGemm")
_QUANTIZED_ADVICE = "replace the head of the float model, and quantize after training"


@dataclass
class Linear:
    """A linear layer, and the nodes between it and an output.

    Attributes:
        node: the Gemm, MatMul or Conv.
        weight: the initializer of the weight, e.g. `fc.weight`.
        through: nodes between `weight` and `node`, in order, e.g. [Cast, Transpose].
        rows: True if the classes are axis 0 of the weight, as in [classes, features]; False for axis 1.
        bias: the initializer of the bias, e.g. `fc.bias`; None for a layer without bias.
        add: the Add node that adds the bias, e.g. after a MatMul; None if `node` itself adds it, or there is no bias.
        tail: the nodes between the layer and `output`, in order, e.g. [Softmax].
        output: the output computed by the tail; None for a layer that is not a head.
    """

    node: ir.Node
    weight: ir.Value
    through: list[ir.Node]
    rows: bool
    bias: ir.Value | None
    add: ir.Node | None = None
    tail: list[ir.Node] = field(default_factory=list)
    output: ir.Value | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        assert self.weight.const_value is not None
        return tuple(self.weight.const_value.shape.numpy())

    @property
    def classes(self) -> int:
        """The number of classes, i.e. output features."""
        return self.shape[0 if self.rows else 1]

    @property
    def fan_in(self) -> int:
        """The number of weights per output."""
        return math.prod(self.shape) // self.classes

    @property
    def last(self) -> ir.Value:
        """The output value of the layer, after its bias is added."""
        return (self.add or self.node).outputs[0]

    @property
    def axis(self) -> int:
        """The class axis of the layer's output; -1 if its rank is unknown."""
        # In ONNX, channels are axis 1, after the batch.
        if self.node.op_type == "Conv":
            return 1
        return -1 if self.last.shape is None else len(self.last.shape) - 1

    @property
    def names(self) -> list[str]:
        """Names that select the layer: the names of its node, outputs, weight and module."""
        # `fc.weight` is the weight of the module `fc`.
        weight = str(self.weight.name)
        names = (self.node.name, self.node.outputs[0].name, self.last.name, weight, weight.rpartition(".")[0])
        return [name for name in dict.fromkeys(names) if name]


def op_name(node: ir.Node) -> str:
    """Returns the op type and the name of a node for error messages, e.g. "Gemm 'fc'"."""
    return f"{node.op_type} '{node.name or node.outputs[0].name}'"


def find_head(model: ir.Model, output: str | None, head: str | None, doing: str = DOING) -> Linear:
    """Finds the linear layer before an output.

    Args:
        model: canonical model.
        output: name of the output. Default: the only output, or the output computed from the layer `head`.
        head: name of the layer. Default: the last linear layer.
        doing: beginning of error messages.

    Raises:
        ModelError: there is no such layer, or the choice among several outputs is ambiguous.
    """
    # Without a name, all outputs are candidates; `head` may single one out.
    outputs = [value for value in model.graph.outputs if output in (None, value.name)]
    names = ", ".join(str(value.name) for value in model.graph.outputs)
    if not outputs:
        raise ModelError(f"{doing}: the model has no output {output!r}; its outputs are {names}.")
    if head is None and len(outputs) > 1:
        ends = "; ".join(f"'{value.name}' computed by {_last_ops(value)}" for value in outputs)
        raise ModelError(
            f"{doing}: the model has several outputs ({ends}). Choose one with output=NAME, or the layer "
            "with head=NAME."
        )
    refusals = []
    for value in outputs:
        traced = _trace(value, head)
        if isinstance(traced, Linear):
            return traced
        # Weights of a quantized model are integers, so naming a different output or layer would not help.
        quantized = next((node for node in _last_nodes(value) if _QUANTIZED.search(node.op_type)), None)
        if quantized is not None:
            traced = f"{op_name(quantized)} is quantized: {_QUANTIZED_ADVICE}"
        refusals.append(
            f"the output '{value.name}' comes from {_last_ops(value)} (last one first), and {traced}"
        )
    wanted = "a linear layer that can be replaced" if head is None else f"a linear layer {head!r}"
    raise ModelError(
        f"{doing}: the model does not end in {wanted}: {'; '.join(refusals)}. Name another output "
        f"(output=NAME, one of {names}) or layer (head=NAME; the last layers are {_layers(model)})."
    )


def _trace(output: ir.Value, head: str | None) -> Linear | str:
    """Follows an output back to its last linear layer.

    Returns the layer, or the reason why there is none. If `head` is not None, the layer must have this name.
    """
    tail: list[ir.Node] = []
    value = output
    while True:
        node = value.producer()
        if node is None:
            return f"'{value.name}' is not computed by a node"
        linear = read_linear(node, any_kernel=head is not None)
        if isinstance(linear, Linear):
            # The search ends at the last linear layer; an earlier one is not the head of this output.
            if head is not None and head not in linear.names:
                return (
                    f"its last linear layer is {op_name(linear.node)} with the weight '{linear.weight.name}'"
                )
            linear.tail, linear.output = tail, output
            return linear
        # The class axis can only be followed through these ops.
        source = data_input(node) if node.domain == "" and node.op_type in TAIL_OPS else None
        if source is None:
            return linear
        tail.insert(0, node)
        value = source


def read_linear(node: ir.Node, *, any_kernel: bool = False) -> Linear | str:
    """Returns the linear layer that ends with `node`, or the reason why there is none.

    Args:
        node: a Gemm, MatMul, Conv, or the Add of a bias.
        any_kernel: True to also accept a convolution with a kernel size above 1.
    """
    # Exporters write a Linear of more than two axes as MatMul and Add. If another node reads the product, the Add is
    # not part of the layer.
    if node.domain == "" and node.op_type == "Add":
        for index in (0, 1):
            bias, product = node.inputs[index], node.inputs[1 - index]
            producer = product.producer() if product is not None else None
            layer = read_linear(producer) if producer is not None else ""
            if (
                isinstance(layer, Linear)
                and layer.bias is None
                and layer.node is producer
                and layer.node.op_type != "Conv"
                and _is_bias(bias, layer.classes)
                and len(producer.outputs[0].uses()) == 1
            ):
                layer.bias, layer.add = bias, node
                return layer
    problem = f"{op_name(node)} is neither a linear layer nor known to keep classes apart"
    if _QUANTIZED.search(node.op_type):
        return f"{op_name(node)} is quantized: {_QUANTIZED_ADVICE}"
    if node.domain != "" or node.op_type not in PRODUCTS | {"Conv"}:
        return problem
    traced = _trace_weight(node.inputs[1])
    if isinstance(traced, str):
        return f"the weight of {op_name(node)} {traced}"
    weight, through = traced
    dims = tuple(weight.const_value.shape.numpy()) if weight.const_value is not None else ()
    rows = node.op_type == "Conv" or node.attributes.get_int("transB", 0) == 1
    # Each Transpose in between swaps the two axes of the weight.
    rows ^= sum(step.op_type == "Transpose" for step in through) % 2 == 1
    if node.op_type == "Conv":
        # A Conv with a larger kernel is rarely a head, unless the user names it. Groups must divide the number of
        # classes.
        small = any_kernel or all(size == 1 for size in dims[2:])
        if node.attributes.get_int("group", 1) != 1 or not small:
            return (
                f"{op_name(node)} has a kernel of {list(dims[2:])}, and is considered a head only if "
                "head= names it"
            )
    elif len(dims) != 2:
        return f"the weight of {op_name(node)} has the shape {list(dims)}"
    bias = node.inputs[2] if node.op_type != "MatMul" and len(node.inputs) > 2 else None
    layer = Linear(node, weight, through, rows, bias)
    if bias is not None and not _is_bias(bias, layer.classes):
        return (
            f"'{bias.name}', which {op_name(node)} adds, is not a stored bias with {layer.classes} elements"
        )
    return layer


def _trace_weight(value: ir.Value | None) -> tuple[ir.Value, list[ir.Node]] | str:
    """Follows the input of a layer back to its weight.

    Returns:
        The initializer, and the nodes between it and the layer. If there is no weight, the reason, as a predicate such
        as "is an input".
    """
    through: list[ir.Node] = []
    while value is not None and not value.is_initializer():
        node = value.producer()
        if node is None or node.domain != "" or node.op_type not in _PASSED_ON:
            kind = f"comes from {op_name(node)}" if node is not None else "is an input"
            quantized = node is not None and "Dequantize" in node.op_type
            return f"{kind}, so it is quantized: {_QUANTIZED_ADVICE}" if quantized else kind
        through.insert(0, node)
        value = node.inputs[0]
    if (
        value is None
        or value.const_value is None
        or value.dtype is None
        or not value.dtype.is_floating_point()
    ):
        return "is not a floating-point tensor in the file"
    if any(node.op_type == "Transpose" and len(static_dims(node.outputs[0]) or ()) != 2 for node in through):
        return "is transposed in more than two axes"
    return value, through


def _is_bias(value: ir.Value | None, classes: int) -> bool:
    """True if a value is a floating-point initializer with one element per class."""
    if value is None or not value.is_initializer() or value.const_value is None:
        return False
    dims = tuple(value.const_value.shape.numpy())
    # A vector [classes], possibly with leading axes of size one.
    floating = is_float_parameter(value) or (value.dtype is not None and value.dtype.is_floating_point())
    return floating and bool(dims) and dims[-1] == classes and math.prod(dims) == classes


def _last_nodes(value: ir.Value) -> list[ir.Node]:
    """Returns the last few nodes that compute an output, in reverse order."""
    # Follows the first input that is not an initializer, by ONNX's convention the data.
    nodes: list[ir.Node] = []
    node = value.producer()
    while node is not None and len(nodes) < _SHOWN:
        nodes.append(node)
        source = next((v for v in node.inputs if v is not None and not v.is_initializer()), None)
        node = source.producer() if source is not None else None
    return nodes


def _last_ops(value: ir.Value) -> str:
    """Describes the last nodes that compute an output for error messages, e.g. "Softmax 'p', Gemm 'fc'"."""
    return ", ".join(map(op_name, _last_nodes(value))) or "no op"


def _layers(model: ir.Model) -> str:
    """Returns the weight names of a model's last linear layers, for error messages."""
    layers = [read_linear(node, any_kernel=True) for node in model.graph]
    names = [str(layer.weight.name) for layer in layers if isinstance(layer, Linear)]
    return ", ".join(list(dict.fromkeys(names))[-5:]) or "none"
