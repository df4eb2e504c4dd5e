"""Folds a frozen BatchNormalization into the preceding convolution."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.passes.parameters.training_mode import is_training_batch_norm
from onnxtrain.passes.tidy.constants import add_initializer

Array = np.ndarray[Any, Any]


class FoldFrozenBatchNormPass(ir.passes.InPlacePass):
    """Rewrites BatchNormalization(Conv(x, W, b)) as Conv(x, W', b') if everything but x is constant.

    In inference mode, BatchNormalization multiplies each channel by a constant and adds a constant, so it can be folded
    into the Conv's weight and bias. For each layer of a frozen backbone, this saves reading and writing the
    activations once, and one residual if gradients flow through the layer. ONNX Runtime's own fusion is not enough: it
    recognizes only Conv, which a later pass replaces with the function `Convolution` to use native kernels.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the model in place; the outputs keep their names."""
        modified = False
        for norm in tuple(model.graph):
            conv = _convolution_before(norm)
            if conv is None:
                continue
            weight, bias = _folded(conv, norm)
            # New initializers, because other nodes may read the old ones.
            inputs = [conv.inputs[0], *(_initializer(model.graph, norm, value) for value in (weight, bias))]
            result = norm.outputs[0]
            folded = ir.Node(
                "", "Conv", inputs, list(conv.attributes.values()), num_outputs=1, name=conv.name
            )
            model.graph.insert_before(norm, folded)
            folded.outputs[0].type, folded.outputs[0].shape = result.type, result.shape
            name = result.name
            result.replace_all_uses_with(folded.outputs[0], replace_graph_outputs=True)
            # The old output gives up its name before its node is removed.
            result.name, folded.outputs[0].name = f"{name}.folded", name
            model.graph.remove([norm, conv], safe=True)
            modified = True
        return ir.passes.PassResult(model, modified)


def _convolution_before(norm: ir.Node) -> ir.Node | None:
    """Returns the Conv into which a BatchNormalization can be folded, or None if there is none."""
    # In training mode, the statistics are those of the batch.
    if norm.op_type != "BatchNormalization" or norm.domain != "" or is_training_batch_norm(norm):
        return None
    value = norm.inputs[0]
    conv = value.producer() if value is not None else None
    if value is None or conv is None or conv.op_type != "Conv" or conv.domain != "":
        return None
    # Another reader needs the Conv's own output.
    if len(value.uses()) != 1 or value.is_graph_output():
        return None
    # Parameters are graph inputs here; the device provides their values.
    constants = [*conv.inputs[1:], *norm.inputs[1:5]]
    if any(c is not None and (c.const_value is None or c.is_graph_input()) for c in constants):
        return None
    # In float16, the folded weight would be rounded a second time.
    kinds = {c.dtype for c in constants if c is not None}
    return conv if kinds <= {ir.DataType.FLOAT, ir.DataType.DOUBLE} and len(kinds) == 1 else None


def _folded(conv: ir.Node, norm: ir.Node) -> tuple[Array, Array]:
    """Returns the weight and the bias of the merged Conv, computed in float64 and rounded once."""
    weight, *others = (_array(value) for value in conv.inputs[1:])
    scale, shift, mean, variance = (_array(value) for value in norm.inputs[1:5])
    bias = others[0] if others and others[0] is not None else np.zeros(())
    assert weight is not None
    assert scale is not None
    factor = scale / np.sqrt(variance + norm.attributes.get_float("epsilon", 1e-5))
    # Output channels are axis 0 of a convolution's weight.
    spread = factor.reshape(-1, *(1,) * (weight.ndim - 1))
    assert conv.inputs[1] is not None
    dtype = conv.inputs[1].dtype
    assert dtype is not None
    return (weight * spread).astype(dtype.numpy()), ((bias - mean) * factor + shift).astype(dtype.numpy())


def _array(value: ir.Value | None) -> Any:
    if value is None:
        return None
    assert value.const_value is not None
    return value.const_value.numpy().astype(np.float64)


def _initializer(graph: ir.Graph, norm: ir.Node, array: Array) -> ir.Value:
    """Adds an initializer named after the normalization, e.g. `bn1_out.folded_weight`."""
    kind = "weight" if array.ndim > 1 else "bias"
    name = f"{norm.outputs[0].name}.folded_{kind}"
    return add_initializer(graph, ir.tensor(array, name=name))
