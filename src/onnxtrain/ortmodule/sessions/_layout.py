"""Results in the memory order that they have in eager PyTorch: what they can be viewed as depends on it."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
import torch

from onnxtrain.ortmodule._torch import DisableTorchDispatch
from onnxtrain.ortmodule.capture._layout import Layout


def lay_out(model: ir.Model, layouts: Mapping[int, Layout]) -> None:
    """Transposes the outputs of a model at these places, in place, into their memory order."""
    outputs = model.graph.outputs
    for place, order in layouts.items():
        value = outputs[place]
        node = ir.node("Transpose", [value], {"perm": order})
        laid_out = node.outputs[0]
        laid_out.name = f"{value.name}_in_memory"
        laid_out.type = value.type
        if value.shape is not None:
            laid_out.shape = ir.Shape([value.shape[axis] for axis in order])
        model.graph.append(node)
        outputs[place] = laid_out


def restride(tensor: torch.Tensor, order: Layout) -> None:
    """Makes of a contiguous result of :func:`lay_out` the tensor itself: no view, which autograd would treat as one."""
    shape, strides = tensor.shape, tensor.stride()
    size, stride = [0] * len(order), [0] * len(order)
    for place, axis in enumerate(order):
        size[axis], stride[axis] = shape[place], strides[place]
    with DisableTorchDispatch():  # the call is watched
        tensor.as_strided_(size, stride)
