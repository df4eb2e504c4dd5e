"""Normalisations, and Dropout where it is not random (tests/autodiff/test_dropout.py has the rest)."""

import numpy as np
import torch
import torch.nn.functional as nnf

from autodiff.case import C, Case, F, R

VARIANCE = {"low": 0.3, "high": 2.0}


def layer_norm(x, scale, bias=None, *, axis=-1, epsilon=1e-5, **_):
    axes = tuple(range(axis % x.ndim, x.ndim))
    y = (x - x.mean(axes, keepdim=True)) / torch.sqrt(x.var(axes, correction=0, keepdim=True) + epsilon)
    return y * scale if bias is None else y * scale + bias


def batch_norm_inference(x, scale, bias, mean, var):
    """torch has no gradients in mean and var."""
    scale, bias, mean, var = (v.reshape(-1, *[1] * (x.ndim - 2)) for v in (scale, bias, mean, var))
    return (x - mean) / torch.sqrt(var + 0.01) * scale + bias


def batch_norm_training(x, scale, bias, mean, var):
    """torch has no gradients in the updated statistics, and its variance is not that of the population."""
    over = (0, *range(2, x.ndim))
    own = x.mean(over), x.var(over, correction=0)
    y = batch_norm_inference(x, scale, bias, *own)
    return y, 0.75 * mean + 0.25 * own[0], 0.75 * var + 0.25 * own[1]


def rms_norm(x, scale, *, axis=-1, epsilon=1e-5, **_):
    axes = tuple(range(axis % x.ndim, x.ndim))
    return x / torch.sqrt((x * x).mean(axes, keepdim=True) + epsilon) * scale


def mean_variance_norm(x, axes):
    centered = x - x.mean(axes, keepdim=True)
    return centered / (torch.sqrt((centered * centered).mean(axes, keepdim=True)) + 1e-9)


CASES = []
for shape in [(5, 3), (3, 2, 5), (2, 3, 4, 2), (2, 2, 2, 3, 2)]:
    x, per_channel, name = F(*shape), F(shape[1]), "x".join(map(str, shape))
    batch_symbolic = {0: (0, *range(2, len(shape)))}
    CASES += [
        Case(
            "BatchNormalization",
            (x, per_channel, per_channel, per_channel, F(shape[1], **VARIANCE)),
            batch_norm_inference,
            {"epsilon": 0.01},
            name=f"inference-{name}",
        ),
        Case(
            "BatchNormalization",
            (x, per_channel, per_channel, per_channel, F(shape[1], **VARIANCE)),
            batch_norm_training,
            {"training_mode": 1, "epsilon": 0.01, "momentum": 0.75},
            outputs=3,
            name=f"statistics-{name}",
            symbolic=batch_symbolic,
        ),
        Case(
            "BatchNormalization",
            (x, per_channel, per_channel, C(np.zeros(shape[1])), C(np.ones(shape[1]))),
            lambda x, scale, bias, *_: nnf.batch_norm(x, None, None, scale, bias, True, eps=0.001),
            {"training_mode": 1, "epsilon": 0.001},
            extra_outputs=2,
            name=f"training-{name}",
            symbolic=batch_symbolic,
        ),
    ]
for shape in [(2, 3, 5), (2, 3, 4, 2), (1, 2, 2, 3, 2)]:
    CASES += [
        Case(
            "InstanceNormalization",
            (F(*shape), F(shape[1]), F(shape[1])),
            lambda x, scale, bias: nnf.instance_norm(x, weight=scale, bias=bias, eps=0.001),
            {"epsilon": 0.001},
        )
    ]
for shape, groups in [((2, 4, 3), 2), ((2, 6, 2, 3), 3), ((2, 3, 2, 3), 1), ((2, 3, 2, 3), 3)]:
    CASES += [
        Case(
            "GroupNormalization",
            (F(*shape), F(shape[1]), F(shape[1])),
            lambda x, scale, bias, groups=groups: nnf.group_norm(x, groups, scale, bias, 0.001),
            {"num_groups": groups, "epsilon": 0.001},
            symbolic={0: (0, *range(2, len(shape)))},
        )
    ]
for x, scale, bias, axis in [
    ((2, 3, 4), (4,), (4,), -1),
    ((2, 3, 4), (4,), None, -1),
    ((2, 3, 4), (3, 4), (3, 4), 1),
    ((2, 3, 4), (2, 3, 4), (2, 3, 4), 0),
    ((3, 4), (4,), (1,), 1),  # repeated to the normalised axes
    ((2, 3, 4), (4,), (3, 1), 1),
]:
    inputs = (F(*x), F(*scale)) + ((F(*bias),) if bias else ())
    attrs = {"axis": axis, "epsilon": 0.001}
    CASES += [
        Case("LayerNormalization", inputs, lambda *args, attrs=attrs: layer_norm(*args, **attrs), attrs)
    ]
    if bias != (1,):
        CASES += [
            Case(
                "RMSNormalization",
                inputs[:2],
                lambda *args, attrs=attrs: rms_norm(*args, **attrs),
                attrs,
                opset=23,
                name="-".join(["x".join(map(str, s)) for s in (x, scale)] + [str(axis), str(bias is None)]),
            )
        ]
for axis in (-1, 0, 1):
    CASES += [
        Case(
            "LpNormalization",
            (F(3, 4, 2),),
            lambda x, axis=axis, p=p: nnf.normalize(x, p, axis),
            {"axis": axis, "p": p},
        )
        for p in (1, 2)
    ]
CASES += [
    Case(
        "LRN",
        (F(*shape),),
        lambda x, size=size: nnf.local_response_norm(x, size, 0.5, 0.625, 2.0),
        {"size": size, "alpha": 0.5, "beta": 0.625, "bias": 2.0},
    )
    for shape, size in [((2, 4, 3, 2), 3), ((1, 7, 2, 2), 5), ((2, 3, 2, 2), 1)]
] + [
    Case("LRN", (F(2, 4, 3, 2),), lambda x: nnf.local_response_norm(x, 3), {"size": 3}, name="defaults"),
    # Without axes, the shape inference of onnx fails on the op.
    Case(
        "MeanVarianceNormalization",
        (F(3, 2, 2, 4),),
        lambda x: mean_variance_norm(x, (0, 2, 3)),
        {"axes": [0, 2, 3]},
    ),
    Case(
        "MeanVarianceNormalization",
        (F(3, 2, 5),),
        lambda x: mean_variance_norm(x, (0, -1)),
        {"axes": [0, -1]},
    ),
]
CASES += [
    Case("Dropout", inputs, lambda x, *_: x * 1.0, name=name)
    for name, inputs in {
        "inference": (F(3, 4),),
        "inference-ratio": (F(3, 4), C(np.array(0.3))),
        "inference-constant": (F(3, 4), None, C(np.array(False))),
        "inference-run-time": (F(3, 4), C(np.array(0.3)), R(np.array(False))),
        "zero-ratio": (F(3, 4), C(np.array(0.0)), C(np.array(True))),
        "zero-ratio-run-time": (F(3, 4), R(np.array(0.0, np.float32)), R(np.array(True))),
    }.items()
]
