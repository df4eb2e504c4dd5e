"""Make a program, i.e. a graph in ONNX Runtime, a function that PyTorch's autograd can differentiate.

Forward runs one session and saves what backward takes; backward runs another one. PyTorch computes the graph again, by
:class:`Replay`, for derivatives that ONNX Runtime does not give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from onnxtrain.ortmodule import _torch
from onnxtrain.ortmodule._exceptions import ORTModuleONNXModelException, ORTModuleTorchModelException
from onnxtrain.ortmodule.capture.dynamo._calling import without_capture
from onnxtrain.ortmodule.sessions._program import Program, TrainingStep
from onnxtrain.ortmodule.sessions._pytorch_derivatives import Replay
from onnxtrain.ortmodule.sessions._session import is_of_onnxruntime

# Each of these is asked in every call: looking them up in their modules would take longer than the answer.
_grad_enabled = torch.is_grad_enabled
_saved_tensors_hooks = _torch.saved_tensors_hooks
_transforms_active = _torch.functorch_transforms_active
_is_wrapped = _torch.is_functorch_wrapped_tensor
_is_batched = _torch.is_legacy_batchedtensor
_unwrap = _torch.unwrap_if_dead


class _Call(NamedTuple):
    """A call in autograd's graph.

    Attributes:
        program: the graph in ONNX Runtime.
        replay: the same graph in PyTorch.
        needs: per input, whether it requires a gradient, e.g. (True, False).
        step: the sessions for `needs`.
        recorded: indices of the inputs that autograd's graph records, e.g. (0,); None stands for all.
    """

    program: Program
    replay: Replay
    needs: tuple[bool, ...]
    step: TrainingStep
    recorded: tuple[int, ...] | None


class _Kept(NamedTuple):
    """State of a call that backward needs beside the saved tensors: its inputs, and version counters to compare.

    Attributes:
        inputs: all inputs, from which PyTorch may compute the outputs again.
        versions: version counters of the inputs in `TrainingStep.reads`, e.g. [0, 3].
        results: per saved output of the program (its index, an alias of it, its version counter).
        checked: per input in `TrainingStep.checked` (the input, its version counter, indices of outputs).
        residuals: values of ONNX Runtime that backward takes and nobody else sees.
    """

    inputs: Sequence[torch.Tensor]
    versions: Sequence[int]
    results: Sequence[tuple[int, torch.Tensor, int]]
    checked: Sequence[tuple[torch.Tensor, int, frozenset[int]]]
    residuals: Sequence[Any]


def call(program: Program, tensors: list[torch.Tensor], replay: Replay) -> tuple[torch.Tensor, ...]:
    """Runs a program, and records it in PyTorch's autograd graph if an input requires a gradient.

    Args:
        program: the graph in ONNX Runtime.
        tensors: its inputs.
        replay: the same graph in PyTorch, for derivatives that ONNX Runtime does not give.

    Returns:
        The outputs of the program.
    """
    if _grad_enabled() and program.seeds:
        needs = tuple([t.requires_grad for t in tensors])
        if True in needs:
            step = program.training_step(needs)
            # PyTorch's engine would call the hooks of an input that gets no gradient, with None.
            if step.unreached:
                tensors = _detached(tensors, step.unreached, step.unreached_alone)
            outputs: tuple[torch.Tensor, ...]
            # Transforms of torch.func unwrap the tensors among the arguments.
            if _transforms_active():
                outputs = _Step.apply(_Call(program, replay, needs, step, None), None, *map(_unwrap, tensors))  # type: ignore[no-untyped-call]
                return outputs
            tensors = list(map(_unwrap, tensors))
            # Autograd takes its time for each argument, e.g. for the weights of a frozen backbone.
            recorded = step.recorded
            outputs = _apply(
                _Call(program, replay, needs, step, recorded), tensors, *[tensors[i] for i in recorded]
            )
            return outputs
    return tuple(program.inference.run(tensors))


def _detached(tensors: list[torch.Tensor], unreached: Sequence[int], alone: bool) -> list[torch.Tensor]:
    """Detaches the inputs that no gradient reaches; `alone` says that none reaches any input."""
    # Transforms of torch.func refuse `requires_grad_` below.
    if alone and _transforms_active():
        return tensors
    tensors = list(tensors)
    for index in unreached:
        tensors[index] = tensors[index].detach()
    # The outputs must require a gradient all the same: in eager PyTorch a product with a view that was taken under
    # `no_grad` does, although no gradient arrives anywhere. The detached tensor gets it and has no hooks.
    if alone:
        tensors[unreached[0]].requires_grad_()
    return tensors


def _versions(
    step: TrainingStep, tensors: Sequence[torch.Tensor]
) -> tuple[list[int], list[tuple[torch.Tensor, int, frozenset[int]]]]:
    """Returns `_Kept.versions` and `_Kept.checked` for these inputs."""
    checked = [(tensors[i], tensors[i]._version, outputs) for i, outputs in step.checked]
    return [tensors[i]._version for i in step.reads], checked


class _Step(torch.autograd.Function):
    """One call of a program in PyTorch's autograd graph."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, inputs: Sequence[torch.Tensor] | None, *recorded: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        program, step = call.program, call.step
        tensors = recorded if inputs is None else inputs
        # A tensor that was made under `inference_mode` has no version counter, and PyTorch refuses to save it.
        try:
            versions, checked = _versions(step, tensors)
        except RuntimeError:
            tensors = tuple([t.clone() if t.is_inference() else t for t in tensors])
            versions, checked = _versions(step, tensors)
        hooked = _saved_tensors_hooks(True) is not None
        residuals: list[Any] = []
        # The user's hooks see every tensor that is saved.
        if step.keeps_values and not hooked:
            results, residuals = step.forward.run_keeping(tensors, program.count)
        else:
            results = step.forward.run(tensors)
        outputs = results[: program.count]
        # A zero cotangent for an output that the loss does not use would be NaN behind the square root of 0.
        ctx.set_materialize_grads(False)
        if program.constants:
            ctx.mark_non_differentiable(*[outputs[index] for index in program.constants])
        # `_cotangent` makes zeros of these shapes. To keep the outputs themselves would keep their memory.
        if len(program.seeds) > 1:
            ctx.shapes = [(out.shape, out.dtype, out.device) for out in outputs]
        saved = [tensors[i] for i in step.saved_inputs]
        saved += [results[index] for _, index in step.shared]
        saved += results[program.count :]
        saved_results = []
        for place, index in step.shared:
            # The caller may write to this output. PyTorch would raise for every write, but eager PyTorch only raises if
            # an operator's backward reads the output: it is saved without version counter, and `_backward` compares
            # versions. The watch for operators of PyTorch (`_pytorch_work.py`) would take its time for each call.
            with _torch.DisableTorchDispatch():
                saved_results.append((index, saved[place].detach(), saved[place]._version))
                saved[place] = saved[place].data
        for place in step.unchecked:
            with _torch.DisableTorchDispatch():
                saved[place] = saved[place].data
        kept = _Kept(tensors, versions, saved_results, checked, residuals)
        # `kept` is an attribute of a saved tensor, as PyTorch frees these after backward, while `ctx` lives on. Its
        # inputs are not saved themselves: the caller may write to an input that the gradients do not depend on.
        if not hooked:
            ctx.kept = None
            # An output would have the attribute as long as the caller holds it.
            if len(results) == program.count:
                with _torch.DisableTorchDispatch():
                    saved.append(torch.empty(0))
            saved[-1].kept = kept  # type: ignore[attr-defined]
        # The user's hooks may return another tensor, without the attribute.
        else:
            ctx.kept = kept
        ctx.save_for_backward(*saved)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return _backward(ctx, cotangents)  # type: ignore[no-any-return]


# `_Step.apply` for calls outside of transforms. PyTorch's own (2.13) first looks for `setup_context`, which takes part
# of each call.
_apply: Callable[..., Any] = _torch.apply_function.__get__(None, _Step)


# A gradient that is taken inside of a captured forward must not have its own code captured.
@without_capture
def _backward(ctx: Any, cotangents: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """Returns the gradients of `_Step.forward`'s arguments; see `torch.autograd.Function.backward`."""
    call: _Call = ctx.call
    program, replay, needs, step, recorded = call
    seeds = program.seeds
    received = tuple([index for index in seeds if cotangents[index] is not None])
    # E.g. a later call took a buffer from this one. Nothing may read the saved tensors, which may be freed by then.
    if not received:
        count = len(needs if recorded is None else recorded)
        return (None, None, *_keep_from_hooks(ctx, [None] * count))
    saved: list[Any] = list(ctx.saved_tensors)
    kept: _Kept = ctx.kept or saved[-1].kept
    if kept.residuals:
        saved[-1:] = kept.residuals
    present = [ct for ct in cotangents if ct is not None]
    _check_versions(kept.checked, received)
    gradients: Sequence[torch.Tensor | None]
    written = [index for index, result, version in kept.results if result._version != version]
    # PyTorch raises here if one of its operators saves the output that was written to.
    if written:
        inputs = _unchanged_inputs(kept, step.reads)
        by_output = dict(zip(received, present, strict=True))
        gradients = replay.gradients(inputs, needs, by_output, written)
        replay.announce(
            "gradient",
            ORTModuleTorchModelException(
                "the caller has written to a result that backward reads; write to a clone of it"
            ),
        )
    # With `create_graph=True` PyTorch enables gradients in backward.
    elif _grad_enabled() or any(map(_is_transformed, present)):
        inputs = _unchanged_inputs(kept, step.reads)
        gradients = _differentiable(program, replay, needs, inputs, received, present)
    else:
        complete = received == seeds
        backward = step.backward if complete else program.backward(needs, received)
        if not complete:
            present = [_cotangent(cotangents[i], ctx.shapes[i]) for i in backward.seeds]
        values = [*(saved[index] for index in backward.takes), *present]
        try:
            # Hooks on saved tensors may have put other tensors into the memory of earlier ones.
            results = backward.session.run(values, trusted=ctx.kept is None)
            gradients = [None if slot is None else results[slot] for slot in backward.gradients]
        # ONNX Runtime may lack memory, for example.
        except Exception as error:
            if not is_of_onnxruntime(error):
                raise
            inputs = _unchanged_inputs(kept, step.reads)
            replay.announce("gradient", ORTModuleONNXModelException(f"ONNX Runtime failed: {error}"))
            by_output = {index: ct for index in received if (ct := cotangents[index]) is not None}
            gradients = replay.gradients(inputs, needs, by_output)
    if recorded is not None:
        gradients = [gradients[index] for index in recorded]
    return (None, None, *(gradients if received == seeds else _keep_from_hooks(ctx, gradients)))


def _keep_from_hooks(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
    """Returns the gradients unchanged, and protects hooks of parameters whose gradient is None."""
    # If a loss uses some outputs of a call only, no gradient may reach a parameter. Eager PyTorch does not visit such a
    # parameter. PyTorch's engine (2.13) does here, and would call the parameter's hooks with None.
    functions = [function for function, _ in ctx.next_functions[-len(gradients) :]]
    for gradient, function in zip(gradients, functions, strict=True):
        hooks = getattr(getattr(function, "variable", None), "_backward_hooks", None)
        if gradient is None and hooks:
            hooks.update(
                {
                    key: _HookOfGradients(hook)
                    for key, hook in hooks.items()
                    if type(hook) is not _HookOfGradients
                }
            )
    return gradients


class _HookOfGradients:
    """A hook of a tensor that ignores calls with None.

    Args:
        hook: the hook that the user registered, e.g. `lambda gradient: gradient * 2`.
    """

    def __init__(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        self._hook = hook

    def __call__(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return None if gradient is None else self._hook(gradient)


def _is_transformed(tensor: torch.Tensor) -> bool:
    """True if a tensor is a wrapper of torch.func's transforms, or of the older vmap of `is_grads_batched`."""
    # ONNX Runtime cannot read the memory of such a tensor.
    return _is_wrapped(tensor) or _is_batched(tensor)


def _cotangent(received: torch.Tensor | None, shape: Any) -> torch.Tensor:
    """Returns the cotangent of an output, zeros if it received none; `shape` is an entry of `ctx.shapes`."""
    if received is not None:
        return received
    size, dtype, device = shape
    return torch.zeros(size, dtype=dtype, device=device)


def _check_versions(
    checked: Sequence[tuple[torch.Tensor, int, frozenset[int]]], received: Sequence[int]
) -> None:
    """Raises, as eager PyTorch does, if an input was written to that it saved for one of the outputs `received`."""
    for tensor, version, outputs in checked:
        if tensor._version != version and not outputs.isdisjoint(received):
            # PyTorch's own words, which programs and their users know.
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} "
                "instead"
            )


def _unchanged_inputs(kept: _Kept, reads: Sequence[int]) -> Sequence[torch.Tensor]:
    """Returns the inputs of a call.

    Raises:
        RuntimeError: the caller has written to an input of `TrainingStep.reads`.
    """
    inputs = kept.inputs
    for tensor, version in zip([inputs[i] for i in reads], kept.versions, strict=True):
        if tensor._version != version:
            raise RuntimeError(
                f"computing the outputs again for a derivative: an input of shape {list(tensor.shape)} has been "
                f"modified by an inplace operation (version {tensor._version}, expected {version}); "
                "change a clone of it instead"
            )
    return inputs


def _differentiable(
    program: Program,
    replay: Replay,
    needs: tuple[bool, ...],
    inputs: Sequence[torch.Tensor],
    received: tuple[int, ...],
    cotangents: Sequence[torch.Tensor],
) -> Sequence[torch.Tensor | None]:
    """Returns gradients that can be differentiated again, or that take a batch of cotangents.

    ONNX Runtime computes them if the gradient graph itself has a gradient; else PyTorch does.
    """
    by_output = dict(zip(received, cotangents, strict=True))
    if any(map(_is_transformed, cotangents)):
        why = ORTModuleTorchModelException(
            "torch.vmap, is_grads_batched and vectorize=True differentiate for a batch of cotangents; "
            "in a loop over them the graph runs in ONNX Runtime"
        )
        replay.announce("batched gradient", why)
        return replay.gradients(inputs, needs, by_output)
    tensors = [*inputs, *cotangents]
    wanted = tuple([t.requires_grad for t in tensors])
    vjp_or_reason = program.differentiable_vjp(needs, received, wanted)
    if isinstance(vjp_or_reason, str):
        replay.announce("second derivative", ORTModuleONNXModelException(vjp_or_reason))
        return replay.gradients(inputs, needs, by_output)
    vjp, slots, dependent = vjp_or_reason
    if not vjp.seeds:
        return [None] * len(needs)
    # Eager PyTorch's rule differs from dependence: the gradient of a convolution's weight requires a gradient although
    # it does not depend on the weight, and one that is computed through a path of zeros does not. It is asked once.
    answers = program.differentiable_again
    if (needs, received, wanted) not in answers:
        answers[needs, received, wanted] = replay.differentiable_gradients(inputs, needs, by_output)
    flags = answers[needs, received, wanted]
    if flags is not None:
        by_slot = {slot: flag for slot, flag in zip(slots, flags, strict=True) if slot is not None}
        dependent = tuple(by_slot[slot] for slot in range(len(dependent)))
    with torch.set_grad_enabled(any(dependent)):
        results = call(vjp, tensors, replay.derivative(needs, received, slots))
    gradients = [g if flag else g.detach() for g, flag in zip(results, dependent, strict=True)]
    return [None if slot is None else gradients[slot] for slot in slots]
