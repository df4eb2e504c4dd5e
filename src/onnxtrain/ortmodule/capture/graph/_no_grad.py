"""Correct fake tensors that say that a result under `torch.no_grad` requires a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from onnxtrain.ortmodule._torch import pytree, set_grad_enabled
from onnxtrain.ortmodule.capture._nodes import changes, memory_of, plain_tensors_in


def correct_requires_grad(graph_module: fx.GraphModule) -> None:
    """Makes `requires_grad` of example values what it is in eager PyTorch.

    Args:
        graph_module: a Dynamo graph; `meta["example_value"]` of its nodes is changed.
    """
    # Under `torch.no_grad` a result with memory of its own never requires a gradient. In PyTorch 2.13 some fake tensors
    # do: `torch.nn.functional.pad` runs as a decomposition that writes by `prims.copy_to`. Taken at its word, the graph
    # would have a gradient that eager PyTorch has not.
    enabled = torch.is_grad_enabled()
    written = _written(graph_module)
    # Memory of the results that were corrected: what is computed from them alone requires no gradient either.
    wrong: set[int] = set()
    for node in graph_module.graph.nodes:
        if node.target is set_grad_enabled:
            enabled = bool(node.args[0])
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


def _written(graph_module: fx.GraphModule) -> set[int]:
    """Returns the memory that a graph writes to: such a write may give a tensor without a gradient one."""
    return {
        memory_of(tensor)
        for node in graph_module.graph.nodes
        if changes(node) and node.all_input_nodes
        for tensor in plain_tensors_in(node.all_input_nodes[0].meta.get("example_value"))
    }


def _without_gradient(example: Any, values: list[torch.Tensor]) -> Any:
    """Returns an example value with some of its tensors detached."""
    detached = {id(value): value.detach() for value in values}
    return pytree.tree_map_only(torch.Tensor, lambda t: detached.get(id(t), t), example)
