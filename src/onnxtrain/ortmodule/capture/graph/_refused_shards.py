"""Refuse graphs of DTensors, whose operators exchange data between workers."""

from __future__ import annotations

import sys

from torch import fx

from onnxtrain.ortmodule._exceptions import ORTModuleTorchModelException
from onnxtrain.ortmodule.capture._nodes import argument_name, tensors_in

_NAMED = 3
"""The number of DTensors that a message names at most."""


def refuse_shards(graph_module: fx.GraphModule) -> None:
    """Raises if a value of a graph is a DTensor, as the parameters of `parallelize_module` are.

    Raises:
        ORTModuleTorchModelException: the names of the DTensors, and how to train shards in ONNX Runtime.
    """
    # Not imported: a program that has a DTensor has imported it, and for others it would take its time.
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
    # What the graph computes of a DTensor is one, too.
    names = [argument_name(node) for node in shards if node.op == "placeholder"] or [
        node.name for node in shards
    ]
    if not names:
        return
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    raise ORTModuleTorchModelException(
        f"capturing DTensors: {', '.join(names[:_NAMED])}{more} are DTensors, whose operators "
        "exchange data between workers, which no ONNX graph does. To train shards of layers in ONNX Runtime, hold them "
        "in plain parameters and exchange their results in a torch.autograd.Function: "
        "docs/many-machines.md#tensor-parallel-layers"
    )
