"""The gradients of a captured graph where its values alone do not tell them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from onnxtrain.ortmodule.capture._fakes import is_float, tensors_in


@dataclass(frozen=True)
class GradientFlow:
    """What the values of a graph do not tell of their gradients.

    Attributes:
        stopped: per node, which of the tensors that it returns have no gradient although its arguments have.
        fresh: nodes among these whose results have memory of their own, to which what has a gradient may be written.
        hidden: per node that writes to memory without autograd seeing it (under `no_grad`, through `detach`, through
            `.data`), the first nodes with that memory: their gradient is that of what was there before.
        ended: per node, the first nodes with the memory whose gradient it ends (`detach_`), or does not begin (a write
            under `no_grad`).
        links: per output index, the input indices that get a zero gradient, not None, when no gradient reaches them,
            e.g. {0: {2, 3}}; empty if the graph itself shows them.
        written_links: the same per input index, for the value that the graph writes to this input.
        kept: indices of the placeholders that are, for autograd, what they were, whatever has been written to them.
    """

    stopped: Mapping[fx.Node, frozenset[int]]
    fresh: frozenset[fx.Node] = frozenset()
    hidden: Mapping[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    ended: Mapping[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    links: Mapping[int, frozenset[int]] = field(default_factory=dict)
    written_links: Mapping[int, frozenset[int]] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()


def stops(value: Any, arguments: Sequence[torch.Tensor], enabled: bool) -> frozenset[int]:
    """Which of the tensors in a result do not carry the gradient of what they were computed from.

    An argument that is returned as it is (`+x`, `x.contiguous()`, `x.to(x.dtype)`) keeps its gradient under `no_grad`.
    """
    same = {id(tensor) for tensor in arguments}
    return frozenset(
        place
        for place, tensor in enumerate(tensors_in(value))
        if is_float(tensor) and not (enabled and tensor.requires_grad) and id(tensor) not in same
    )
