"""Gives parameters their own learning rates, as factors of the optimizer's rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ._base import Optimizer, ParameterGroup
from ._plan import parameter_settings


def with_learning_rate_scales(optimizer: Optimizer, scales: Mapping[str, float]) -> Optimizer:
    """Returns an optimizer that multiplies the learning rates of some parameters, also those set by its groups.

    Args:
        optimizer: the optimizer.
        scales: factor by name of parameter, for all trained parameters of the model; empty to change nothing.

    Raises:
        GraphBuildError: a group of the optimizer matches no parameter.

    >>> from onnxtrain.optimizers import SGD
    >>> optimizer = SGD(groups=(ParameterGroup("b", learning_rate_scale=2.0),))
    >>> [group.learning_rate_scale for group in with_learning_rate_scales(optimizer, {"a": 0.5, "b": 0.5}).groups]
    [2.0, 0.5, 1.0]
    """
    if not scales:
        return optimizer
    products = {
        name: scale * scales[name] for name, (_, scale) in parameter_settings(optimizer, list(scales)).items()
    }
    groups = [
        ParameterGroup([name for name in products if products[name] == scale], learning_rate_scale=scale)
        for scale in dict.fromkeys(products.values())
    ]
    # Of several groups, the last one with a setting decides.
    return dataclasses.replace(optimizer, groups=(*optimizer.groups, *groups))
