"""Implements per-sample differential privacy (DP-SGD), which clips each sample's gradient and adds noise.

Abadi et al. 2016, "Deep Learning with Differential Privacy". Uses the accountant of Google's dp-accounting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxtrain.api import CheckpointState, Module
from onnxtrain.errors import DivergenceError, InputError, MissingPackageError
from onnxtrain.runtime.dtypes import Array


@dataclass(frozen=True)
class SamplePrivacy:
    """Settings of DP-SGD for `client_app(..., privacy=...)`.

    Attributes:
        noise_multiplier: standard deviation of the noise as a multiple of `clip_norm`, e.g. 1.1; more noise gives more
            privacy.
        clip_norm: maximum norm of a single sample's gradient, over all parameters, e.g. 1.0.
        delta: probability that the guarantee fails, e.g. 1e-5; choose a value below 1 / number of samples.
        max_epsilon: maximum epsilon that a client spends over all rounds of a Flower run, e.g. 10.0. The client does
            not train in a round that would exceed it. `math.inf` for no limit.
    """

    noise_multiplier: float
    clip_norm: float
    delta: float = 1e-5
    max_epsilon: float = 10.0

    def __post_init__(self) -> None:
        for name in ("noise_multiplier", "clip_norm", "delta"):
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0 or (name == "delta" and value >= 1):
                allowed = "between 0 and 1" if name == "delta" else "positive"
                raise InputError(f"SamplePrivacy: {name} must be {allowed}, received {value!r}.")
        if not self.max_epsilon > 0:
            raise InputError(f"SamplePrivacy: max_epsilon must be positive, received {self.max_epsilon!r}.")


def check_private(module: Module) -> None:
    """Raises InputError if the model mixes the samples of a batch, or has gradients that cannot be clipped."""
    # Running statistics would also leak information about the samples without noise.
    manifest = module.manifest
    if manifest.statistics:
        raise InputError(
            "Training with SamplePrivacy: the model has BatchNorm layers, which mix the samples of a batch, so that "
            "there is no gradient of one sample. Use GroupNorm or LayerNorm, or freeze the BatchNorm layers."
        )
    if manifest.sparse:
        raise InputError(
            "Training with SamplePrivacy: the gradient of "
            f"'{manifest.sparse[0].name}' is sparse, and noise on its rows alone would reveal which rows are used. "
            "Generate the artifacts without SparseAdam."
        )
    narrow = [spec for spec in manifest.trainable if spec.dtype.name not in ("float32", "float64")]
    if narrow:
        raise InputError(
            f"Training with SamplePrivacy: '{narrow[0].name}' is {narrow[0].dtype.name}, in which small noise is "
            "rounded away. Train a float32 model."
        )


def private_step(
    module: Module,
    state: CheckpointState,
    data: Sequence[Array],
    rows: Array,
    expected_size: int,
    privacy: SamplePrivacy,
    random: np.random.Generator,
) -> tuple[float, float]:
    """Computes the private gradient of a batch, and writes it to the gradient buffers that the optimizer reads.

    Args:
        module: module in training mode.
        state: the module's state.
        data: one array per argument of the module, with all samples.
        rows: indices of the batch's samples, e.g. [3, 17]; may be empty.
        expected_size: expected number of samples per batch; the sum of the gradients is divided by it.
        privacy: clipping norm and noise.
        random: random number generator for the noise.

    Returns:
        The mean loss of the samples, and their number; (0, 0) if there are none.

    Raises:
        DivergenceError: the gradient of a sample is NaN or infinite.
    """
    names = [spec.name for spec in module.manifest.trainable]
    # In float64, because a float32 sum of hundreds of clipped gradients loses precision.
    sums = {name: np.zeros(state.parameters[name].data.shape, np.float64) for name in names}
    losses = []
    for row in rows:
        # With a batch of one, the gradient is the sample's.
        losses.append(_run_sample(module, data, int(row)))
        gradients = {name: _gradient(state, name).astype(np.float64) for name in names}
        norm = math.sqrt(sum(float(np.vdot(g, g)) for g in gradients.values()))
        # A NaN gradient cannot be clipped, so it must not be added at any scale.
        if not math.isfinite(norm):
            raise DivergenceError(
                f"Training with SamplePrivacy: the gradient of a sample has the norm {norm}. Lower the learning rate."
            )
        # One norm over all parameters, because the bound is for the whole gradient of a sample.
        scale = min(1.0, privacy.clip_norm / norm) if norm else 1.0
        for name, gradient in gradients.items():
            sums[name] += scale * gradient
    # The optimizer requires a preceding training step. This sample leaves no trace: its gradients are overwritten.
    if not losses:
        _run_sample(module, data, 0)
    # Divided by the expected size, because the actual size is itself a property of the data.
    for name, total in sums.items():
        noise = random.normal(0.0, privacy.noise_multiplier * privacy.clip_norm, total.shape)
        _gradient(state, name)[...] = (total + noise) / expected_size
    return (float(np.mean(losses)) if losses else 0.0), float(len(losses))


def loss_of(results: object) -> float:
    """Extracts the loss, the first output, from the result of a module call."""
    return float(results[0] if isinstance(results, tuple) else results)  # type: ignore[arg-type]


def _run_sample(module: Module, data: Sequence[Array], row: int) -> float:
    """Computes the gradients of the sample at index `row`; returns its loss."""
    module.lazy_reset_grad()
    return loss_of(module(*(array[row : row + 1] for array in data)))


def _gradient(state: CheckpointState, name: str) -> Array:
    """Returns the gradient of a trainable parameter, as a writable view."""
    gradient = state.parameters[name].grad
    assert gradient is not None
    return gradient


def spent_epsilon(steps: int, sampling_rate: float, noise_multiplier: float, delta: float) -> float:
    """Returns the epsilon of (epsilon, delta)-differential privacy spent by a number of DP-SGD steps.

    Computed with dp-accounting's Rényi accountant for the subsampled Gaussian mechanism (Mironov et al. 2019).

    Args:
        steps: number of optimizer steps over all rounds, e.g. 1000.
        sampling_rate: probability that a batch contains a given sample: batch size / number of samples.
        noise_multiplier: as in `SamplePrivacy`.
        delta: as in `SamplePrivacy`.

    Raises:
        MissingPackageError: dp-accounting is not installed.
    """
    try:
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
        from dp_accounting.rdp import RdpAccountant
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "spent_epsilon needs dp-accounting, which is not installed: pip install 'onnxtrain[flower]'"
        ) from error
    if steps == 0:
        return 0.0
    # Steps compose: the accountant adds their Rényi divergences before converting to epsilon.
    accountant = RdpAccountant()
    event = PoissonSampledDpEvent(sampling_rate, GaussianDpEvent(noise_multiplier))
    accountant.compose(SelfComposedDpEvent(event, steps))
    return float(accountant.get_epsilon(delta))
