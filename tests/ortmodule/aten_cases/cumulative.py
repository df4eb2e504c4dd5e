"""Cumulative operations."""

import torch

from ortmodule.aten_case import Case, T

NAN, INF = float("nan"), float("inf")
INTS = torch.tensor([[3, -7, 7], [5, 0, 7]])
TIES = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]], requires_grad=True)
NANS = torch.tensor([[1.0, NAN, 3.0], [NAN, 2.0, NAN], [-INF, INF, NAN], [2.0, INF, 1.0], [NAN, -INF, INF]])
ZEROS = torch.tensor([[1.0, 0.0, 3.0], [0.0, 0.0, 2.0]], requires_grad=True)
MASKED = torch.tensor([[1.0, -INF, 3.0], [500.0, 2.0, -INF]], requires_grad=True)
ROWS_OF_ZEROS = (
    (torch.arange(1024 * 6) % 7)
    .reshape(1024, 6)
    .sub(torch.tensor([0, 1, 2, 0, 3, 0]))
    .float()
    .requires_grad_()
)
X = T(3, 4, 5)

CASES = [
    Case("cumsum", lambda x: (x.cumsum(1), x.cumsum(-1)), (X,)),
    Case("cumsum_ints", lambda i: (i.cumsum(1), (i > 0).cumsum(0)), (INTS,)),
    Case("cumprod", lambda x: (x.cumprod(1), x.cumprod(0)), (X,)),
    Case("cumprod_zeros", lambda x: x.cumprod(1), (ZEROS,)),
    # Computed row by row.
    Case("cumprod_rows", lambda x: (x.cumprod(1), x.T.cumprod(0)), (T(1100, 5),), dynamic=False),
    Case("cumprod_rows_inside", lambda x: x.cumprod(1), (T(40, 3, 30),), dynamic=False),
    Case("cumprod_rows_zeros", lambda x: x.cumprod(1), (ROWS_OF_ZEROS,), dynamic=False),
    Case("cumprod_ints", lambda i: (i.cumprod(1), i.cumprod(0)), (INTS,)),
    Case("logcumsumexp", lambda x: (x.logcumsumexp(1), x.logcumsumexp(0), x.sum().logcumsumexp(0)), (X,)),
    Case("logcumsumexp_ties", lambda x: x.logcumsumexp(1), (TIES,)),
    Case("logcumsumexp_large", lambda x: x.logcumsumexp(1), (MASKED,)),
    Case("logcumsumexp_nan", lambda x: (x.logcumsumexp(1), x.logcumsumexp(0)), (NANS,)),
    Case("cummax", lambda x: (*x.cummax(1), *x.cummin(-1), *x.cummax(0)), (X,)),
    Case("cummax_ties", lambda x: (*x.cummax(1), *x.cummin(1)), (TIES,)),
    Case("cummax_ints", lambda i: (*i.cummax(1), *i.cummin(0)), (INTS,)),
    Case("cummax_nan", lambda x: (*x.cummax(1), *x.cummin(0)), (NANS,)),
]
