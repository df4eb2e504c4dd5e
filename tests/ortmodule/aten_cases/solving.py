"""Systems of linear equations: what PyTorch computes by factors of the matrix."""

from functools import partial

import torch

from ortmodule.aten_case import Case, T


def positive(x):
    return x @ x.mT + 3 * torch.eye(x.shape[-1], dtype=x.dtype)


def regular(x):
    """With zeros on the diagonal, so that rows have to change places."""
    n = x.shape[-1]
    return x.tril(-1) + x.triu(1) + 4 * torch.eye(n, dtype=x.dtype).flip(0)


def triangular(x, b, upper, left=True, unitriangular=False):
    a = x * 0.3 + 2 * torch.eye(x.shape[-1], dtype=x.dtype)
    return torch.linalg.solve_triangular(a, b, upper=upper, left=left, unitriangular=unitriangular)


CASES = [
    Case("cholesky", lambda x: torch.linalg.cholesky(positive(x)), (T(4, 4),)),
    Case("cholesky_upper", lambda x: torch.linalg.cholesky(positive(x), upper=True), (T(2, 3, 4, 4),)),
    Case("cholesky_info", lambda x: torch.linalg.cholesky_ex(x)[1], (T(3, 4, 4, grad=False),)),
    Case(
        "cholesky_solve",
        lambda x, b: torch.cholesky_solve(b, torch.linalg.cholesky(positive(x))),
        (T(2, 4, 4), T(2, 4, 3)),
    ),
    Case(
        "cholesky_solve_upper",
        lambda x, b: torch.cholesky_solve(b, torch.linalg.cholesky(positive(x), upper=True), upper=True),
        (T(4, 4), T(4, 3)),
    ),
    *(
        Case(
            f"cholesky_inverse_{'upper' if upper else 'lower'}",
            lambda x, upper=upper: torch.cholesky_inverse(
                torch.linalg.cholesky(positive(x), upper=upper), upper=upper
            ),
            (T(4, 4),),
        )
        for upper in (False, True)
    ),
    *(
        Case(
            f"solve_triangular_{'upper' if upper else 'lower'}{'_unit' if unit else ''}{'' if left else '_right'}",
            partial(triangular, upper=upper, left=left, unitriangular=unit),
            (T(2, 4, 4), T(4, 3) if left else T(3, 4)),
        )
        for upper in (False, True)
        for left in (False, True)
        for unit in (False, True)
    ),
    Case("inv", lambda x: torch.linalg.inv(regular(x)), (T(2, 4, 4),), tolerance=1e-4),
    Case("inv_info", lambda x: torch.linalg.inv_ex(x * 0)[1], (T(2, 3, 3, grad=False),)),
    Case("solve", lambda x, b: torch.linalg.solve(regular(x), b), (T(4, 4), T(4, 3)), tolerance=1e-4),
    Case("solve_vector", lambda x, b: torch.linalg.solve(regular(x), b), (T(4, 4), T(4)), tolerance=1e-4),
    Case(
        "solve_vectors", lambda x, b: torch.linalg.solve(regular(x), b), (T(3, 4, 4), T(3, 4)), tolerance=1e-4
    ),
    Case(
        "solve_batch", lambda x, b: torch.linalg.solve(regular(x), b), (T(3, 4, 4), T(4, 2)), tolerance=1e-4
    ),
    Case(
        "solve_right",
        lambda x, b: torch.linalg.solve(regular(x), b, left=False),
        (T(3, 4, 4), T(3, 2, 4)),
        tolerance=1e-4,
    ),
    Case("det", lambda x: torch.linalg.det(regular(x)), (T(2, 3, 3),)),
]
