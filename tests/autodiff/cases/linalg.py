"""Matrix products."""

import torch

from autodiff.case import Case, F

CASES = [
    Case("MatMul", (F(*a), F(*b)), torch.matmul)
    for a, b in [
        ((2, 3), (3, 4)),
        ((3,), (3,)),
        ((3,), (3, 4)),
        ((2, 3), (3,)),
        ((3,), (5, 3, 4)),
        ((3,), (2, 5, 3, 4)),
        ((5, 2, 3), (3,)),
        ((5, 6, 2, 3), (3,)),
        ((5, 2, 3), (3, 4)),
        ((5, 6, 2, 3), (3, 4)),
        ((2, 3), (5, 3, 4)),
        ((5, 2, 3), (5, 3, 4)),
        ((5, 1, 2, 3), (6, 3, 4)),
        ((1, 2, 3), (5, 3, 4)),
        ((5, 1, 3), (5, 3, 1)),
        ((1, 3), (5, 3, 4)),
    ]
]


def _gemm(alpha=1.0, beta=1.0, transA=0, transB=0):
    def twin(a, b, c=None):
        y = alpha * (a.T if transA else a) @ (b.T if transB else b)
        return y if c is None else y + beta * c

    return twin


CASES += [
    Case(
        "Gemm",
        (F(3, 2) if trans_a else F(2, 3), F(4, 3) if trans_b else F(3, 4), *bias),
        _gemm(0.5, 0.25, trans_a, trans_b),
        {"alpha": 0.5, "beta": 0.25, "transA": trans_a, "transB": trans_b},
    )
    for trans_a in (0, 1)
    for trans_b in (0, 1)
    for bias in [(), (F(4),), (F(2, 1),), (F(),), (F(2, 4),)]
]
CASES += [
    Case("Gemm", (F(2, 3), F(3, 4), F(4)), _gemm()),
    Case("Gemm", (F(2, 3), F(3, 4), None), _gemm()),
]
