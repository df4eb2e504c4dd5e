"""A program as a differentiable PyTorch function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxtrain.ortmodule import _torch
from onnxtrain.ortmodule._exceptions import ORTModuleONNXModelException, ORTModuleTorchModelException
from onnxtrain.ortmodule.capture._calling import without_capture
from onnxtrain.ortmodule.sessions._program import Program, TrainingStep
from onnxtrain.ortmodule.sessions._pytorch_derivatives import Replay
from onnxtrain.ortmodule.sessions._session import is_of_onnxruntime

_grad_enabled = torch.is_grad_enabled
_saved_tensors_hooks = _torch.saved_tensors_hooks
_transforms_active = _torch.functorch_transforms_active
_is_wrapped = _torch.is_functorch_wrapped_tensor
_is_batched = _torch.is_legacy_batchedtensor
_unwrap = _torch.unwrap_if_dead

_Call = tuple[Program, Replay, tuple[bool, ...], TrainingStep]
_Kept = tuple[
    Sequence[torch.Tensor],
    Sequence[int],
    Sequence[tuple[int, torch.Tensor, int]],
    Sequence[tuple[torch.Tensor, int, frozenset[int]]],
]
"""What second derivatives compute the outputs again from: the inputs, versions of those that are read, of results
that are (index, a tensor with its memory, version), and of the inputs in `TrainingStep.checked`.

It is an attribute of a saved tensor, as PyTorch frees what is saved after backward. The inputs themselves are not
saved: one that the gradients do not depend on may change.
"""


def call(program: Program, tensors: list[torch.Tensor], replay: Replay) -> tuple[torch.Tensor, ...]:
    """Returns the outputs of a program, part of PyTorch's autograd graph where an input requires a gradient.

    Args:
        program: the program.
        tensors: its inputs.
        replay: the same in PyTorch, for derivatives that ONNX Runtime does not give.
    """
    if _grad_enabled() and program.seeds:
        needs = tuple([t.requires_grad for t in tensors])
        if True in needs:
            step = program.training_step(needs)
            if step.unreached:  # else hooks of these inputs would be called, with None
                tensors = _detached(tensors, step.unreached, step.unreached_alone)
            apply: Callable[..., Any] = _Step.apply if _transforms_active() else _apply
            outputs: tuple[torch.Tensor, ...] = apply((program, replay, needs, step), *map(_unwrap, tensors))
            return outputs
    return tuple(program.inference.run(tensors))


def _detached(tensors: list[torch.Tensor], indices: Sequence[int], alone: bool) -> list[torch.Tensor]:
    """Returns the inputs, those that no gradient comes to detached.

    Args:
        tensors: the inputs.
        indices: of those that no gradient comes to.
        alone: whether there is no other that needs a gradient. Outputs require one that leads nowhere then, as products
            of a view that was taken under `no_grad`: one of the detached tensors requires a gradient in its place.
    """
    if alone and _transforms_active():  # `requires_grad_` is refused within these
        return tensors
    tensors = list(tensors)
    for index in indices:
        tensors[index] = tensors[index].detach()
    if alone:
        tensors[indices[0]].requires_grad_()
    return tensors


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        program, _, _, step = ctx.call = call
        try:
            versions = [tensors[i]._version for i in step.reads]
            checked = [(tensors[i], tensors[i]._version, outputs) for i, outputs in step.checked]
        except RuntimeError:  # a tensor made under `inference_mode` has none, and cannot be saved
            tensors = tuple([t.clone() if t.is_inference() else t for t in tensors])
            versions = [tensors[i]._version for i in step.reads]
            checked = [(tensors[i], tensors[i]._version, outputs) for i, outputs in step.checked]
        results = step.forward.run(tensors)
        outputs = results[: program.count]
        ctx.set_materialize_grads(False)
        if program.constants:
            ctx.mark_non_differentiable(*[outputs[index] for index in program.constants])
        if len(program.seeds) > 1:
            ctx.shapes = [(out.shape, out.dtype, out.device) for out in outputs]
        saved = [tensors[i] for i in step.saved_inputs]
        saved += [results[i] for i in step.residuals]
        watched = []
        for (
            place,
            index,
        ) in step.shared:  # the caller may write to it, which only some operators of PyTorch mind
            with _torch.DisableTorchDispatch():
                watched.append((index, saved[place].detach(), saved[place]._version))
                saved[place] = saved[place].data
        for place in step.unchecked:
            with _torch.DisableTorchDispatch():
                saved[place] = saved[place].data
        kept = (tensors, versions, watched, checked)
        if _saved_tensors_hooks(True) is not None:  # they may give another tensor back
            ctx.kept = kept
        else:
            ctx.kept = None
            if step.keeper == len(saved):
                with _torch.DisableTorchDispatch():  # the call is watched, which takes its time
                    saved.append(torch.empty(0))
            saved[step.keeper].kept = kept  # type: ignore[attr-defined]
        ctx.save_for_backward(*saved)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return _backward(ctx, cotangents)  # type: ignore[no-any-return]


_apply: Callable[..., Any] = _torch.apply_function.__get__(None, _Step)
"""`_Step.apply` outside of transforms, without what it asks of functions of another style in each call."""


@without_capture  # of a gradient taken inside of a captured forward
def _backward(ctx: Any, cotangents: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    call: _Call = ctx.call
    program, replay, needs, step = call
    seeds = program.seeds
    received = tuple([index for index in seeds if cotangents[index] is not None])
    if not received:  # a later call took a buffer from this one, whose tensors may be freed already
        return (None, *_keep_from_hooks(ctx, [None] * len(needs)))
    saved = ctx.saved_tensors
    kept: _Kept = ctx.kept or saved[step.keeper].kept
    present = [ct for ct in cotangents if ct is not None]
    _check_versions(kept[3], received)
    gradients: Sequence[torch.Tensor | None]
    changed = [index for index, of, version in kept[2] if of._version != version]
    if changed:
        inputs = _unchanged_inputs(kept, step.reads)
        by_output = dict(zip(received, present, strict=True))
        gradients = replay.gradients(inputs, needs, by_output, changed)
        written = ORTModuleTorchModelException(
            "a result that it reads has been written to; write to a clone of it"
        )
        replay.announce("gradient", written)
    elif _grad_enabled() or any(map(_is_transformed, present)):
        inputs = _unchanged_inputs(kept, step.reads)
        gradients = _differentiable(program, replay, needs, inputs, received, present)
    else:
        whole = received == seeds
        backward = step.backward if whole else program.backward(needs, received)
        given = present if whole else [_cotangent(cotangents[i], ctx.shapes[i]) for i in backward.seeds]
        values = [*(saved[index] for index in backward.takes), *given]
        try:
            results = backward.session.run(values, trusted=ctx.kept is None)
            gradients = [None if slot is None else results[slot] for slot in backward.gradients]
        except Exception as error:
            if not is_of_onnxruntime(error):
                raise
            inputs = _unchanged_inputs(kept, step.reads)
            why = ORTModuleONNXModelException(f"ONNX Runtime failed: {error}")
            replay.announce("gradient", why)
            gradients = replay.gradients(inputs, needs, dict(zip(received, present, strict=True)))
    return (None, *(gradients if received == seeds else _keep_from_hooks(ctx, gradients)))


def _keep_from_hooks(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
    """Returns the gradients, after it has kept those that are None from the hooks of parameters.

    Only some outputs of this call have got gradients, and a parameter may be reached from the others alone. Eager
    PyTorch does not come to such a parameter. PyTorch's engine (2.13) does here, and would call the parameter's hooks
    with None, which they cannot work with.
    """
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
    """A hook of a tensor that is not called with None.

    Args:
        hook: what the user has registered, e.g. `lambda gradient: gradient * 2`.
    """

    def __init__(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        self._hook = hook

    def __call__(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return None if gradient is None else self._hook(gradient)


def _is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a transform of torch.func, or the older vmap of `is_grads_batched`, holds the tensor's memory."""
    return _is_wrapped(tensor) or _is_batched(tensor)


def _cotangent(received: torch.Tensor | None, shape: Any) -> torch.Tensor:
    if received is not None:
        return received
    size, dtype, device = shape
    return torch.zeros(size, dtype=dtype, device=device)


def _check_versions(
    checked: Sequence[tuple[torch.Tensor, int, frozenset[int]]], received: Sequence[int]
) -> None:
    """Raises where PyTorch does: a tensor has been written to that its backward from these outputs would read."""
    for tensor, version, outputs in checked:
        if tensor._version != version and not outputs.isdisjoint(received):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} "
                "instead"
            )


def _unchanged_inputs(kept: _Kept, reads: Sequence[int]) -> Sequence[torch.Tensor]:
    """The inputs; raises RuntimeError if one that gradients depend on has changed since."""
    inputs, versions, *_ = kept
    for tensor, version in zip([inputs[i] for i in reads], versions, strict=True):
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
    """Returns the gradients, computed by a program that is differentiable itself, or by PyTorch."""
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
    found = program.differentiable_vjp(needs, received, wanted)
    if isinstance(found, str):
        replay.announce("second derivative", ORTModuleONNXModelException(found))
        return replay.gradients(inputs, needs, by_output)
    vjp, slots, dependent = found
    if not vjp.seeds:
        return [None] * len(needs)
    again = program.differentiable_again
    if (needs, received, wanted) not in again:
        again[needs, received, wanted] = replay.differentiable_gradients(inputs, needs, by_output)
    flags = again[needs, received, wanted]
    if flags is not None:
        by_slot = {slot: flag for slot, flag in zip(slots, flags, strict=True) if slot is not None}
        dependent = tuple(by_slot[slot] for slot in range(len(dependent)))
    with torch.set_grad_enabled(any(dependent)):
        found_gradients = call(vjp, tensors, replay.derivative(needs, received, slots))
    gradients = [g if flag else g.detach() for g, flag in zip(found_gradients, dependent, strict=True)]
    return [None if slot is None else gradients[slot] for slot in slots]
