"""Say where gradients stop in a captured graph, and what writes in place do to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from onnxtrain.ortmodule.capture._nodes import is_float, tensors_in


@dataclass(frozen=True)
class GradientFlow:
    """Gradients that differ from those of the plain formula of a node.

    The mappings by node steer the trace of the graph (`lowering/_functional_graph.py`); those by index become fields of
    the graph's signature.

    Attributes:
        stopped: per node, the indices of its results that carry no gradient although an argument does, e.g.
            {detach: {0}}.
        fresh: nodes of `stopped` whose results have memory of their own. A later write may give that memory a gradient.
        hidden: per node that writes without autograd seeing it (under `no_grad`, through `detach` or `.data`), the
            nodes that first had this memory. They keep the gradient of the value before the write.
        ended: per node, the nodes that first had a memory whose gradient ends here: `detach_`, or a write under
            `no_grad` to a tensor without a gradient.
        links: per output index, the input indices that get a zero gradient, not None, when no gradient reaches them,
            e.g. {0: {2, 3}}. Empty if the graph itself shows this.
        written_links: the same per input index, for the value that the graph writes to this input.
        kept: indices of the inputs whose `grad_fn` the graph leaves as it was, even where it writes to them.
    """

    stopped: Mapping[fx.Node, frozenset[int]]
    fresh: frozenset[fx.Node] = frozenset()
    hidden: Mapping[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    ended: Mapping[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    links: Mapping[int, frozenset[int]] = field(default_factory=dict)
    written_links: Mapping[int, frozenset[int]] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()


def stops(value: Any, arguments: Sequence[torch.Tensor], enabled: bool) -> frozenset[int]:
    """Returns the indices of the tensors in a result that carry no gradient although an argument does.

    Args:
        value: the result of a node.
        arguments: the tensors that the node takes.
        enabled: whether gradients are enabled where the node runs.
    """
    # `+x`, `x.contiguous()` and `x.to(x.dtype)` may return `x` itself, which keeps its gradient under `no_grad`.
    same = {id(tensor) for tensor in arguments}
    return frozenset(
        place
        for place, tensor in enumerate(tensors_in(value))
        if is_float(tensor) and not (enabled and tensor.requires_grad) and id(tensor) not in same
    )
