"""Rejects graphs with DTensors, because operators on DTensors communicate between workers."""

from __future__ import annotations

import sys

from torch import fx

from onnxtrain.ortmodule._exceptions import ORTModuleTorchModelException
from onnxtrain.ortmodule.capture._nodes import argument_name, tensors_in

_MAX_NAMED = 3
"""Maximum number of DTensors that an error message names."""


def refuse_shards(graph_module: fx.GraphModule) -> None:
    """Raises if a value of a graph is a DTensor, e.g. a parameter after `parallelize_module`.

    Raises:
        ORTModuleTorchModelException: the graph has DTensors. The message names them, and explains how to train shards
            in ONNX Runtime.
    """
    # The module is not imported here, which would take time: a program that uses DTensors has imported it already.
    tensor_parallel = sys.modules.get("torch.distributed.tensor")
    if tensor_parallel is None:
        return
    shards = [
        node
        for node in graph_module.graph.nodes
        if any(
            isinstance(value, tensor_parallel.DTensor) for value in tensors_in(node.meta.get("example_value"))
        )
    ]
    # Results computed from a DTensor are DTensors, too: inputs are named in preference.
    names = [argument_name(node) for node in shards if node.op == "placeholder"] or [
        node.name for node in shards
    ]
    if not names:
        return
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    raise ORTModuleTorchModelException(
        f"capturing DTensors: {', '.join(names[:_MAX_NAMED])}{more} are DTensors, whose operators "
        "communicate between workers; ONNX graphs cannot do that. To train sharded layers in ONNX Runtime, keep the "
        "shards as plain parameters and exchange their results in a torch.autograd.Function: "
        "docs/pytorch/with-other-tools.md#tensor-parallel-layers"
    )
