"""Converts a loss of `torch.nn` to the loss of the same name, without importing PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ._base import Loss

# Its distance is a function of PyTorch tensors, which is traced.
_TRACED = frozenset({"TripletMarginWithDistanceLoss"})


def of_criterion(value: object, kinds: Mapping[str, type[Loss]]) -> Loss | None:
    """Returns the loss with the settings of a loss of `torch.nn`, e.g. of `nn.CrossEntropyLoss(label_smoothing=0.1)`.

    Args:
        value: any object.
        kinds: classes of losses by name.

    Returns:
        The loss; None if `value` is not an object of such a class, but e.g. of a subclass.
    """
    kind = kinds.get(type(value).__name__)
    if kind is None or type(value).__module__ != "torch.nn.modules.loss" or kind.__name__ in _TRACED:
        return None
    settings: dict[str, Any] = {}
    for field in fields(kind):
        if hasattr(value, field.name):
            setting = getattr(value, field.name)
            # A tensor of weights.
            settings[field.name] = setting.detach().cpu().numpy() if hasattr(setting, "detach") else setting
    if kind.__name__ == "CTCLoss":
        settings["batch_first"] = False
    return kind(**settings)
