"""From a Dynamo graph to a functional ATen graph: no views, no mutations but at the end, gradients stopped by marks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from onnxtrain.ortmodule import _torch
from onnxtrain.ortmodule._torch import (
    FunctionalTensorMode,
    enable_python_dispatcher,
    from_fun,
    has_data_mutation,
    pytree,
    to_fun,
)
from onnxtrain.ortmodule.capture._checkpoint import REGION
from onnxtrain.ortmodule.capture._data_dependent import without_tracebacks
from onnxtrain.ortmodule.capture._fakes import example_values, fake_mode_of, is_symbolic, map_tensors
from onnxtrain.ortmodule.capture._flow import GradientFlow
from onnxtrain.ortmodule.capture._gradients import straight_through
from onnxtrain.ortmodule.capture._mixed_dtypes import refuse_mixed_dtypes
from onnxtrain.ortmodule.lowering.aten.attention import ATTENTION, EMBEDDINGS
from onnxtrain.ortmodule.lowering.aten.indexing import INDEXING
from onnxtrain.ortmodule.lowering.aten.pooling import INTERPOLATE
from onnxtrain.ortmodule.lowering.aten.random import DROPOUTS
from onnxtrain.ortmodule.lowering.aten.recurrent import WHOLE_LAYERS
from onnxtrain.ortmodule.lowering.aten.solving import CHECKS

# Ops that PyTorch writes with others, which ONNX has; those it has itself are better lowered as they are.
_DECOMPOSED = (
    "_weight_norm_interface",
    "addr",
    "aminmax",
    "block_diag",
    "bucketize",
    "channel_shuffle",
    "col2im",
    "count_nonzero",
    "deg2rad",
    "diag_embed",
    "dist",
    "dot",
    "frac",
    "heaviside",
    "im2col",
    "index_add",
    "index_copy",
    "index_fill",
    "index_reduce",
    "isneginf",
    "isposinf",
    "linalg_cross",
    "logaddexp2",
    "logit",
    "mvlgamma",
    "nansum",
    "pixel_shuffle",
    "pixel_unshuffle",
    "rad2deg",
    "renorm",
    "rot90",
    "soft_margin_loss",
    "special_entr",
    "take",
    "trace",
    "vdot",
)


@functools.cache
def _decompositions() -> dict[Any, Any]:
    table = _torch.decompositions
    packets = (getattr(torch.ops.aten, name) for name in _DECOMPOSED)
    overloads = (overload for packet in packets for overload in _overloads(packet))
    aten = torch.ops.aten
    found = {overload: table[overload] for overload in overloads if overload in table}
    for packet in (aten.index_add, aten.index_copy, aten.index_reduce):
        found |= {
            overload: _counting(found[overload], False)
            for overload in _overloads(packet)
            if overload in found
        }
    for overload in _overloads(aten.index_fill):
        found[overload] = _counting(table[overload], True)
    return {**found, aten._euclidean_dist.default: _euclidean_dist}


def _overloads(packet: Any) -> Iterator[Any]:
    return (getattr(packet, overload) for overload in packet.overloads())


def _euclidean_dist(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """By one product, as PyTorch does it; without gradient where the distance is 0."""
    of_a, of_b = a.square().sum(-1, keepdim=True), b.square().sum(-1, keepdim=True)
    left = torch.cat([a.mul(-2), of_a, torch.ones_like(of_a)], -1)
    squares = left.matmul(torch.cat([b, torch.ones_like(of_b), of_b], -1).mT)
    near = squares <= 0
    return torch.where(near, 0.0, torch.where(near, 1.0, squares).sqrt())


def _counting(decomposition: Callable[..., Any], from_the_end: bool) -> Callable[..., Any]:
    """Decomposes by index_put, for which negative indices count from the end, as by one for which they may or not."""

    def decomposed(x: torch.Tensor, dim: int, index: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        instead = index + x.shape[dim] if from_the_end and x.dim() else torch.iinfo(index.dtype).max
        return decomposition(x, dim, torch.where(index < 0, instead, index), *args, **kwargs)

    return decomposed


def functional_graph(graph_module: fx.GraphModule, flow: GradientFlow) -> fx.GraphModule:
    """Returns the ATen graph of a Dynamo graph.

    Its placeholders and outputs are those of `graph_module`. Mutated inputs are written by `aten.copy_` nodes at its
    end. Where PyTorch's autograd would stop, because of `detach` or inside `no_grad`, there is a `detach` node.
    """
    values = example_values(graph_module)
    fake_mode = fake_mode_of(graph_module) or contextlib.nullcontext()
    traced = make_fx(
        lambda *args: _functionalized(_Interpreter(graph_module, flow).run, args),
        decomposition_table=_decompositions(),
    )
    math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    regions = any(REGION in node.meta for node in graph_module.graph.nodes)
    noting = fx.traceback.preserve_node_meta() if regions else contextlib.nullcontext()
    with torch.no_grad(), math, fake_mode, without_tracebacks(), noting:
        try:
            result = traced(*values)
        except RuntimeError as error:
            if not is_symbolic(graph_module) and not isinstance(error, GuardOnDataDependentSymNode):
                raise
            # Some operators, mutating ones above all, work out symbolic sizes only in PyTorch's Python dispatcher.
            # It is not the first choice because it also takes apart operators that ONNX has.
            with enable_python_dispatcher():
                result = traced(*values)
    assert isinstance(result, fx.GraphModule)
    return result


_REPLACED: dict[Any, Callable[..., Any]] = {
    **WHOLE_LAYERS, **DROPOUTS, **INTERPOLATE, **INDEXING, **EMBEDDINGS, **ATTENTION,
}  # fmt: skip
"""Functions of Dynamo graphs that trace better, or as eager PyTorch runs them, when written in other terms."""


class _Interpreter(fx.Interpreter):
    def __init__(self, graph_module: fx.GraphModule, flow: GradientFlow) -> None:
        keeps = bool(flow.hidden or flow.ended)
        super().__init__(graph_module, garbage_collect_values=not keeps)
        self.flow = flow

    def run_node(self, n: fx.Node) -> Any:
        flow = self.flow
        refuse_mixed_dtypes(n)
        before = {base: self.env[base].clone() for base in flow.hidden.get(n, ())}
        result = super().run_node(n)
        for base, value in before.items():
            self.env[base].copy_(straight_through(value, self.env[base]))
        for base in flow.ended.get(n, ()):
            self.env[base].copy_(self.env[base].detach().clone())
        stopped = flow.stopped.get(n)
        if stopped:
            copies = n in flow.fresh
            return map_tensors(lambda place, t: _detached(t, copies) if place in stopped else t, result)
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is _torch.set_grad_enabled:  # what it does is known, and tracing needs no autograd
            return None
        return super().call_function(_REPLACED.get(target, target), args, kwargs)


def _detached(tensor: torch.Tensor, copies: bool) -> torch.Tensor:
    return tensor.detach().clone() if copies else tensor.detach()


class _FunctionalMode(FunctionalTensorMode):
    """Functionalisation that keeps operators that only raise, of which AOTAutograd makes a chain of tokens."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        check = CHECKS.get(func)
        result = super().__torch_dispatch__(check or func, types, args, kwargs)  # type: ignore[no-untyped-call]
        return None if check else result


def _functionalized(run: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Returns `run(*args)`, computed without mutations, but for those of the arguments, which come last.

    As AOTAutograd does it: unlike `torch.func.functionalize` this knows symbolic sizes, and reaches the mutations
    inside composite operators.
    """
    with _FunctionalMode():
        wrapped = [to_fun(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        outputs = pytree.tree_map_only(torch.Tensor, from_fun, run(*wrapped))
        mutated = [
            (arg, from_fun(after))
            for arg, after in zip(args, wrapped, strict=True)
            if isinstance(arg, torch.Tensor) and has_data_mutation(after)
        ]
    for arg, value in mutated:
        arg.copy_(value)  # type: ignore[arg-type]
    return outputs
