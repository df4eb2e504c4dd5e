"""Functions of square matrices."""

import torch

from ortmodule.aten_case import Case, T

CASES = [
    Case("slogdet", lambda a: tuple(torch.linalg.slogdet(a)), (T(3, 4, 4),)),
    Case("slogdet_one", lambda a: torch.slogdet(a)[1] * 2, (T(5, 5),)),
    Case("logdet", lambda a: torch.logdet(a @ a.mT + torch.eye(3, dtype=a.dtype)), (T(2, 3, 3),)),
    Case(
        "slogdet_large", lambda a: torch.linalg.slogdet(a * 1e6 + 2e6 * torch.eye(12, dtype=a.dtype))[1],
        (T(12, 12),), dynamic=False,
    ),
    Case(
        "slogdet_too_small_for_float32",
        lambda a: torch.linalg.slogdet(4096 * a @ a.mT + torch.eye(14, dtype=a.dtype)),
        (T(14, 1, low=1.0, high=1.0, grad=False),),
        dynamic=False,
        tolerance=1e-3,  # of the cancellation in float32
    ),
    Case(
        "slogdet_singular", lambda a: torch.linalg.slogdet(torch.stack([a * 0, a])), (T(4, 4, grad=False),),
        dynamic=False,
    ),
    Case("matrix_exp", torch.linalg.matrix_exp, (T(2, 3, 3),), dynamic=False),
    Case("matrix_exp_small", lambda a: torch.linalg.matrix_exp(a * 1e-3), (T(3, 3),), dynamic=False),
    Case(
        "matrix_exp_skew", lambda a: torch.linalg.matrix_exp(20 * (a - a.mT)), (T(4, 4),), dynamic=False,
        tolerance=1e-4,
    ),
    Case("matrix_exp_zero", lambda a: torch.linalg.matrix_exp(a * 0), (T(3, 3),), dynamic=False),
]  # fmt: skip
