"""Einsum equations."""

import torch

from autodiff.case import Case, F

EQUATIONS = [
    ("ij,jk->ik", (2, 3), (3, 4)),
    (" i j , j k -> i k ", (2, 3), (3, 4)),
    ("ij,jk", (2, 3), (3, 4)),  # implicit output
    ("bA,Ac", (2, 3), (3, 4)),
    ("bhqd,bhkd->bhqk", (2, 3, 4, 5), (2, 3, 6, 5)),
    ("bl,l->b", (2, 3), (3,)),
    ("i,j->ij", (2,), (3,)),
    ("i,i->", (3,), (3,)),
    ("ij->ji", (2, 3)),
    ("ij->ij", (2, 3)),
    ("ij->i", (2, 3)),  # summed over
    ("ij->", (2, 3)),
    ("bij,k->b", (2, 3, 4), (5,)),
    ("...ij,...jk->...ik", (2, 5, 3, 4), (2, 5, 4, 6)),
    ("...ij,...jk", (2, 3, 4), (1, 4, 5)),  # broadcast ellipsis
    ("...ij,jk->...ik", (2, 5, 3, 4), (4, 6)),
    ("...i->...", (2, 3)),
    ("i...->...i", (2, 3, 4)),
    ("ii->i", (3, 3)),  # diagonals
    ("ii", (3, 3)),
    ("iij->j", (3, 3, 2)),
    ("iii->i", (3, 3, 3)),
    ("bij,bij,bjk->bk", (2, 3, 4), (2, 3, 4), (2, 4, 2)),
    ("ii,ij->j", (3, 3), (3, 2)),
    ("ij,ij->i", (2, 3), (2, 1)),  # broadcast axes of size one
    ("ij,jk->ik", (2, 3), (1, 4)),
    ("ij,ijm,jim", (3, 2), (1, 2, 1), (1, 3, 1)),  # each of two operands broadcasts against the other
    ("ij,ij,jj->i", (3, 2), (1, 2), (1, 1)),
    ("i,i->i", (1,), (1,)),
    ("ij,jk,kl->il", (2, 3), (3, 4), (4, 2)),
    (",i->i", (), (3,)),
    ("->", ()),
]
CASES = [
    Case(
        "Einsum",
        tuple(F(*shape) for shape in shapes),
        lambda *xs, equation=equation: torch.einsum(equation, *xs),
        {"equation": equation},
        name=f"{equation.replace(' ', '_')}-{shapes}".replace(" ", ""),
    )
    for equation, *shapes in EQUATIONS
]
