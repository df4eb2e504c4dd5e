"""Normalisations and softmax."""

from functools import partial

import torch
import torch.nn.functional as F

from ortmodule.aten_case import Case, T


def _batch_norm_training(x, mean, var, weight=None, bias=None, momentum=0.1):
    """Also returns the running statistics, which it updates."""
    mean, var = mean.clone(), var.clone()
    y = F.batch_norm(x, mean, var, weight, bias, training=True, momentum=momentum)
    return y, mean, var


def _statistics(channels):
    return T(channels, grad=False), T(channels, low=0.5, high=2, grad=False)


CASES = [
    Case("batch_norm_training", _batch_norm_training, (T(4, 3, 5, 5), *_statistics(3), T(3), T(3))),
    Case("batch_norm_training_2d", _batch_norm_training, (T(6, 3), *_statistics(3), T(3), T(3))),
    Case("batch_norm_training_1d", _batch_norm_training, (T(4, 3, 5), *_statistics(3), T(3), T(3))),
    Case("batch_norm_training_3d", _batch_norm_training, (T(2, 3, 2, 3, 4), *_statistics(3), T(3), T(3))),
    Case(
        "batch_norm_training_momentum",
        partial(_batch_norm_training, momentum=0.7),
        (T(4, 3, 5), *_statistics(3)),
    ),
    Case(
        "batch_norm_no_statistics",
        partial(F.batch_norm, running_mean=None, running_var=None, training=True),
        (T(4, 3, 5),),
    ),
    Case("batch_norm_eval", F.batch_norm, (T(4, 3, 5, 5), *_statistics(3), T(3), T(3))),
    Case("batch_norm_eval_2d", F.batch_norm, (T(4, 3), *_statistics(3))),
    Case("layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b), (T(2, 3, 4), T(4), T(4))),
    Case(
        "layer_norm_two_axes", lambda x, w, b: F.layer_norm(x, (3, 4), w, b), (T(2, 3, 4), T(3, 4), T(3, 4))
    ),
    Case("layer_norm_plain", lambda x: F.layer_norm(x, (x.shape[-1],)), (T(2, 3, 4),)),
    Case("layer_norm_without_bias", lambda x, w: F.layer_norm(x, (4,), w), (T(2, 3, 4), T(4))),
    Case("group_norm", partial(F.group_norm), (T(2, 6, 4, 3), 3, T(6), T(6))),
    Case("group_norm_plain", F.group_norm, (T(2, 6, 5), 2)),
    Case("group_norm_far_from_zero", lambda x: F.group_norm(x + 100, 2), (T(2, 6, 32),)),
    Case("group_norm_2d", F.group_norm, (T(5, 6), 2, T(6), T(6))),
    Case("instance_norm", lambda x, w, b: F.instance_norm(x, weight=w, bias=b), (T(2, 3, 5, 4), T(3), T(3))),
    Case("rms_norm", lambda x, w: F.rms_norm(x, (4,), w), (T(2, 3, 4), T(4))),
    Case("softmax", partial(F.softmax, dim=-1), (T(2, 3, 4),)),
    Case("softmax_middle", partial(F.softmax, dim=1), (T(2, 3, 4),)),
    Case("softmax_scalar", partial(torch.softmax, dim=0), (T(),)),
    Case("log_softmax", partial(F.log_softmax, dim=1), (T(2, 3, 4),)),
    Case("softmin", partial(F.softmin, dim=0), (T(3, 4),)),
]
