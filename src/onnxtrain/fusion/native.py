"""Rewrites convolutional ops, their gradients and LayerNormalization as functions that have native kernels.

Unlike the standard ops, these functions have no gradient rules, so this pass is for graphs that contain their
gradients. On a stock runtime, each function runs its body, which consists of the replaced nodes, except for depthwise
convolutions of small planes, which are matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.functions import (
    CompositeOp,
    DepthwisePlanes,
    batch_normalization_gradient,
    batch_normalization_max_pool_relu,
    batch_normalization_max_pool_relu_gradient,
    batch_normalization_relu,
    batch_normalization_relu6,
    batch_normalization_relu6_gradient,
    batch_normalization_relu_gradient,
    batch_normalization_training,
    convolution,
    convolution_transpose,
    depthwise_convolution,
    hardtanh,
    hardtanh_gradient_of_finite,
    layer_normalization_training,
    max_pool,
    relu_gradient_of_finite,
)
from onnxtrain.fusion._pass import KeepingPass, become, set_inputs, take_over
from onnxtrain.passes import is_training_batch_norm, remove_unread_chains

_FLOAT = ir.DataType.FLOAT
_Attributes = Mapping[str, int | float | list[int]]


class NativeOpsPass(KeepingPass):
    """Replaces float32 convolutions, max pooling and normalizations with functions that have native kernels.

    Rewrites Conv, ConvTranspose, MaxPool with indices, LayerNormalization with statistics, and training-mode
    BatchNormalization and its gradient. `kept` applies only to convolutions and LayerNormalization.

    Run this pass last, because other passes look for the standard ops.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the main graph in place; subgraphs are not modified."""
        op = Emitter(model.graph, functions=model.functions)
        rewrites: list[Callable[[Emitter, ir.Node], bool]] = [
            _convolution,
            _normalization,
            _pooling,
            _gradient,
            _layer_normalization,
        ]
        modified = [
            rewrite(op, node)
            for node in tuple(model.graph)
            for rewrite in rewrites
            if node.graph is model.graph and node.inputs and _is_float(node.inputs[0])
            # The other kernels are bit-identical to ONNX Runtime's, or compute ops that an inference model doesn't
            # contain.
            if not (rewrite in (_convolution, _layer_normalization) and self.keeps(node))
        ]
        return ir.passes.PassResult(model, any(modified))


def _is_float(value: ir.Value | None) -> bool:
    return value is not None and value.dtype == _FLOAT


def _calls(node: ir.Node, composite: CompositeOp) -> bool:
    return (node.domain, node.op_type) == composite.identifier(_FLOAT, {})[:2]


def _convolution(op: Emitter, node: ir.Node) -> bool:
    """Replaces a Conv or ConvTranspose with a native function, unless its padding depends on the size of the input.

    Returns:
        True if `node` was rewritten.
    """
    composite = {"Conv": convolution, "ConvTranspose": convolution_transpose}.get(node.op_type)
    weight = node.inputs[1] if composite is not None and node.domain == "" else None
    dims = static_dims(weight) if weight is not None else None
    auto_pad = node.attributes.get_string("auto_pad", "NOTSET")
    # The padding of SAME_UPPER and SAME_LOWER depends on the size of the input, which may be symbolic.
    if composite is None or dims is None or not 3 <= len(dims) <= 5 or auto_pad not in ("NOTSET", "VALID"):
        return False
    # With output_shape, the padding depends on the size of the input too.
    if "output_shape" in node.attributes:
        return False
    rank = len(dims) - 2
    pads = node.attributes.get_ints("pads") if auto_pad == "NOTSET" else None
    attributes: dict[str, int | float | list[int]] = {
        "strides": list(node.attributes.get_ints("strides") or [1] * rank),
        "dilations": list(node.attributes.get_ints("dilations") or [1] * rank),
        "pads": list(pads or [0] * 2 * rank),
        "group": node.attributes.get_int("group", 1),
    }
    if composite is convolution_transpose:
        attributes["output_padding"] = list(node.attributes.get_ints("output_padding") or [0] * rank)
    else:
        composite = _small_depthwise(node, dims, attributes) or composite
    become(op, node, composite, attributes)
    return True


def _small_depthwise(
    node: ir.Node, weight: Sequence[int | None], attributes: Mapping[str, int | float | list[int]]
) -> CompositeOp | None:
    """Returns the op for a depthwise Conv of small planes; None for other Convs."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    geometry = {
        name: value if isinstance(value, list) else [int(value)] for name, value in attributes.items()
    }
    planes = DepthwisePlanes.of(x, y, weight, geometry)
    bias = len(node.inputs) > 2 and node.inputs[2] is not None
    return None if planes is None else depthwise_convolution(planes, bias=bias)


def _normalization(op: Emitter, node: ir.Node) -> bool:
    """Replaces a training-mode BatchNormalization with a native function, fused with a Relu or ReLU6 that follows.

    A MaxPool between BatchNormalization and Relu is fused too. Nodes are not fused if other nodes read the values
    between them, except for Shape nodes that read MaxPool's input.

    Returns:
        True if `node` was rewritten.
    """
    if not is_training_batch_norm(node):
        return False
    attributes: _Attributes = {
        "epsilon": node.attributes.get_float("epsilon", 1e-5),
        "momentum": node.attributes.get_float("momentum", 0.9),
    }
    # The function has three outputs; a node without running statistics has one.
    node.resize_outputs(3)
    for output in node.outputs:
        output.name = output.name or ""
    y = node.outputs[0]
    # MaxPool's gradient reads the shape of its input, which equals that of x.
    relu, pool = _reader(y, "Relu"), _reader(y, "MaxPool", but="Shape")
    if relu is not None:
        become(op, node, batch_normalization_relu, attributes)
        take_over(y, relu)
        return True
    relu6 = _sole_reader(y)
    # A Hardtanh between 0 and 6.
    if relu6 is not None and _calls(relu6, hardtanh) and _within_relu6(relu6.inputs):
        become(op, node, batch_normalization_relu6, attributes)
        take_over(y, relu6)
        return True
    windows = None if pool is None else _windows(pool)
    behind = None if pool is None or windows is None else _reader(pool.outputs[0], "Relu")
    if pool is None or windows is None or behind is None:
        become(op, node, batch_normalization_training, attributes)
        return True
    become(op, node, batch_normalization_max_pool_relu, {**attributes, **windows})
    for use in tuple(y.uses()):
        # All readers but the pooling are Shape nodes.
        if use.node is not pool:
            use.node.replace_input_with(use.idx, node.inputs[0])
    take_over(y, behind)
    node.resize_outputs(4)
    indices = node.outputs[3]
    if len(pool.outputs) > 1:
        pool_indices = pool.outputs[1]
        indices.name, pool_indices.name = pool_indices.name, None
        indices.type, indices.shape = pool_indices.type, pool_indices.shape
        pool_indices.replace_all_uses_with(indices, replace_graph_outputs=True)
    # In frozen parts nothing reads the indices. ONNX Runtime (1.32) rejects a node whose trailing outputs are omitted
    # by an empty name if its function has them.
    indices.name = indices.name or op.unique_name(f"{y.name}_indices")
    op.graph.remove(pool, safe=True)
    return True


def _layer_normalization(op: Emitter, node: ir.Node) -> bool:
    """Replaces a LayerNormalization with a native function, if all of its three outputs are present.

    Scale and bias must have the shape of the normalized axes, because the kernel does not broadcast them. The bias is
    optional.

    Returns:
        True if `node` was rewritten.
    """
    if (node.op_type, node.domain, len(node.outputs)) != ("LayerNormalization", "", 3):
        return False
    x, scale = node.inputs[:2]
    bias = node.inputs[2] if len(node.inputs) == 3 else None
    axis, sizes = node.attributes.get_int("axis", -1), None if x is None else static_dims(x)
    if sizes is None or None in sizes[axis:] or node.attributes.get_int("stash_type", 1) != 1:
        return False
    # In ONNX, scale and bias may broadcast; the kernel doesn't support that.
    if any(value is not None and static_dims(value) != sizes[axis:] for value in (scale, bias)):
        return False
    if not all(output.name for output in node.outputs):
        return False
    node.resize_inputs(3)
    if bias is None:
        # ONNX Runtime (1.32) crashes on a bias that is omitted by an empty name, as it would be in the function's body.
        node.replace_input_with(2, op.const(np.zeros(sizes[axis:], np.float32)))
    attributes: _Attributes = {"axis": axis, "epsilon": node.attributes.get_float("epsilon", 1e-5)}
    become(op, node, layer_normalization_training, attributes)
    return True


def _pooling(op: Emitter, node: ir.Node) -> bool:
    """Replaces a MaxPool whose indices are used, e.g. by its gradient, with a native function.

    Returns:
        True if `node` was rewritten.
    """
    if (node.op_type, node.domain) != ("MaxPool", "") or len(node.outputs) < 2:
        return False
    if not node.outputs[1].uses() and not node.outputs[1].is_graph_output():
        return False
    windows = _windows(node)
    if windows is None:
        return False
    become(op, node, max_pool, windows)
    return True


def _within_relu6(inputs: Sequence[ir.Value | None]) -> bool:
    """True if inputs 1 and 2 are the constants 0 and 6."""
    return all(
        value is not None and value.const_value is not None and value.const_value.numpy().item() == bound
        for value, bound in zip(inputs[1:3], (0, 6), strict=True)
    )


def _reader(value: ir.Value, op_type: str, but: str = "") -> ir.Node | None:
    """Returns the only reader of a value, ignoring nodes of type `but`, if it is an `op_type` node; else None."""
    reader = _sole_reader(value, but)
    return reader if reader is not None and (reader.op_type, reader.domain) == (op_type, "") else None


def _sole_reader(value: ir.Value, but: str = "") -> ir.Node | None:
    """Returns the only reader of a value, ignoring nodes of type `but`, if it is in the same graph; else None."""
    readers = [use.node for use in value.uses() if use.node.op_type != but]
    source = value.producer()
    if len(readers) != 1 or value.is_graph_output() or source is None or readers[0].graph is not source.graph:
        return None
    return readers[0]


def _windows(pool: ir.Node) -> dict[str, list[int]] | None:
    """Returns the attributes for the max-pooling function, or None if the function does not support this MaxPool."""
    kernel, attributes = list(pool.attributes.get_ints("kernel_shape") or []), pool.attributes
    # The kernel supports neither ceil_mode nor storage_order nor dilations.
    rank = len(kernel)
    plain = (
        1 <= rank <= 3
        and not attributes.get_int("ceil_mode", 0)
        and not attributes.get_int("storage_order", 0)
        and attributes.get_string("auto_pad", "NOTSET") in ("NOTSET", "VALID")
        and set(attributes.get_ints("dilations") or [1]) == {1}
    )
    pads = list(attributes.get_ints("pads") or [0] * 2 * rank)
    strides = list(attributes.get_ints("strides") or [1] * rank)
    # A window that lies entirely in the padding has no maximum.
    if not plain or any(pad >= size for pad, size in zip(pads, kernel * 2, strict=True)):
        return None
    if attributes.get_string("auto_pad", "NOTSET") == "VALID":
        pads = [0] * 2 * rank
    return {"kernel_shape": kernel, "strides": strides, "pads": pads}


def _gradient(op: Emitter, node: ir.Node) -> bool:
    """Fuses the gradient of Relu, ReLU6, or MaxPool and Relu with the BatchNormalization gradient that follows.

    Returns:
        True if `node` was rewritten.
    """
    if not _calls(node, batch_normalization_gradient):
        return False
    last = _sole_producer(node, node.inputs[0])
    unpool = last if last is not None and (last.op_type, last.domain) == ("MaxUnpool", "") else None
    if unpool is not None and not _is_spread(unpool, node.inputs[1]):
        return False
    relu = _sole_producer(unpool, unpool.inputs[0]) if unpool is not None else last
    if relu is None:
        return False
    if _calls(relu, hardtanh_gradient_of_finite) and _within_relu6(relu.inputs) and unpool is None:
        composite = batch_normalization_relu6_gradient
    elif _calls(relu, relu_gradient_of_finite):
        composite = batch_normalization_relu_gradient
    else:
        return False
    # The gradients of both Relu and Hardtanh have y as the first input and ct as the last.
    y, ct = relu.inputs[0], relu.inputs[-1]
    more = [y]
    if unpool is not None:
        # The kernel itself writes each cotangent to its index, without a tensor of zeros.
        composite, more = batch_normalization_max_pool_relu_gradient, [y, unpool.inputs[1]]
    set_inputs(node, [ct, *node.inputs[1:3], *more])
    become(op, node, composite, {"epsilon": node.attributes.get_float("epsilon", 1e-5)})
    remove_unread_chains(op.graph, [last])
    return True


def _sole_producer(reader: ir.Node, value: ir.Value | None) -> ir.Node | None:
    """Returns the node that computes a value if `reader` is its only reader; None otherwise."""
    if value is None or value.is_graph_output() or {use.node for use in value.uses()} != {reader}:
        return None
    return value.producer()


def _is_spread(unpool: ir.Node, x: ir.Value | None) -> bool:
    """True if a MaxUnpool scatters its input, at the flat indices of its second input, into zeros of x's shape."""
    value, attributes = unpool.inputs[0], unpool.attributes
    unit = set(attributes.get_ints("kernel_shape") or []) == {1} and set(
        attributes.get_ints("strides") or [1]
    ) == {1}
    result = unpool.outputs[0]
    same = x is not None and x.shape is not None and x.shape == result.shape
    return unit and same and _is_float(value) and not any(attributes.get_ints("pads") or [])
