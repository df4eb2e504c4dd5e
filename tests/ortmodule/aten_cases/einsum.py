"""Sums of products in Einstein's notation."""

import torch

from ortmodule.aten_case import Case, T

CASES = [
    Case(
        "einsum_four",
        lambda c, b, d, x: torch.einsum("zcln,zcsn,zcls,zcsp->zclp", c, b, d, x),
        (T(2, 2, 4, 3), T(2, 2, 4, 3), T(2, 2, 4, 4), T(2, 2, 4, 5)),
        dynamic=False,
    ),
    Case(
        "einsum_repeated",
        lambda k, q: torch.einsum("bkhd,bqhd->bhqk", k.unsqueeze(2).expand(-1, -1, 3, -1), q),
        (T(2, 5, 4), T(2, 6, 3, 4)),
        dynamic=False,
    ),
    Case(
        "einsum_repeated_apart",
        lambda k, q: torch.einsum(
            "bckhd,bckhe->bchde", k.unsqueeze(2).expand(-1, -1, 3, -1).unflatten(1, (2, -1)), q
        ),
        (T(2, 6, 4), T(2, 2, 3, 3, 5)),
        dynamic=False,
    ),
    Case("einsum_implicit", lambda a, b: torch.einsum("Ab, bA", a, b), (T(3, 4), T(4, 3)), dynamic=False),
    Case(
        "einsum_dot",
        lambda a, b: (torch.einsum("ij,ij->i", a, b), torch.einsum("ij,ij->", a, b)),
        (T(3, 4), T(3, 4)),
    ),
    Case(
        "einsum_strided",
        lambda a, b: torch.einsum("ij,kj->ki", a.T, b[:, ::2]),
        (T(4, 3), T(5, 8)),
        dynamic=False,
    ),
    Case(
        "einsum_broadcast",
        lambda a, b: torch.einsum("bij,bjk->bik", a, b),
        (T(1, 3, 4), T(5, 4, 2)),
        dynamic=False,
    ),
    Case("einsum_empty", lambda a, b: (torch.einsum("ij,jk->ik", a, b),), (T(3, 0), T(0, 4)), dynamic=False),
]
