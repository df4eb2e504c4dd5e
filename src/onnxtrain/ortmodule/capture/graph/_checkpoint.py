"""Carry the regions of `torch.utils.checkpoint` from Dynamo's graph to the ONNX graph.

Backward computes the values of a region again, instead of keeping them since the forward pass
(`sessions/_forward_backward.py`).
"""

from __future__ import annotations

import itertools
from typing import Any

import onnx_ir as ir
import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

_CHECKPOINT: Any = torch.ops.higher_order.tag_activation_checkpoint

REGION = "ac_graph_id"
"""Key of a node's metadata: the number of its region, under the name that PyTorch's own checkpointing uses."""

_KEY = "onnxtrain.checkpoint"
"""The same for nodes of an ONNX graph, whose metadata survives cloning and is written to files."""


def inline_checkpoints(graph_module: fx.GraphModule) -> bool:
    """Replaces calls of checkpointed regions by the nodes that these run; returns whether there was one.

    Each node gets the number of its region in `meta[REGION]`. A policy of what to keep (`context_fn`) is ignored: all
    values of a region are computed again.
    """
    numbers = itertools.count(1)
    found = False
    while calls := [node for node in graph_module.graph.nodes if _is_checkpoint(node)]:
        found = True
        for call in calls:
            # A region inside of another one has the outer one's number.
            _inline(graph_module, call, call.meta.get(REGION) or next(numbers))
    if found:
        graph_module.recompile()
    return found


def draw_again_alike(graph_module: fx.GraphModule) -> None:
    """Makes regions that PyTorch runs draw the same random numbers when backward computes them again.

    Dynamo's operator (PyTorch 2.13) forgets the state of the generator: it expects a compiler to note what was drawn.
    Run by itself, dropout would have another mask in backward than in forward.

    Args:
        graph_module: a captured graph, whose regions have been inlined in the copy that is lowered; changed in place.
    """
    for part in graph_module.modules():
        if isinstance(part, fx.GraphModule) and (calls := list(filter(_is_checkpoint, part.graph.nodes))):
            for call in calls:
                call.target = _run_region
            part.recompile()


def _run_region(body: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    """Runs a region as eager PyTorch does: :func:`torch.utils.checkpoint.checkpoint` preserves the random state."""
    options, others = _CHECKPOINT.divide_kwargs(kwargs)
    # Dynamo has captured the region under autograd, which `use_reentrant=True` would run without.
    options["use_reentrant"] = False
    return checkpoint(body, *args, **options, **others)


def _is_checkpoint(node: fx.Node) -> bool:
    return node.target is _CHECKPOINT


def _inline(graph_module: fx.GraphModule, call: fx.Node, region: int) -> None:
    """Replaces a call of a checkpointed region by copies of the region's nodes."""
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
            made[node].meta[REGION] = region
            if node.op == "get_attr":
                made[node].target = _adopted(graph_module, part, str(node.target))
    output = part.graph.find_nodes(op="output")[0]
    results = fx.node.map_arg(output.args[0], made.__getitem__)
    for user in list(call.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(call)
    if not body.users:
        graph.erase_node(body)


def _adopted(graph_module: fx.GraphModule, part: fx.GraphModule, name: str) -> str:
    """Gives the outer graph an attribute of an inlined region; returns its new name."""
    value = part
    for step in name.split("."):
        value = getattr(value, step)
    new_name = name.replace(".", "_")
    while hasattr(graph_module, new_name) and getattr(graph_module, new_name) is not value:
        new_name += "_"
    setattr(graph_module, new_name, value)
    return new_name


def mark_region(node: ir.Node, region: int) -> None:
    """Notes at a node of an ONNX graph the number of its region."""
    node.metadata_props[_KEY] = str(region)


def region_of(node: ir.Node) -> str | None:
    """Returns the number of the region that a node of an ONNX graph belongs to, or None."""
    return node.metadata_props.get(_KEY)
