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
        ctx.save_for_backward(*tensors, *returned)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        program: Program = ctx.program
        needs = tuple(ctx.needs_input_grad[1:])
        seeds = [
            torch.zeros(shape, dtype=dtype, device=device) if ct is None else ct
            for index in program.seeds
            for ct, (shape, dtype, device) in [(cotangents[index], ctx.shapes[index])]
        ]
        saved = list(ctx.saved_tensors)
        tensors, returned = saved[: len(needs)], iter(saved[len(needs) :])
        if (
            torch.is_grad_enabled()
        ):  # create_graph=True: recomputed by a program that is differentiable itself
            vjp, slots = program.vjp(needs)
            gradients = call(vjp, [*tensors, *seeds])
        else:
            step = program.training_step(needs)
            residuals = [next(returned) if r is None else r for r in ctx.residuals]
            slots = step.gradients
            inputs = [tensors[i] for i in step.saved_inputs]
            gradients = tuple(step.backward.run([*inputs, *residuals, *seeds]))
        return (None, *(None if slot is None else gradients[slot] for slot in slots))
