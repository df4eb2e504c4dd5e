"""Traces a Dynamo graph into a functional ATen graph, as AOTAutograd does, but without tracing the backward pass.

The ATen graph has no views. It writes to inputs only at its end, and has a `detach` node wherever autograd stops.
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
from onnxtrain.ortmodule.capture._modes import left_on_error
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
from onnxtrain.ortmodule.lowering.aten.einsum import EINSUM
from onnxtrain.ortmodule.lowering.aten.indexing import INDEXING
from onnxtrain.ortmodule.lowering.aten.random import DROPOUTS, fill_with_bernoulli
from onnxtrain.ortmodule.lowering.aten.recurrent import WHOLE_LAYERS
from onnxtrain.ortmodule.lowering.aten.resizing import INTERPOLATE
from onnxtrain.ortmodule.lowering.aten.solving import CHECKS
from onnxtrain.ortmodule.lowering.aten.symbolic import NUMBERS

# Only these ops use PyTorch's decompositions. All others have a lowering, because some of PyTorch's decompositions have
# wrong gradients when differentiated, and some replace ops for which ONNX Runtime has a kernel.
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
    "mvlgamma",
    "nansum",
    "pixel_shuffle",
    "pixel_unshuffle",
    "rad2deg",
    "renorm",
    "rot90",
    "soft_margin_loss",
    "take",
    "trace",
    "vdot",
)


@functools.cache
def _decompositions() -> dict[Any, Any]:
    """Returns the decompositions for `make_fx` by overload: PyTorch's for `_DECOMPOSED`, and `_euclidean_dist`."""
    table = _torch.decompositions
    aten = torch.ops.aten
    packets = (getattr(aten, name) for name in _DECOMPOSED)
    overloads = (overload for packet in packets for overload in _overloads(packet))
    chosen = {overload: table[overload] for overload in overloads if overload in table}
    # PyTorch decomposes these into `index_put`, which accepts negative indices.
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
    """Decomposes `torch.cdist(a, b)` into one matrix product, as PyTorch's kernel does."""
    # |a - b|² = |a|² - 2 a·b + |b|².
    squares_a, squares_b = a.square().sum(-1, keepdim=True), b.square().sum(-1, keepdim=True)
    left = torch.cat([a.mul(-2), squares_a, torch.ones_like(squares_a)], -1)
    squares = left.matmul(torch.cat([b, torch.ones_like(squares_b), squares_b], -1).mT)
    # PyTorch defines the gradient of a distance of 0 as 0; sqrt would give infinity. Rounding can make a square
    # negative.
    is_zero = squares <= 0
    return torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, squares).sqrt())


def _with_negative_indices(decomposition: Callable[..., Any], allowed: bool) -> Callable[..., Any]:
    """Wraps a decomposition that uses `index_put`, so that negative indices behave as in the decomposed op.

    Args:
        decomposition: decomposition of an op with the arguments (x, dim, index, ...).
        allowed: True if the op counts negative indices from the end, False if it raises an error for them.
    """

    def decomposed(x: torch.Tensor, dim: int, index: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # The largest integer is out of range, so ONNX Runtime raises.
        replacement = index + x.shape[dim] if allowed and x.dim() else torch.iinfo(index.dtype).max
        return decomposition(x, dim, torch.where(index < 0, replacement, index), *args, **kwargs)

    return decomposed


def functional_graph(
    graph_module: fx.GraphModule, flow: GradientFlow, values: Sequence[Any] | None = None
) -> fx.GraphModule:
    """Returns the functional ATen graph of a Dynamo graph, with the same placeholders and outputs.

    Args:
        graph_module: the Dynamo graph. Its writes to inputs become `aten.copy_` nodes at the end of the result.
        flow: describes where autograd stops, e.g. because of `detach` or `no_grad`.
        values: example inputs to trace with, e.g. with fixed sizes instead of symbolic ones. Default: the example
            values in the graph's metadata.
    """
    values = values or example_values(graph_module)
    fake_mode = fake_mode_of(graph_module) or contextlib.nullcontext()
    traced = make_fx(
        lambda *args: _functionalized(_Interpreter(graph_module, flow).run, args),
        decomposition_table=_decompositions(),
    )
    # Other SDPA backends are traced as one fused operator.
    math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    # Copies the number of the checkpointed region from a Dynamo node to its ATen nodes.
    has_regions = any(CHECKPOINT_REGION in node.meta for node in graph_module.graph.nodes)
    keeping_metadata = fx.traceback.preserve_node_meta() if has_regions else contextlib.nullcontext()
    # Without cuDNN's ops: tracing does not see that cuDNN's batch norm updates the running statistics.
    on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in values)
    native = torch.backends.cudnn.flags(enabled=False) if on_gpu else contextlib.nullcontext()
    with torch.no_grad(), math, native, fake_mode, without_tracebacks(), keeping_metadata:
        try:
            result = traced(*values)
        except RuntimeError as error:
            if not has_symbolic_integer(graph_module) and not isinstance(error, GuardOnDataDependentSymNode):
                raise
            # Some operators, mostly in-place ones, support symbolic sizes only with PyTorch's Python dispatcher. It
            # also decomposes operators that have a lowering, so it is used only if tracing without it fails.
            with enable_python_dispatcher():
                result = traced(*values)
    assert isinstance(result, fx.GraphModule)
    # `make_fx` (PyTorch 2.13) sets "val" for tensors and symbols only, not for Python numbers.
    for node, value in zip(result.graph.find_nodes(op="placeholder"), values, strict=True):
        node.meta.setdefault("val", value)
    return result


_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    **WHOLE_LAYERS, **DROPOUTS, **INTERPOLATE, **INDEXING, **EMBEDDINGS, **ATTENTION,
    **NUMBERS, **EINSUM,
}  # fmt: skip
"""Maps functions in a Dynamo graph to functions that are traced instead, e.g. `torch.lstm` to one op per layer."""


class _Interpreter(fx.Interpreter):
    """Runs a Dynamo graph for tracing, and adds the ops that stop or redirect gradients according to `flow`.

    The traced graph then has the same gradients as the Dynamo graph has in eager PyTorch.
    """

    def __init__(self, graph_module: fx.GraphModule, flow: GradientFlow) -> None:
        # `run_node` reads the base tensors of written memory after their last use in the graph.
        super().__init__(graph_module, garbage_collect_values=not (flow.hidden or flow.ended))
        self.flow = flow

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with left_on_error(self):
            return super().run(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        flow = self.flow
        refuse_call(n)
        before = {base: self.env[base].clone() for base in flow.hidden.get(n, ())}
        result = super().run_node(n)
        # Autograd does not see this write, so the gradient of the new value is passed straight-through to the old one.
        for base, value in before.items():
            self.env[base].copy_(straight_through(value, self.env[base]))
        for base in flow.ended.get(n, ()):
            self.env[base].copy_(self.env[base].detach().clone())
        stopped = flow.stopped.get(n)
        if stopped:
            # A later write may give this memory a gradient. An alias would lose it, because functionalization would
            # apply `detach` to the written value, too.
            copies = n in flow.fresh
            return map_tensors(
                lambda index, t: t if index not in stopped else t.detach().clone() if copies else t.detach(),
                result,
            )
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The trace runs without autograd. `flow` knows the effect on gradients.
        if target is _torch.set_grad_enabled:
            return None
        return super().call_function(_REPLACEMENTS.get(target, target), args, kwargs)


class _FunctionalMode(FunctionalTensorMode):
    """Functionalizes operators. Replaces error checks, e.g. for singular matrices, with the custom ops in `CHECKS`.

    `bernoulli_` without a generator draws in the memory order of its tensor, as in eager PyTorch.
    """

    # AOTAutograd (PyTorch 2.13) keeps them with effect tokens, which would be additional inputs and outputs.
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bernoulli_.float and not (kwargs or {}).get("generator"):
            # The functional `bernoulli` draws in a different memory order than `bernoulli_` if `x` is not contiguous.
            with self:
                return fill_with_bernoulli(*args)
        check = CHECKS.get(func)
        result = super().__torch_dispatch__(check or func, types, args, kwargs)  # type: ignore[no-untyped-call]
        return None if check else result


def _functionalized(run: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Computes `run(*args)` without in-place operators, then copies the new values of mutated tensors back into `args`.

    Returns:
        The outputs of `run`.
    """
    # As in AOTAutograd. Unlike `torch.func.functionalize`, this supports symbolic sizes, and functionalizes the
    # in-place operators within composite operators.
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
