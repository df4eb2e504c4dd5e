"""Recomputes a captured graph in PyTorch, for derivatives that ONNX Runtime cannot compute.

These are second derivatives for which a gradient rule is missing, gradients for a batch of cotangents, and gradients
whose computation fails in ONNX Runtime. The replay uses the random numbers of the original run and the autocast
settings of the capture.
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
from onnxtrain.ortmodule.capture._modes import restoring_modes
from onnxtrain.ortmodule.capture.autograd._gradients import unseen_by_hooks
from onnxtrain.ortmodule.lowering._table import Lowered

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)

Outputs = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
Announce = Callable[[str, ORTModuleFallbackException], None]


@dataclass(frozen=True)
class Replay:
    """A program that PyTorch runs in place of ONNX Runtime.

    Attributes:
        outputs: computes the program's outputs from its inputs, in a way that autograd can differentiate.
        announce: called with a kind of computation that PyTorch is about to run, e.g. "second derivative", and an error
            that explains why. Warns, or raises the error if the fallback policy forbids the computation.
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
        """Computes the gradients of the program's inputs. They are differentiable if gradients are enabled.

        Args:
            inputs: the inputs of the program.
            needs: for each input, True if it needs a gradient.
            cotangents: maps the index of an output to its cotangent. `torch.vmap` may have batched the cotangents.
            changed: indices of the outputs that the caller has written to.

        Returns:
            For each input, its gradient, or None if it needs no gradient or the outputs don't depend on it.

        Raises:
            RuntimeError: an operator's backward needs an output in `changed`.
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
        """Predicts the `requires_grad` of each gradient that eager PyTorch would compute with `create_graph=True`.

        The caller detaches a gradient from ONNX Runtime if the prediction is False. Runs the program and its backward
        on fake tensors.

        Args:
            inputs: the inputs of the program. Their `requires_grad` matters, not their data.
            needs: for each input, True if it needs a gradient.
            cotangents: maps the index of an output to its cotangent. Their `requires_grad` matters, not their data.

        Returns:
            For each input, True if its gradient requires grad. None if an operator cannot run on fake tensors.
        """
        # This doesn't follow from the formula: in PyTorch a gradient requires a gradient if any tensor that the
        # operator's backward takes does, even if the gradient doesn't depend on that tensor.
        sizes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes, static_shapes=True)
        try:
            # The mode keeps weak references to the original tensors. A parameter with a weak reference cannot be
            # swapped (`set_swap_module_params_on_conversion`).
            aliases = [x.detach().requires_grad_(x.requires_grad) for x in (*inputs, *cotangents.values())]
            with mode, torch.enable_grad(), unseen_by_hooks():
                fakes = [mode.from_tensor(x) for x in aliases]
                by_output = dict(zip(cotangents, fakes[len(inputs) :], strict=True))
                gradients = self.gradients(fakes[: len(inputs)], needs, by_output)
        # E.g. an operator has no fake kernel, or its result is data-dependent.
        except Exception:
            return None
        return [gradient is not None and gradient.requires_grad for gradient in gradients]

    def derivative(
        self, needs: Sequence[bool], received: Sequence[int], slots: Sequence[int | None]
    ) -> Replay:
        """Returns the PyTorch counterpart of `Program.vjp`: a replay of this program's vector-Jacobian product.

        Its inputs are the inputs of this program, then the cotangents of the outputs in `received`.

        Args:
            needs: for each input of this program, True if it needs a gradient.
            received: indices of the outputs of this program that received a cotangent.
            slots: for each input of this program, the index of its gradient in the outputs of the new program, or None
                if the new program doesn't return this gradient.
        """

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
    """Context manager that suspends `torch.func` transforms, and the legacy vmap of `is_grads_batched`."""
    # Transforms reject random operators, which the graph calls. (`_ReplayRandomOps` makes them return earlier random
    # numbers.)
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
    """Returns an alias that requires grad, so that the gradient with respect to `tensor` can be computed."""
    # The tensor itself is not used, because its hooks would be called with gradients that never reach it. The alias
    # keeps the autograd history, which second derivatives need.
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()


class ReplayedGraph:
    """Runs a captured graph in PyTorch, with the inputs and outputs of the ONNX graph that was lowered from it.

    Args:
        graph_module: the captured graph.
        lowered: the ONNX graph.
        device: device of the tensors.
        run: runs the captured graph; by default `restoring_modes(graph_module)`.

    Attributes:
        numbers: indices of the arguments that are not tensors, e.g. [1].
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        lowered: Lowered,
        device: torch.device,
        run: Callable[..., Any] | None = None,
    ) -> None:
        self._run = run or restoring_modes(graph_module)
        self._lowered = lowered
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        values = [node.meta.get("example_value") for node in placeholders]
        self._places = len(values)
        self.numbers = [i for i, value in enumerate(values) if not isinstance(value, torch.Tensor)]
        self._changed = frozenset(place for place, _ in lowered.mutated)
        # The autocast settings of the capture. In backward, the caller's settings may differ.
        kind = device.type
        self._autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def of_call(self, args: Sequence[Any]) -> Outputs:
        """Returns a function that maps the ONNX graph's inputs to its outputs, computed in PyTorch.

        Args:
            args: the arguments of the captured graph. Only the numbers among them are used.
        """
        return partial(self._outputs, [args[index] for index in self.numbers])

    def _outputs(self, numbers: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Computes the outputs of the ONNX graph by running the captured graph in PyTorch.

        Args:
            numbers: the arguments of the captured graph that are not tensors.
            tensors: the inputs of the ONNX graph, followed by the random tensors that random operators return.

        Returns:
            The outputs in the ONNX graph's order. Complex tensors are viewed as real, as in `tensors`.
        """
        lowered = self._lowered
        args: list[Any] = [None] * self._places
        for place, tensor in zip(lowered.inputs, tensors, strict=False):
            if place in lowered.complex:
                tensor = torch.view_as_complex(tensor)
            # The captured graph writes to its inputs in place, unlike the ONNX graph.
            args[place] = tensor.clone() if place in self._changed else tensor
        # Set after the tensors: a symbolic size is a tensor for the ONNX graph, but a number for the captured graph.
        for place, number in zip(self.numbers, numbers, strict=True):
            args[place] = number
        with self._captured_settings(tensors[len(lowered.inputs) :]):
            returned = self._run(*args)
        results: dict[int, torch.Tensor] = {}
        for (kind, index), value in zip(lowered.outputs, returned, strict=True):
            if kind == "tensor":
                results[index] = value
            elif kind == "complex":
                results[index] = torch.view_as_real(value.resolve_conj())
            elif kind == "number":
                # On fake tensors `item()` returns a symbol. Its value doesn't matter: a number has no gradient.
                results[index] = torch.tensor(0 if isinstance(value, _SYMBOLS) else value)
        for place, index in lowered.mutated:
            results[index] = torch.view_as_real(args[place]) if place in lowered.complex else args[place]
        # A failed assertion would have raised in the captured graph.
        for index, _ in lowered.assertions:
            results[index] = torch.tensor(True)
        return [results[index] for index in range(len(results))]

    @contextlib.contextmanager
    def _captured_settings(self, drawn: Sequence[torch.Tensor]) -> Iterator[None]:
        """Context manager that restores the capture's autocast settings, and makes random operators return `drawn`."""
        kind, dtype, enabled = self._autocast
        # PyTorch's fused attention kernels (2.13) have no second derivative.
        with torch.autocast(kind, dtype, enabled), sdpa_kernel(SDPBackend.MATH):
            if drawn:
                with _ReplayRandomOps(drawn):
                    yield
            else:
                yield


# Random operators that fill their first argument, and random operators that return a new tensor.
_IN_PLACE = frozenset({
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_",
})  # fmt: skip
_FUNCTIONAL_DRAWS = frozenset({
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "normal_functional", "rand",
    "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "uniform",
})  # fmt: skip


class _ReplayRandomOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes random operators return given random numbers instead of drawing new ones.

    Args:
        values: the random inputs of the ONNX graph, in the order in which the random operators run.
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
        if name in _FUNCTIONAL_DRAWS:
            return next(self._values).clone()
        # PyTorch draws no random numbers for dropout in inference, or with probability 0 or 1.
        if name == "native_dropout" and args[2] is not False and 0 < args[1] < 1:
            kept = next(self._values).to(args[0].dtype)
            return args[0] * (kept / (1 - args[1])), kept.bool()
        if name == "multinomial":
            return _multinomial(*args, noise=next(self._values))
        # With new random numbers the gradients would be silently wrong.
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotImplementedError(f"computing a graph again: the random numbers of {func} are not known")
        return func(*args, **(kwargs or {}))


def _multinomial(
    weights: torch.Tensor, count: int, replacement: bool = False, *, noise: torch.Tensor
) -> torch.Tensor:
    """Computes `torch.multinomial` from given random numbers; returns the drawn indices.

    Args:
        weights: unnormalized probabilities, [..., n].
        count: number of indices to draw.
        replacement: True to draw with replacement.
        noise: exponential random numbers [..., n]; uniform ones [..., count] if `replacement` and `count` is not 1.
    """
    # The formulas of PyTorch's CPU kernels: eager PyTorch draws the same indices for the same seed.
    if not replacement or count == 1:
        return (weights / noise).topk(count).indices
    sums = weights.cumsum(-1)
    cumulative = (sums / sums[..., -1:]).double()
    return (cumulative[..., None, :] < noise[..., None]).sum(-1)
