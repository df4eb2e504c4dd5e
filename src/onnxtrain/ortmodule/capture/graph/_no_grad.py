"""Corrects fake tensors that wrongly require a gradient under `torch.no_grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from onnxtrain.ortmodule._torch import (
    enter_inference_mode,
    exit_inference_mode,
    pytree,
    set_grad_enabled,
)
from onnxtrain.ortmodule.capture._nodes import memory_of, plain_tensors_in, writes_in_place


def correct_requires_grad(graph_module: fx.GraphModule) -> None:
    """Corrects `requires_grad` of example values under `torch.no_grad`, to match eager PyTorch.

    Args:
        graph_module: a Dynamo graph; `meta["example_value"]` of its nodes is changed.
    """
    # Under `torch.no_grad`, a result that is not a view never requires a gradient. In PyTorch 2.13 some fake tensors
    # do: `torch.nn.functional.pad` is decomposed, and its `prims.copy_to` sets the flag. The graph would have a
    # gradient where eager PyTorch has none.
    enabled = torch.is_grad_enabled()
    before: dict[fx.Node, bool] = {}
    written = _written_memory(graph_module)
    # Memory of corrected results. Values computed from these alone don't require a gradient either.
    wrong: set[int] = set()
    for node in graph_module.graph.nodes:
        if node.target is set_grad_enabled:
            enabled = bool(node.args[0])
        elif node.target is enter_inference_mode:
            before[node], enabled = enabled, not node.args[0]
        elif node.target is exit_inference_mode:
            enabled = before[node.args[0]]
        if node.op not in ("call_function", "call_method"):
            continue
        sources = [
            t for source in node.all_input_nodes for t in plain_tensors_in(source.meta.get("example_value"))
        ]
        if not any(t.requires_grad for t in plain_tensors_in(node.meta.get("example_value"))):
            continue
        memories = {memory_of(t) for t in sources}
        from_wrong = bool(wrong & memories) and not any(t.requires_grad for t in sources)
        values = [
            value
            for value in plain_tensors_in(node.meta["example_value"])
            if value.requires_grad
            and memory_of(value) not in written
            and (from_wrong or (not enabled and memory_of(value) not in memories))
        ]
        wrong.update(map(memory_of, values))
        node.meta["example_value"] = _without_gradient(node.meta["example_value"], values)


def _written_memory(graph_module: fx.GraphModule) -> set[int]:
    """Returns the storage identifiers (`memory_of`) of tensors that a graph writes to in place.

    Such a write may make a tensor require a gradient.
    """
    return {
        memory_of(tensor)
        for node in graph_module.graph.nodes
        if writes_in_place(node) and node.all_input_nodes
        for tensor in plain_tensors_in(node.all_input_nodes[0].meta.get("example_value"))
    }


def _without_gradient(example: Any, values: list[torch.Tensor]) -> Any:
    """Returns a copy of the nested value `example` in which the tensors in `values` are detached."""
    detached = {id(value): value.detach() for value in values}
    return pytree.tree_map_only(torch.Tensor, lambda t: detached.get(id(t), t), example)
