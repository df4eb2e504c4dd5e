"""Reading and writing at positions."""

from typing import Any

import torch

from ortmodule.aten_case import Case, T

X = T(3, 4, 5)
I = torch.tensor([0, 2, -1])  # noqa: E741
J = torch.tensor([[1], [3]])
PLACES = torch.tensor([[0, 1, 1], [2, 0, 2]])
DISTINCT = torch.tensor([[0, 1, 2], [2, 0, 1]])


def _written(write: Any) -> Any:
    def fn(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        y = x * 2
        write(y, *arguments)
        return y

    return fn


def _set(place: Any) -> Any:
    return _written(lambda y, v: y.__setitem__(place, v))


def _reduce(how: str, include_self: bool) -> Case:
    return Case(
        f"scatter_reduce_{how}_{include_self}",
        lambda x, y: x.scatter_reduce(1, PLACES, y, how, include_self=include_self),
        (T(2, 4), T(2, 3)),
    )


CASES = [
    Case("index", lambda x, i: (x[i], x[:, i], x[..., i]), (X, I)),
    Case("index_matrix", lambda x, j: x[:, j], (X, J)),
    Case("index_two", lambda x, i, j: (x[i, j], x[:, i, j], x[i, :, j]), (X, I, J)),
    Case("index_three", lambda x, i: x[i, i, i], (X, I)),
    Case("index_none", lambda x, i: x[i, None, :, i], (X, I)),
    Case("index_list", lambda x: x[[0, 2], 1:], (X,)),
    Case("index_int32", lambda x, i: x[i.int()], (X, I)),
    Case("index_select", lambda x, i: x.index_select(1, i.abs()), (X, I)),
    Case("gather", lambda x, p: (x.gather(1, p), x.gather(0, p.clamp(max=1))), (T(2, 3), PLACES)),
    Case("take", lambda x, p: torch.take(x, p), (T(3, 4), PLACES)),
    Case("take_along_dim", lambda x, p: torch.take_along_dim(x, p, 1), (T(2, 3), PLACES)),
    Case("scatter", lambda x, p, y: x.scatter(1, p, y), (T(2, 4), DISTINCT, T(2, 3))),
    Case(
        "scatter_larger_source", lambda x, p, y: x.scatter(1, p, y), (T(2, 4), DISTINCT, T(3, 5, grad=False))
    ),
    Case("scatter_value", lambda x, p: x.scatter(1, p, 1.5), (T(2, 4), PLACES)),
    Case("scatter_add", lambda x, p, y: x.scatter_add(1, p, y), (T(2, 4), PLACES, T(2, 3))),
    Case("scatter_ints", lambda p: torch.zeros(2, 4, dtype=torch.int64).scatter(1, p, 1), (PLACES,)),
    *(_reduce(how, own) for how in ("sum", "mean", "prod", "amax", "amin") for own in (True, False)),
    *(
        Case(
            f"scatter_reduce_ints_{how}_{own}",
            lambda p, how=how, own=own: (p + 5).scatter_reduce(1, p, p * p - 3, how, include_self=own),
            (PLACES,),
        )
        for how in ("sum", "prod", "amax", "amin")
        for own in (True, False)
    ),
    Case("fold", lambda x: torch.nn.functional.fold(x, (4, 5), 2), (T(2, 8, 12),), dynamic=False),
    Case(
        "unfold_windows",
        lambda x: torch.nn.functional.unfold(x, 2, stride=2),
        (T(2, 3, 4, 6),),
        dynamic=False,
    ),
    Case("index_put", _written(lambda y, i, v: y.index_put_((i,), v)), (X, I, T(4, 5))),
    Case("index_put_two", _written(lambda y, i, v: y.index_put_((i, i), v)), (X, I, T(3, 5))),
    Case(
        "index_put_accumulate",
        _written(lambda y, p, v: y.index_put_((p,), v, accumulate=True)),
        (X, PLACES, T(2, 3, 4, 5)),
    ),
    Case("set_rows", _written(lambda y, i, v: y.__setitem__((slice(None), i), v)), (X, I, T(3, 3, 5))),
    Case("set_apart", _written(lambda y, i, v: y.__setitem__((i, slice(None), i), v)), (X, I, T(3, 4))),
    Case("set_mask", _written(lambda y: y.__setitem__(y > 1, 0.5)), (X,)),
    Case("set_row_mask", _written(lambda y, i: y.__setitem__(i > 0, 0.5)), (X, I)),
    Case("set_mask_values", _written(lambda y, i, v: y.__setitem__(i > 0, v)), (X, I, T(1, 4, 5))),
    Case("set_mask_broadcast", _written(lambda y, v: y.__setitem__(y > 1, v)), (X, T())),
    Case("set_row_mask_broadcast", _written(lambda y, i, v: y.__setitem__(i >= 0, v)), (X, I, T(5))),
    Case("set_mask_from", _written(lambda y, z: y.__setitem__(y > 1, z[y > 1])), (X, X)),
    Case("add_mask", _written(lambda y, v: y.index_put_((y > 1,), v, accumulate=True)), (X, T())),
    Case("mask", lambda x: (x[x > 0.5], x[x > 9]), (X,)),
    Case("mask_rows", lambda x, i: x[i > 0] * 2, (X, I)),
    Case("mask_columns", lambda x: x[:, x.sum((0, 2)) > 0], (X,)),
    Case("mask_two_axes", lambda x: x[x.sum(2) > 0].exp(), (X,)),
    Case("mask_after_index", lambda x: x[:, 1][x[:, 1] > 0], (X,)),
    Case("mask_then_mean", lambda x: (x[x > 0] ** 2).mean() + x.masked_select(x < 0).sum(), (X,)),
    Case("mask_size", lambda x: x * x[x > 0].numel(), (X,)),
    Case("masked_select_broadcast", lambda x, i: x.masked_select(i[:, None, None] > 0), (X, I)),
    Case("masked_scatter", lambda x, y: x.masked_scatter(x > 0, y), (X, T(3, 4, 6))),
    Case("masked_scatter_0d", lambda x, y: x.sum().masked_scatter(y.sum() < 99, y), (X, T(3))),
    Case("nonzero", lambda x: (x > 0.5).nonzero(), (X,)),
    Case("nonzero_index", lambda x: x[(x.sum(2) > 0).nonzero(as_tuple=True)].sum(0), (X,)),
    Case("where_condition", lambda x: x[torch.where(x > 0.5)], (X,)),
    Case("set_slice", _set((slice(None), slice(1, 3))), (X, T(3, 2, 5))),
    Case("set_slice_number", _written(lambda y: y.__setitem__(slice(0, 2), 1.0)), (X,)),
    Case("set_slice_to_the_end", _set((Ellipsis, slice(-2, None))), (X, T(3, 4, 2))),
    Case("set_slice_step", _set((slice(None), slice(0, None, 2))), (X, T(3, 2, 5))),
    Case("set_all", _set(slice(None)), (T(3, 4, 5, grad=False), T(5))),
    Case("set_row", _set(1), (X, T(4, 5))),
    Case("set_last_column", _set((slice(None), slice(None), -1)), (X, T(3, 4))),
    Case("set_element", _written(lambda y: y.__setitem__((0, 1, 2), 3.0)), (X,)),
    Case("shifted_right", lambda x: _shifted(x), (T(3, 5),)),
    Case("copy_", _written(lambda y, v: y.copy_(v)), (T(3, 4, 5, grad=False), T(5))),
    Case("diagonal_write", _written(lambda y, v: y.diagonal(1, 1, 2).copy_(v)), (X, T(3, 4))),
    Case("index_add", lambda x, i, y: x.index_add(1, i.abs(), y, alpha=2), (X, I, T(3, 3, 5))),
    Case(
        "index_copy", lambda x, i, y: x.index_copy(1, i.abs() * 1, y), (X, torch.tensor([0, 2]), T(3, 2, 5))
    ),
    Case("index_fill", lambda x, i: x.index_fill(1, i.abs(), 2.0), (X, I)),
    Case("one_hot_alone", lambda p: torch.nn.functional.one_hot(p, 5), (PLACES,)),
    Case("slice_scatter", lambda x, y: torch.slice_scatter(x, y, 1, 1, 3), (X, T(3, 2, 5))),
    Case("select_scatter", lambda x, y: torch.select_scatter(x, y, 1, 0), (X, T(3, 5))),
]


def _shifted(x: torch.Tensor) -> torch.Tensor:
    result = x.new_zeros(x.shape)
    result[:, 1:] = x[:, :-1].clone()
    result[:, 0] = 7
    return result
