"""Complex numbers inside of a graph; results are real."""

from typing import Any

import torch

from ortmodule.aten_case import Case, T

Z = torch.view_as_complex
R = torch.view_as_real
A, B = T(3, 4, 2), T(3, 4, 2)


def _both(fn: Any) -> Any:
    return lambda a, b: R(fn(Z(a), Z(b)))


def _one(fn: Any) -> Any:
    return lambda a: R(fn(Z(a)).contiguous())


def _rotary(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """As DeepSeek and Llama 4 turn queries."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    turns = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(pairs * turns[:, :, None]).flatten(3)


def _written(z: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(z)
    out[1:, :2] = w[1:, :2] * 2
    out[0, 1] = 1.5
    return out + z.new_ones(4) * z.mean()


CASES = [
    Case("complex_product", _both(lambda z, w: z * w), (A, B)),
    Case("complex_quotient", _both(lambda z, w: z / w), (A, T(3, 4, 2, low=0.5))),
    Case("complex_sums", _both(lambda z, w: z + 2 * w - (1 - 2j) - w.sub(z, alpha=3)), (A, B)),
    Case("complex_and_real", lambda a, x: R(Z(a) * x + x / 2 - Z(a) / x), (A, T(4, low=0.5))),
    Case("complex_from_parts", lambda x, y: R(torch.complex(x, y) * 1j), (T(3, 4), T(3, 4))),
    Case("polar", lambda r, t: R(torch.polar(r, t)), (T(3, 4, low=0.1), T(3, 4))),
    Case("complex_length", lambda a: (Z(a).abs(), Z(a).angle(), Z(a).real, Z(a).imag), (A,)),
    Case(
        "complex_length_at_zero",
        lambda x: torch.complex(x, x * 0).abs(),
        (torch.tensor([0.0, 2.0], requires_grad=True),),
    ),
    Case("complex_conjugate", _both(lambda z, w: z.conj() * w + (z * w).conj()), (A, B)),
    Case("complex_exp", _one(lambda z: torch.exp(z) + torch.log(z) + z.sgn()), (T(3, 4, 2, low=0.5),)),
    Case("complex_powers", _one(lambda z: z**3 + z.reciprocal() + z**-2 + z**0), (T(3, 4, 2, low=0.5),)),
    Case("complex_matmul", _both(lambda z, w: z @ w.T + torch.einsum("ij,kj->ik", z, w)), (A, B)),
    Case("complex_batched_matmul", _both(lambda z, w: (z[None] @ w.T[None]).squeeze(0)), (A, B)),
    Case("complex_shapes", _one(lambda z: torch.cat([z[:, 1:].T, z.reshape(4, 3) * 2]).flip(0)[None]), (A,)),
    Case("complex_where", _both(lambda z, w: torch.where(z.real > 0, z, w).roll(1, 0).cumsum(1)), (A, B)),
    Case("complex_write", _both(_written), (A, B)),
    Case("complex_detached", _both(lambda z, w: z.detach() * w), (A, B)),
    Case("complex_index", _one(lambda z: z[torch.tensor([2, 0])].sum(0)), (A,)),
    Case("angle_of_real", lambda x: x.angle() + x, (T(3, 4),)),
    Case("rotary_complex", _rotary, (T(2, 3, 2, 8), T(2, 3, 4, grad=False))),
]
