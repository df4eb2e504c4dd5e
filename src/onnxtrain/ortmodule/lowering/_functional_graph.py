"""Trace a Dynamo graph into a functional ATen graph: without views, with writes to inputs at its end only.

Nodes `detach` mark where PyTorch's autograd would stop.
"""

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
from onnxtrain.ortmodule.capture._nodes import (
    CHECKPOINT_REGION,
    example_values,
    fake_mode_of,
    has_symbolic_integer,
    map_tensors,
    without_tracebacks,
)
from onnxtrain.ortmodule.capture.autograd._flow import GradientFlow
from onnxtrain.ortmodule.capture.autograd._gradients import straight_through
from onnxtrain.ortmodule.capture.autograd._refused_calls import refuse_call
from onnxtrain.ortmodule.lowering.aten.attention import ATTENTION, EMBEDDINGS
from onnxtrain.ortmodule.lowering.aten.indexing import INDEXING
from onnxtrain.ortmodule.lowering.aten.random import DROPOUTS, fill_with_bernoulli
from onnxtrain.ortmodule.lowering.aten.recurrent import WHOLE_LAYERS
from onnxtrain.ortmodule.lowering.aten.resizing import INTERPOLATE
from onnxtrain.ortmodule.lowering.aten.solving import CHECKS
from onnxtrain.ortmodule.lowering.aten.symbolic import NUMBERS

# Ops without counterpart in ONNX, which PyTorch decomposes into ops that have one. All other ops have a lowering of
# their own: PyTorch's decompositions of some compute wrong gradients, or hide ops that ONNX Runtime has a kernel for.
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
    """Returns the decompositions of `_DECOMPOSED`, by overload."""
    table = _torch.decompositions
    aten = torch.ops.aten
    packets = (getattr(aten, name) for name in _DECOMPOSED)
    overloads = (overload for packet in packets for overload in _overloads(packet))
    chosen = {overload: table[overload] for overload in overloads if overload in table}
    # PyTorch decomposes these by `index_put`, for which negative indices count from the end.
    for packet in (aten.index_add, aten.index_copy, aten.index_reduce):
        chosen |= {
            overload: _with_negative_indices(chosen[overload], allowed=False)
            for overload in _overloads(packet)
            if overload in chosen
        }
    for overload in _overloads(aten.index_fill):
        chosen[overload] = _with_negative_indices(table[overload], allowed=True)
    return {**chosen, aten._euclidean_dist.default: _euclidean_dist}


def _overloads(packet: Any) -> Iterator[Any]:
    return (getattr(packet, overload) for overload in packet.overloads())


def _euclidean_dist(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Computes the distances of the rows of `a` and `b` by one matrix product, as PyTorch's kernel does."""
    # |a - b|² = |a|² - 2 a·b + |b|².
    squares_a, squares_b = a.square().sum(-1, keepdim=True), b.square().sum(-1, keepdim=True)
    left = torch.cat([a.mul(-2), squares_a, torch.ones_like(squares_a)], -1)
    squares = left.matmul(torch.cat([b, torch.ones_like(squares_b), squares_b], -1).mT)
    # In PyTorch a distance of 0 has the gradient 0; that of the square root would be infinite. Rounding may give a
    # square below 0.
    near = squares <= 0
    return torch.where(near, 0.0, torch.where(near, 1.0, squares).sqrt())


def _with_negative_indices(decomposition: Callable[..., Any], allowed: bool) -> Callable[..., Any]:
    """Returns a decomposition whose negative indices count from the end if `allowed`, else are out of range."""

    def decomposed(x: torch.Tensor, dim: int, index: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # The largest integer is out of range: ONNX Runtime raises, as eager PyTorch does.
        instead = index + x.shape[dim] if allowed and x.dim() else torch.iinfo(index.dtype).max
        return decomposition(x, dim, torch.where(index < 0, instead, index), *args, **kwargs)

    return decomposed


def functional_graph(
    graph_module: fx.GraphModule, flow: GradientFlow, values: Sequence[Any] | None = None
) -> fx.GraphModule:
    """Returns the functional ATen graph of a Dynamo graph, with the same placeholders and outputs.

    Args:
        graph_module: the Dynamo graph. Its writes to inputs become `aten.copy_` nodes at the end of the result.
        flow: says where autograd stops, because of `detach` or `no_grad`. The result has a `detach` node there.
        values: example values of the inputs, with numbers for symbols; those of the graph if left out.
    """
    values = values or example_values(graph_module)
    fake_mode = fake_mode_of(graph_module) or contextlib.nullcontext()
    traced = make_fx(
        lambda *args: _functionalized(_Interpreter(graph_module, flow).run, args),
        decomposition_table=_decompositions(),
    )
    # The other backends trace as one fused operator, which has no lowering of its gradient.
    math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    # Carries the number of a checkpointed region from a Dynamo node to its ATen nodes.
    has_regions = any(CHECKPOINT_REGION in node.meta for node in graph_module.graph.nodes)
    keeping_metadata = fx.traceback.preserve_node_meta() if has_regions else contextlib.nullcontext()
    # cuDNN's layers are traced as ops of their own, of which that of BatchNorm writes its statistics unseen.
    on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in values)
    native = torch.backends.cudnn.flags(enabled=False) if on_gpu else contextlib.nullcontext()
    with torch.no_grad(), math, native, fake_mode, without_tracebacks(), keeping_metadata:
        try:
            result = traced(*values)
        except RuntimeError as error:
            if not has_symbolic_integer(graph_module) and not isinstance(error, GuardOnDataDependentSymNode):
                raise
            # Some operators, mutating ones above all, work out symbolic sizes only in PyTorch's Python dispatcher.
            # It is not the first choice because it also takes apart operators that ONNX has.
            with enable_python_dispatcher():
                result = traced(*values)
    assert isinstance(result, fx.GraphModule)
    # `make_fx` (PyTorch 2.13) notes tensors and symbols there, and no numbers.
    for node, value in zip(result.graph.find_nodes(op="placeholder"), values, strict=True):
        node.meta.setdefault("val", value)
    return result


_REPLACED: dict[Any, Callable[..., Any]] = {
    **WHOLE_LAYERS, **DROPOUTS, **INTERPOLATE, **INDEXING, **EMBEDDINGS, **ATTENTION,
    **NUMBERS,
}  # fmt: skip
"""Replacements by the function in a Dynamo graph, e.g. one op per LSTM layer instead of one per time step."""


class _Interpreter(fx.Interpreter):
    """Runs a Dynamo graph, and writes the gradients that `flow` describes into the trace."""

    def __init__(self, graph_module: fx.GraphModule, flow: GradientFlow) -> None:
        # `run_node` reads the nodes that first had a memory, long after their last use in the graph.
        super().__init__(graph_module, garbage_collect_values=not (flow.hidden or flow.ended))
        self.flow = flow

    def run_node(self, n: fx.Node) -> Any:
        flow = self.flow
        refuse_call(n)
        before = {base: self.env[base].clone() for base in flow.hidden.get(n, ())}
        result = super().run_node(n)
        # Autograd does not see the write: the new value has the gradient of the value before.
        for base, value in before.items():
            self.env[base].copy_(straight_through(value, self.env[base]))
        for base in flow.ended.get(n, ()):
            self.env[base].copy_(self.env[base].detach().clone())
        stopped = flow.stopped.get(n)
        if stopped:
            # A later write may give this memory a gradient, which an alias would lose: functionalisation would apply
            # `detach` to what was written.
            copies = n in flow.fresh
            return map_tensors(
                lambda place, t: t if place not in stopped else t.detach().clone() if copies else t.detach(),
                result,
            )
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # `flow` has its effect on gradients, and the trace runs without autograd.
        if target is _torch.set_grad_enabled:
            return None
        return super().call_function(_REPLACED.get(target, target), args, kwargs)


class _FunctionalMode(FunctionalTensorMode):
    """Functionalisation that keeps operators that only raise an error, e.g. for a singular matrix."""

    # AOTAutograd's own (PyTorch 2.13) chains such operators by tokens, which would be further inputs and outputs.
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bernoulli_.float and not (kwargs or {}).get("generator"):
            # The functional `bernoulli` draws in another memory order than `bernoulli_` if `x` is not contiguous.
            with self:
                return fill_with_bernoulli(*args)
        check = CHECKS.get(func)
        result = super().__torch_dispatch__(check or func, types, args, kwargs)  # type: ignore[no-untyped-call]
        return None if check else result


def _functionalized(run: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Returns `run(*args)`, computed without in-place operators; writes to arguments come last."""
    # As AOTAutograd does it: unlike `torch.func.functionalize` this knows symbolic sizes, and reaches the in-place
    # operators inside of composite operators.
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
