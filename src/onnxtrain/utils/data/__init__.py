"""Load-balancing samplers for PyTorch's DataLoader, source compatible with onnxruntime-training."""

from __future__ import annotations

# First of all imports: where PyTorch is missing, the error then says what to install.
import onnxtrain._pytorch  # noqa: F401  # isort: skip

from onnxtrain.utils.data.sampler import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"]
