"""Converts outputs to eager PyTorch's memory layout. E.g. `y.view(-1)` and the masks of dropout depend on the layout.

ONNX Runtime's results are contiguous. If an output is not contiguous in eager PyTorch, it is transposed into its memory
order at the end of the ONNX graph, and its strides are set, without a copy, when PyTorch receives it.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
import torch

from onnxtrain.ortmodule._torch import DisableTorchDispatch
from onnxtrain.ortmodule.capture.graph._layout import Layout


def lay_out(model: ir.Model, layouts: Mapping[int, Layout]) -> None:
    """Appends a Transpose to outputs of a model, in place, so that their axes are in memory order.

    Args:
        model: the model.
        layouts: maps the index of each output that is not contiguous in eager PyTorch to its layout, e.g.
            {0: (0, 2, 3, 1)}.
    """
    outputs = model.graph.outputs
    for index, layout in layouts.items():
        value = outputs[index]
        node = ir.node("Transpose", [value], {"perm": layout})
        transposed = node.outputs[0]
        transposed.name = f"{value.name}_in_memory"
        transposed.type = value.type
        if value.shape is not None:
            transposed.shape = ir.Shape([value.shape[axis] for axis in layout])
        model.graph.append(node)
        outputs[index] = transposed


def restride(tensor: torch.Tensor, layout: Layout) -> None:
    """Undoes the transposition of :func:`lay_out`, in place, by changing shape and strides only.

    Args:
        tensor: a contiguous result of ONNX Runtime, e.g. [N, H, W, C]. It becomes [N, C, H, W].
        layout: the layout of the output, e.g. (0, 2, 3, 1).
    """
    shape, strides = tensor.shape, tensor.stride()
    size, stride = [0] * len(layout), [0] * len(layout)
    for place, axis in enumerate(layout):
        size[axis], stride[axis] = shape[place], strides[place]
    # In place, because autograd would treat `permute` of a result as a view of another tensor. The call must be hidden
    # from the watch for PyTorch operators (`_pytorch_work.py`).
    with DisableTorchDispatch():
        tensor.as_strided_(size, stride)
