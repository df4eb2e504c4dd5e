"""Run a captured graph once more on fake tensors, with autograd on, to see what its writes do to gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from onnxtrain.ortmodule._torch import enable_python_dispatcher
from onnxtrain.ortmodule.capture._nodes import (
    depends_on_data,
    fake_mode_of,
    functions_behind,
    has_symbolic_integer,
    hint_of,
    ignoring_new_symbols,
    memory_of,
    saved_by,
    tensors_in,
    without_tracebacks,
)
from onnxtrain.ortmodule.capture.autograd._flow import GradientFlow, stops

_REQUIRED_GRAD = "onnxtrain_required_grad"
"""Key of a placeholder's metadata: (requires_grad, is_leaf) of the input when the graph begins."""


def note_inputs(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Notes at each placeholder whether the input requires a gradient, and is a leaf, when the graph begins.

    Args:
        graph_module: a Dynamo graph; the metadata of its placeholders is changed.
        inputs: the inputs that Dynamo passes to its backend.
    """
    # Dynamo's fake tensors (PyTorch 2.13) have gone through the whole capture: an input that the graph writes to, as in
    # `buffer.add_(weight)`, requires a gradient in them from the start.
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders, inputs, strict=False):
        if isinstance(value, torch.Tensor):
            node.meta[_REQUIRED_GRAD] = (value.requires_grad, value.is_leaf)


def rehearsed(graph_module: fx.GraphModule) -> GradientFlow:
    """Returns where gradients stop in a graph that writes to memory.

    Raises:
        NotImplementedError: PyTorch's backward would raise, or one memory would have two gradients.
    """
    try:
        with without_tracebacks():
            return _Rehearsal(graph_module).flow()
    except RuntimeError as error:
        # Some operators, constant_pad_nd among them, can work out symbolic sizes only in PyTorch's Python dispatcher
        # (PyTorch 2.13); without it such a graph would be left to PyTorch.
        if not has_symbolic_integer(graph_module) and not isinstance(error, GuardOnDataDependentSymNode):
            raise
        with enable_python_dispatcher():
            return _Rehearsal(graph_module).flow()


class _Rehearsal(fx.Interpreter):
    """Runs a graph on fake tensors with autograd on, and compares each argument before and after each node.

    Attributes:
        first: per memory, the node that had it first, and its tensor.
        stopped: see `GradientFlow`; likewise `fresh`, `hidden` and `ended`.
        placeholders: of the graph.
        reads_data: whether the graph reads `.data` of a tensor.
        fake_mode: of the graph's fake tensors.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        # All values are kept: a freed storage would give its address, by which memory is told apart, to another one.
        super().__init__(graph_module, garbage_collect_values=False)
        self.first: dict[int, tuple[fx.Node, torch.Tensor]] = {}
        self.stopped: dict[fx.Node, frozenset[int]] = {}
        self.fresh: set[fx.Node] = set()
        self.hidden: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.ended: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.placeholders = graph_module.graph.find_nodes(op="placeholder")
        # `tensor.data` has a version counter of its own, so that a write through `tensor` does not raise it.
        self.reads_data = any(
            getattr(n.target, "__name__", "") == "_get_data_attr" for n in graph_module.graph.nodes
        )
        self.fake_mode = fake_mode_of(graph_module)

    def flow(self) -> GradientFlow:
        """Runs the graph; returns where gradients stop in it."""
        mode = self.fake_mode or contextlib.nullcontext()
        with mode, ignoring_new_symbols(self.fake_mode), torch.set_grad_enabled(torch.is_grad_enabled()):
            leaves, inputs = self._inputs()
            functions = [_function(value) for value in inputs]
            returned = self.run(*inputs)
            kept = [index for index, value in enumerate(inputs) if _function(value) is functions[index]]
            # By id: one tensor may be returned twice, or be an input that is returned.
            results = {id(t): t for t in tensors_in([*returned, *inputs]) if t.requires_grad}
            _check_backward(list(results.values()), [leaf for leaf in leaves.values() if leaf.requires_grad])
            indices = {id(leaf): index for index, leaf in leaves.items()}
            links, written_links = (
                {
                    index: frozenset(_reached(value, indices))
                    for index, value in enumerate(values)
                    if id(value) in results
                }
                for values in (returned, inputs)
            )
        return GradientFlow(
            self.stopped,
            frozenset(self.fresh),
            self.hidden,
            self.ended,
            links,
            written_links,
            frozenset(kept),
        )

    def _inputs(self) -> tuple[dict[int, torch.Tensor], list[Any]]:
        """Returns a leaf per input tensor, by index, and new inputs: the leaves, or clones for inputs that are none."""
        leaves: dict[int, torch.Tensor] = {}
        inputs: list[Any] = []
        values = [node.meta["example_value"] for node in self.placeholders]
        # Derivatives of symbolic sizes take several times as long. What depends on a size, e.g. whether a reshape is a
        # view, depends on it in Dynamo's own run of the graph, too, which makes it a guard.
        number = _as_it_is if any(map(depends_on_data, values)) else hint_of
        for index, (node, value) in enumerate(zip(self.placeholders, values, strict=True)):
            if isinstance(value, torch.SymInt):
                value = number(value)
            if isinstance(value, torch.Tensor):
                required, is_leaf = node.meta.get(_REQUIRED_GRAD, (value.requires_grad, value.is_leaf))
                value = torch.empty_strided(
                    [number(size) for size in value.size()],
                    [number(stride) for stride in value.stride()],
                    dtype=value.dtype,
                    device=value.device,
                ).requires_grad_(required)
                leaves[index] = value
                # In-place writes to a leaf that requires a gradient raise; those to another tensor must not.
                if required and not is_leaf:
                    with torch.enable_grad():
                        value = value.clone()
            inputs.append(value)
        return leaves, inputs

    def fetch_attr(self, target: str) -> Any:
        value = super().fetch_attr(target)
        return (
            self.fake_mode.from_tensor(value) if self.fake_mode and isinstance(value, torch.Tensor) else value
        )

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr"):
            result = super().run_node(n)
            self._meet(n, result)
            return result
        arguments = [t for source in n.all_input_nodes for t in tensors_in(self.env[source])]
        before = [(tensor, _State.of(tensor, self._first(tensor))) for tensor in arguments]
        carrying = any(tensor.requires_grad for tensor in arguments)
        enabled = torch.is_grad_enabled()
        result = super().run_node(n)
        if n.op != "output":
            for tensor, state in before:
                self._compare(n, tensor, state, enabled, carrying)
            if carrying and not any(result is tensor for tensor in arguments):
                self.stopped[n] = stops(result, arguments, enabled)
                if not any(memory_of(tensor) in self.first for tensor in tensors_in(result)):
                    self.fresh.add(n)
            self._meet(n, result)
        return result

    def _meet(self, node: fx.Node, value: Any) -> None:
        """Notes the node as the first one with the memory of its result, unless another node had it before."""
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            self.first.setdefault(memory_of(value), (node, value))

    def _first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the first tensor with the memory of this one."""
        return self.first.get(memory_of(tensor), (None, tensor))[1]

    def _compare(
        self, node: fx.Node, tensor: torch.Tensor, state: _State, enabled: bool, carrying: bool
    ) -> None:
        """Notes what a node has done to one of its arguments.

        Args:
            node: the node.
            tensor: the argument, after the node has run.
            state: the argument before.
            enabled: whether gradients are enabled there.
            carrying: whether any argument requires a gradient.
        """
        source, base = self.first.get(memory_of(tensor), (node, tensor))
        if state.base_required and not base.requires_grad:
            self.ended[node] = (*self.ended.get(node, ()), source)
        elif tensor._version != state.version:
            # `seen`: autograd has given the first tensor with this memory a new backward function for the write.
            written = enabled and tensor.requires_grad and tensor.grad_fn is not state.function
            seen = base.requires_grad and base.grad_fn is not state.base_function
            if written and not seen:
                raise NotImplementedError(
                    "the graph writes a value with a gradient to a detached tensor, whose memory has another gradient "
                    "or none: write to a clone"
                )
            # A write that raises no version counter goes past PyTorch's check of saved tensors: backward would use the
            # new value. ONNX Runtime would use the old one, so the graph is left to PyTorch.
            unnoticed = base._version == state.base_version
            after = _State.of(tensor, base)
            made = {after.function, after.base_function} - {state.function, state.base_function}
            if (unnoticed or self.reads_data) and self._is_kept(base, made):
                raise NotImplementedError(
                    "the graph writes, through `.data` or past it, to a tensor that PyTorch saves for backward: write "
                    "to a clone"
                )
            if base.requires_grad and not seen and source not in self.hidden.get(node, ()):
                self.hidden[node] = (*self.hidden.get(node, ()), source)
            elif carrying and not base.requires_grad:
                self.ended[node] = (*self.ended.get(node, ()), source)

    def _is_kept(self, base: torch.Tensor, made: set[Any]) -> bool:
        """Returns whether a backward function has saved the memory of a tensor, as that of `exp` saves its result.

        Args:
            base: the tensor; it has been written to.
            made: backward functions that the write itself has added; they have saved the new value.
        """
        tensors = [tensor for value in self.env.values() for tensor in tensors_in(value)]
        functions: set[Any] = set().union(*map(functions_behind, tensors)) - made
        kept = [value for function in functions for value in saved_by(function)]
        return any(memory_of(tensor) == memory_of(base) for tensor in kept)


@dataclass(frozen=True)
class _State:
    """The state of a tensor, and of the first tensor with its memory (the base), before a node runs.

    Attributes:
        version: version counter of the tensor.
        base_version: that of the base.
        function: `grad_fn` of the tensor.
        base_required: whether the base requires a gradient.
        base_function: `grad_fn` of the base.
    """

    version: int
    base_version: int
    function: Any
    base_required: bool
    base_function: Any

    @staticmethod
    def of(tensor: torch.Tensor, base: torch.Tensor) -> _State:
        # PyTorch (2.13) raises when it is asked for the `grad_fn` of a view that was made under `no_grad` and whose
        # base has been written to since.
        function = tensor.grad_fn if torch.is_grad_enabled() and tensor.requires_grad else None
        return _State(tensor._version, base._version, function, base.requires_grad, base.grad_fn)


def _check_backward(results: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> None:
    """Raises where PyTorch's backward of these results would: a saved tensor was changed in place.

    Raises:
        NotImplementedError: the graph is left to PyTorch, whose backward raises with its own message.
    """
    results = [result for result in results if result.grad_fn is not None]
    if not results or not leaves:
        return
    try:
        torch.autograd.grad(
            results, leaves, [torch.ones_like(result) for result in results], allow_unused=True
        )
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            raise NotImplementedError(f"the graph's backward raises in PyTorch: {error}") from error


def _reached(result: torch.Tensor, leaves: Mapping[int, int]) -> Iterator[int]:
    """Yields the indices of the leaves that backward of a result comes to; `leaves` has them by id."""
    for function in functions_behind(result):
        index = leaves.get(id(getattr(function, "variable", None)))
        if index is not None:
            yield index


def _function(value: Any) -> Any:
    """Returns the `grad_fn` of a tensor; None for other values."""
    return value.grad_fn if isinstance(value, torch.Tensor) else None


def _as_it_is(size: int | torch.SymInt) -> int | torch.SymInt:
    return size
