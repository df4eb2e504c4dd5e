"""From a Dynamo graph to a functional ATen graph: no views, no mutations but at the end, gradients stopped by marks."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._decomp
import torch._refs  # fills the table of decompositions
import torch.utils._pytree as pytree
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.functional_utils import from_fun, has_data_mutation, to_fun
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from onnxtrain.ortmodule.aten.pooling import INTERPOLATE
from onnxtrain.ortmodule.aten.random import DROPOUTS
from onnxtrain.ortmodule.aten.recurrent import WHOLE_LAYERS

__all__ = ["example_values", "functional_graph"]


def example_values(graph_module: fx.GraphModule) -> list[Any]:
    """Returns what Dynamo knows of each input: a fake tensor or a symbolic integer."""
    return [node.meta["example_value"] for node in graph_module.graph.nodes if node.op == "placeholder"]


# Ops that PyTorch writes with others, which ONNX has; those it has itself are better lowered as they are.
_DECOMPOSED = (
    "_euclidean_dist",
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
    table = torch._decomp.decomposition_table
    packets = (getattr(torch.ops.aten, name) for name in _DECOMPOSED)
    overloads = (getattr(packet, overload) for packet in packets for overload in packet.overloads())
    return {overload: table[overload] for overload in overloads if overload in table}


def functional_graph(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Returns the ATen graph of a Dynamo graph.

    Its placeholders and outputs are those of `graph_module`. Mutated inputs are written by `aten.copy_` nodes at its
    end. Where PyTorch's autograd would stop, because of `detach` or inside `no_grad`, there is a `detach` node.

    Raises:
        NotImplementedError: the graph takes derivatives itself, or writes to a leaf that requires a gradient.
    """
    values = example_values(graph_module)
    _refuse_derivatives(graph_module)
    _mark_stopped_gradients(graph_module)
    fake_mode = next((v.fake_mode for v in values if hasattr(v, "fake_mode")), contextlib.nullcontext())
    leaves = [isinstance(v, torch.Tensor) and v.requires_grad and v.is_leaf for v in values]
    run = _functionalized(_Interpreter(graph_module).run, leaves)
    traced = make_fx(run, decomposition_table=_decompositions())
    math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with torch.no_grad(), math, fake_mode, _without_tracebacks():
        try:
            result = traced(*values)
        except RuntimeError:
            if not any(isinstance(value, torch.SymInt) for value in values):
                raise
            # Some operators, mutating ones above all, work out symbolic sizes only in PyTorch's Python dispatcher.
            # It is not the first choice because it also takes apart operators that ONNX has.
            with enable_python_dispatcher():
                result = traced(*values)
    assert isinstance(result, fx.GraphModule)
    return result


@contextlib.contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Keeps PyTorch from printing the traceback of an operator that fails here; its error is raised, or dealt with."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(_is_no_traceback)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_traceback)


def _is_no_traceback(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("failed while attempting to run meta")


_REPLACED: dict[Any, Callable[..., Any]] = {**WHOLE_LAYERS, **DROPOUTS, **INTERPOLATE}
"""Functions of Dynamo graphs that trace better, or as eager PyTorch runs them, when written in other terms."""


class _Interpreter(fx.Interpreter):
    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(_REPLACED.get(target, target), args, kwargs)


def _functionalized(run: Callable[..., Any], leaves: Sequence[bool]) -> Callable[..., Any]:
    """Returns `run` without mutations, but for those of its arguments, which come last.

    As AOTAutograd does it: unlike `torch.func.functionalize` this knows symbolic sizes, and reaches the mutations
    inside composite operators. `leaves` tells which arguments are leaves that require a gradient: those can be written
    to only where autograd does not see it, so that the gradient is not that of what the graph computes.
    """

    def functional(*args: Any) -> Any:
        with FunctionalTensorMode():
            wrapped = [to_fun(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
            outputs = pytree.tree_map_only(torch.Tensor, from_fun, run(*wrapped))
            mutated = []
            for arg, after, leaf in zip(args, wrapped, leaves, strict=True):
                if isinstance(arg, torch.Tensor) and has_data_mutation(after):
                    if leaf:
                        raise NotImplementedError(
                            "it writes to a parameter, or another leaf that requires a gradient"
                        )
                    mutated.append((arg, from_fun(after)))
        for arg, value in mutated:
            arg.copy_(value)  # type: ignore[arg-type]
        return outputs

    return functional


def _mark_stopped_gradients(graph_module: fx.GraphModule) -> None:
    """Detaches what Dynamo found not to require a gradient although something that it was computed from does.

    `torch.no_grad` regions leave no trace in an ATen graph, and `detach` is lost among the aliases. What Dynamo says
    of values inside `torch.vmap` is not true: there the causes themselves are looked for.
    """
    enabled = True
    for node in list(graph_module.graph.nodes):
        value = node.meta.get("example_value")
        if node.target is torch._C._set_grad_enabled:
            enabled = bool(node.args[0])
        if node.op in ("placeholder", "output") or not _is_float(value):
            continue
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            stopped = not enabled or node.target in ("detach", "detach_", torch.detach)
        else:
            stopped = not value.requires_grad and any(
                _requires_grad(source) for source in node.all_input_nodes
            )
        if stopped:
            _detach(graph_module.graph, node)
    graph_module.recompile()


def _detach(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_after(node):
        stopped = graph.call_method("detach", (node,))
    stopped.meta["example_value"] = node.meta["example_value"]
    node.replace_all_uses_with(stopped, delete_user_cb=lambda user: user is not stopped)


_DERIVATIVES = frozenset({"_grad_increment_nesting", "_jvp_increment_nesting"})


def _refuse_derivatives(graph_module: fx.GraphModule) -> None:
    """Raises where the graph takes derivatives: traced without autograd they would come out wrong."""
    if any(getattr(node.target, "__name__", "") in _DERIVATIVES for node in graph_module.graph.nodes):
        raise NotImplementedError(
            "torch.func.grad, vjp, jvp and what is made of them, as a part of the graph"
        )


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _requires_grad(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    parts: Sequence[Any] = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(part, torch.Tensor) and part.requires_grad for part in parts)
