"""Reductions and cumulative sums."""

import numpy as np
import torch

from autodiff.case import C, Case, F, R


def _prod(x, axes, keepdim):
    for axis in sorted((axis % x.ndim for axis in axes), reverse=True):
        x = x.prod(axis, keepdim=keepdim)
    return x


# op: (domain, twin over given axes)
REDUCTIONS = {
    "ReduceSum": ({}, lambda x, a, k: x.sum(a, keepdim=k)),
    "ReduceMean": ({}, lambda x, a, k: x.mean(a, keepdim=k)),
    "ReduceMax": ({"distinct": True}, lambda x, a, k: x.amax(a, keepdim=k)),
    "ReduceMin": ({"distinct": True}, lambda x, a, k: x.amin(a, keepdim=k)),
    "ReduceProd": ({}, _prod),
    "ReduceL1": ({}, lambda x, a, k: x.abs().sum(a, keepdim=k)),
    "ReduceL2": ({}, lambda x, a, k: torch.linalg.vector_norm(x, dim=a, keepdim=k)),
    "ReduceSumSquare": ({}, lambda x, a, k: x.square().sum(a, keepdim=k)),
    "ReduceLogSum": ({"low": 0.3}, lambda x, a, k: x.sum(a, keepdim=k).log()),
    "ReduceLogSumExp": ({}, lambda x, a, k: x.logsumexp(a, keepdim=k)),
}
CASES = [
    Case(
        op,
        (F(2, 3, 4, **domain), *([] if axes is None else [kind(np.array(axes, np.int64))])),
        lambda x, *_, twin=twin, axes=axes or (0, 1, 2), keepdims=keepdims: twin(x, axes, bool(keepdims)),
        {"keepdims": keepdims},
        name=f"{kind.__name__}-axes={axes}-keepdims={keepdims}".replace(" ", ""),
    )
    for op, (domain, twin) in REDUCTIONS.items()
    for kind, axes, keepdims in [
        (C, None, 1),
        (C, None, 0),
        (C, (-2,), 1),
        (C, (0, -1), 0),
        (C, (), 0),
        (R, (2, 0), 0),
        (R, (1,), 1),
        (R, (), 1),
    ]
]

# An empty set of axes: each element is reduced by itself.
ELEMENTWISE = {
    "ReduceSum": lambda x: x * 1,
    "ReduceMean": lambda x: x * 1,
    "ReduceMax": lambda x: x * 1,
    "ReduceMin": lambda x: x * 1,
    "ReduceProd": lambda x: x * 1,
    "ReduceL1": torch.abs,
    "ReduceL2": torch.abs,
    "ReduceSumSquare": torch.square,
    "ReduceLogSum": torch.log,
    "ReduceLogSumExp": lambda x: x * 1,
}
CASES += [
    Case(
        op,
        (F(2, 3, **REDUCTIONS[op][0]), *extra),
        lambda x, *_, twin=twin: twin(x),
        {"noop_with_empty_axes": 1, "keepdims": keepdims},
        name=f"noop-{'absent' if not extra else type(extra[0]).__name__}-keepdims={keepdims}",
    )
    for op, twin in ELEMENTWISE.items()
    for keepdims in (0, 1)
    for extra in [(), (C(np.zeros(0, np.int64)),), (R(np.zeros(0, np.int64)),)]
]
CASES += [
    Case("ReduceSum", (F(),), lambda x: x * 1, name="of-a-scalar"),
    Case("ReduceMean", (F(),), lambda x: x * 1, name="of-a-scalar"),
]


def _cumulative(function):
    """torch's cumulative function with the attributes of ONNX."""

    def twin(x, axis, exclusive, reverse, neutral):
        x = x.flip(axis) if reverse else x
        y = function(x, axis)
        if exclusive:
            head = torch.full_like(y.narrow(axis, 0, 1), neutral)
            y = torch.cat([head, y.narrow(axis, 0, y.shape[axis] - 1)], axis)
        return y.flip(axis) if reverse else y

    return twin


CASES += [
    Case(
        "CumSum",
        (F(2, 4), kind(np.array(axis, np.int64))),
        lambda x, _, a=axis, e=exclusive, r=reverse: _cumulative(torch.cumsum)(x, a, e, r, 0.0),
        {"exclusive": exclusive, "reverse": reverse},
        name=f"{kind.__name__}-axis={axis}-exclusive={exclusive}-reverse={reverse}",
    )
    for kind, axis in ((C, 0), (C, -1), (R, 1))
    for exclusive in (0, 1)
    for reverse in (0, 1)
]
CASES += [
    Case(
        "CumProd",
        (F(2, 4), kind(np.array(axis, np.int64))),
        lambda x, _, a=axis, e=exclusive, r=reverse: _cumulative(torch.cumprod)(x, a, e, r, 1.0),
        {"exclusive": exclusive, "reverse": reverse},
        opset=26,
        name=f"{kind.__name__}-axis={axis}-exclusive={exclusive}-reverse={reverse}",
    )
    for kind, axis in ((C, 0), (R, -1))
    for exclusive in (0, 1)
    for reverse in (0, 1)
]
