"""Describes the inputs and outputs of a captured graph: gradients, in-place writes, views and memory layout.

:func:`describe` returns one :class:`GraphSignature` per graph. Sessions and calls of the graph depend only on the
signature, so that no code after the capture needs to inspect Dynamo's graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from onnxtrain.ortmodule.capture._nodes import argument_name
from onnxtrain.ortmodule.capture.autograd._flow import GradientFlow
from onnxtrain.ortmodule.capture.autograd._gradients import flow_of
from onnxtrain.ortmodule.capture.autograd._refused_gradients import refuse_missing_gradients
from onnxtrain.ortmodule.capture.autograd._saved import saved_arguments
from onnxtrain.ortmodule.capture.graph._aliases import Views, split_views
from onnxtrain.ortmodule.capture.graph._data_setting import (
    is_reassigned,
    refuse_set_data,
    refuse_written_attributes,
)
from onnxtrain.ortmodule.capture.graph._layout import Layout, layout_of
from onnxtrain.ortmodule.capture.graph._overlaps import Overlaps


@dataclass(frozen=True)
class GraphInput:
    """One input of a captured graph.

    Attributes:
        name: the `state_dict` key of a parameter or buffer, e.g. "0.weight", or the name of an argument, e.g. "x".
        requires_grad: True if it requires a gradient.
        written_with_grad: True if an in-place op of the graph, e.g. `x.mul_(weight)`, sets the input's `grad_fn`.
            Meaningful only for inputs that the graph writes to.
        counts_writes: True if the graph's writes increment the input's version counter. Writes through `.data` do not.
        reassigned: True if the graph assigns to `.data`, e.g. `x.data = value`. After a run, the input's `.data` is set
            to the new value, instead of being overwritten.
        zero_grads: indices of the inputs whose gradient is zero, not None, even if the ONNX graph has no differentiable
            path from them to the value written to this input. See :attr:`GraphOutput.zero_grads`.
        saves: indices of the inputs that eager PyTorch saves for the backward pass of the value written to this input,
            or None if unknown.
    """

    name: str = ""
    requires_grad: bool = False
    written_with_grad: bool = False
    counts_writes: bool = False
    reassigned: bool = False
    zero_grads: frozenset[int] = frozenset()
    saves: frozenset[int] | None = None


@dataclass(frozen=True)
class GraphOutput:
    """One output of a captured graph.

    Attributes:
        requires_grad: True if it requires a gradient.
        layout: its memory layout in eager PyTorch, e.g. (0, 2, 3, 1), or None if it is contiguous or not dense.
        zero_grads: indices of the inputs whose gradient is zero, not None, even if the ONNX graph has no differentiable
            path from them to this output, e.g. {2, 3}. Inputs with a non-differentiable path, e.g. through Floor,
            get zeros even if they are not listed.
        saves: indices of the inputs that eager PyTorch saves for the backward pass of this output, e.g. both factors of
            a product, or None if unknown. Eager PyTorch raises if the caller writes to one of these inputs before
            backward; the caller may write to all other inputs.
    """

    requires_grad: bool = False
    layout: Layout | None = None
    zero_grads: frozenset[int] = frozenset()
    saves: frozenset[int] | None = None


@dataclass(frozen=True)
class GraphSignature:
    """The inputs and outputs of a captured graph, or of a part of one.

    Attributes:
        inputs: one per placeholder.
        outputs: one per output of the graph after :func:`split_views`. Outputs from index `returned` on are inputs of
            `views.graph`.
        returned: number of outputs before `split_views`: the outputs that the caller gets, including views, and the
            conditions of assertions.
        device: the device of all tensors.
        views: the outputs that PyTorch creates as views, or None if there are none.
        overlaps: detects inputs that overlap an input that the graph writes to; None for a part of a graph.
    """

    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    returned: int
    device: torch.device
    views: Views | None = None
    overlaps: Overlaps | None = None


def describe(graph_module: fx.GraphModule, device: torch.device) -> tuple[GraphSignature, GradientFlow]:
    """Returns the signature and the gradient flow of a Dynamo graph.

    Args:
        graph_module: the graph. Outputs that are views are removed from it, in place.
        device: the device of its tensors.

    Raises:
        NotImplementedError: the graph uses memory or gradients in a way that ONNX Runtime cannot reproduce.
        ORTModuleTorchModelException: PyTorch has no derivative of an operator.
        RuntimeError: PyTorch cannot determine the `grad_fn` of an input.
    """
    refuse_set_data(graph_module)
    refuse_written_attributes(graph_module)
    refuse_missing_gradients(graph_module)
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    values = [node.meta["example_value"] for node in placeholders]
    # This comes first: PyTorch raises for a view that was created under `no_grad` and whose base has been written to.
    has_history = [_has_history(value) for value in values]
    overlaps = Overlaps(graph_module)
    returned = len(graph_module.graph.find_nodes(op="output")[0].args[0])
    views = split_views(graph_module)
    flow = flow_of(graph_module)
    saved = saved_arguments(graph_module)
    inputs = [
        GraphInput(
            name=argument_name(node),
            requires_grad=isinstance(value, torch.Tensor) and value.requires_grad,
            written_with_grad=has_history[index] and index not in flow.kept,
            counts_writes=index in overlaps.noticed,
            reassigned=is_reassigned(node),
            zero_grads=flow.written_links.get(index, frozenset()),
            saves=None if saved is None else saved.written[index],
        )
        for index, (node, value) in enumerate(zip(placeholders, values, strict=True))
    ]
    outputs = [
        _output(
            result,
            flow.links.get(index, frozenset()),
            None if saved is None else saved.outputs[index],
        )
        for index, result in enumerate(graph_module.graph.find_nodes(op="output")[0].args[0])
    ]
    return GraphSignature(tuple(inputs), tuple(outputs), returned, device, views, overlaps), flow


def _output(result: Any, zero_grads: frozenset[int], saves: frozenset[int] | None) -> GraphOutput:
    fake = result.meta.get("example_value") if isinstance(result, fx.Node) else None
    requires_grad = isinstance(fake, torch.Tensor) and fake.requires_grad
    return GraphOutput(requires_grad, layout_of(fake), zero_grads, saves)


def _has_history(value: Any) -> bool:
    """True if an input has a `grad_fn` after the graph has run, from the caller or a write such as `x.mul_(weight)`."""
    return isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf
