"""Activation functions."""

import torch
from autodiff.case import Case, F

CASES = [
    Case("Relu", (F(3, 4),), torch.relu),
    Case("Sigmoid", (F(3, 4),), torch.sigmoid),
    Case("Tanh", (F(3, 4),), torch.tanh),
]
CASES += [Case("Softmax", (F(3, 4),), lambda x, a=axis: torch.softmax(x, a), {"axis": axis}) for axis in (0, 1, -1)]
