"""A program as a differentiable PyTorch function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from onnxtrain.ortmodule._exceptions import ORTModuleONNXModelException, ORTModuleTorchModelException
from onnxtrain.ortmodule._program import Program
from onnxtrain.ortmodule._replay import Replay
from onnxtrain.ortmodule._session import is_of_onnxruntime

__all__ = ["call"]

_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def call(program: Program, tensors: list[torch.Tensor], replay: Replay) -> tuple[torch.Tensor, ...]:
    """Returns the outputs of a program, part of PyTorch's autograd graph where an input requires a gradient.

    Args:
        program: the program.
        tensors: its inputs.
        replay: the same in PyTorch, for derivatives that ONNX Runtime does not give.
    """
    needs = tuple([t.requires_grad for t in tensors]) if torch.is_grad_enabled() else ()
    if any(needs) and any(program.differentiable):
        step = program.training_step(needs)
        if 0 < len(step.unreached) < sum(needs):  # else their hooks would be called, with None
            tensors = list(tensors)
            for index in step.unreached:
                tensors[index] = tensors[index].detach()
        return _Step.apply(program, replay, needs, *tensors)  # type: ignore[no-any-return, no-untyped-call]
    return tuple(program.inference.run(tensors))


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, program: Program, replay: Replay, needs: tuple[bool, ...], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        step = program.training_step(needs)
        results = step.forward.run(tensors)
        outputs = results[: len(program.differentiable)]
        ctx.program, ctx.replay, ctx.needs = program, replay, needs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(out for out, flag in zip(outputs, program.differentiable, strict=True) if not flag)
        )
        ctx.shapes = [(out.shape, out.dtype, out.device) for out in outputs]
        residuals = [results[i] for i in step.residuals]
        watched = []
        for place, index in enumerate(step.residuals):
            if index < len(outputs):  # the caller may write to it, which only some operators of PyTorch mind
                with torch._C._DisableTorchDispatch():
                    watched.append((index, residuals[place].detach(), residuals[place]._version))
                    residuals[place] = residuals[place].data
        ctx.save_for_backward(
            *[tensors[i] for i in step.saved_inputs],
            *residuals,
            _keeper(ctx, (tensors, [tensors[i]._version for i in step.reads], watched)),
        )
        return tuple(outputs)

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # of a gradient taken inside of a captured forward
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        program: Program = ctx.program
        needs: tuple[bool, ...] = ctx.needs
        seeds = program.seeds
        received = tuple([index for index in seeds if cotangents[index] is not None])
        if not received:  # a later call took a buffer from this one, whose tensors may be freed already
            return (None,) * (3 + len(needs))
        *saved, keeper = ctx.saved_tensors
        present = [ct for ct in cotangents if ct is not None]
        gradients: Sequence[torch.Tensor | None]
        changed = [index for index, of, version in _kept(ctx, keeper)[2] if of._version != version]
        if changed:
            inputs = _unchanged_inputs(ctx, keeper, program.training_step(needs).reads)
            by_output = dict(zip(received, present, strict=True))
            gradients = ctx.replay.gradients(inputs, needs, by_output, changed)
            written = ORTModuleTorchModelException(
                "a result that it reads has been written to; write to a clone of it"
            )
            ctx.replay.announce("gradient", written)
        elif torch.is_grad_enabled() or any(map(_is_transformed, present)):
            inputs = _unchanged_inputs(ctx, keeper, program.training_step(needs).reads)
            gradients = _differentiable(program, ctx.replay, needs, inputs, received, present)
        else:
            every = received == seeds
            backward = program.training_step(needs).backward if every else program.backward(needs, received)
            values = saved if every else [saved[index] for index in backward.takes]
            given = [_cotangent(cotangents[index], ctx.shapes[index]) for index in backward.seeds]
            try:
                results = backward.session.run([*values, *given])
                gradients = [None if slot is None else results[slot] for slot in backward.gradients]
            except Exception as error:
                if not is_of_onnxruntime(error):
                    raise
                inputs = _unchanged_inputs(ctx, keeper, program.training_step(needs).reads)
                why = ORTModuleONNXModelException(f"ONNX Runtime failed: {error}")
                ctx.replay.announce("gradient", why)
                gradients = ctx.replay.gradients(inputs, needs, dict(zip(received, present, strict=True)))
        return (None, None, None, *gradients)


def _is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a transform of torch.func, or the older vmap of `is_grads_batched`, holds the tensor's memory."""
    functorch = torch._C._functorch
    return functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def _kept(ctx: Any, keeper: torch.Tensor) -> Any:
    """What :func:`_keeper` kept: the inputs, versions of those that are read, and of results that are."""
    return ctx.kept if hasattr(ctx, "kept") else keeper.kept  # type: ignore[attr-defined]


def _keeper(ctx: Any, kept: Any) -> torch.Tensor:
    """Returns a tensor to save whose attribute `kept` holds what second derivatives compute the outputs again from.

    PyTorch frees what is saved after backward. The inputs themselves are not saved: one that the gradients do not
    depend on may change.
    """
    with torch._C._DisableTorchDispatch():  # the call is watched, which takes its time
        keeper = torch.empty(0)
    if _saved_tensors_hooks(True) is None:
        keeper.kept = kept  # type: ignore[attr-defined]
    else:  # they may give another tensor back
        ctx.kept = kept
    return keeper


def _cotangent(received: torch.Tensor | None, shape: Any) -> torch.Tensor:
    if received is not None:
        return received
    size, dtype, device = shape
    return torch.zeros(size, dtype=dtype, device=device)


def _unchanged_inputs(ctx: Any, keeper: torch.Tensor, reads: Sequence[int]) -> Sequence[torch.Tensor]:
    """What :func:`_keeper` kept; raises RuntimeError if an input that gradients depend on has changed since."""
    inputs, versions, _ = _kept(ctx, keeper)
    for tensor, version in zip([inputs[i] for i in reads], versions, strict=True):
        if tensor._version != version:
            raise RuntimeError(
                f"computing the outputs again for a derivative: an input of shape {list(tensor.shape)} has been "
                f"modified by an inplace operation (version {tensor._version}, expected {version}); "
                "change a clone of it instead"
            )
    return inputs  # type: ignore[no-any-return]


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
    if not any(vjp.differentiable):
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
