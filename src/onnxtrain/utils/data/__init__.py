"""Offers onnxruntime-training's samplers for PyTorch's DataLoader, which balance the load of several processes."""

from __future__ import annotations

# PyTorch is no dependency of the package: it is needed by those who train in PyTorch.
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
