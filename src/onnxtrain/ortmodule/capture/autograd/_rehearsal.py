"""Runs a captured graph again on fake tensors, with autograd, to see how its in-place writes affect gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from onnxtrain.ortmodule._torch import enable_python_dispatcher
from onnxtrain.ortmodule.capture._modes import left_on_error
from onnxtrain.ortmodule.capture._nodes import (
    backward_functions,
    depends_on_data,
    fake_mode_of,
    has_symbolic_integer,
    hint_of,
    ignoring_new_symbols,
    memory_of,
    saved_tensors_of,
    tensors_in,
    without_tracebacks,
)
from onnxtrain.ortmodule.capture.autograd._flow import GradientFlow, results_without_gradient

_REQUIRED_GRAD = "onnxtrain_required_grad"
"""Key of a placeholder's metadata: `(requires_grad, is_leaf)` of the input before the graph runs."""


def note_inputs(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Records in each placeholder's metadata whether the input requires a gradient and is a leaf before the graph runs.

    Args:
        graph_module: a Dynamo graph; the metadata of its placeholders is changed.
        inputs: the inputs that Dynamo passes to its backend.
    """
    # Dynamo's fake inputs (PyTorch 2.13) have the state after the captured graph: after `buffer.add_(weight)`, the fake
    # `buffer` requires a gradient.
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders, inputs, strict=False):
        if isinstance(value, torch.Tensor):
            node.meta[_REQUIRED_GRAD] = (value.requires_grad, value.is_leaf)


def rehearsed(graph_module: fx.GraphModule) -> GradientFlow:
    """Returns the gradient flow of a graph with in-place writes, by running it on fake tensors.

    Raises:
        NotImplementedError: PyTorch's backward would raise, or the same memory would have two gradients.
    """
    try:
        with without_tracebacks():
            return _Rehearsal(graph_module).flow()
    except RuntimeError as error:
        # Some operators, e.g. constant_pad_nd, support symbolic sizes only under PyTorch's Python dispatcher
        # (PyTorch 2.13). Without it, such a graph would fall back to PyTorch.
        if not has_symbolic_integer(graph_module) and not isinstance(error, GuardOnDataDependentSymNode):
            raise
        with enable_python_dispatcher():
            return _Rehearsal(graph_module).flow()


class _Rehearsal(fx.Interpreter):
    """Runs a graph on fake tensors with autograd, and compares each node's arguments before and after the node runs.

    Attributes:
        first: maps the identifier of a storage (`memory_of`) to the node that allocated it and the result of the node.
        stopped, fresh, hidden, ended: the fields of the same names of the `GradientFlow` that `flow` returns.
        placeholders: the placeholders of the graph.
        reads_data: True if the graph reads `.data` of a tensor.
        fake_mode: the mode of the graph's fake tensors.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        # All values are kept: a new storage could reuse the address of a freed one, by which memory is identified.
        super().__init__(graph_module, garbage_collect_values=False)
        self.first: dict[int, tuple[fx.Node, torch.Tensor]] = {}
        self.stopped: dict[fx.Node, frozenset[int]] = {}
        self.fresh: set[fx.Node] = set()
        self.hidden: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.ended: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.placeholders = graph_module.graph.find_nodes(op="placeholder")
        # `tensor.data` has a separate version counter, which a write to `tensor` doesn't increment.
        self.reads_data = any(
            getattr(n.target, "__name__", "") == "_get_data_attr" for n in graph_module.graph.nodes
        )
        self.fake_mode = fake_mode_of(graph_module)

    def flow(self) -> GradientFlow:
        """Runs the graph; returns its gradient flow."""
        mode = self.fake_mode or contextlib.nullcontext()
        with mode, ignoring_new_symbols(self.fake_mode), torch.set_grad_enabled(torch.is_grad_enabled()):
            leaves, inputs = self._inputs()
            functions = [_grad_fn_of(value) for value in inputs]
            with left_on_error(self):
                returned = self.run(*inputs)
            kept = [index for index, value in enumerate(inputs) if _grad_fn_of(value) is functions[index]]
            # Keyed by id, because the same tensor may be returned twice, or be an input and an output.
            results = {id(t): t for t in tensors_in([*returned, *inputs]) if t.requires_grad}
            _check_backward(list(results.values()), [leaf for leaf in leaves.values() if leaf.requires_grad])
            indices = {id(leaf): index for index, leaf in leaves.items()}
            links, written_links = (
                {
                    index: frozenset(_reached_leaves(value, indices))
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
        """Creates the fake tensors and numbers on which the graph is run.

        Returns:
            The leaf tensors by input index, and the list of all inputs. A tensor input is its leaf tensor or, if it
            requires a gradient but is not a leaf in eager PyTorch, a clone of the leaf tensor.
        """
        leaves: dict[int, torch.Tensor] = {}
        inputs: list[Any] = []
        values = [node.meta["example_value"] for node in self.placeholders]
        # Hints instead of symbolic sizes: a run with symbols takes several times as long. If the result depends on a
        # size, e.g. whether a reshape is a view, Dynamo's own run of the graph has added a guard.
        number = _unchanged if any(map(depends_on_data, values)) else hint_of
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
                # In-place writes to a leaf that requires a gradient raise. For an input that is not a leaf they must
                # not raise.
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
            self._record_allocation(n, result)
            return result
        arguments = [t for source in n.all_input_nodes for t in tensors_in(self.env[source])]
        before = [(tensor, _AutogradState.of(tensor, self._base_of(tensor))) for tensor in arguments]
        carrying = any(tensor.requires_grad for tensor in arguments)
        enabled = torch.is_grad_enabled()
        result = super().run_node(n)
        if n.op != "output":
            for tensor, state in before:
                self._record_changes(n, tensor, state, enabled, carrying)
            if carrying and not any(result is tensor for tensor in arguments):
                self.stopped[n] = results_without_gradient(result, arguments, enabled)
                if not any(memory_of(tensor) in self.first for tensor in tensors_in(result)):
                    self.fresh.add(n)
            self._record_allocation(n, result)
        return result

    def _record_allocation(self, node: fx.Node, value: Any) -> None:
        """Records that a node allocated the memory of its result, unless an earlier node did."""
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            self.first.setdefault(memory_of(value), (node, value))

    def _base_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the first tensor with the same memory as `tensor`, or the tensor that it is a view of."""
        first = self.first.get(memory_of(tensor), (None, tensor))[1]
        # `x.repeat_interleave(2)` and `x.inner(y)` return a view of a tensor that no node has. Any write to the memory
        # changes the `grad_fn` of the view, but only recorded writes change the `grad_fn` of the tensor.
        return first if first._base is None else first._base

    def _record_changes(
        self, node: fx.Node, tensor: torch.Tensor, state: _AutogradState, enabled: bool, carrying: bool
    ) -> None:
        """Records in `hidden` and `ended` how a node changed the autograd state of an argument.

        Args:
            node: the node.
            tensor: the argument, after the node has run.
            state: the state of the argument before the node ran.
            enabled: True if gradients are enabled at the node.
            carrying: True if any argument of the node required a gradient.

        Raises:
            NotImplementedError: the same memory would have two gradients after the write, or the write changes a
                tensor saved for backward without PyTorch detecting it.
        """
        source, base = self.first.get(memory_of(tensor), (node, tensor))[0], self._base_of(tensor)
        if state.base_required and not base.requires_grad:
            self.ended[node] = (*self.ended.get(node, ()), source)
        elif tensor._version != state.version:
            # `seen`: autograd has recorded the write, as a new `grad_fn` of the base.
            written = enabled and tensor.requires_grad and tensor.grad_fn is not state.function
            seen = base.requires_grad and base.grad_fn is not state.base_function
            if written and not seen:
                raise NotImplementedError(
                    "the graph writes a value that has a gradient to a detached tensor, where autograd does not see "
                    "the write: write to a clone"
                )
            # PyTorch's check of saved tensors misses a write that doesn't increment the version counter: backward uses
            # the new value. ONNX Runtime would use the old value, so the graph falls back to PyTorch.
            unnoticed = base._version == state.base_version
            after = _AutogradState.of(tensor, base)
            made = {after.function, after.base_function} - {state.function, state.base_function}
            if (unnoticed or self.reads_data) and self._is_saved(base, made):
                raise NotImplementedError(
                    "the graph writes to a tensor that PyTorch saves for backward, and autograd does not see the "
                    "write (e.g. through `.data`): write to a clone"
                )
            if base.requires_grad and not seen and source not in self.hidden.get(node, ()):
                self.hidden[node] = (*self.hidden.get(node, ()), source)
            elif carrying and not base.requires_grad:
                self.ended[node] = (*self.ended.get(node, ()), source)

    def _is_saved(self, base: torch.Tensor, made: set[Any]) -> bool:
        """True if a backward function has saved a tensor with the memory of `base`, e.g. `exp` saves its result.

        Args:
            base: the tensor that has been written to.
            made: backward functions that the write itself has added. They are ignored, as they save the new value.
        """
        tensors = [tensor for value in self.env.values() for tensor in tensors_in(value)]
        functions: set[Any] = set().union(*map(backward_functions, tensors)) - made
        kept = [value for function in functions for value in saved_tensors_of(function)]
        return any(memory_of(tensor) == memory_of(base) for tensor in kept)


@dataclass(frozen=True)
class _AutogradState:
    """The autograd state of a tensor and of its base, the first tensor with the same memory.

    Attributes:
        version: version counter of the tensor.
        base_version: version counter of the base.
        function: `grad_fn` of the tensor; None if gradients are disabled.
        base_required: True if the base requires a gradient.
        base_function: `grad_fn` of the base.
    """

    version: int
    base_version: int
    function: Any
    base_required: bool
    base_function: Any

    @staticmethod
    def of(tensor: torch.Tensor, base: torch.Tensor) -> _AutogradState:
        # PyTorch (2.13) raises on access to the `grad_fn` of a view that was created under `no_grad` and whose base has
        # been written to since.
        function = tensor.grad_fn if torch.is_grad_enabled() and tensor.requires_grad else None
        return _AutogradState(tensor._version, base._version, function, base.requires_grad, base.grad_fn)


def _check_backward(results: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> None:
    """Raises if PyTorch's backward would raise because a saved tensor was modified in place.

    Raises:
        NotImplementedError: backward raises. The graph falls back to PyTorch, so that the user gets PyTorch's error.
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


def _reached_leaves(result: torch.Tensor, leaves: Mapping[int, int]) -> Iterator[int]:
    """Yields the indices of the leaves that backward from a result reaches.

    Args:
        result: the tensor that backward starts from.
        leaves: index of each leaf, by the leaf's id.
    """
    for function in backward_functions(result):
        index = leaves.get(id(getattr(function, "variable", None)))
        if index is not None:
            yield index


def _grad_fn_of(value: Any) -> Any:
    """Returns the `grad_fn` of a tensor, or None if the value is not a tensor."""
    return value.grad_fn if isinstance(value, torch.Tensor) else None


def _unchanged(size: int | torch.SymInt) -> int | torch.SymInt:
    return size
