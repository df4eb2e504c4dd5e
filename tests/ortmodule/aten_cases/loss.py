"""Losses."""

from functools import partial

import torch
import torch.nn.functional as F

from ortmodule.aten_case import Case, T

_LABELS = torch.tensor([0, 4, 2, 2])
_IGNORED = torch.tensor([0, -100, 2, 1])
_IMAGE_LABELS = torch.arange(24).view(2, 3, 4) % 5
_TARGETS = {
    "ended": [[3, 0, -1, 1], [2, -1, -1, -1]],
    "none": [[-1, 0, 1, 2], [-1, -1, -1, -1]],
    "all": [[0, 1, 2, 3], [3, 2, 1, 0]],
    "repeated": [[3, 3, -1, 1], [1, 1, 1, 0]],
}
_PROBABILITY = {"low": 0.05, "high": 0.95}


def _each_reduction(name, fn, arguments):
    return [
        Case(f"{name}_{reduction}", partial(fn, reduction=reduction), arguments)
        for reduction in ("none", "mean", "sum")
    ]


CASES = [
    *_each_reduction("cross_entropy", F.cross_entropy, (T(4, 5), _LABELS)),
    *_each_reduction("cross_entropy_weight", F.cross_entropy, (T(4, 5), _IGNORED, T(5, low=0.5, grad=False))),
    Case(
        "cross_entropy_nan",
        partial(F.cross_entropy, reduction="none"),
        (torch.tensor([[1.0, float("nan"), 3.0], [1.0, 2.0, 0.5]]), torch.tensor([0, 1])),
    ),
    Case("cross_entropy_ignore", F.cross_entropy, (T(4, 5), _IGNORED)),
    Case("cross_entropy_ignore_index", partial(F.cross_entropy, ignore_index=2), (T(4, 5), _LABELS)),
    Case("cross_entropy_image", F.cross_entropy, (T(2, 5, 3, 4), _IMAGE_LABELS)),
    Case("cross_entropy_sequence", F.cross_entropy, (T(2, 5, 3), _IMAGE_LABELS[..., 0].contiguous())),
    Case("cross_entropy_one_sample", F.cross_entropy, (T(5), torch.tensor(3))),
    Case("cross_entropy_smoothing", partial(F.cross_entropy, label_smoothing=0.1), (T(4, 5), _IGNORED)),
    Case(
        "cross_entropy_smoothing_weight",
        partial(F.cross_entropy, label_smoothing=0.1),
        (T(4, 5), _IGNORED, T(5, low=0.5, grad=False)),
    ),
    Case("cross_entropy_probabilities", F.cross_entropy, (T(4, 5), T(4, 5, low=0, high=1))),
    *_each_reduction("nll_loss", F.nll_loss, (T(4, 5), _LABELS)),
    Case("nll_loss_weight", F.nll_loss, (T(4, 5), _IGNORED, T(5, low=0.5, grad=False))),
    Case("nll_loss_one_sample", partial(F.nll_loss, reduction="none"), (T(5), torch.tensor(3))),
    Case("nll_loss_image", F.nll_loss, (T(2, 5, 3, 4), _IMAGE_LABELS)),
    Case(
        "log_probabilities_and_loss",
        lambda x, y: (F.nll_loss(p := F.log_softmax(x, dim=-1), y), p),
        (T(4, 5), _LABELS),
    ),
    *_each_reduction("mse_loss", F.mse_loss, (T(3, 4), T(3, 4))),
    Case("mse_loss_broadcast", lambda x, y: F.mse_loss(*torch.broadcast_tensors(x, y)), (T(3, 4), T(4))),
    *_each_reduction("smooth_l1_loss", F.smooth_l1_loss, (T(3, 4), T(3, 4))),
    Case("smooth_l1_loss_beta", partial(F.smooth_l1_loss, beta=0.3), (T(3, 4), T(3, 4))),
    *_each_reduction("huber_loss", F.huber_loss, (T(3, 4), T(3, 4))),
    Case("huber_loss_delta", partial(F.huber_loss, delta=0.3), (T(3, 4), T(3, 4))),
    Case("l1_loss", F.l1_loss, (T(3, 4), T(3, 4))),
    *_each_reduction(
        "binary_cross_entropy", F.binary_cross_entropy, (T(3, 4, **_PROBABILITY), T(3, 4, low=0, high=1))
    ),
    Case(
        "binary_cross_entropy_weight",
        F.binary_cross_entropy,
        (T(3, 4, **_PROBABILITY), T(3, 4, low=0, high=1, grad=False), T(4, low=0.5, grad=False)),
    ),
    Case(
        "binary_cross_entropy_saturated",
        lambda x, y: F.binary_cross_entropy(torch.sigmoid(200 * x), y),
        (T(3, 4), T(3, 4, low=0, high=1, grad=False)),
        random=True,  # float64 saturates elsewhere
    ),
    Case(
        "binary_cross_entropy_gradient_when_saturated",
        partial(F.binary_cross_entropy, reduction="none"),
        (
            torch.tensor([0.0, 0.0, 1.0, 1.0, 1e-13, 1e-20, 1.0, 0.25], requires_grad=True),
            torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.5, 0.5, 1.0]),
        ),
    ),
    Case(
        "binary_cross_entropy_gradient_when_right",
        partial(F.binary_cross_entropy, reduction="none"),
        (torch.tensor([0.0, 1.0, 0.5], requires_grad=True), torch.tensor([0.0, 1.0, 1.0])),
    ),
    Case(
        "kl_div_target_zero",
        partial(F.kl_div, reduction="sum"),
        (T(4), torch.tensor([0.0, 0.5, 0.0, 0.5], requires_grad=True)),
    ),
    Case(
        "binary_cross_entropy_with_logits",
        F.binary_cross_entropy_with_logits,
        (T(3, 4), T(3, 4, low=0, high=1)),
    ),
    Case(
        "binary_cross_entropy_pos_weight",
        lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, pos_weight=w),
        (T(3, 4), T(3, 4, low=0, high=1, grad=False), T(4, low=0.5, grad=False)),
    ),
    Case("kl_div", partial(F.kl_div, reduction="batchmean"), (T(3, 4), T(3, 4, low=0.1, high=1))),
    Case("kl_div_log_target", partial(F.kl_div, reduction="sum", log_target=True), (T(3, 4), T(3, 4))),
    Case("triplet_margin_loss", F.triplet_margin_loss, (T(3, 4), T(3, 4), T(3, 4))),
    Case("soft_margin_loss", lambda x, y: F.soft_margin_loss(x, y.sign()), (T(3, 4), T(3, 4, grad=False))),
    *_each_reduction("multi_margin_loss", F.multi_margin_loss, (T(4, 5), _LABELS)),
    Case(
        "multi_margin_loss_weight",
        lambda x, y, w: F.multi_margin_loss(x, y, 2, 0.5, w),
        (T(4, 5), _LABELS, T(5, low=0.5, grad=False)),
    ),
    Case("multi_margin_loss_one_sample", F.multi_margin_loss, (T(5), torch.tensor(3))),
    *(
        case
        for name, targets in _TARGETS.items()
        for case in _each_reduction(
            f"multilabel_margin_loss_{name}", F.multilabel_margin_loss, (T(2, 4), torch.tensor(targets))
        )
    ),
    Case("multilabel_margin_loss_one_sample", F.multilabel_margin_loss, (T(4), torch.tensor([3, 0, -1, 1]))),
    Case(
        "cosine_embedding_loss", lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(3)), (T(3, 4), T(3, 4))
    ),
]
