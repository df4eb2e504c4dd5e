"""Finds the arguments of a graph that eager PyTorch saves for backward, which the caller must not modify until then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from onnxtrain.ortmodule.capture._nodes import (
    CHECKPOINT_REGION,
    backward_functions,
    example_values,
    is_transformed,
    memory_of,
    saved_tensors_of,
)


@dataclass(frozen=True)
class SavedArguments:
    """The arguments that eager PyTorch saves for backward, for each result of a graph.

    Arguments that cannot be written to, e.g. numbers, count as saved for every result.

    Attributes:
        outputs: for each output, the indices of the arguments that its backward functions have saved.
        written: for each argument, the indices of the arguments that are saved for the gradient of the value that the
            graph writes to this argument.
    """

    outputs: tuple[frozenset[int], ...]
    written: tuple[frozenset[int], ...]


def saved_arguments(graph_module: fx.GraphModule) -> SavedArguments | None:
    """Returns the arguments of a graph that eager PyTorch saves for backward.

    Args:
        graph_module: a Dynamo graph.

    Returns:
        The arguments, per result of the graph. None if they are unknown because the graph has `torch.func` transforms
        or checkpointed regions. Backward recomputes a checkpointed region from the current values of its arguments.
    """
    # Dynamo's fake tensors have the autograd graph of eager PyTorch. A backward function saves the argument itself, a
    # view of it (which shares its version counter), or a copy: cast by `autocast`, or made contiguous (a matrix product
    # of an expanded tensor). The caller cannot write to the copy.
    nodes = graph_module.graph.nodes
    if any(
        CHECKPOINT_REGION in node.meta or is_transformed(node.meta.get("example_value")) for node in nodes
    ):
        return None
    arguments = example_values(graph_module)
    places: dict[int, set[int]] = {}
    for place, value in enumerate(arguments):
        if _is_dense(value):
            places.setdefault(memory_of(value), set()).add(place)
    constants = frozenset(place for place, value in enumerate(arguments) if not _is_dense(value))
    by_function: dict[Any, set[int]] = {}

    def saved_behind(value: Any) -> frozenset[int]:
        found: set[int] = set()
        for function in backward_functions(value):
            if function not in by_function:
                saved = [memory_of(tensor) for tensor in saved_tensors_of(function) if _is_dense(tensor)]
                by_function[function] = set().union(*(places.get(memory, ()) for memory in saved))
            found |= by_function[function]
        return constants.union(found)

    returned = graph_module.graph.find_nodes(op="output")[0].args[0]
    return SavedArguments(
        tuple(
            saved_behind(node.meta.get("example_value") if isinstance(node, fx.Node) else None)
            for node in returned
        ),
        tuple(saved_behind(value) for value in arguments),
    )


def _is_dense(value: Any) -> bool:
    """True if a value is a tensor with a strided layout, i.e. with a single storage."""
    return isinstance(value, torch.Tensor) and value.layout == torch.strided
