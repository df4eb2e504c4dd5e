"""What PyTorch's autograd does in a captured graph: where gradients stop, and which writes it does not see."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from onnxtrain.ortmodule import _torch
from onnxtrain.ortmodule._torch import enable_python_dispatcher, pytree
from onnxtrain.ortmodule.capture._aliases import changes, memory_of
from onnxtrain.ortmodule.capture._data_dependent import unnoted_sizes, without_tracebacks


@contextlib.contextmanager
def unseen_by_hooks() -> Iterator[None]:
    """Switches the user's `saved_tensors_hooks` off, for computations that these hooks must not see.

    `torch.utils.checkpoint(use_reentrant=False)` counts the tensors that such hooks see, and compares two runs: in the
    first one graphs are compiled. Hooks of our own that do nothing would not do: PyTorch (2.13) does not notice that a
    tensor was written to that a hook has seen.
    """
    before = _torch.defer_saved_tensors_hooks(True)
    try:
        yield
    finally:
        _torch.defer_saved_tensors_hooks(before)


_REQUIRED_GRAD = "onnxtrain_required_grad"


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
        links: per output of the graph, then per written placeholder, indices of the placeholders whose gradient is
            zero, and not nothing, where nothing comes through; empty if the graph itself shows them.
        kept: indices of the placeholders that are, for autograd, what they were, whatever has been written to them.
    """

    stopped: Mapping[fx.Node, frozenset[int]]
    fresh: frozenset[fx.Node] = frozenset()
    hidden: Mapping[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    ended: Mapping[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    links: Mapping[fx.Node, frozenset[int]] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()


def example_values(graph_module: fx.GraphModule) -> list[Any]:
    """Returns what Dynamo knows of each input: a fake tensor or a symbolic integer."""
    return [node.meta["example_value"] for node in graph_module.graph.nodes if node.op == "placeholder"]


def fake_mode_of(graph_module: fx.GraphModule) -> Any:
    """Returns the mode of Dynamo's fake tensors; None for a graph of no tensor and no symbolic integer.

    A graph whose inputs are symbolic integers alone makes tensors of these sizes, which needs the mode of its results:
    without it PyTorch's kernels are called ("SymIntArrayRef expected to contain only concrete integers").
    """
    values = example_values(graph_module)
    if not any(hasattr(value, "fake_mode") for value in values) and is_symbolic(graph_module):
        values = [node.meta.get("example_value") for node in graph_module.graph.nodes]
    return next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)


def is_symbolic(graph_module: fx.GraphModule) -> bool:
    """Returns whether a graph has a symbolic integer among its inputs."""
    return any(isinstance(value, torch.SymInt) for value in example_values(graph_module))


def note_inputs(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Keeps of each input whether it requires a gradient when the graph begins, and whether it is a leaf.

    Dynamo's own fake tensors tell what is true at the graph's end.
    """
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    for node, value in zip(placeholders, inputs, strict=False):
        if isinstance(value, torch.Tensor):
            node.meta[_REQUIRED_GRAD] = (value.requires_grad, value.is_leaf)


def flow_of(graph_module: fx.GraphModule) -> GradientFlow:
    """Returns what autograd does in a graph of Dynamo's.

    Where nothing with a gradient is written to, Dynamo's fake tensors tell. Else the graph is run once more on fake
    tensors, with autograd, which knows of each write whether it belongs to the gradient.

    Raises:
        NotImplementedError: it takes derivatives itself; PyTorch cannot differentiate it; or memory has two gradients
            (that of a tensor, and that of a detached one that was written to).
    """
    _refuse_derivatives(graph_module)
    output = next(node for node in graph_module.graph.nodes if node.op == "output")
    if not torch.is_grad_enabled() and any(
        tensor.requires_grad and not tensor._is_view()  # a view of a parameter requires one anyway
        for node in output.all_input_nodes
        if node.op != "placeholder"
        for tensor in _tensors(node.meta.get("example_value"))
    ):
        raise NotImplementedError("it enables gradients where its caller has disabled them")
    for node in output.all_input_nodes:
        if any(
            function.name().endswith("::NotImplemented")
            for function in functions_behind(node.meta.get("example_value"))
        ):
            raise NotImplementedError(
                "PyTorch has no derivative of one of its operators, whose result needs one"
            )
    if not _writes_to_gradients(graph_module):
        if _writes_to_factors(graph_module):
            _rehearsed(graph_module)  # raises where PyTorch's backward would
        return GradientFlow(_stopped_by_metadata(graph_module))
    if any(is_transformed(node.meta.get("example_value")) for node in graph_module.graph.nodes):
        raise NotImplementedError("it writes to what requires a gradient, within a transform of torch.func")
    return _rehearsed(graph_module)


def _rehearsed(graph_module: fx.GraphModule) -> GradientFlow:
    """Returns what autograd does in a graph that writes to memory."""
    try:
        with without_tracebacks():
            return _Rehearsal(graph_module).flow()
    except RuntimeError as error:
        # Some operators, constant_pad_nd among them, know such sizes only in PyTorch's Python dispatcher.
        if not is_symbolic(graph_module) and not isinstance(error, GuardOnDataDependentSymNode):
            raise
        with enable_python_dispatcher():
            return _Rehearsal(graph_module).flow()


def straight_through(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """The value of `after` with the gradient of `before`."""
    nothing = before.detach() - before
    return after.detach() - torch.where(nothing == 0, nothing, 0)


_DERIVATIVES = frozenset({"_grad_increment_nesting", "_jvp_increment_nesting"})


def _refuse_derivatives(graph_module: fx.GraphModule) -> None:
    """Raises where the graph takes derivatives: traced without autograd they would come out wrong."""
    if any(getattr(node.target, "__name__", "") in _DERIVATIVES for node in graph_module.graph.nodes):
        raise NotImplementedError(
            "torch.func.grad, vjp, jvp and what is made of them, as a part of the graph"
        )


def _writes_to_factors(graph_module: fx.GraphModule) -> bool:
    """Returns whether memory without a gradient is written to after it was an argument beside one that has a gradient.

    Backward may need it: a factor of a product, whose gradient PyTorch refuses then.
    """
    factors: set[int] = set()
    for node in graph_module.graph.nodes:
        arguments = [t for source in node.all_input_nodes for t in _tensors(source.meta.get("example_value"))]
        arguments = [t for t in arguments if t.layout == torch.strided and not is_transformed(t)]
        if changes(node) and arguments and memory_of(arguments[0]) in factors:
            return True
        if any(t.requires_grad for t in _tensors(node.meta.get("example_value"))):
            factors.update(memory_of(t) for t in arguments if not t.requires_grad)
    return False


def _writes_to_gradients(graph_module: fx.GraphModule) -> bool:
    """Whether memory is written to that ever belongs to a tensor that requires a gradient.

    Or whether it might be written to, under `torch.no_grad`, with what requires one.
    """
    carrying: set[int] = set()
    written: set[int] = set()
    beside: set[int] = (
        set()
    )  # memory of what is an argument under no_grad, beside one that requires a gradient
    enabled = True
    for node in graph_module.graph.nodes:
        if node.target in ("detach_", torch.detach_, "requires_grad_"):
            return True
        if node.target is _torch.set_grad_enabled:
            enabled = bool(node.args[0])
        if not enabled:
            beside.update(_beside_gradients(node))
        for tensor in _tensors(node.meta.get("example_value")):
            if tensor.layout != torch.strided or is_transformed(tensor):
                continue
            if tensor.requires_grad:
                carrying.add(memory_of(tensor))
            if not tensor.is_inference() and tensor._version > 0:
                written.add(memory_of(tensor))
    return bool((carrying | beside) & written)


def _beside_gradients(node: fx.Node) -> set[int]:
    """The memory of a node's arguments, if any of these requires a gradient."""
    arguments = [t for source in node.all_input_nodes for t in _tensors(source.meta.get("example_value"))]
    if not any(tensor.requires_grad for tensor in arguments):
        return set()
    return {memory_of(t) for t in arguments if t.layout == torch.strided and not is_transformed(t)}


def _stopped_by_metadata(graph_module: fx.GraphModule) -> dict[fx.Node, frozenset[int]]:
    """`torch.no_grad` regions leave no trace in an ATen graph, and `detach` is lost among the aliases."""
    enabled = True
    stopped = {}
    for node in graph_module.graph.nodes:
        value = node.meta.get("example_value")
        if node.target is _torch.set_grad_enabled:
            enabled = bool(node.args[0])
        if node.op in ("placeholder", "output"):
            continue
        if is_transformed(value):
            # What Dynamo says of values inside `torch.vmap` is not true: the causes themselves are looked for.
            if not enabled or node.target in ("detach", "detach_", torch.detach):
                stopped[node] = frozenset(range(len(_tensors(value))))
        else:
            arguments = [
                t for source in node.all_input_nodes for t in _tensors(source.meta.get("example_value"))
            ]
            if any(tensor.requires_grad for tensor in arguments):
                stopped[node] = _stops(value, arguments, enabled)
    return {node: places for node, places in stopped.items() if places}


def _stops(value: Any, arguments: Sequence[torch.Tensor], enabled: bool) -> frozenset[int]:
    """Which of the tensors in a result do not carry the gradient of what they were computed from.

    An argument that is returned as it is (`+x`, `x.contiguous()`, `x.to(x.dtype)`) keeps its gradient under `no_grad`.
    """
    same = {id(tensor) for tensor in arguments}
    return frozenset(
        place
        for place, tensor in enumerate(_tensors(value))
        if _is_float(tensor) and not (enabled and tensor.requires_grad) and id(tensor) not in same
    )


class _Rehearsal(fx.Interpreter):
    """Runs a graph on fake tensors, with autograd."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module, garbage_collect_values=False)  # memory is told apart by its address
        self.first: dict[int, tuple[fx.Node, torch.Tensor]] = {}
        self.stopped: dict[fx.Node, frozenset[int]] = {}
        self.fresh: set[fx.Node] = set()
        self.hidden: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.ended: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.placeholders = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
        # `tensor.data` has a version counter of its own: PyTorch does not notice that it was changed through `tensor`.
        self.reads_data = any(
            getattr(n.target, "__name__", "") == "_get_data_attr" for n in graph_module.graph.nodes
        )
        self.fake_mode = fake_mode_of(graph_module)

    def flow(self) -> GradientFlow:
        """Returns what was found."""
        mode = self.fake_mode or contextlib.nullcontext()
        with mode, unnoted_sizes(self.fake_mode), torch.set_grad_enabled(torch.is_grad_enabled()):
            leaves, inputs = self._inputs()
            functions = [_function(value) for value in inputs]
            returned = self.run(*inputs)
            kept = [index for index, value in enumerate(inputs) if _function(value) is functions[index]]
            output = next(node for node in self.graph.nodes if node.op == "output")
            results = {
                node: value
                for node, value in [
                    *zip(output.args[0], returned, strict=True),
                    *zip(self.placeholders, inputs, strict=True),
                ]
                if isinstance(node, fx.Node) and isinstance(value, torch.Tensor) and value.requires_grad
            }
            _check_backward(list(results.values()), [leaf for leaf in leaves.values() if leaf.requires_grad])
            indices = {id(leaf): index for index, leaf in leaves.items()}
            links = {node: frozenset(_reached(value, indices)) for node, value in results.items()}
        return GradientFlow(
            self.stopped, frozenset(self.fresh), self.hidden, self.ended, links, frozenset(kept)
        )

    def _inputs(self) -> tuple[dict[int, torch.Tensor], list[Any]]:
        """Tensors like the graph's inputs, that nothing has been done to; the leaves among them and behind them."""
        leaves: dict[int, torch.Tensor] = {}
        inputs: list[Any] = []
        for index, node in enumerate(self.placeholders):
            value = node.meta["example_value"]
            if isinstance(value, torch.Tensor):
                required, is_leaf = node.meta.get(_REQUIRED_GRAD, (value.requires_grad, value.is_leaf))
                value = torch.empty_strided(
                    value.size(), value.stride(), dtype=value.dtype, device=value.device
                ).requires_grad_(required)
                leaves[index] = value
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
        arguments = [t for source in n.all_input_nodes for t in _tensors(self.env[source])]
        before = [(tensor, _State.of(tensor, self._first(tensor))) for tensor in arguments]
        carrying = any(tensor.requires_grad for tensor in arguments)
        enabled = torch.is_grad_enabled()
        result = super().run_node(n)
        if n.op != "output":
            for tensor, state in before:
                self._compare(n, tensor, state, enabled, carrying)
            if carrying and not any(result is tensor for tensor in arguments):
                self.stopped[n] = _stops(result, arguments, enabled)
                if not any(memory_of(tensor) in self.first for tensor in _tensors(result)):
                    self.fresh.add(n)
            self._meet(n, result)
        return result

    def _meet(self, node: fx.Node, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            self.first.setdefault(memory_of(value), (node, value))

    def _first(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.first.get(memory_of(tensor), (None, tensor))[1]

    def _compare(
        self, node: fx.Node, tensor: torch.Tensor, state: _State, enabled: bool, carrying: bool
    ) -> None:
        """Finds out what a node, of whose arguments some may carry a gradient, has done to one of them."""
        source, base = self.first.get(memory_of(tensor), (node, tensor))
        if state.base_required and not base.requires_grad:
            self.ended[node] = (*self.ended.get(node, ()), source)
        elif tensor._version != state.version:
            written = enabled and tensor.requires_grad and tensor.grad_fn is not state.function
            seen = base.requires_grad and base.grad_fn is not state.base_function
            if written and not seen:
                raise NotImplementedError(
                    "it writes what has a gradient to a detached tensor, whose memory has another gradient or none"
                )
            unnoticed = base._version == state.base_version
            after = _State.of(tensor, base)
            made = {after.function, after.base_function} - {state.function, state.base_function}
            if (unnoticed or self.reads_data) and self._is_kept(base, made):
                raise NotImplementedError(
                    "it writes, through `.data` or past it, to what PyTorch's backward has kept: write to a clone"
                )
            if base.requires_grad and not seen and source not in self.hidden.get(node, ()):
                self.hidden[node] = (*self.hidden.get(node, ()), source)
            elif carrying and not base.requires_grad:
                self.ended[node] = (*self.ended.get(node, ()), source)

    def _is_kept(self, base: torch.Tensor, made: set[Any]) -> bool:
        """Returns whether backward will read the memory of a tensor as it is now, e.g. the result of `exp`.

        Args:
            base: the tensor; it has been written to.
            made: functions of autograd that the write itself may have added, and whose values are newer than it.
        """
        tensors = [tensor for value in self.env.values() for tensor in _tensors(value)]
        functions: set[Any] = set().union(*map(functions_behind, tensors)) - made
        kept = [value for function in functions for value in saved_by(function)]
        return any(memory_of(tensor) == memory_of(base) for tensor in kept)


@dataclass(frozen=True)
class _State:
    """A tensor, and the first one with its memory, before a node runs."""

    version: int
    base_version: int
    function: Any
    base_required: bool
    base_function: Any

    @staticmethod
    def of(tensor: torch.Tensor, base: torch.Tensor) -> _State:
        # That of a view made under no_grad whose base has changed cannot be asked for.
        function = tensor.grad_fn if torch.is_grad_enabled() and tensor.requires_grad else None
        return _State(tensor._version, base._version, function, base.requires_grad, base.grad_fn)


def saved_by(function: Any) -> Iterator[torch.Tensor]:
    """The tensors that a function of autograd has kept for backward."""
    for name in dir(function):
        if name.startswith("_saved_"):
            with contextlib.suppress(RuntimeError):  # it has been changed, which backward will say
                yield from _tensors(getattr(function, name))


def _check_backward(results: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> None:
    """Raises where PyTorch's backward would: what it has saved was changed, or an op has no derivative."""
    results = [result for result in results if result.grad_fn is not None]
    if not results or not leaves:
        return
    try:
        torch.autograd.grad(
            results, leaves, [torch.ones_like(result) for result in results], allow_unused=True
        )
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            raise NotImplementedError(f"its backward raises in PyTorch: {error}") from error


def _reached(result: torch.Tensor, leaves: Mapping[int, int]) -> Iterator[int]:
    """The indices of the leaves that gradients of a tensor are passed to."""
    for function in functions_behind(result):
        index = leaves.get(id(getattr(function, "variable", None)))
        if index is not None:
            yield index


def _function(value: Any) -> Any:
    """The function of autograd that a tensor comes from."""
    return value.grad_fn if isinstance(value, torch.Tensor) else None


def functions_behind(value: Any) -> set[Any]:
    """The functions of autograd's graph behind a tensor."""
    if not isinstance(value, torch.Tensor) or not value.requires_grad or is_transformed(value):
        return set()
    stack, seen = [value.grad_fn], set()
    while stack:
        current = stack.pop()
        if current is not None and current not in seen:
            seen.add(current)
            stack += [following for following, _ in current.next_functions]
    return seen


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def map_tensors(function: Callable[[int, torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Returns the value with `function` of each tensor in it and its number among these."""
    numbers: Iterable[int] = iter(range(len(_tensors(value))))
    return pytree.tree_map_only(torch.Tensor, lambda t: function(next(numbers), t), value)  # type: ignore[call-overload]


def is_transformed(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and _torch.is_functorch_wrapped_tensor(value)


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
