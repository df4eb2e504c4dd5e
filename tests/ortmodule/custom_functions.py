"""Custom autograd functions, most of them with a derivative of their own, which shows whose backward has run."""

from __future__ import annotations

from typing import Any

import torch


class StraightThrough(torch.autograd.Function):
    """Rounds; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * 2).round() / 2

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:
        return ct


class Scaled(torch.autograd.Function):
    """x * y with a gradient of its own, and one for each input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        return 0.5 * ct * y, 2 * ct * x


class SetUp(torch.autograd.Function):
    """Rounds; its derivative is 2, also under transforms, which derive a rule for vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).round() / 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:
        return 2 * ct

    @staticmethod
    def jvp(ctx: Any, t: torch.Tensor) -> torch.Tensor:
        return 2 * t


class VmapRule(SetUp):
    """The same with a rule for vmap of its own."""

    generate_vmap_rule = False

    @staticmethod
    def vmap(info: Any, dims: Any, x: torch.Tensor) -> Any:
        return VmapRule.apply(x), dims[0]


class Scaling(torch.autograd.Function):
    """x³ / 10 with a wrong derivative that depends on x."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x**3 / 10

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return ct * x.cos()


class Once(torch.autograd.Function):
    """2x, whose derivative cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:
        return 3 * ct


class _DoublesInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:
        return 5 * ct


class Dirty:
    """2x, written to a copy of x."""

    @staticmethod
    def apply(x: torch.Tensor) -> torch.Tensor:
        return _DoublesInPlace.apply(x.clone())


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        sign = x.sign()
        ctx.mark_non_differentiable(sign)
        ctx.save_for_backward(sign)
        return x / 2, sign

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        (sign,) = ctx.saved_tensors
        return ct * sign


class Halves:
    """x / 2 and the sign of x, which is not differentiable."""

    @staticmethod
    def apply(x: torch.Tensor) -> torch.Tensor:
        half, sign = _Parts.apply(x)
        return half + sign
