"""Defines layer normalization with and without a learned scale and bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

__all__ = ["LayerNorm", "LayerNormNoBias"]


class LayerNorm(nn.LayerNorm):
    """Layer normalization: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last axes.

    Ba, Kiros and Hinton, "Layer Normalization", 2016.

    Args:
        input_size: size of the last axis of the input, or sizes of the last axes, which are normalized.
        **kwargs: arguments of `torch.nn.LayerNorm`: `eps`, `elementwise_affine`, `bias`, `device`, `dtype`.

    Example:
        >>> list(LayerNorm(4).state_dict())
        ['weight', 'bias']
    """

    def __init__(self, input_size: int | Sequence[int], **kwargs: Any) -> None:
        super().__init__(input_size, **kwargs)


class LayerNormNoBias(nn.LayerNorm):
    """Layer normalization without parameters: y = (x - mean(x)) / sqrt(var(x) + eps) over the last axes.

    Args:
        input_size: size of the last axis of the input, or sizes of the last axes, which are normalized.
        **kwargs: arguments of `torch.nn.LayerNorm` other than `elementwise_affine`, which is always False.

    Example:
        >>> list(LayerNormNoBias(4).state_dict())
        []
    """

    def __init__(self, input_size: int | Sequence[int], **kwargs: Any) -> None:
        super().__init__(input_size, elementwise_affine=False, **kwargs)
