"""Extrema and order, also of NaN."""

import torch

from ortmodule.aten_case import Case, T

NAN, INF = float("nan"), float("inf")
INTS = torch.tensor([[3, -7, 7], [5, 0, 7]])
TIES = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]], requires_grad=True)
NANS = torch.tensor([[1.0, NAN, 3.0], [NAN, 2.0, NAN], [-INF, INF, NAN], [2.0, INF, 1.0], [NAN, -INF, INF]])
# NaN before infinities.
INFINITE = torch.tensor([[NAN, NAN, NAN], [NAN, INF, 1.0], [INF, -INF, NAN]], requires_grad=True)
ALL_NAN = torch.full((2, 3), NAN, requires_grad=True)
# For order, which puts NaN and infinity in one place.
NANS_ONLY = NANS.nan_to_num(NAN, 7.0, -7.0)
GRID = torch.tensor([[-1.5, -1.0, -0.5, 0.0], [0.5, 1.0, 1.5, 2.0]])  # on the bounds of bins
X = T(3, 4, 5)

CASES = [
    Case("amax", lambda x: (x.amax(), x.amax(1), x.amax((0, 2), keepdim=True)), (X,)),
    Case("amin", lambda x: (x.amin(), x.amin(1), x.amin((0, 2), keepdim=True)), (X,)),
    Case("amax_ties", lambda x: (x.amax(1), x.max(), x.min()), (TIES,)),
    Case("max", lambda x: (x.max(), x.min()), (X,)),
    Case("max_dim", lambda x: (*x.max(1), *x.min(-1, keepdim=True)), (X,)),
    Case("max_dim_ties", lambda x: (*x.max(1), *x.min(1)), (TIES,)),
    Case("max_ints", lambda i: (i.max(), *i.max(1), i.to(torch.int8).amin(0), (i > 0).amax(1)), (INTS,)),
    Case("aminmax", lambda x: tuple(torch.aminmax(x, dim=1)), (T(3, 4),)),
    Case(
        "argmax", lambda x: (x.argmax(), x.argmax(1), x.argmin(-1, keepdim=True)), (T(3, 4, 5, grad=False),)
    ),
    Case("argmax_keepdim", lambda x: (x.argmax(keepdim=True), x.argmin()), (T(3, 4, grad=False),)),
    Case("argmax_ints", lambda i: (i.argmax(), i.argmin(1), i.to(torch.int16).argmax(0)), (INTS,)),
    Case("topk", lambda x: (*x.topk(2), *x.topk(2, 1, largest=False)), (X,)),
    Case("sort", lambda x: (*x.sort(), *x.sort(1, descending=True)), (X,)),
    Case("sort_stable", lambda i: (*torch.sort(i, stable=True, dim=0), i.argsort(1)), (INTS,)),
    Case("amax_nan", lambda x: (x.amax(), x.amax(1), x.amax(0, keepdim=True), x.amin(1), x.max()), (NANS,)),
    Case("max_dim_nan", lambda x: (*x.max(1), *x.min(0, keepdim=True)), (NANS,)),
    Case("argmax_nan", lambda x: (x.argmax(), x.argmax(1), x.argmin(0, keepdim=True)), (NANS,)),
    Case("norm_inf_nan", lambda x: x.norm(INF, dim=1), (NANS,)),
    Case(
        "sort_nan",
        lambda x: (*x.sort(stable=True), *x.sort(stable=True, dim=1, descending=True)),
        (NANS_ONLY,),
    ),
    Case("topk_nan", lambda x: (x.topk(2)[0], x.topk(2, 0, largest=False)[0]), (NANS_ONLY,)),
    Case("log_softmax_nan", lambda x: x.log_softmax(1), (NANS_ONLY,)),
    Case("median", lambda x: (x.median(), *x.median(1), *x.median(0, keepdim=True)), (X,)),
    Case("median_ties", lambda x: x.median(), (TIES,)),
    Case("median_ints", lambda i: (i.median(), i.to(torch.int16).median()), (INTS,)),
    Case("median_nan", lambda x: (x.median(), x.median(1)[0]), (NANS,)),
    Case("median_nan_gradient", lambda x: x.median(), (INFINITE,)),
    Case("nanmedian", lambda x: (x.nanmedian(), *x.nanmedian(1), *x.nanmedian(0, keepdim=True)), (X,)),
    Case("nanmedian_nan", lambda x: (x.nanmedian(), *x.nanmedian(1), x.nanmedian(0)[0]), (NANS,)),
    Case("nanmedian_all_nan", lambda x: (x.nanmedian(), x.nanmedian(1)[0]), (ALL_NAN,)),
    Case("nanmedian_infinite", lambda x: (*x.nanmedian(0), *x.nanmedian(1)), (INFINITE,)),
    Case("nanmedian_ties", lambda x: x.nanmedian(), (TIES,)),
    Case(
        "nanmedian_ints", lambda i: (i.nanmedian(), i.nanmedian(0)[0], i.to(torch.int16).nanmedian()), (INTS,)
    ),
    Case("kthvalue", lambda x: (*x.kthvalue(2), *x.kthvalue(3, 0, keepdim=True)), (X,)),
    Case("kthvalue_nan", lambda x: x.kthvalue(2, 0)[0], (NANS_ONLY,)),
    Case(
        "unique_nan",
        lambda x: torch.unique(x, return_inverse=True, return_counts=True),
        (torch.tensor([[NAN, 1.0, -INF], [INF, NAN, 1.0]]),),
    ),
    Case(
        "sort_nan_and_infinity",
        lambda x: (*x.sort(), *x.sort(descending=True), x.topk(4)[0]),
        (torch.tensor([INF, NAN, 1.0, INF, NAN, -INF]),),
    ),
    Case("unique", lambda i: torch.unique(i, return_inverse=True, return_counts=True), (INTS,)),
    Case(
        "unique_small", lambda i: (torch.unique(i > 0), torch.unique(i.int()), torch.unique(i * 0.5)), (INTS,)
    ),
    Case(
        "searchsorted",
        lambda x: torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0], dtype=x.dtype), x),
        (GRID,),
    ),
    Case(
        "searchsorted_right",
        lambda x: torch.searchsorted(
            torch.tensor([-1.0, 0.0, 1.0], dtype=x.dtype), x, side="right", out_int32=True
        ),
        (GRID,),
    ),
    Case(
        "searchsorted_rows",
        lambda x, y: torch.searchsorted(x.sort(1)[0], y),
        (T(3, 4, grad=False), T(3, 2, grad=False)),
    ),
    Case("bucketize", lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0], dtype=x.dtype)), (GRID,)),
    Case("histc", lambda x: (torch.histc(x, 4, -1.0, 1.0), torch.histc(x, 3, 0, 2)), (GRID,)),
    Case(
        "histc_special_values",
        lambda x: (torch.histc(x, 3, -1.0, 2.0), torch.histc(x, 1, 0, 1), torch.histc(x, 40, -9.0, -8.0)),
        (torch.tensor([[torch.nan, torch.inf, -torch.inf], [-1.0, 2.0, -1e-38], [1.0, 1.999999, 0.0]]),),
    ),
]
