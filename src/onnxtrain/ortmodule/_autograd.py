"""A program as a differentiable PyTorch function."""

from __future__ import annotations

from typing import Any

import torch

from onnxtrain.ortmodule._program import Program

__all__ = ["call"]


def call(program: Program, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Returns the outputs of a program, part of PyTorch's autograd graph where an input requires a gradient."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors) and any(program.differentiable):
        return _Step.apply(program, *tensors)  # type: ignore[no-any-return, no-untyped-call]
    return tuple(program.inference.run(tensors))


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, program: Program, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        step = program.training_step(tuple(ctx.needs_input_grad[1:]))
        results = step.forward.run(tensors)
        outputs = results[: len(program.differentiable)]
        ctx.program = program
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(out for out, flag in zip(outputs, program.differentiable, strict=True) if not flag)
        )
        ctx.shapes = [(out.shape, out.dtype, out.device) for out in outputs]
        ctx.residuals = [None if i < len(outputs) else results[i] for i in step.residuals]
        returned = [outputs[i] for i in step.residuals if i < len(outputs)]
        ctx.save_for_backward(*(tensors[i] for i in step.saved_inputs), *returned)
        # Second derivatives compute the outputs again, from all inputs.
        ctx.inputs = [(tensor, tensor._version) for tensor in tensors]
        return tuple(outputs)

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # of a gradient taken inside of a captured forward
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        program: Program = ctx.program
        needs = tuple(ctx.needs_input_grad[1:])
        seeds = [
            torch.zeros(shape, dtype=dtype, device=device) if ct is None else ct
            for index in program.seeds
            for ct, (shape, dtype, device) in [(cotangents[index], ctx.shapes[index])]
        ]
        saved = list(ctx.saved_tensors)
        if torch.is_grad_enabled():  # create_graph=True: computed by a program that is differentiable itself
            vjp, slots = program.vjp(needs)
            gradients = call(vjp, [*_unchanged(ctx.inputs), *seeds])
        else:
            step = program.training_step(needs)
            slots = step.gradients
            inputs, returned = saved[: len(step.saved_inputs)], iter(saved[len(step.saved_inputs) :])
            residuals = [next(returned) if r is None else r for r in ctx.residuals]
            gradients = tuple(step.backward.run([*inputs, *residuals, *seeds]))
        return (None, *(None if slot is None else gradients[slot] for slot in slots))


def _unchanged(inputs: list[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
    """The tensors, if none was changed in place since its version was noted."""
    for tensor, version in inputs:
        if tensor._version != version:
            raise RuntimeError(
                f"computing a second derivative: an input of shape {list(tensor.shape)} has been modified by an "
                f"inplace operation (version {tensor._version}, expected {version}); change a clone of it instead"
            )
    return [tensor for tensor, _ in inputs]
