"""Defines `torch_metric`, which makes a metric of a function of PyTorch tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from onnxtrain.errors import InputError
from onnxtrain.runtime.dtypes import Array
from onnxtrain.trainer._metrics.metrics import Metric
from onnxtrain.trainer._optional import optional


def torch_metric(
    function: Callable[..., Any], *, name: str | None = None, higher_is_better: bool | None = None
) -> Metric:
    """Returns a metric that is a function of PyTorch tensors, e.g. of `torchmetrics.functional`.

    It is called once per evaluation, with the predictions and the targets of the whole data set. Arguments in another
    order, or settings, take a lambda: `lambda scores, y: F.cross_entropy(scores, y, weight=weight)`.

    Args:
        function: `(prediction, target) -> number`, or an object such as `torchmetrics.AUROC(...)`; its `reset` method
            is called first, if it has one.
        name: key in the history, e.g. "auroc". Default: the name of the function.
        higher_is_better: True if higher values are better; None if unknown. Callbacks use it to compare epochs.

    Raises:
        InputError: `function` cannot be called, or has no name and `name` is None.

    Example:
        >>> import numpy as np
        >>> from onnxtrain.trainer import torch_metric
        >>> metric = torch_metric(lambda scores, y: (scores.argmax(1) == y).float().mean(), name="accuracy")
        >>> metric.function(np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([1, 1]))
        0.5
    """
    if not callable(function):
        raise InputError(
            f"torch_metric: received {type(function).__name__}; pass a function (prediction, target)."
        )
    inner = function.func if isinstance(function, partial) else function
    key: str = name or getattr(inner, "__name__", None) or type(inner).__name__
    if key == "<lambda>":
        raise InputError("torch_metric: a lambda has no name; pass name=, the key in the history.")
    return Metric(key, function=partial(_computed, function, key), higher_is_better=higher_is_better)


def _computed(function: Callable[..., Any], name: str, prediction: Array, target: Array) -> float:
    """Calls a function with tensors; returns its result as a Python number."""
    torch = optional("torch", f"The metric '{name}'", "'onnxtrain[torch]'")
    if hasattr(function, "reset"):
        function.reset()
    with torch.no_grad():
        # Copied, because a function may write to its arguments, and arrays may be read-only.
        result = function(torch.from_numpy(prediction.copy()), torch.from_numpy(target.copy()))
    number = np.asarray(result.detach().cpu().numpy() if isinstance(result, torch.Tensor) else result)
    if number.size != 1 or number.dtype.kind not in "fiub":
        raise InputError(f"The metric '{name}' returned {result!r}; it must return one number.")
    return float(number.item())
