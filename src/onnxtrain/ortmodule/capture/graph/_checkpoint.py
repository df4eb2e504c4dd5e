"""Transfers `torch.utils.checkpoint` regions from Dynamo's graph to the ONNX graph.

The backward pass recomputes the activations of a region instead of saving them (`sessions/_forward_backward.py`).
"""

from __future__ import annotations

import itertools
from typing import Any

import onnx_ir as ir
import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from onnxtrain.ortmodule.capture._nodes import CHECKPOINT_REGION

_CHECKPOINT: Any = torch.ops.higher_order.tag_activation_checkpoint

_KEY = "onnxtrain.checkpoint"
"""Metadata key of an ONNX node: the number of its region. Node metadata is kept by cloning and written to files."""


def inline_checkpoints(graph_module: fx.GraphModule) -> bool:
    """Inlines all checkpointed regions of a graph, in place.

    Each inlined node gets the number of its region in `meta[CHECKPOINT_REGION]`. A selective checkpointing policy
    (`context_fn`) is ignored: all values of a region are recomputed.

    Returns:
        True if the graph had a checkpointed region.
    """
    numbers = itertools.count(1)
    found = False
    while calls := [node for node in graph_module.graph.nodes if _is_checkpoint(node)]:
        found = True
        for call in calls:
            # A nested region takes the number of the outer one.
            _inline(graph_module, call, call.meta.get(CHECKPOINT_REGION) or next(numbers))
    if found:
        graph_module.recompile()
    return found


def preserve_random_state(graph_module: fx.GraphModule) -> None:
    """Makes checkpointed regions that PyTorch runs draw the same random numbers when they are recomputed.

    Dynamo's operator (PyTorch 2.13) doesn't preserve the random state: it relies on the compiler to save the random
    numbers. Without the compiler, dropout would use different masks in forward and backward.

    Args:
        graph_module: a captured graph whose regions are not inlined; changed in place.
    """
    for part in graph_module.modules():
        if isinstance(part, fx.GraphModule) and (calls := list(filter(_is_checkpoint, part.graph.nodes))):
            for call in calls:
                call.target = _run_region
            part.recompile()


def _run_region(body: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    """Runs a region with :func:`torch.utils.checkpoint.checkpoint`, which preserves the random state."""
    options, others = _CHECKPOINT.divide_kwargs(kwargs)
    # Dynamo has captured the region with gradients enabled; `use_reentrant=True` would disable them.
    options["use_reentrant"] = False
    return checkpoint(body, *args, **options, **others)


def _is_checkpoint(node: fx.Node) -> bool:
    return node.target is _CHECKPOINT


def _inline(graph_module: fx.GraphModule, call: fx.Node, region: int) -> None:
    """Replaces the call to a checkpointed region with copies of the region's nodes."""
    graph = graph_module.graph
    body, *arguments = call.args
    assert isinstance(body, fx.Node)
    part = graph_module.get_submodule(str(body.target))
    assert isinstance(part, fx.GraphModule)
    made: dict[fx.Node, fx.Node] = {}
    placeholders = part.graph.find_nodes(op="placeholder")
    made.update(zip(placeholders, arguments, strict=True))  # type: ignore[arg-type]
    for node in part.graph.nodes:
        if node.op in ("call_function", "call_method", "call_module", "get_attr"):
            with graph.inserting_before(call):
                made[node] = graph.node_copy(node, made.__getitem__)
            made[node].meta[CHECKPOINT_REGION] = region
            if node.op == "get_attr":
                made[node].target = _copied_attribute(graph_module, part, str(node.target))
    output = part.graph.find_nodes(op="output")[0]
    results = fx.node.map_arg(output.args[0], made.__getitem__)
    for user in list(call.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(call)
    if not body.users:
        graph.erase_node(body)


def _copied_attribute(graph_module: fx.GraphModule, part: fx.GraphModule, name: str) -> str:
    """Copies an attribute of an inlined region to the outer graph; returns its new name."""
    value = part
    for step in name.split("."):
        value = getattr(value, step)
    new_name = name.replace(".", "_")
    while hasattr(graph_module, new_name) and getattr(graph_module, new_name) is not value:
        new_name += "_"
    setattr(graph_module, new_name, value)
    return new_name


def mark_region(node: ir.Node, region: int) -> None:
    """Stores the number of a checkpointed region in the metadata of an ONNX node."""
    node.metadata_props[_KEY] = str(region)


def region_of(node: ir.Node) -> str | None:
    """Returns the number of the checkpointed region that an ONNX node belongs to, or None."""
    return node.metadata_props.get(_KEY)
