"""Compute a captured graph once more in PyTorch, for derivatives that ONNX Runtime does not give.

These are second derivatives of ops whose gradient has no rule, gradients for a batch of cotangents, and gradients that
fail in ONNX Runtime. PyTorch gets the random numbers that ONNX Runtime had, and the autocast settings of the capture.
"""

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
from onnxtrain.ortmodule.capture.autograd._gradients import unseen_by_hooks
from onnxtrain.ortmodule.lowering._table import Lowered

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)

Outputs = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
Announce = Callable[[str, ORTModuleFallbackException], None]


@dataclass(frozen=True)
class Replay:
    """A program in PyTorch.

    Attributes:
        outputs: computes the program's outputs from its inputs, in a way that autograd can differentiate.
        announce: warns of what PyTorch is about to compute, e.g. "second derivative", with the error that tells why.
            Raises that error if the fallback policy forbids it.
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
        """Returns one gradient per input, None if it needs none or the outputs do not depend on it.

        The gradients can be differentiated again if gradients are enabled.

        Args:
            inputs: the inputs of the program.
            needs: per input, whether it needs a gradient.
            cotangents: cotangents by the index of their output. `torch.vmap` may have batched them.
            changed: indices of the outputs that the caller has written to. PyTorch raises if the backward of one of its
                operators needs such an output.
        """
        differentiable = torch.is_grad_enabled()
        with torch.enable_grad(), _outside_transforms():
            leaves = [_leaf(x) if need else x for x, need in zip(inputs, needs, strict=True)]
            outputs = self.outputs(leaves)
        torch.autograd.graph.increment_version([outputs[index] for index in changed])
        dependent = [index for index in cotangents if outputs[index].requires_grad]
        if not dependent:
            return [None] * len(leaves)
        gradients = iter(
            torch.autograd.grad(
                [outputs[index] for index in dependent],
                [leaf for leaf, need in zip(leaves, needs, strict=True) if need],
                [cotangents[index] for index in dependent],
                create_graph=differentiable,
                allow_unused=True,
            )
        )
        return [next(gradients) if need else None for need in needs]

    def differentiable_gradients(
        self,
        inputs: Sequence[torch.Tensor],
        needs: Sequence[bool],
        cotangents: Mapping[int, torch.Tensor],
    ) -> list[bool] | None:
        """Returns per input whether its gradient requires a gradient in eager PyTorch with `create_graph=True`.

        Returns None if PyTorch cannot tell from fake tensors. The arguments are those of `gradients`; it matters which
        of the tensors require a gradient.
        """
        # A formula does not tell: in PyTorch a gradient requires a gradient if any tensor that the operator's backward
        # takes does, even if the gradient does not depend on that tensor.
        sizes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes, static_shapes=True)
        try:
            # The mode keeps weak references to the tensors that it imitates. A parameter with a weak reference cannot
            # be swapped (`set_swap_module_params_on_conversion`).
            aliases = [x.detach().requires_grad_(x.requires_grad) for x in (*inputs, *cotangents.values())]
            with mode, torch.enable_grad(), unseen_by_hooks():
                fakes = [mode.from_tensor(x) for x in aliases]
                by_output = dict(zip(cotangents, fakes[len(inputs) :], strict=True))
                gradients = self.gradients(fakes[: len(inputs)], needs, by_output)
        # E.g. an operator has no fake kernel, or its result depends on the numbers in memory.
        except Exception:
            return None
        return [gradient is not None and gradient.requires_grad for gradient in gradients]

    def derivative(
        self, needs: Sequence[bool], received: Sequence[int], slots: Sequence[int | None]
    ) -> Replay:
        """Returns in PyTorch what `Program.vjp` returns for the same arguments, with these `slots`."""

        def outputs(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            inputs, cotangents = tensors[: len(needs)], tensors[len(needs) :]
            gradients = self.gradients(inputs, needs, dict(zip(received, cotangents, strict=True)))
            return [
                torch.zeros_like(x) if gradient is None else gradient
                for x, gradient, slot in zip(inputs, gradients, slots, strict=True)
                if slot is not None
            ]

        return Replay(outputs, self.announce)


@contextlib.contextmanager
def _outside_transforms() -> Iterator[None]:
    """Leaves torch.func's transforms, and the older vmap of `is_grads_batched`, until the context is closed."""
    # Transforms refuse random operators. The graph still calls these; `_Drawn` returns numbers drawn before.
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
    """Returns an alias of a tensor, to differentiate with respect to."""
    # Not the tensor itself: its hooks would be called with gradients that never reach it. A view keeps the history that
    # second derivatives follow.
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()


class ReplayedGraph:
    """A captured graph in PyTorch, with the inputs and outputs of the ONNX graph that was lowered from it.

    Args:
        graph_module: the captured graph.
        lowered: the ONNX graph.
        device: device of the tensors.
        run: runs the captured graph; `graph_module.forward` if left out.

    Attributes:
        numbers: indices of the arguments that are no tensors, e.g. [1].
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
        # The graph is captured under the autocast settings of the caller, which may differ in backward.
        kind = device.type
        self._autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def of_call(self, args: Sequence[Any]) -> Outputs:
        """Returns the graph as a function of the ONNX graph's inputs, with the numbers among the arguments `args`."""
        return partial(self._outputs, [args[index] for index in self.numbers])

    def _outputs(self, numbers: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs the graph on the inputs of the ONNX graph, and returns the outputs of the ONNX graph.

        Args:
            numbers: the arguments of the captured graph that are no tensors.
            tensors: the inputs of the ONNX graph, random numbers included.
        """
        lowered = self._lowered
        args: list[Any] = [None] * self._places
        for place, tensor in zip(lowered.inputs, tensors, strict=False):
            if place in lowered.complex:
                tensor = torch.view_as_complex(tensor)
            # ONNX Runtime writes to no input, the graph in PyTorch would.
            args[place] = tensor.clone() if place in self._changed else tensor
        # After the tensors: a symbolic size is an input of both graphs, a tensor in the one, a number in the other.
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
                # On fake tensors `item()` returns a symbol. Its value does not matter: a number has no gradient.
                results[index] = torch.tensor(0 if isinstance(value, _SYMBOLS) else value)
        for place, index in lowered.mutated:
            results[index] = torch.view_as_real(args[place]) if place in lowered.complex else args[place]
        # An assertion that does not hold has raised its error before.
        for index, _ in lowered.assertions:
            results[index] = torch.tensor(True)
        return [results[index] for index in range(len(results))]

    @contextlib.contextmanager
    def _settings(self, drawn: Sequence[torch.Tensor]) -> Iterator[None]:
        """Restores the settings of the capture, and the random numbers `drawn`, until the context is closed."""
        kind, dtype, enabled = self._autocast
        # PyTorch's fused attention (2.13) has no second derivative.
        with torch.autocast(kind, dtype, enabled), sdpa_kernel(SDPBackend.MATH):
            if drawn:
                with _Drawn(drawn):
                    yield
            else:
                yield


# Random operators by what they return: their first argument, or a new tensor.
_IN_PLACE = frozenset({
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_",
})  # fmt: skip
_NEW = frozenset({
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "normal_functional", "rand",
    "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "uniform",
})  # fmt: skip


class _Drawn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes random operators return numbers that were drawn before, instead of drawing anew.

    Args:
        values: per operator, in the order in which they run, the random input of the ONNX graph.
    """

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
        # PyTorch draws nothing for a dropout in inference, or of probability 0 or 1.
        if name == "native_dropout" and args[2] is not False and 0 < args[1] < 1:
            kept = next(self._values)
            return args[0] * (kept / (1 - args[1])), kept.bool()
        if name == "multinomial":
            return _chosen(*args, noise=next(self._values))
        # Drawing anew would make the gradients those of another call, without a word.
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotImplementedError(f"computing a graph again: the random numbers of {func} are not known")
        return func(*args, **(kwargs or {}))


def _chosen(
    weights: torch.Tensor, count: int, replacement: bool = False, *, noise: torch.Tensor
) -> torch.Tensor:
    """Returns the indices that `torch.multinomial` chooses for random numbers that were drawn before.

    Args:
        weights: [..., n].
        count: number of indices to choose.
        replacement: True if an index may be chosen twice.
        noise: exponential random numbers [..., n], or uniform ones [..., count] with replacement.
    """
    # The formulas of PyTorch's CPU kernels: eager PyTorch chooses the same indices for the same seed.
    if not replacement or count == 1:
        return (weights / noise).topk(count).indices
    sums = weights.cumsum(-1)
    cumulative = (sums / sums[..., -1:]).double()
    return (cumulative[..., None, :] < noise[..., None]).sum(-1)
