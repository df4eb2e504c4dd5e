"""Classification losses."""

import numpy as np
import torch
import torch.nn.functional as fn

from autodiff.case import Case, F, R

# (labels, ignored label)
LABELS = {
    "labels": (np.array([1, 0, 3, 3]), None),
    "int32": (np.array([1, 0, 3, 3], np.int32), None),
    "ignored": (np.array([1, 2, 0, 2]), 2),
    "ignored-int32": (np.array([1, 2, 0, 2], np.int32), 2),
    "ignored-outside": (np.array([-100, 0, 3, -100]), -100),
    "ignored-none": (np.array([1, 0, 3, 3]), 2),
}


def _cases(op, function, name, labels, ignored, reduction, weighted, extra=()):
    """Class scores [4, 5, *extra], and labels [4, *extra], the given ones rolled along the extra axes."""
    count = int(np.prod(extra))
    grid = np.stack([np.roll(labels, shift) for shift in range(count)], 1).reshape(len(labels), *extra)

    def twin(x, t, w=None):
        options = {} if ignored is None else {"ignore_index": ignored}
        return function(x, t.long(), w, reduction=reduction, **options)

    weights = (F(5, low=0.3, wrt=False),) if weighted else ()
    return Case(
        op,
        (F(4, 5, *extra), R(grid), *weights),
        twin,
        {"reduction": reduction} | ({} if ignored is None else {"ignore_index": ignored}),
        symbolic={0: tuple(range(2 + len(extra))), 1: tuple(range(1 + len(extra))), 2: (0,)},
        name=f"{name}-{len(extra) + 2}d-{reduction}-{'weighted' if weighted else 'plain'}",
    )


CASES = [
    _cases(op, function, name, labels, ignored, reduction, weighted)
    for op, function in [
        ("SoftmaxCrossEntropyLoss", fn.cross_entropy),
        ("NegativeLogLikelihoodLoss", fn.nll_loss),
    ]
    for name, (labels, ignored) in LABELS.items()
    for reduction in ("mean", "sum", "none")
    for weighted in (False, True)
]
CASES += [
    _cases(op, function, name, *LABELS[name], reduction, weighted, extra)
    for op, function in [
        ("SoftmaxCrossEntropyLoss", fn.cross_entropy),
        ("NegativeLogLikelihoodLoss", fn.nll_loss),
    ]
    for name in ("labels", "ignored")
    for reduction, weighted in (("mean", False), ("mean", True), ("none", True))
    for extra in ((3,), (2, 3))
]
CASES += [
    Case(
        "SoftmaxCrossEntropyLoss", (F(4, 5), R(np.array([1, 0, 3, 3]))), lambda x,
        t: (fn.cross_entropy(x, t), torch.log_softmax(x, 1)), outputs=2, name="with-log-prob",
    ),
    Case(
        "SoftmaxCrossEntropyLoss", (F(4, 5, 3), R(np.array([[1, 0, 3], [3, 2, 2], [4, 1, 0], [2, 2, 2]]))),
        lambda x, t: (fn.cross_entropy(x, t, reduction="none"), torch.log_softmax(x, 1)),
        {"reduction": "none"}, outputs=2, name="with-log-prob-3d",
    ),
]  # fmt: skip
