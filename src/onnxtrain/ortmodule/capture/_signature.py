"""Describe a captured graph once, for all that comes behind: what each of its inputs and outputs is.

:func:`describe` makes a :class:`GraphSignature` where a graph is captured. Lowering changes nothing of it, sessions are
made by it, and each call of the graph goes by it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from onnxtrain.ortmodule.capture._aliases import Views, split_views
from onnxtrain.ortmodule.capture._data_setting import refuse_set_data
from onnxtrain.ortmodule.capture._flow import GradientFlow
from onnxtrain.ortmodule.capture._gradients import flow_of
from onnxtrain.ortmodule.capture._layout import Layout, layout_of
from onnxtrain.ortmodule.capture._overlaps import Overlaps
from onnxtrain.ortmodule.capture._refused_gradients import refuse_missing_gradients
from onnxtrain.ortmodule.capture._saved import saved_arguments


@dataclass(frozen=True)
class GraphInput:
    """One input of a captured graph.

    Attributes:
        name: of a parameter or buffer as in `state_dict`, e.g. "0.weight"; else of the argument, e.g. "x".
        requires_grad: whether it requires a gradient.
        written_with_grad: whether autograd takes the input, once the graph has written to it, for a result of the
            graph: after `x.mul_(weight)`.
        counts_writes: whether the graph's writes raise the input's version counter: not those through `.data`.
        zero_grads: indices of the inputs that get a zero gradient, not None, when none reaches them from the value
            written to this input; what the graph itself shows is left out.
        saves: indices of the inputs that eager PyTorch saves for the gradient of the value written to this input.
    """

    name: str = ""
    requires_grad: bool = False
    written_with_grad: bool = False
    counts_writes: bool = False
    zero_grads: frozenset[int] = frozenset()
    saves: frozenset[int] | None = None


@dataclass(frozen=True)
class GraphOutput:
    """One output of a captured graph.

    Attributes:
        requires_grad: whether it has a gradient.
        layout: how it lies in memory in eager PyTorch; None where it is contiguous.
        zero_grads: indices of the inputs that get a zero gradient, not None, when none reaches them from this output,
            e.g. {2, 3}; what the graph itself shows is left out.
        saves: indices of the inputs that eager PyTorch saves for its gradient, e.g. the factors of a product: it raises
            if the caller writes to one of them before backward. To others the caller may write, as eager PyTorch has
            saved a copy, or nothing. None if that is not known.
    """

    requires_grad: bool = False
    layout: Layout | None = None
    zero_grads: frozenset[int] = frozenset()
    saves: frozenset[int] | None = None


@dataclass(frozen=True)
class GraphSignature:
    """What a captured graph takes and returns.

    Attributes:
        inputs: one per placeholder.
        outputs: one per output. Those behind the first `returned` are no results, but views are taken of them.
        returned: the number of results.
        device: of the tensors.
        views: the outputs that PyTorch takes as views; the graph has None in their places. None if there are none.
        overlaps: finds inputs of a call that share memory with one that the graph writes to; None in a part of a graph.
    """

    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    returned: int
    device: torch.device
    views: Views | None = None
    overlaps: Overlaps | None = None


def describe(graph_module: fx.GraphModule, device: torch.device) -> tuple[GraphSignature, GradientFlow]:
    """Returns the signature of a Dynamo graph, and where gradients stop in it.

    Args:
        graph_module: the graph; its results that are views of others are taken out of it.
        device: of its tensors.

    Raises:
        NotImplementedError: ONNX Runtime could not do what the graph does to memory or to gradients.
        ORTModuleTorchModelException: PyTorch has no derivative of an operator.
        RuntimeError: autograd has lost what an input's history was.
    """
    refuse_set_data(graph_module)
    refuse_missing_gradients(graph_module)
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    values = [node.meta["example_value"] for node in placeholders]
    has_history = [_has_history(value) for value in values]  # which raises for what autograd has lost
    overlaps = Overlaps(graph_module)
    returned = len(graph_module.graph.find_nodes(op="output")[0].args[0])
    views = split_views(graph_module)
    flow = flow_of(graph_module)
    saved = saved_arguments(graph_module)
    inputs = [
        GraphInput(
            name=_argument_name(node),
            requires_grad=isinstance(value, torch.Tensor) and value.requires_grad,
            written_with_grad=has_history[index] and index not in flow.kept,
            counts_writes=index in overlaps.noticed,
            zero_grads=flow.written_links.get(index, frozenset()),
            saves=None if saved is None else saved.written[index] | saved.constants,
        )
        for index, (node, value) in enumerate(zip(placeholders, values, strict=True))
    ]
    outputs = [
        _output(
            result,
            flow.links.get(index, frozenset()),
            None if saved is None else saved.outputs[index] | saved.constants,
        )
        for index, result in enumerate(graph_module.graph.find_nodes(op="output")[0].args[0])
    ]
    return GraphSignature(tuple(inputs), tuple(outputs), returned, device, views, overlaps), flow


def _output(result: Any, zero_grads: frozenset[int], saves: frozenset[int] | None) -> GraphOutput:
    fake = result.meta.get("example_value") if isinstance(result, fx.Node) else None
    requires_grad = isinstance(fake, torch.Tensor) and fake.requires_grad
    return GraphOutput(requires_grad, layout_of(fake), zero_grads, saves)


def _has_history(value: Any) -> bool:
    """Returns whether an input, when the graph is done, is a result of it that has a gradient: `x.mul_(weight)`."""
    return isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf


_OF_MODULE = re.compile(r"\.(?:_modules|_parameters|_buffers)\[")


def _argument_name(node: fx.Node) -> str:
    argument = node.meta.get("grapharg")
    source = str(getattr(getattr(argument, "source", None), "name", ""))
    keys = re.findall(r"\['?([^'\]]+)'?\]|\.(\w+)", source)
    path = [key or attribute for key, attribute in keys]
    if _OF_MODULE.search(source):
        path = [part for part in path[1:] if part not in ("_modules", "_parameters", "_buffers")]
    return ".".join(path) or node.name
