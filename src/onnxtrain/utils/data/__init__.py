"""Offers the samplers of onnxruntime-training for PyTorch's DataLoader."""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "importing onnxtrain.utils.data: PyTorch is not installed; pip install 'onnxtrain[torch]'",
        name="torch",
    ) from error

from onnxtrain.utils.data.sampler import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"]
