"""Elementwise functions."""

import torch

from ortmodule.aten_case import Case, T

CASES = [
    Case("add", torch.add, (T(2, 3), T(3))),
    Case("tanh", torch.tanh, (T(2, 3),)),
]
