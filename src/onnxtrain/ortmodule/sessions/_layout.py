"""Results in the memory order that they have in eager PyTorch: what they can be viewed as depends on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from onnxtrain.ortmodule._torch import DisableTorchDispatch, is_functorch_wrapped_tensor

Layout = tuple[int, ...]
"""The axes of a tensor from the slowest in memory to the fastest."""


def layouts_of(graph_module: fx.GraphModule) -> list[Layout | None]:
    """Returns for each output of a Dynamo graph how it lies in memory; None where it is contiguous or has gaps."""
    output = next(node for node in graph_module.graph.nodes if node.op == "output")
    values = [
        item.meta.get("example_value") if isinstance(item, fx.Node) else None for item in output.args[0]
    ]
    return [_layout(value) if isinstance(value, torch.Tensor) else None for value in values]


def _layout(fake: torch.Tensor) -> Layout | None:
    if fake.layout != torch.strided or is_functorch_wrapped_tensor(fake):
        return None
    sizes, strides = _hints(fake.shape), _hints(fake.stride())
    if sizes is None or strides is None:
        return None
    order = tuple(sorted(range(len(sizes)), key=lambda axis: (sizes[axis] != 1, -strides[axis])))
    length = 1
    for axis in reversed(order):
        if sizes[axis] != 1 and strides[axis] != length:
            return None
        length *= sizes[axis]
    wide = [axis for axis in order if sizes[axis] != 1]
    return None if length == 0 or wide == sorted(wide) else order


def _hints(sizes: Sequence[Any]) -> list[int] | None:
    """The numbers of this call: to compare symbols would bind the graph to what was found."""
    found = [size if isinstance(size, int) else size.node.hint for size in sizes]
    return found if all(isinstance(size, int) for size in found) else None


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
