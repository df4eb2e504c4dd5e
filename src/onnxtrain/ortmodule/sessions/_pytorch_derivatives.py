"""A captured graph computed once more, by PyTorch, for derivatives that ONNX Runtime does not give."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel

from onnxtrain.ortmodule._exceptions import ORTModuleFallbackException
from onnxtrain.ortmodule._torch import (
    FakeTensorMode,
    TorchDispatchMode,
    enter_vmap,
    leave_vmap,
    temporarily_clear_interpreter_stack,
)
from onnxtrain.ortmodule.capture._gradients import unseen_by_hooks
from onnxtrain.ortmodule.lowering._table import Lowered

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)

Outputs = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
Announce = Callable[[str, ORTModuleFallbackException], None]


@dataclass(frozen=True)
class Replay:
    """A program as PyTorch computes it.

    Attributes:
        outputs: the program's outputs from its inputs; autograd can follow it.
        announce: says what PyTorch is about to compute (`"second derivative"`), and why; raises if that is forbidden.
    """

    outputs: Outputs
    announce: Announce

    def gradients(
        self,
        inputs: Sequence[torch.Tensor],
        needs: Sequence[bool],
        cotangents: Mapping[int, torch.Tensor],
        changed: Sequence[int] = (),
    ) -> list[torch.Tensor | None]:
        """Returns one gradient per input, None where it needs none or the outputs do not depend on it.

        It can be differentiated if gradients are enabled.

        Args:
            inputs: those of the program.
            needs: which of them need a gradient.
            cotangents: by the index of their output; they may be batched by `torch.vmap`.
            changed: outputs that were written to since; PyTorch raises where an operator's backward needs one.
        """
        differentiable = torch.is_grad_enabled()
        with torch.enable_grad(), _outside_transforms():
            leaves = [_leaf(x) if need else x for x, need in zip(inputs, needs, strict=True)]
            outputs = self.outputs(leaves)
        torch.autograd.graph.increment_version([outputs[index] for index in changed])
        reached = [index for index in cotangents if outputs[index].requires_grad]
        if not reached:
            return [None] * len(leaves)
        found = iter(
            torch.autograd.grad(
                [outputs[index] for index in reached],
                [leaf for leaf, need in zip(leaves, needs, strict=True) if need],
                [cotangents[index] for index in reached],
                create_graph=differentiable,
                allow_unused=True,
            )
        )
        return [next(found) if need else None for need in needs]

    def differentiable_gradients(
        self,
        inputs: Sequence[torch.Tensor],
        needs: Sequence[bool],
        cotangents: Mapping[int, torch.Tensor],
    ) -> list[bool] | None:
        """Returns per input whether eager PyTorch could differentiate its gradient again, with `create_graph=True`.

        That of an operator's input requires a gradient where any of what the operator's backward takes does, even if
        it does not depend on that. PyTorch is asked with tensors without memory; None if it cannot say.

        Args:
            inputs: as for `gradients`, and which of them require a gradient.
            needs: as for `gradients`.
            cotangents: as for `gradients`, and which of them require a gradient.
        """
        sizes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes, static_shapes=True)
        try:
            # Of other tensors: the mode keeps weak references, and a parameter with one cannot be swapped.
            apart = [x.detach().requires_grad_(x.requires_grad) for x in (*inputs, *cotangents.values())]
            with mode, torch.enable_grad(), unseen_by_hooks():
                fakes = [mode.from_tensor(x) for x in apart]
                by_output = dict(zip(cotangents, fakes[len(inputs) :], strict=True))
                found = self.gradients(fakes[: len(inputs)], needs, by_output)
        except Exception:  # what depends on numbers in memory; what has no fake kernel
            return None
        return [gradient is not None and gradient.requires_grad for gradient in found]

    def derivative(
        self, needs: Sequence[bool], received: Sequence[int], slots: Sequence[int | None]
    ) -> Replay:
        """Returns what `Program.vjp` gives for the same arguments, with these `slots`."""

        def outputs(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            inputs, cotangents = tensors[: len(needs)], tensors[len(needs) :]
            found = self.gradients(inputs, needs, dict(zip(received, cotangents, strict=True)))
            return [
                torch.zeros_like(x) if gradient is None else gradient
                for x, gradient, slot in zip(inputs, found, slots, strict=True)
                if slot is not None
            ]

        return Replay(outputs, self.announce)


@contextlib.contextmanager
def _outside_transforms() -> Iterator[None]:
    """Leaves torch.func's transforms, and the older vmap of `is_grads_batched`, which forbid random operators."""
    levels = enter_vmap()
    for _ in range(levels):
        leave_vmap()
    try:
        with temporarily_clear_interpreter_stack():
            yield
    finally:
        for _ in range(levels - 1):
            enter_vmap()


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor for another graph: hooks on it are for gradients that reach the tensor itself."""
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()


class ReplayedGraph:
    """A graph of Dynamo's, with the inputs and outputs of the program that was lowered from it.

    Made where Dynamo captures the graph, whose settings of autocast it keeps.

    Args:
        graph_module: the graph.
        lowered: the program.
        device: of the tensors.
        run: does what the graph does, if it is not the graph itself that is to be run.

    Attributes:
        numbers: indices of the arguments that are no tensors.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        lowered: Lowered,
        device: torch.device,
        run: Callable[..., Any] | None = None,
    ) -> None:
        self._run = run or graph_module.forward
        self._lowered = lowered
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        values = [node.meta.get("example_value") for node in placeholders]
        self._places = len(values)
        self.numbers = [i for i, value in enumerate(values) if not isinstance(value, torch.Tensor)]
        self._changed = frozenset(place for place, _ in lowered.mutated)
        kind = device.type
        self._autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def of_call(self, args: Sequence[Any]) -> Outputs:
        """Returns the graph as a function of tensors; numbers are those of a call with `args`."""
        return partial(self._outputs, [args[index] for index in self.numbers])

    def _outputs(self, numbers: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        lowered = self._lowered
        args: list[Any] = [None] * self._places
        for place, tensor in zip(lowered.inputs, tensors, strict=False):
            if place in lowered.complex:
                tensor = torch.view_as_complex(tensor)
            args[place] = tensor.clone() if place in self._changed else tensor
        for place, number in zip(self.numbers, numbers, strict=True):
            args[place] = number
        with self._settings(tensors[len(lowered.inputs) :]):
            returned = self._run(*args)
        results: dict[int, torch.Tensor] = {}
        for (kind, index), value in zip(lowered.outputs, returned, strict=True):
            if kind == "tensor":
                results[index] = value
            elif kind == "complex":
                results[index] = torch.view_as_real(value.resolve_conj())
            elif kind == "integer":
                # On tensors without memory `item()` gives a symbol; no gradient comes from a number in any case.
                results[index] = torch.tensor(0 if isinstance(value, _SYMBOLS) else value)
        for place, index in lowered.mutated:
            results[index] = torch.view_as_real(args[place]) if place in lowered.complex else args[place]
        for index, _ in lowered.assertions:  # they have held
            results[index] = torch.tensor(True)
        return [results[index] for index in range(len(results))]

    @contextlib.contextmanager
    def _settings(self, drawn: Sequence[torch.Tensor]) -> Iterator[None]:
        kind, dtype, enabled = self._autocast
        # PyTorch's fused attention has no second derivative.
        with torch.autocast(kind, dtype, enabled), sdpa_kernel(SDPBackend.MATH):
            if drawn:
                with _Drawn(drawn):
                    yield
            else:
                yield


_IN_PLACE = frozenset({
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_",
})  # fmt: skip
_NEW = frozenset({
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "normal_functional", "rand",
    "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "uniform",
})  # fmt: skip


class _Drawn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives random operators the numbers that the program had, which drew them in the order of eager PyTorch."""

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values = iter(values)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in _IN_PLACE:
            return args[0].copy_(next(self._values))
        if name in _NEW:
            return next(self._values).clone()
        if name == "native_dropout" and args[2] is not False and 0 < args[1] < 1:
            kept = next(self._values)
            return args[0] * (kept / (1 - args[1])), kept.bool()
        if name == "multinomial":
            return _chosen(*args, noise=next(self._values))
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotImplementedError(f"computing a graph again: the random numbers of {func} are not known")
        return func(*args, **(kwargs or {}))


def _chosen(
    weights: torch.Tensor, count: int, replacement: bool = False, *, noise: torch.Tensor
) -> torch.Tensor:
    """Returns the places that `torch.multinomial` chooses with the numbers that its lowering has drawn."""
    if not replacement or count == 1:
        return (weights / noise).topk(count).indices
    sums = weights.cumsum(-1)
    shares = (sums / sums[..., -1:]).double()
    return (shares[..., None, :] < noise[..., None]).sum(-1)
