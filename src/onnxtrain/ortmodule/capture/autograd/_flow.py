"""Defines `GradientFlow`: where gradients stop in a captured graph, and the effect of in-place writes on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from onnxtrain.ortmodule.capture._nodes import is_float, tensors_in


@dataclass(frozen=True)
class GradientFlow:
    """Differences between eager PyTorch's gradients and the gradients that follow from the nodes' formulas alone.

    The mappings by node control how the graph is traced (`lowering/_functional_graph.py`). The mappings by index become
    fields of the graph's signature.

    Attributes:
        stopped: maps a node to the indices of its results that don't require a gradient although an argument of the
            node does, e.g. {detach: {0}}.
        fresh: nodes of `stopped` whose results alias no earlier tensor. A later in-place write may make these results
            require a gradient.
        hidden: maps a node whose in-place write autograd doesn't record (under `no_grad`, or through `detach` or
            `.data`) to the nodes that allocated the memory written to. The gradient of this memory is the gradient of
            the value before the write.
        ended: maps a node that ends the gradient of some memory to the nodes that allocated this memory. The node is a
            `detach_`, a write under `no_grad` to a tensor that doesn't require a gradient, or a normalization that
            updates running statistics.
        links: maps the index of an output to the indices of the inputs that eager PyTorch's backward from this output
            reaches, e.g. {0: {2, 3}}. If the traced graph has no gradient for one of them, it is zero, not None. Empty
            if no in-place operation affects gradients, because the graph was then not run with autograd.
        written_links: maps the index of an input that the graph writes to in place to the indices of the inputs that
            backward from the written value reaches. Otherwise like `links`.
        kept: indices of the inputs whose `grad_fn` the graph doesn't change, even if it writes to them. Empty if the
            graph was not run with autograd.
    """

    stopped: Mapping[fx.Node, frozenset[int]]
    fresh: frozenset[fx.Node] = frozenset()
    hidden: Mapping[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    ended: Mapping[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    links: Mapping[int, frozenset[int]] = field(default_factory=dict)
    written_links: Mapping[int, frozenset[int]] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()


def results_without_gradient(value: Any, arguments: Sequence[torch.Tensor], enabled: bool) -> frozenset[int]:
    """Returns the indices of the floating-point tensors in a node's result that don't require a gradient.

    Args:
        value: the result of a node, at least one of whose arguments requires a gradient.
        arguments: the tensor arguments of the node.
        enabled: True if gradients are enabled where the node runs.
    """
    # `+x`, `x.contiguous()` and `x.to(x.dtype)` may return `x` itself, which requires a gradient under `no_grad`, too.
    same = {id(tensor) for tensor in arguments}
    return frozenset(
        place
        for place, tensor in enumerate(tensors_in(value))
        if is_float(tensor) and not (enabled and tensor.requires_grad) and id(tensor) not in same
    )
