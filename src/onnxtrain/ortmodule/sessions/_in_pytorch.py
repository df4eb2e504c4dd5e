"""Runs parts of a functional ATen graph in PyTorch, in a form that autograd can differentiate.

Some operators of functional graphs have no kernel, or no correct derivative. They are replaced with equivalent
operators, e.g. `as_strided_scatter` with an in-place write.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from onnxtrain.ortmodule._exceptions import ORTModuleTorchModelException
from onnxtrain.ortmodule._torch import DisableAutocast, pytree
from onnxtrain.ortmodule.capture._nodes import ignoring_new_symbols
from onnxtrain.ortmodule.lowering.aten.random import fill_keep_mask

aten = torch.ops.aten


def _recurrent_layer(
    x: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    mode: str,
    bias: bool,
    bidirectional: bool,
) -> tuple[torch.Tensor, ...]:
    """Implements `onnxtrain.recurrent_layer`: runs one layer of an LSTM, GRU or RNN.

    Args:
        x: the input.
        states: the initial states: hidden and cell state for an LSTM, else the hidden state.
        weights: the weights, in the order of PyTorch's functions, e.g. `torch.lstm`.
        mode: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        bias: True if the layer has biases.
        bidirectional: True if the layer is bidirectional.
    """
    function = {"lstm": torch.lstm, "gru": torch.gru, "rnn_tanh": torch.rnn_tanh, "rnn_relu": torch.rnn_relu}[
        mode
    ]
    initial = list(states) if mode == "lstm" else states[0]
    results: tuple[torch.Tensor, ...] = function(  # type: ignore[operator]
        x, initial, list(weights), bias, 1, 0.0, True, bidirectional, False
    )
    return results


def _bernoulli_like(x: torch.Tensor, p: float) -> torch.Tensor:
    """Implements `onnxtrain.bernoulli_like`: draws ones with probability `p`, else zeros, in the layout of `x`."""
    return fill_keep_mask(torch.empty_like(x), p)


def _rrelu_with_noise(
    x: torch.Tensor,
    noise: torch.Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implements `aten.rrelu_with_noise_functional`; returns the result and the slopes."""
    # The derivative of the functional operator (PyTorch 2.13) reads `noise` from before the draw, i.e. uninitialized
    # memory.
    slopes = torch.empty_like(noise)
    return aten.rrelu_with_noise.default(x, slopes, lower, upper, training, generator), slopes


def _as_strided_scatter(
    x: torch.Tensor,
    part: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int | None = None,
) -> torch.Tensor:
    """Implements `aten.as_strided_scatter` as an in-place write to a copy of the storage of `x`."""
    # The derivative of the functional operator (PyTorch 2.13) is wrong: the gradient is twice as large.
    elements = x.untyped_storage().nbytes() // x.element_size()
    memory = x.as_strided((elements,), (1,), 0).clone()
    memory.as_strided(size, stride, x.storage_offset() if offset is None else offset).copy_(part)
    return memory.as_strided(x.size(), x.stride(), x.storage_offset())


def _copy(x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Implements `aten.copy`: copies `source` into a new tensor with the dtype and layout of `x`."""
    # An in-place write, because the functional operator (PyTorch 2.13) has no derivative.
    return torch.empty_like(x).copy_(source)


_RUNNABLE: dict[str, Callable[..., Any]] = {
    "onnxtrain.recurrent_layer.default": _recurrent_layer,
    "onnxtrain.bernoulli_like.default": _bernoulli_like,
    "aten.rrelu_with_noise_functional.default": _rrelu_with_noise,
    "aten.as_strided_scatter.default": _as_strided_scatter,
    "aten.copy.default": _copy,
    "aten._embedding_bag_forward_only.default": aten._embedding_bag.default,
    "aten.view_as_complex_copy.default": aten.view_as_complex.default,
    "aten.view_as_real_copy.default": aten.view_as_real.default,
}
"""Maps an operator without a kernel, or without a correct derivative, in PyTorch to the function that replaces it."""


def runnable(graph_module: fx.GraphModule) -> Callable[..., Any]:
    """Returns a differentiable function that runs a functional ATen graph in PyTorch.

    Args:
        graph_module: the graph. Operators in `_RUNNABLE` are replaced in place.
    """
    for node in graph_module.graph.nodes:
        node.target = _RUNNABLE.get(str(node.target), node.target)
    graph_module.recompile()
    run = graph_module.forward

    def without_autocast(*args: Any) -> Any:
        # The traced graph contains autocast's casts, which must not be applied twice.
        with DisableAutocast():
            return run(*args)

    return without_autocast


def differentiable_nodes(
    graph_module: fx.GraphModule, requires_grad: Sequence[bool], in_pytorch: Mapping[fx.Node, Any]
) -> set[fx.Node]:
    """Returns the nodes whose results require a gradient.

    Args:
        graph_module: a functional ATen graph.
        requires_grad: for each placeholder, True if it requires a gradient.
        in_pytorch: the nodes that PyTorch is to run.

    Raises:
        ORTModuleTorchModelException: PyTorch cannot differentiate a node in `in_pytorch`.
    """
    differentiable: set[fx.Node] = set()
    flags = iter(requires_grad)
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            if next(flags):
                differentiable.add(node)
        elif node.op == "call_function" and not differentiable.isdisjoint(node.all_input_nodes):
            if node.target is aten.detach.default or not _is_differentiable(node.meta.get("val")):
                continue
            # Nodes that ONNX Runtime runs have a gradient rule. Without one the node would be in `in_pytorch`.
            if node not in in_pytorch or _has_derivative(node, differentiable):
                differentiable.add(node)
    return differentiable


def _is_differentiable(value: Any) -> bool:
    """True if a result, or any tensor in a tuple of results, has a floating-point or complex dtype."""
    parts = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(p, torch.Tensor) and (p.is_floating_point() or p.is_complex()) for p in parts)


def _has_derivative(node: fx.Node, differentiable: set[fx.Node]) -> bool:
    """True if autograd records a node's operator when the operator runs on fake tensors.

    Args:
        node: the node.
        differentiable: the earlier nodes whose results require a gradient.

    Raises:
        ORTModuleTorchModelException: the operator raises, or its backward is not implemented.
    """

    def value(argument: fx.Node) -> Any:
        fake = argument.meta["val"]
        if argument in differentiable and isinstance(fake, torch.Tensor):
            return fake.detach().requires_grad_()
        return fake

    # `getitem` of a node with several results. That node has been checked.
    if not callable(node.target) or any(
        isinstance(n.meta.get("val"), tuple | list) for n in node.all_input_nodes
    ):
        return True
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
    fake_mode = next(
        (v.fake_mode for n in node.all_input_nodes if hasattr(v := n.meta["val"], "fake_mode")), None
    )
    target = _RUNNABLE.get(str(node.target), node.target)
    try:
        with torch.enable_grad(), fake_mode or contextlib.nullcontext(), ignoring_new_symbols(fake_mode):
            results = pytree.tree_leaves(target(*args, **kwargs))
    # PyTorch's fake kernels raise exceptions of any type.
    except Exception as error:
        raise ORTModuleTorchModelException(
            f"{node.target} is not differentiable in PyTorch as it was traced ({type(error).__name__}: {error})"
        ) from error
    functions = [r.grad_fn for r in results if isinstance(r, torch.Tensor) and r.grad_fn is not None]
    # For an operator without a derivative, PyTorch records this function, which raises in backward.
    if any("NotImplemented" in function.name() for function in functions):
        raise ORTModuleTorchModelException(f"{node.target} is not differentiable in PyTorch as it was traced")
    return bool(functions)
