"""Ops that grow with a number, such as bins, classes and windows, and ops of tensors whose sizes go together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ortmodule.growing import Grown

CASES: list[Grown] = []


def _add(name: str, fn: Callable[..., Any], *shapes: Callable[[int], Any]) -> None:
    """Adds a case: `fn(n, *tensors)`, with a tensor, or float32 numbers of a shape, for each of `shapes`."""

    def of(n: int) -> tuple[Callable[..., Any], Sequence[Any]]:
        generator = torch.Generator().manual_seed(0)
        arguments = []
        for shape in shapes:
            made = shape(n)
            if not isinstance(made, torch.Tensor):
                made = torch.randn(made, generator=generator).requires_grad_()
            arguments.append(made)
        return lambda *tensors: fn(n, *tensors), arguments

    CASES.append(Grown(name, of))


def _row(n: int) -> tuple[int, ...]:
    return (n,)


def _rows(n: int) -> tuple[int, ...]:
    return (4, n)


def _columns(n: int) -> tuple[int, ...]:
    return (n, 4)


def _signal(n: int) -> tuple[int, ...]:
    return (2, 3, n)


def _image(n: int) -> tuple[int, ...]:
    return (1, 2, n, 4)


def _numbers(n: int) -> torch.Tensor:
    return torch.arange(n) % 7


def _places(n: int) -> torch.Tensor:
    return torch.arange(n).flip(0)


def _prime(n: int) -> int:
    """Returns the next prime."""
    while any(n % k == 0 for k in range(2, math.isqrt(n) + 1)):
        n += 1
    return n


def _spectrum(n: int) -> torch.Tensor:
    return torch.randn(n // 2 + 1, dtype=torch.complex64)


# Numbers that are sizes.
_add("histc, bins", lambda n, x: torch.histc(x, n, -1, 1), _row)
_add("histc, numbers", lambda n, x: torch.histc(x, 8, -1, 1), _row)
_add("bincount, numbers", lambda n, x: torch.bincount(x), _numbers)
_add("bincount, minlength", lambda n, x: torch.bincount(x, minlength=n), lambda n: torch.arange(7))
_add("bincount, weights and places", lambda n, x, w: torch.bincount(x, w), _places, lambda n: torch.ones(n))
_add("one_hot, classes", lambda n, x: F.one_hot(x, n), lambda n: torch.arange(7))
_add("one_hot, rows", lambda n, x: F.one_hot(x, 7), _numbers)
_add("topk, k", lambda n, x: x.topk(n // 2)[0], _rows)
_add("kthvalue, k", lambda n, x: x.kthvalue(n // 2)[0], _rows)
_add("median, axis", lambda n, x: x.median(-1)[0], _rows)
_add("median, all", lambda n, x: x.median(), _rows)
_add("quantile", lambda n, x: x.quantile(torch.tensor([0.2, 0.6]), -1), _rows)
_add("quantile, points", lambda n, x: x.quantile(torch.linspace(0, 1, n)), lambda n: (8,))
_add("mode", lambda n, x: x.mode(-1)[0], _rows)
_add("tril_indices", lambda n: torch.tril_indices(n, 4))
_add("triu_indices", lambda n: torch.triu_indices(4, n))
_add("linspace", lambda n: torch.linspace(0, 1, n))
_add("eye", lambda n: torch.eye(n, 3))
_add("repeat_interleave, number", lambda n, x: x.repeat_interleave(n), lambda n: (3,))
_add(
    "repeat_interleave, tensor",
    lambda n, x, r: x.repeat_interleave(r, 0),
    _columns,
    lambda n: torch.ones(n, dtype=torch.long),
)
_add("repeat", lambda n, x: x.repeat(n, 1), lambda n: (3, 4))
_add("interpolate linear, up", lambda n, x: F.interpolate(x, n, mode="linear"), lambda n: (2, 3, 7))
_add("interpolate nearest, up", lambda n, x: F.interpolate(x, n), lambda n: (2, 3, 7))
_add("interpolate linear", lambda n, x: F.interpolate(x, n + 3, mode="linear"), _signal)
_add("interpolate nearest", lambda n, x: F.interpolate(x, n + 3), _signal)
_add("interpolate nearest-exact", lambda n, x: F.interpolate(x, n + 3, mode="nearest-exact"), _signal)
_add("interpolate bicubic", lambda n, x: F.interpolate(x, (n + 3, 4), mode="bicubic"), _image)
_add("interpolate area", lambda n, x: F.interpolate(x, n // 2 + 1, mode="area"), _signal)
_add(
    "interpolate antialias",
    lambda n, x: F.interpolate(x, (n // 2 + 1, 4), mode="bilinear", antialias=True),
    _image,
)
_add("adaptive_avg_pool1d", lambda n, x: F.adaptive_avg_pool1d(x, n // 3), _signal)
_add("adaptive_avg_pool1d, up", lambda n, x: F.adaptive_avg_pool1d(x, 2 * n + 1), _signal)
_add("adaptive_avg_pool2d", lambda n, x: F.adaptive_avg_pool2d(x, (n // 3, 3)), _image)
_add("adaptive_max_pool1d", lambda n, x: F.adaptive_max_pool1d(x, n // 3), _signal)
_add("adaptive_max_pool1d, few", lambda n, x: F.adaptive_max_pool1d(x, 3), lambda n: (2, 3, n + 1))
_add("adaptive_avg_pool1d, few", lambda n, x: F.adaptive_avg_pool1d(x, 3), lambda n: (2, 3, n + 1))
_add("avg_pool1d, window", lambda n, x: F.avg_pool1d(x, n // 2, 1), _signal)
_add("avg_pool1d, window and stride", lambda n, x: F.avg_pool1d(x, n // 8), _signal)
_add("max_pool1d, window and stride", lambda n, x: F.max_pool1d(x, n // 8), _signal)
_add("fractional_max_pool2d", lambda n, x: F.fractional_max_pool2d(x, 2, (n // 2, 2)), _image)
_add("lp_pool1d", lambda n, x: F.lp_pool1d(x, 2, 3), _signal)
_add("max_unpool1d", lambda n, x: F.max_unpool1d(*F.max_pool1d(x, 2, return_indices=True), 2), _signal)
_add("unfold, axis", lambda n, x: x.unfold(-1, 4, 2), _rows)
_add("unfold, step", lambda n, x: x.unfold(-1, n // 8, n // 8), _rows)
_add("im2col", lambda n, x: F.unfold(x, 3, padding=1), _image)
_add("col2im", lambda n, x: F.fold(x, (n, 4), 3, padding=1), lambda n: (1, 18, 4 * n))
_add("pad constant", lambda n, x: F.pad(x, (n, n)), lambda n: (2, 3, 5))
_add("pad circular", lambda n, x: F.pad(x, (n // 2, n // 2), mode="circular"), _signal)
_add("pad reflect", lambda n, x: F.pad(x, (n // 2, n // 2), mode="reflect"), _signal)
_add("pad replicate", lambda n, x: F.pad(x, (n, n), mode="replicate"), lambda n: (2, 3, 5))
_add("roll", lambda n, x: x.roll(n // 3, -1), _rows)
_add("chunk", lambda n, x: torch.cat([part * 2 for part in x.chunk(4, -1)], -1), _rows)
_add("diff", lambda n, x: x.diff(n=2), _rows)
_add("trapezoid", lambda n, x: torch.trapezoid(x), _rows)
_add("cumulative_trapezoid", lambda n, x: torch.cumulative_trapezoid(x), _rows)
_add("vander", lambda n, x: torch.vander(x, 4), _row)
_add("affine_grid", lambda n, x: F.affine_grid(x, [1, 2, n, 4], align_corners=False), lambda n: (1, 2, 3))
_add(
    "grid_sample, image",
    lambda n, x, g: F.grid_sample(x, g, align_corners=False),
    _image,
    lambda n: (1, 3, 3, 2),
)
_add(
    "grid_sample, points",
    lambda n, x, g: F.grid_sample(x, g, align_corners=False),
    lambda n: (1, 2, 4, 4),
    lambda n: (1, n, 3, 2),
)
_add(
    "grid_sample, both",
    lambda n, x, g: F.grid_sample(x, g, align_corners=True),
    _image,
    lambda n: (1, n, 3, 2),
)
_add(
    "grid_sample nearest, both",
    lambda n, x, g: F.grid_sample(x, g, mode="nearest", align_corners=True),
    _image,
    lambda n: (1, n, 3, 2),
)
_add(
    "grid_sample bicubic, both",
    lambda n, x, g: F.grid_sample(x, g, mode="bicubic", align_corners=True),
    _image,
    lambda n: (1, n, 3, 2),
)
# Indices.
_add("index, rows", lambda n, x, i: x[i], _columns, _places)
_add("index, pairs", lambda n, x, i: x[i, i % 4], _columns, _places)
_add("index_put", lambda n, x, i, v: x.index_put((i,), v), _columns, _places, _columns)
_add(
    "index_put accumulate",
    lambda n, x, i, v: x.index_put((i,), v, accumulate=True),
    _columns,
    _places,
    _columns,
)
_add(
    "index_put accumulate, pairs",
    lambda n, x, i, v: x.index_put((i, i % 4), v, accumulate=True),
    _columns,
    _places,
    _row,
)
_add("index_add", lambda n, x, i, v: x.index_add(0, i, v), _columns, _places, _columns)
_add("index_copy", lambda n, x, i, v: x.index_copy(0, i, v), _columns, _places, _columns)
_add("index_fill", lambda n, x, i: x.index_fill(0, i, 1.0), _columns, _places)
_add(
    "index_reduce amax",
    lambda n, x, i, v: x.index_reduce(0, i, v, "amax"),
    lambda n: torch.randn(n, 4),
    _places,
    lambda n: torch.randn(n, 4),
)
_add("index_reduce mean", lambda n, x, i, v: x.index_reduce(0, i, v, "mean"), _columns, _places, _columns)
_add("scatter", lambda n, x, i, v: x.scatter(0, i[:, None].expand(n, 4), v), _columns, _places, _columns)
_add(
    "scatter_add",
    lambda n, x, i, v: x.scatter_add(0, i[:, None].expand(n, 4), v),
    _columns,
    _places,
    _columns,
)
for _how in ("sum", "prod", "mean", "amax", "amin"):
    _add(
        f"scatter_reduce {_how}",
        lambda n, x, i, v, how=_how: x.scatter_reduce(0, i[:, None].expand(n, 4), v, how),
        _columns,
        _places,
        _columns,
    )
_add("gather", lambda n, x, i: x.gather(0, i[:, None].expand(n, 4)), _columns, _places)
_add("take", lambda n, x, i: x.take(i), _columns, _places)
_add("take_along_dim", lambda n, x, i: x.take_along_dim(i[:, None], 0), _columns, _places)
_add("put", lambda n, x, i, v: x.put(i, v), _columns, _places, _row)
_add("masked_scatter", lambda n, x, v: x.masked_scatter(x > 0, v), _columns, _columns)
_add("masked_fill", lambda n, x: x.masked_fill(x > 0, 1.0), _columns)
_add("masked_select", lambda n, x: x.masked_select(x > 0), _columns)
_add("nonzero", lambda n, x: x.nonzero(), _columns)
_add("argwhere and index", lambda n, x: x[x[:, 0] > 0], _columns)
_add("select_scatter", lambda n, x, v: x.select_scatter(v, 1, 2), _columns, _row)
_add("slice_scatter", lambda n, x, v: x.slice_scatter(v, 0, 0, n // 2), _columns, lambda n: (n // 2, 4))
_add("diagonal", lambda n, x: x.diagonal(), _columns)
_add("diag_embed", lambda n, x: x.diag_embed(), _row)
_add("unique", lambda n, x: x.unique(), _numbers)
_add(
    "unique, floats and inverse",
    lambda n, x: x.unique(return_inverse=True, return_counts=True),
    lambda n: torch.randn(n),
)
_add("unique_consecutive", lambda n, x: x.unique_consecutive(), _numbers)
_add("isin", lambda n, x: torch.isin(x, torch.arange(3)), _numbers)
_add("isin, both", lambda n, x, y: torch.isin(x, y), _places, _places)
_add("searchsorted", lambda n, x, v: torch.searchsorted(x, v), lambda n: torch.arange(float(n)), _row)
_add(
    "searchsorted, rows",
    lambda n, x, v: torch.searchsorted(x, v),
    lambda n: torch.arange(float(n)).repeat(4, 1),
    _rows,
)
_add("bucketize", lambda n, v: torch.bucketize(v, torch.linspace(-1, 1, n)), _row)
_add("embedding", lambda n, i, w: F.embedding(i, w), _places, _columns)
_add(
    "embedding max_norm",
    lambda n, i, w: F.embedding(i, w.clone(), max_norm=1.0),
    _places,
    lambda n: torch.randn(n, 4),
)
for _mode in ("sum", "mean", "max"):
    _add(
        f"embedding_bag {_mode}, bags",
        lambda n, i, w, mode=_mode: F.embedding_bag(i, w, mode=mode),
        lambda n: _places(4 * n).view(n, 4) % n,
        _columns,
    )
    _add(
        f"embedding_bag {_mode}, offsets",
        lambda n, i, w, o, mode=_mode: F.embedding_bag(i, w, o, mode=mode),
        _places,
        _columns,
        lambda n: torch.arange(0, n, 2),
    )
    _add(
        f"embedding_bag {_mode}, one bag",
        lambda n, i, w, o, mode=_mode: F.embedding_bag(i, w, o, mode=mode),
        _places,
        _columns,
        lambda n: torch.zeros(1, dtype=torch.long),
    )
_add(
    "embedding_bag, weights",
    lambda n, i, w, s: F.embedding_bag(i, w, mode="sum", per_sample_weights=s),
    lambda n: _places(4 * n).view(n, 4) % n,
    _columns,
    _columns,
)
_add(
    "embedding_bag, weights and offsets",
    lambda n, i, w, o, s: F.embedding_bag(i, w, o, mode="sum", per_sample_weights=s),
    _places,
    _columns,
    lambda n: torch.arange(0, n, 2),
    _row,
)
# Prefix scans.
_add("cumsum", lambda n, x: x.cumsum(-1), _rows)
_add("cumprod", lambda n, x: x.cumprod(-1), _rows)
_add("cummax", lambda n, x: x.cummax(-1)[0], _rows)
_add("logcumsumexp", lambda n, x: x.logcumsumexp(-1), _rows)
_add("sort", lambda n, x: x.sort(-1)[0], _rows)
_add("argsort", lambda n, x: x.argsort(-1), _rows)
# Distances and products.
_add("cdist, p 2", lambda n, x, y: torch.cdist(x, y), _columns, lambda n: (5, 4))
_add("cdist, p 2, width", lambda n, x, y: torch.cdist(x, y), lambda n: (5, n), lambda n: (6, n))
_add("cdist, p 1", lambda n, x, y: torch.cdist(x, y, 1.0), lambda n: (5, n), lambda n: (6, n))
_add("cdist, p 1, both", lambda n, x, y: torch.cdist(x, y, 1.0), _columns, _columns)
_add("cdist, p 2, both", lambda n, x, y: torch.cdist(x, y), _columns, _columns)
_add("pdist", lambda n, x: F.pdist(x), _columns)
_add("pairwise_distance", lambda n, x, y: F.pairwise_distance(x, y), _columns, _columns)
_add("cosine_similarity", lambda n, x, y: F.cosine_similarity(x, y), _columns, _columns)
_add("kron", lambda n, x, y: torch.kron(x, y), _columns, lambda n: (2, 3))
_add("outer", lambda n, x, y: torch.outer(x, y), _row, lambda n: (3,))
_add("tensordot", lambda n, x, y: torch.tensordot(x, y, 1), _rows, _columns)
_add(
    "tensordot, two axes", lambda n, x, y: torch.tensordot(x, y, 2), lambda n: (3, n, 4), lambda n: (n, 4, 2)
)
_add("bilinear", lambda n, x, y, w: F.bilinear(x, y, w), _columns, lambda n: (n, 3), lambda n: (5, 4, 3))
_add(
    "einsum, three",
    lambda n, x, y, z: torch.einsum("ab,bc,cd->ad", x, y, z),
    _rows,
    lambda n: (n, 3),
    lambda n: (3, n),
)
_add("einsum, diagonal", lambda n, x: torch.einsum("iij->ij", x), lambda n: (3, 3, n))
_add("einsum, elementwise", lambda n, x, y: torch.einsum("ij,ij->ij", x, y), _rows, _rows)
_add("mv", lambda n, x, y: x.mv(y), lambda n: (n, n), _row)
_add(
    "chain_matmul",
    lambda n, x, y, z: torch.linalg.multi_dot([x, y, z]),
    lambda n: (3, n),
    lambda n: (n, n),
    lambda n: (n, 2),
)
_add("matrix_exp", lambda n, x: torch.matrix_exp(x * 0.01), lambda n: (n // 4, n // 4))
_add("matrix_power", lambda n, x: torch.linalg.matrix_power(x * 0.01, 5), lambda n: (n // 4, n // 4))
_add("linalg.solve", lambda n, x, y: torch.linalg.solve(x + 9 * torch.eye(4), y), lambda n: (4, 4), _rows)
_add("linalg.inv", lambda n, x: torch.linalg.inv(x + 99 * torch.eye(x.shape[0])), lambda n: (n // 8, n // 8))
_add("linalg.det, batch", lambda n, x: torch.linalg.det(x), lambda n: (n, 3, 3))
_add("linalg.det", lambda n, x: torch.linalg.det(x), lambda n: (n // 8, n // 8))
_add("linalg.slogdet", lambda n, x: torch.linalg.slogdet(x)[1], lambda n: (n // 8, n // 8))
_add(
    "linalg.cholesky",
    lambda n, x: torch.linalg.cholesky(x @ x.mT + n * torch.eye(n // 8)),
    lambda n: (n // 8, n // 8),
)
_add(
    "linalg.solve_triangular",
    lambda n, x, y: torch.linalg.solve_triangular(x.tril() + 99 * torch.eye(n // 8), y, upper=False),
    lambda n: (n // 8, n // 8),
    lambda n: (n // 8, 3),
)
_add("linalg.norm", lambda n, x: torch.linalg.norm(x), _rows)
_add("linalg.vector_norm, p 3", lambda n, x: torch.linalg.vector_norm(x, 3, -1), _rows)
_add("linalg.matrix_norm, p 1", lambda n, x: torch.linalg.matrix_norm(x, 1), _rows)
_add("linalg.qr", lambda n, x: torch.linalg.qr(x)[1], lambda n: (n // 8, n // 8))
_add("linalg.eigh", lambda n, x: torch.linalg.eigh(x + x.mT)[0], lambda n: (n // 8, n // 8))
_add("linalg.svdvals", lambda n, x: torch.linalg.svdvals(x), lambda n: (n // 8, n // 8))
_add("linalg.pinv", lambda n, x: torch.linalg.pinv(x), lambda n: (n, 3))
_add("linalg.cross", lambda n, x, y: torch.linalg.cross(x, y), lambda n: (n, 3), lambda n: (n, 3))
# Convolutions.
_add("conv1d, length", lambda n, x, w: F.conv1d(x, w), _signal, lambda n: (4, 3, 3))
_add("conv1d, window", lambda n, x, w: F.conv1d(x, w), lambda n: (2, 3, n + 8), lambda n: (4, 3, n))
_add("conv1d, channels", lambda n, x, w: F.conv1d(x, w), lambda n: (2, n, 8), lambda n: (4, n, 3))
_add(
    "conv1d, depthwise channels",
    lambda n, x, w: F.conv1d(x, w, groups=n),
    lambda n: (2, n, 8),
    lambda n: (n, 1, 3),
)
_add(
    "conv2d, depthwise channels",
    lambda n, x, w: F.conv2d(x, w, groups=n),
    lambda n: (2, n, 5, 5),
    lambda n: (n, 1, 3, 3),
)
_add("conv1d, stride", lambda n, x, w: F.conv1d(x, w, stride=n // 8), _signal, lambda n: (4, 3, 3))
_add("conv1d, dilation", lambda n, x, w: F.conv1d(x, w, dilation=n // 4), _signal, lambda n: (4, 3, 3))
_add(
    "conv2d dilated",
    lambda n, x, w: F.conv2d(x, w, dilation=(n // 4, 1)),
    lambda n: (1, 2, n, 5),
    lambda n: (4, 2, 3, 3),
)
_add(
    "conv2d, stride",
    lambda n, x, w: F.conv2d(x, w, stride=(n // 8, 1)),
    lambda n: (1, 2, n, 5),
    lambda n: (4, 2, 3, 3),
)
_add(
    "conv_transpose1d, length",
    lambda n, x, w: F.conv_transpose1d(x, w, stride=2),
    _signal,
    lambda n: (3, 4, 3),
)
_add(
    "conv_transpose1d, stride",
    lambda n, x, w: F.conv_transpose1d(x, w, stride=n),
    lambda n: (2, 3, 8),
    lambda n: (3, 4, 3),
)
_add(
    "conv_transpose1d, window",
    lambda n, x, w: F.conv_transpose1d(x, w),
    lambda n: (2, 3, 8),
    lambda n: (3, 4, n),
)
_add(
    "conv_transpose2d, depthwise channels",
    lambda n, x, w: F.conv_transpose2d(x, w, groups=n),
    lambda n: (2, n, 5, 5),
    lambda n: (n, 1, 3, 3),
)
# Losses.
_add("cross_entropy, rows", lambda n, x, t: F.cross_entropy(x, t), lambda n: (n, 7), _numbers)
_add(
    "cross_entropy, classes",
    lambda n, x, t: F.cross_entropy(x, t),
    lambda n: (7, n),
    lambda n: torch.arange(7),
)
_add("cross_entropy, both", lambda n, x, t: F.cross_entropy(x, t), lambda n: (n, n), _places)
_add(
    "cross_entropy smoothed, classes",
    lambda n, x, t, w: F.cross_entropy(x, t, w, label_smoothing=0.1),
    lambda n: (7, n),
    lambda n: torch.arange(7),
    lambda n: torch.ones(n),
)
_add(
    "cross_entropy, pixels",
    lambda n, x, t: F.cross_entropy(x, t),
    lambda n: (2, 7, n),
    lambda n: _numbers(2 * n).view(2, n),
)
_add(
    "cross_entropy of probabilities, classes",
    lambda n, x, t: F.cross_entropy(x, t.softmax(-1)),
    lambda n: (7, n),
    lambda n: (7, n),
)
_add(
    "nll_loss, classes",
    lambda n, x, t: F.nll_loss(x.log_softmax(-1), t),
    lambda n: (7, n),
    lambda n: torch.arange(7),
)
_add(
    "nll_loss, pixels",
    lambda n, x, t: F.nll_loss(x.log_softmax(1), t),
    lambda n: (2, 7, n, 3),
    lambda n: _numbers(6 * n).view(2, n, 3),
)
_add(
    "multi_margin_loss, classes",
    lambda n, x, t: F.multi_margin_loss(x, t),
    lambda n: (7, n),
    lambda n: torch.arange(7),
)
_add(
    "multilabel_margin_loss, one label",
    lambda n, x: F.multilabel_margin_loss(x, torch.tensor([[0, 2, 1] + [-1] * (n - 3)])),
    lambda n: (1, n),
)
_add("multilabel_margin_loss, all labels", lambda n, x, t: F.multilabel_margin_loss(x, t), _row, _places)
_add("triplet_margin_loss", lambda n, a, b, c: F.triplet_margin_loss(a, b, c), _columns, _columns, _columns)
_add(
    "ctc_loss, time",
    lambda n, x: F.ctc_loss(
        x.log_softmax(-1), torch.tensor([[1, 2, 3]]), torch.tensor([n]), torch.tensor([3])
    ),
    lambda n: (n, 1, 5),
)
_add(
    "ctc_loss, classes",
    lambda n, x: F.ctc_loss(
        x.log_softmax(-1), torch.tensor([[1, 2, 3]]), torch.tensor([8]), torch.tensor([3])
    ),
    lambda n: (8, 1, n),
)
_add(
    "ctc_loss, targets",
    lambda n, x, t: F.ctc_loss(x.log_softmax(-1), t, torch.tensor([2 * n]), torch.tensor([n])),
    lambda n: (2 * n, 1, 5),
    lambda n: (_places(n) % 4 + 1)[None],
)
# Sequences.
_LAYERS = {kind: getattr(nn, kind)(4, 5, batch_first=True) for kind in ("RNN", "LSTM", "GRU")}
for _kind, _layer in _LAYERS.items():
    _add(f"{_kind}, length", lambda n, x, layer=_layer: layer(x)[0], lambda n: (2, n, 4))
    _add(f"{_kind}, batch", lambda n, x, layer=_layer: layer(x)[0], lambda n: (n, 3, 4))
_add(
    "LSTM, width",
    lambda n, x, h, c, *weights: torch.lstm(x, (h, c), list(weights), True, 1, 0.0, False, False, False)[0],
    lambda n: (3, 2, 4),
    *[lambda n: (1, 2, n // 4)] * 2,
    lambda n: (n, 4),
    lambda n: (n, n // 4),
    _row,
    _row,
)
_both_ways = nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True)
_add("LSTM of two layers, both ways, length", lambda n, x: _both_ways(x)[0], lambda n: (2, n, 4))
_cell = nn.GRUCell(4, 5)
_add("GRUCell, batch", lambda n, x, h: _cell(x, h), _columns, lambda n: (n, 5))
_add(
    "attention, keys",
    lambda n, q, k, v: F.scaled_dot_product_attention(q, k, v),
    lambda n: (1, 2, 8, 4),
    lambda n: (1, 2, n, 4),
    lambda n: (1, 2, n, 4),
)
_add(
    "attention, length",
    lambda n, q, k, v: F.scaled_dot_product_attention(q, k, v),
    *[lambda n: (1, 2, n, 4)] * 3,
)
_add(
    "attention causal, length",
    lambda n, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    *[lambda n: (1, 2, n, 4)] * 3,
)
# Normalisation.
_add("layer_norm, width", lambda n, x, w, b: F.layer_norm(x, (n,), w, b), _rows, _row, _row)
_add(
    "layer_norm, rows",
    lambda n, x, w, b: F.layer_norm(x, (4,), w, b),
    _columns,
    lambda n: (4,),
    lambda n: (4,),
)
_add("rms_norm, width", lambda n, x, w: F.rms_norm(x, (n,), w), _rows, _row)
_add("group_norm, groups", lambda n, x: F.group_norm(x, n), lambda n: (2, 2 * n, 3))
_add(
    "group_norm, length",
    lambda n, x, w, b: F.group_norm(x, 2, w, b),
    lambda n: (2, 4, n),
    lambda n: (4,),
    lambda n: (4,),
)
_add("instance_norm, length", lambda n, x: F.instance_norm(x), _signal)
_add("instance_norm, channels", lambda n, x: F.instance_norm(x), lambda n: (2, n, 3))
_add(
    "batch_norm, channels",
    lambda n, x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    lambda n: (3, n, 4),
    _row,
    _row,
)
_add("local_response_norm, channels", lambda n, x: F.local_response_norm(x, 5), lambda n: (2, n, 4))
_add("local_response_norm, window", lambda n, x: F.local_response_norm(x, n), lambda n: (2, n, 4))
_add("renorm", lambda n, x: x.renorm(2, 0, 1.0), _columns)
_add("softmax", lambda n, x: x.softmax(-1), _rows)
_add("logsumexp", lambda n, x: x.logsumexp(-1), _rows)
_add("var", lambda n, x: x.var(-1), _rows)
_add("prod", lambda n, x: x.prod(-1), _rows)
_add("prod, zeros", lambda n, x: (x * (x > 0)).prod(-1), _rows)
_add("prod, all", lambda n, x: x.prod(), _rows)
_add("amax", lambda n, x: x.amax(-1), _rows)
# Spectra.
_add("fft", lambda n, x: torch.fft.fft(x).abs(), _rows)
_add("rfft", lambda n, x: torch.fft.rfft(x).abs(), _rows)
_add("irfft", lambda n, x: torch.fft.irfft(x, n), _spectrum)
_add("rfft, prime", lambda n, x: torch.fft.rfft(x).abs(), lambda n: (4, _prime(16 * n)))
_add("stft", lambda n, x: torch.stft(x, 16, window=torch.hann_window(16), return_complex=True).abs(), _row)
_add(
    "stft, frame",
    lambda n, x: torch.stft(x, n // 4, window=torch.hann_window(n // 4), return_complex=True).abs(),
    _row,
)
# In Python.
_add("stack of rows", lambda n, x: torch.stack([x[i] * 2 for i in range(8)]), lambda n: (8, n))
_add("list of rows", lambda n, x: torch.stack([row * 2 for row in x]), lambda n: (n // 8, n))
_add("writes to rows", lambda n, x: _written(x), lambda n: (n // 8, 8))
_add("rows in a recurrence", lambda n, x: _recurrence(x), lambda n: (n // 8, 8))
_add("block_diag", lambda n, x, y: torch.block_diag(x, y), _row, lambda n: (3,))
_add("cartesian_prod", lambda n, x, y: torch.cartesian_prod(x, y), _row, lambda n: (3,))
_add("tril", lambda n, x: x.tril(), lambda n: (n, n))
_add("pixel_shuffle", lambda n, x: F.pixel_shuffle(x, 2), lambda n: (1, 8, n, 3))


def _written(x: torch.Tensor) -> torch.Tensor:
    result = torch.zeros_like(x)
    for i in range(x.shape[0]):
        result[i] = x[i] * 2
    return result


def _recurrence(x: torch.Tensor) -> torch.Tensor:
    state, states = x[0], []
    for i in range(x.shape[0]):
        state = torch.tanh(state + x[i])
        states.append(state)
    return torch.stack(states)
