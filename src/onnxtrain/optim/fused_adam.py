"""Defines FusedAdam, a PyTorch optimizer that updates all parameters with a few multi-tensor operator calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any

import torch

__all__ = ["AdamWMode", "FusedAdam"]


class AdamWMode(IntEnum):
    """Kinds of weight decay, with the same names and values as in onnxruntime-training."""

    ADAM_L2_REGULARIZATION = 0
    """Adds the decay to the gradient, like `torch.optim.Adam`."""
    ADAMW_TRANSFORMERS = 1
    """Decays the parameter after the update, and adds epsilon before the bias correction, like AdamW in
    transformers 4."""
    ADAMW_TORCH = 2
    """Decays the parameter before the update, like `torch.optim.AdamW`."""


class FusedAdam(torch.optim.Optimizer):
    """Adam and AdamW optimizer that updates all parameters together, with PyTorch's multi-tensor operators.

    Name, arguments and defaults are the same as in onnxruntime-training. Unlike its CUDA kernels, these operators run
    on every device, in every floating-point dtype. Papers: https://arxiv.org/abs/1412.6980 (Adam),
    https://arxiv.org/abs/1711.05101 (AdamW).

    Args:
        params: parameters, or parameter groups, as for `torch.optim.Adam`.
        lr: learning rate, e.g. 1e-3.
        bias_correction: True to divide the moments by `1 - beta ** step`.
        betas: decay rates of the two moments, e.g. (0.9, 0.999).
        eps: added to the denominator for numerical stability, e.g. 1e-6.
        adam_w_mode: kind of weight decay, an :class:`AdamWMode`.
        weight_decay: weight decay coefficient, e.g. 0.01. In each step, the AdamW modes multiply parameters by
            `1 - lr * weight_decay`; the L2 mode adds `weight_decay * parameter` to the gradient.
        set_grad_none: True to make :meth:`zero_grad` set gradients to None, regardless of its argument.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedAdam([weight], lr=0.1, adam_w_mode=AdamWMode.ADAMW_TORCH)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([0.9000, 0.9000])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        adam_w_mode: AdamWMode | int = AdamWMode.ADAMW_TRANSFORMERS,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            # Not `value < 0`, which would accept NaN.
            if not value >= 0:
                raise ValueError(f"FusedAdam: {name} must not be negative, received {value}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"FusedAdam: betas must be at least 0 and below 1, received {betas}")
        self._adam_w_mode = AdamWMode(adam_w_mode)
        self._set_grad_none = set_grad_none
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
            },
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets the gradients to None, or to zero if both `set_to_none` and `set_grad_none` are False."""
        super().zero_grad(set_to_none or self._set_grad_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters that have a gradient.

        Args:
            closure: recomputes the loss and its gradients; None if the gradients have been computed.

        Returns:
            The result of `closure`, or None without a closure.

        Raises:
            RuntimeError: a gradient is sparse or complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            # A parameter without a gradient in some steps has a smaller step count, and therefore a different bias
            # correction.
            by_step: dict[int, list[torch.Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_step.setdefault(self._count(parameter, group), []).append(parameter)
            for step, parameters in by_step.items():
                self._update(parameters, group, step)
        return loss

    def _count(self, parameter: torch.Tensor, group: dict[str, Any]) -> int:
        """Increments the step count of a parameter, and creates its state at the first step.

        Returns:
            The number of this step, counted from 1.

        Raises:
            RuntimeError: the gradient is sparse or complex.
        """
        gradient = parameter.grad
        # `_update` assumes dense, real gradients: the square of a complex one would be |g|², not g·g.
        if gradient is None or gradient.is_sparse or gradient.is_complex():
            raise RuntimeError(
                "FusedAdam: a gradient is sparse or complex; use torch.optim.SparseAdam or Adam"
            )
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["step"] = 0
        elif "step" not in state:
            # Checkpoints of onnxruntime-training count steps per group.
            state["step"] = int(group["step"])
        state["step"] = int(state["step"]) + 1
        return int(state["step"])

    def _update(self, parameters: list[torch.Tensor], group: dict[str, Any], step: int) -> None:
        """Updates parameters that have the same step count, with PyTorch's multi-tensor operators."""
        mode, decay, lr, eps = self._adam_w_mode, group["weight_decay"], float(group["lr"]), group["eps"]
        beta1, beta2 = group["betas"]
        gradients: Any = [parameter.grad for parameter in parameters]
        first = [self.state[parameter]["exp_avg"] for parameter in parameters]
        second = [self.state[parameter]["exp_avg_sq"] for parameter in parameters]
        if decay and mode is AdamWMode.ADAM_L2_REGULARIZATION:
            gradients = torch._foreach_add(gradients, parameters, alpha=decay)
        # PyTorch's AdamW decays the weights before the update; transformers' AdamW decays them after it, at the end of
        # this function. The only other difference is where eps is added.
        if decay and mode is AdamWMode.ADAMW_TORCH:
            torch._foreach_mul_(parameters, 1 - lr * decay)
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        corrections = (
            (1 - beta1**step, math.sqrt(1 - beta2**step)) if group["bias_correction"] else (1.0, 1.0)
        )
        denominators = torch._foreach_sqrt(second)
        # transformers' AdamW adds eps to the square root of the uncorrected second moment.
        if mode is AdamWMode.ADAMW_TRANSFORMERS:
            torch._foreach_add_(denominators, eps)
            size = lr * corrections[1] / corrections[0]
        else:
            torch._foreach_div_(denominators, corrections[1])
            torch._foreach_add_(denominators, eps)
            size = lr / corrections[0]
        torch._foreach_addcdiv_(parameters, first, denominators, -size)
        if decay and mode is AdamWMode.ADAMW_TRANSFORMERS:
            torch._foreach_mul_(parameters, 1 - lr * decay)
