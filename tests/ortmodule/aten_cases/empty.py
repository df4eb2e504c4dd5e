"""Tensors without elements. Dynamo never takes a size of 0 for symbolic."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ortmodule.aten_case import Case, T

_INF = float("inf")


def _case(name: str, fn: Any, *arguments: Any) -> Case:
    return Case(f"empty_{name}", fn, arguments, dynamic=False)


_MATRIX_FUNCTIONS = {
    "cholesky": torch.linalg.cholesky,
    "inverse": torch.linalg.inv,
    "det": torch.linalg.det,
    "slogdet": lambda a: torch.linalg.slogdet(a).logabsdet,
    "solve": lambda a: torch.linalg.solve(a, a),
    "cholesky_inverse": torch.cholesky_inverse,
    "triangular": lambda a: torch.linalg.solve_triangular(a, a, upper=False),
}

CASES = [
    *(
        _case(f"{name}_{'_'.join(map(str, shape))}", function, T(*shape))
        for name, function in _MATRIX_FUNCTIONS.items()
        for shape in ((0, 0), (2, 0, 0))
    ),
    _case("erfc", torch.erfc, T(0)),
    _case("erfinv", torch.special.erfinv, T(0, 3)),
    _case("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 5), T(0, 8, 8)),
    _case("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 3), T(0, 2, 7, 7)),
    _case("max_pool2d", lambda x: F.max_pool2d(x, 2), T(0, 2, 8, 8)),
    _case(
        "max_unpool2d", lambda x, i: F.max_unpool2d(x, i, 2), T(0, 2, 4, 4), torch.zeros(0, 2, 4, 4).long()
    ),
    _case("convolution", F.conv2d, T(0, 2, 8, 8), T(3, 2, 3, 3), T(3)),
    _case("group_norm", lambda x, w: F.group_norm(x, 1, w), T(0, 3, 4), T(3)),
    _case("bilinear", lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), T(0, 2, 4, 4)),
    _case("nanmedian", lambda x: (x.nanmedian(), *x.nanmedian(1)), T(0, 3)),
    _case("linear", F.linear, T(0, 4), T(5, 4), T(5)),
    _case("detached", lambda x, y: (x * y.detach()).sum(0) + y.sum(0), T(0, 3), T(0, 3)),
    *(
        _case(f"cdist_{p}_{rows}_{size}", partial(torch.cdist, p=p), T(rows, size), T(4, size))
        for p in (1.0, 2.0, _INF)
        for rows, size in ((0, 3), (2, 0))
        if p != _INF or size
    ),
    *(
        _case(f"pdist_{p}_{rows}_{size}", partial(F.pdist, p=p), T(rows, size))
        for p in (1.0, 2.0, _INF)
        # Not of 0 rows, at whose gradient PyTorch (2.13) crashes.
        for rows, size in ((1, 3), (3, 0))
        if p != _INF or size
    ),
    *(
        _case(f"searchsorted_{ordered.numel()}_{values.dim()}d", torch.searchsorted, ordered, values)
        for ordered, values in (
            (torch.arange(3.0), torch.zeros(0)),
            (torch.arange(3.0), torch.zeros(0, 2)),
            (torch.zeros(0), torch.arange(2.0)),
        )
    ),
    _case("product", lambda a, b: a @ b, T(2, 0), T(0, 3)),
    _case("addmm", partial(torch.addmm, alpha=0.2, beta=0.6), T(2, 3), T(2, 0), T(0, 3)),
    _case("baddbmm", partial(torch.baddbmm, beta=0.6), T(1, 2, 3), T(1, 2, 0), T(1, 0, 3)),
    _case("mean", lambda x: (x.mean(), x.mean(0), x.mean(1)), T(0, 3)),
    _case("sum_of_result", lambda x, y: (x * y).sum(0), T(0, 3), T(3)),
    _case("any_and_all", lambda x: ((x > 0).any(), (x > 0).all(), (x > 0).all(0)), T(0, 3)),
    *(
        _case(f"{loss.__name__}_{reduction}", partial(loss, reduction=reduction), T(0, 3), T(0, 3))
        for loss in (F.mse_loss, F.l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits)
        for reduction in ("mean", "sum", "none")
    ),
]
