"""Reading from and writing to positions given by indices."""

import numpy as np
import torch

from autodiff.case import C, Case, F, R

REPEATED = np.array([[0, 3, -1], [3, 3, 1]])


def _gather(indices, axis, *, where=R, name="", sizes=(4, 5, 4)) -> Case:
    indices = np.asarray(indices)

    def twin(x, i):
        flat = torch.as_tensor(indices.ravel() % x.shape[axis])
        picked = x.index_select(axis, flat)
        axis_ = axis % x.ndim
        return picked.reshape((*x.shape[:axis_], *indices.shape, *x.shape[axis_ + 1 :]))

    label = name or f"axis={axis}-indices={'x'.join(map(str, indices.shape)) or 'scalar'}-{where.__name__}"
    return Case("Gather", (F(*sizes), where(indices)), twin, {"axis": axis}, name=label)


CASES = [
    *[_gather(REPEATED, axis) for axis in (0, 1, -1)],
    *[_gather([2, 0, 2], axis, where=C) for axis in (0, 1, 2)],
    *[_gather(np.int64(-2), axis, where=where) for axis in (0, 1, -1) for where in (R, C)],
    _gather(np.arange(8).reshape(2, 2, 2) % 3, 1, name="rank_three"),
    _gather(np.array([1, 0, 1], np.int32), 1, name="int32"),
    _gather(np.array([1, 1, 0]), 0, sizes=(3,), name="vector"),
    _gather(np.array(1, np.int32), 0, sizes=(3,), name="element"),
    _gather(np.zeros((0,), np.int64), 1, name="nothing"),
]


# The reference evaluator's GatherElements wants indices as long as the data in all other axes.
SHORT = {"evaluator": "onnxruntime"}

CASES += [
    Case(
        "GatherElements", (F(3, 4), R([[0, 3, -1], [3, 3, 1]])), lambda x, i: x[:2].gather(1, i % 4),
        {"axis": 1}, **SHORT,
    ),
    Case(
        "GatherElements", (F(3, 4), C([[2, 0, 0, -1]])), lambda x, i: x.gather(0, i % 3), {},
        name="default_axis",
    ),
    Case(
        "GatherElements", (F(2, 2, 2), R(np.ones((2, 2, 2), np.int64))), lambda x, i: x.gather(-1, i),
        {"axis": -1},
    ),
    Case(
        "GatherND", (F(3, 4, 2), R([[0, 1], [2, -1], [0, 1]])), lambda x, i: x[i[:, 0], i[:, 1]],
        name="slices",
    ),
    Case(
        "GatherND", (F(3, 4), R([[[0, 1]], [[2, 3]]])), lambda x, i: x[i[..., 0], i[..., 1]], name="elements"
    ),
    Case(
        "GatherND",
        (F(2, 3, 4), R([[[1], [1]], [[0], [-1]]])),
        lambda x, i: torch.stack([x[b][i[b, :, 0]] for b in range(2)]),
        {"batch_dims": 1},
    ),
    Case("Compress", (F(3, 4), R([False, True, True])), lambda x, c: x[1:], {"axis": 0}),
    Case(
        "Compress", (F(3, 4), C([True, False])), lambda x, c: x[:, :1], {"axis": -1}, name="short_condition"
    ),
    Case(
        "Compress", (F(2, 3), C([False, True, False, True, True])), lambda x, c: x.ravel()[[1, 3, 4]],
        name="flat",
    ),
    *[
        Case(
            "TopK",
            (F(3, 5, distinct=True), where([2])),
            lambda x, k, a=axis, big=largest: x.topk(2, a, bool(big)).values,
            {"axis": axis, "largest": largest},
            name=f"axis={axis}-largest={largest}-{where.__name__}",
        )
        for axis, largest, where in [(-1, 1, C), (0, 0, C), (1, 1, R)]
    ],
    *[
        Case(
            "OneHot",
            (R([[0, 2], [-1, 7]]), C(np.array(3)), F(2)),
            lambda i, d, v, a=axis: torch.where(
                torch.stack([((i == k) | (i == k - 3)) for k in range(3)], a), v[1], v[0]
            ),
            {"axis": axis},
        )
        for axis in (-1, 0, 1)
    ],
]  # fmt: skip


def _elements(reduction, *, axis=0, positive=False, indices=((0, 2, -1), (2, 2, 1)), distinct=False) -> Case:
    """Against torch.scatter_reduce; without a reduction against torch.scatter."""
    low = 0.5 if positive else -2.0
    indices = np.array(indices)

    def twin(data, i, updates):
        i = i % data.shape[axis]
        if reduction == "none":
            return data.scatter(axis, i, updates)
        name = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}[reduction]
        return data.scatter_reduce(axis, i, updates, name)

    return Case(
        "ScatterElements",
        (
            F(3, 4, low=low, distinct=distinct),
            R(indices),
            F(*indices.shape, low=low + distinct * 0.03, distinct=distinct),
        ),
        twin,
        {"reduction": reduction, "axis": axis},
        **SHORT,
    )


CASES += [
    _elements("none", indices=((0, 2, -2), (2, 1, -3))),
    _elements("none", axis=1, indices=((0, 2, -1), (2, 0, 1))),
    *[_elements("add", axis=axis) for axis in (0, 1, -1)],
    *[_elements("mul", axis=axis, positive=True) for axis in (0, 1)],
    *[_elements(how, axis=axis, distinct=True) for how in ("max", "min") for axis in (0, 1)],
]


def _nd(reduction, *, indices, sizes, updates, distinct=False) -> Case:
    indices = np.array(indices)

    def twin(data, i, values):
        depth = i.shape[-1]
        flat = data.reshape(-1, *data.shape[depth:])
        row = sum(
            (i[..., k] % data.shape[k]) * int(np.prod(data.shape[k + 1 : depth])) for k in range(depth)
        ).reshape(-1)
        values = values.reshape(-1, *data.shape[depth:])
        if reduction in ("none", "add"):
            return flat.index_put((row,), values, accumulate=reduction == "add").reshape(data.shape)
        name = {"mul": "prod", "max": "amax", "min": "amin"}[reduction]
        row = row.reshape(-1, *[1] * (values.ndim - 1)).expand_as(values)
        return flat.scatter_reduce(0, row, values, name).reshape(data.shape)

    low = -2.0 if distinct or reduction in ("none", "add") else 0.5
    data, new = (
        F(*sizes, low=low, distinct=distinct),
        F(*updates, low=low + distinct * 0.03, distinct=distinct),
    )
    shape = "x".join(map(str, indices.shape))
    return Case(
        "ScatterND", (data, R(indices), new), twin, {"reduction": reduction}, name=f"{reduction}-{shape}"
    )


CASES += [
    _nd("none", indices=[[0, 1], [2, -1]], sizes=(3, 4, 2), updates=(2, 2)),
    _nd("none", indices=[[[1]], [[-1]]], sizes=(4, 2), updates=(2, 1, 2)),
    _nd("add", indices=[[0, 1], [2, 3], [0, 1]], sizes=(3, 4, 2), updates=(3, 2)),
    _nd("add", indices=[[1], [1]], sizes=(3,), updates=(2,)),
    *[
        _nd(how, indices=[[0], [2], [0]], sizes=(3, 4), updates=(3, 4), distinct=how != "mul")
        for how in ("mul", "max", "min")
    ],
]


def _tensor_scatter(mode, starts, *, axis=None) -> Case:
    """Batch 2, cache of 5 rows, 3 of them written."""
    attrs = {"mode": mode} | ({"axis": axis} if axis is not None else {})
    shape = {None: (2, 2, 5, 3), 1: (2, 5, 3)}[axis]
    rows = 2 if axis is None else 1

    def twin(past, update, write):
        result = past.clone()
        for b in range(2):
            start = 0 if write is None else int(write[b])
            for i in range(3):
                at = (start + i) % 5
                result[(b, slice(None), at) if rows == 2 else (b, at)] = update[
                    (b, slice(None), i) if rows == 2 else (b, i)
                ]
        return result

    update = tuple(3 if i == rows else size for i, size in enumerate(shape))
    write = R(np.array(starts)) if starts else None
    return Case(
        "TensorScatter", (F(*shape), F(*update), write), twin, attrs, opset=24, name=f"{mode}-{starts}-{axis}"
    )


CASES += [
    _tensor_scatter("linear", (0, 2)),
    _tensor_scatter("circular", (4, 1)),
    _tensor_scatter("linear", None),
    _tensor_scatter("linear", (1, 2), axis=1),
]


def unique(x, axis=None, ordered=True):
    """The first of equal elements or slices, by numpy."""
    first = np.unique(x.detach().numpy(), return_index=True, axis=axis)[1]
    first = torch.from_numpy(first if ordered else np.sort(first))
    return x.flatten()[first] if axis is None else x.index_select(axis, first)


CASES += [
    Case("Unique", (F(2, 4),), unique, extra_outputs=1, name="flat"),
    Case(
        "Unique",
        (F(4, 3),),
        lambda x: unique(x, ordered=False),
        {"sorted": 0},
        name="unsorted",
        evaluator="onnxruntime",  # the reference evaluator takes positions among the elements for ones of rows
    ),
    Case("Unique", (F(3, 4, 2),), lambda x: unique(x, 1), {"axis": 1}, extra_outputs=3, name="axis"),
    Case("Unique", (F(3, 4),), lambda x: unique(x, 1), {"axis": -1}, name="negative-axis"),
]
