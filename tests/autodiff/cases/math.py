"""Elementwise arithmetic."""

import torch
from autodiff.case import Case, F

POSITIVE = {"low": 0.3, "high": 2.0}

CASES = [
    Case(op, inputs, twin)
    for op, twin in {"Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": torch.div}.items()
    for inputs in [
        (F(2, 3), F(2, 3, **POSITIVE)),
        (F(2, 3, 4), F(4, **POSITIVE)),
        (F(2, 1, 4), F(3, 1, **POSITIVE)),
        (F(), F(2, 3, **POSITIVE)),
    ]
] + [
    Case("Neg", (F(2, 3),), torch.neg),
    Case("Abs", (F(2, 3),), torch.abs),
    Case("Sqrt", (F(2, 3, **POSITIVE),), torch.sqrt),
    Case("Reciprocal", (F(2, 3, **POSITIVE),), torch.reciprocal),
    Case("Exp", (F(2, 3),), torch.exp),
    Case("Log", (F(2, 3, **POSITIVE),), torch.log),
    Case("Sin", (F(2, 3),), torch.sin),
    Case("Cos", (F(2, 3),), torch.cos),
]
CASES += [Case("Sum", (F(2, 3), F(3), F(2, 1)), lambda a, b, c: a + b + c)]
