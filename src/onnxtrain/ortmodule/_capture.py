"""From a Dynamo graph to a functional ATen graph: no views, no mutations but at the end, gradients stopped by marks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from onnxtrain.ortmodule.aten.pooling import INTERPOLATE
from onnxtrain.ortmodule.aten.random import DROPOUTS
from onnxtrain.ortmodule.aten.recurrent import WHOLE_LAYERS

__all__ = ["example_values", "functional_graph"]


def example_values(graph_module: fx.GraphModule) -> list[Any]:
    """Returns what Dynamo knows of each input: a fake tensor or a symbolic integer."""
    return [node.meta["example_value"] for node in graph_module.graph.nodes if node.op == "placeholder"]


def functional_graph(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Returns the ATen graph of a Dynamo graph.

    Its placeholders and outputs are those of `graph_module`. Mutated inputs are written by `aten.copy_` nodes at its
    end (and by `native_batch_norm`, which does so unannounced). Where PyTorch's autograd would stop, because of
    `detach` or inside `no_grad`, there is a `detach_copy` node.
    """
    values = example_values(graph_module)
    _mark_stopped_gradients(graph_module)
    fake_mode = next((v.fake_mode for v in values if hasattr(v, "fake_mode")), None)
    with (
        torch.no_grad(),
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        fake_mode or nullcontext(),
    ):
        result = _trace(graph_module, values)
        if any(_mutates(node) for node in result.graph.nodes):
            # Composite ops (attention, matmul, losses) come apart below functionalisation, mutations and all.
            result = _trace(result, values)
    return result


def _trace(graph_module: fx.GraphModule, values: Sequence[Any]) -> fx.GraphModule:
    # Views stay views: random numbers are drawn in the order of the strides that eager PyTorch has.
    functional = torch.func.functionalize(_Interpreter(graph_module).run, remove="mutations")
    result = make_fx(functional)(*values)
    assert isinstance(result, fx.GraphModule)
    return result


_REPLACED: dict[Any, Callable[..., Any]] = {**WHOLE_LAYERS, **DROPOUTS, **INTERPOLATE}
"""Functions of Dynamo graphs that trace better, or as eager PyTorch runs them, when written in other terms."""


class _Interpreter(fx.Interpreter):
    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(_REPLACED.get(target, target), args, kwargs)


def _mutates(node: fx.Node) -> bool:
    """Whether the node mutates something that is not an input of the graph."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return False
    mutated = node.args[0] if node.args else None
    return not (isinstance(mutated, fx.Node) and mutated.op == "placeholder")


def _mark_stopped_gradients(graph_module: fx.GraphModule) -> None:
    """Detaches what Dynamo found not to require a gradient although something that it was computed from does.

    `torch.no_grad` regions leave no trace in an ATen graph, and `detach` is lost among the aliases.
    """
    for node in list(graph_module.graph.nodes):
        value = node.meta.get("example_value")
        if node.op in ("placeholder", "output") or not _is_float(value) or value.requires_grad:
            continue
        if any(_requires_grad(source) for source in node.all_input_nodes):
            with graph_module.graph.inserting_after(node):
                stopped = graph_module.graph.call_method("detach", (node,))
            stopped.meta["example_value"] = value
            node.replace_all_uses_with(stopped, delete_user_cb=lambda user, new=stopped: user is not new)
    graph_module.recompile()


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _requires_grad(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    parts: Sequence[Any] = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(part, torch.Tensor) and part.requires_grad for part in parts)
