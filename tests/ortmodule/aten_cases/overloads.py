"""Overloads of ATen ops that no function or operator of Python calls, but that graphs can have."""

import torch

from ortmodule.aten_case import Case, T

aten = torch.ops.aten
INTS = torch.tensor([[3, -7, 7], [5, 0, 6]])
SHIFTS = torch.tensor([[1, 0, 3], [2, 1, 0]])
MASK = INTS > 3
INDEX = torch.tensor([[0, 1, 1], [1, 0, 2]])
X = T(2, 3)

CASES = [
    Case(
        "bitwise_scalars",
        lambda i: (
            *(op.Scalar(i, 5) for op in (aten.bitwise_or, aten.bitwise_xor)),
            *(op.Scalar_Tensor(5, i) for op in (aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor)),
        ),
        (INTS,),
    ),
    Case(
        "bitwise_shifts",
        lambda i, n: (
            *(op.Tensor(i, n) for op in (aten.bitwise_left_shift, aten.bitwise_right_shift)),
            *(op.Tensor_Scalar(i, 2) for op in (aten.bitwise_left_shift, aten.bitwise_right_shift)),
        ),
        (INTS, SHIFTS),
    ),
    Case(
        "div_scalar_mode",
        lambda x: (*(aten.div.Scalar_mode(x, 0.7, rounding_mode=m) for m in ("floor", "trunc", None)),),
        (X,),
    ),
    Case(
        "floor_divide_scalar",
        lambda x, i: (aten.floor_divide.Scalar(x, 0.7), aten.floor_divide.Scalar(i, 2)),
        (T(2, 3, grad=False), INTS),
    ),
    Case("fmod_scalar", lambda x, i: (aten.fmod.Scalar(x, 0.7), aten.fmod.Scalar(i, 3)), (X, INTS)),
    Case(
        "remainder_scalar_tensor",
        lambda x, i: (aten.remainder.Scalar_Tensor(3.5, x), aten.remainder.Scalar_Tensor(7, i + 8)),
        (T(2, 3, low=0.5, grad=False), INTS),
    ),
    Case("norm_scalar", lambda x: (aten.norm.Scalar(x, 2), aten.norm.Scalar(x, 3)), (X,)),
    Case(
        "scatter_reductions",
        lambda x, i, y: (
            *(aten.scatter.reduce(x, 0, i, y, reduce=r) for r in ("add", "multiply")),
            *(aten.scatter.value_reduce(x, 0, i, 1.5, reduce=r) for r in ("add", "multiply")),
        ),
        (T(3, 3, grad=False), INDEX, T(2, 3, grad=False)),
    ),
    Case(
        "searchsorted_scalar",
        lambda x: (aten.searchsorted.Scalar(x, 0.5), aten.searchsorted.Scalar(x, 1, right=True)),
        (torch.arange(-2.0, 3.0),),
    ),
    Case(
        "where_scalars",
        lambda m, x: (
            aten.where.Scalar(m, 1.5, 0),
            aten.where.ScalarOther(m, x, 2),
            aten.where.ScalarSelf(m, 2.5, x),
        ),
        (MASK, X),
    ),
]
