"""Reductions."""

import torch

from autodiff.case import Case, F

CASES = [
    Case("ReduceSum", (F(2, 3),), lambda x: x.sum((0, 1), keepdim=True)),
    Case("ReduceSum", (F(2, 3),), torch.sum, {"keepdims": 0}),
]
