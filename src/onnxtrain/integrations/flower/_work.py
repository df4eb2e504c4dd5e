"""Trains and evaluates with artifacts on the data of one client."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.errors import CheckpointError, DivergenceError, InputError
from onnxtrain.integrations.flower._privacy import SamplePrivacy, check_private, loss_of, private_step
from onnxtrain.runtime.artifact_folder import MANIFEST, find_manifest
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.json_text import parse_json

Metric = Callable[[Sequence[Array], Sequence[Array]], float]
"""Function `(outputs, targets) -> value`.

`outputs` are the model's outputs except the loss, `targets` the targets; both are arrays for all samples.
"""


@dataclass(frozen=True)
class ClientData:
    """The samples of one client.

    Attributes:
        train: arrays for training, in the order of `Module.input_names()`: inputs, then targets, e.g. `(x, labels)`.
            Axis 0 is the batch axis.
        evaluation: arrays for evaluation in the same order; empty if this client does not evaluate.
    """

    train: Sequence[Array]
    evaluation: Sequence[Array] = ()


@dataclass(frozen=True)
class Settings:
    """Training settings of a client; the server may override them for a round, see `client_app`.

    Attributes:
        epochs: number of epochs per round, e.g. 1.
        batch_size: number of samples per step, e.g. 32.
        learning_rate: learning rate, e.g. 0.1; None for the learning rate in the checkpoint.
    """

    epochs: int = 1
    batch_size: int = 32
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        _require_integers("Training a client", epochs=self.epochs, batch_size=self.batch_size)
        if self.learning_rate is not None:
            _require_number("Training a client", "learning_rate", self.learning_rate)

    def steps(self, count: int) -> int:
        """Returns the number of optimizer steps that a round of DP-SGD on `count` samples takes."""
        return self.epochs * private_batches(count, self.batch_size)


def private_batches(count: int, batch_size: int) -> int:
    """Returns the number of batches per epoch if batches are drawn by Poisson sampling."""
    return max(1, round(count / batch_size))


@dataclass(frozen=True)
class Limits:
    """Maximum values that a server may set for a client in a round, for `client_app(..., limits=...)`.

    A server may always use the client's own settings, or lower values.

    Attributes:
        epochs: number of epochs per round, e.g. 50.
        batch_size: number of samples per step, e.g. 1024, which bounds the memory of a step.
        learning_rate: learning rate, e.g. 10.0.

    Raises:
        InputError: a value is out of range.
    """

    epochs: int = 50
    batch_size: int = 1024
    learning_rate: float = 10.0

    def __post_init__(self) -> None:
        _require_integers("Limits", epochs=self.epochs, batch_size=self.batch_size)
        _require_number("Limits", "learning_rate", self.learning_rate)


def _require_integers(doing: str, **values: object) -> None:
    """Raises InputError unless all values are positive integers."""
    for name, value in values.items():
        # True is an integer for isinstance, and 0 epochs would train nothing.
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{doing}: {name} must be a positive integer, received {value!r}.")


def _require_number(doing: str, name: str, value: object) -> None:
    """Raises InputError unless a value is a finite, non-negative number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise InputError(f"{doing}: {name} must be a finite number >= 0, received {value!r}.")


def asked_settings(own: Settings, config: Mapping[str, Any], limits: Limits | None = None) -> Settings:
    """Returns the settings for a round: the client's own settings, overridden by the server's.

    Args:
        own: the client's own settings.
        config: the server's settings, e.g. `{"epochs": 2, "learning-rate": 0.1}`; unknown keys are ignored.
        limits: maximum values that the server may set; None for no limits.

    Raises:
        InputError: a value is not a number, or exceeds its limit.
    """
    names = {"epochs": "epochs", "batch_size": "batch-size", "learning_rate": "learning-rate"}
    sent = {name: config[key] for name, key in names.items() if key in config}
    # The dataclass validates the values.
    asked = replace(own, **sent)
    for name in sent if limits is not None else ():
        value, most = getattr(asked, name), max(getattr(limits, name), getattr(own, name) or 0)
        if value > most:
            raise InputError(
                f"Training a client: the server asks for {names[name]} {value}, but this client accepts at most "
                f"{most}. Raise the limit on the client, client_app(..., limits=Limits({name}=...)), or ask for less."
            )
    return asked


def manifest_files(artifacts: str | os.PathLike[str]) -> dict[str, Path]:
    """Returns the files of a directory of artifacts by role, e.g. "training_model".

    Raises:
        CheckpointError: the directory contains no artifacts, or several with different prefixes.
    """
    folder = Path(artifacts)
    manifest = find_manifest(folder) or MANIFEST
    # A truncated or handwritten manifest may contain any JSON.
    try:
        files = parse_json((folder / manifest).read_bytes())["files"]
        named = {role: name for role, name in files.items() if name is not None}
        # Artifacts from a stranger must not refer to files outside of their directory.
        wrong = [name for name in named.values() if name in ("", ".", "..") or Path(name).name != name]
        if wrong or not {"checkpoint", "training_model"} <= named.keys():
            raise ValueError(f"files {files}")
        return {role: folder / name for role, name in named.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"Reading artifacts: '{folder}' is not a directory written by generate_artifacts "
            f"({type(error).__name__}: {error})."
        ) from error


class Work:
    """Loads the model of a client or of the server from artifacts, and trains and evaluates it.

    Args:
        artifacts: directory written by `generate_artifacts`.
        trains: False for the server, which only evaluates.

    Attributes:
        state: parameters and statistics.
        module: module that uses `state`.
    """

    def __init__(self, artifacts: str | os.PathLike[str], *, trains: bool = True) -> None:
        files = manifest_files(artifacts)
        # Loaded for each round: frozen parameters come from the checkpoint, trained parameters from the message.
        self.state = CheckpointState.load_checkpoint(files["checkpoint"])
        self.module = Module(
            str(files["training_model"]),
            self.state,
            str(files["eval_model"]) if "eval_model" in files else None,
            # `train` checks the losses: that of a batch whose labels are all ignored is 0/0.
            error_if_nonfinite=False,
        )
        self._optimizer_file = files.get("optimizer_model")
        if trains and self._optimizer_file is None:
            raise InputError(
                f"Training '{os.fspath(artifacts)}': it has no optimizer. Generate the artifacts with optimizer=..."
            )

    def train(
        self,
        data: Sequence[Array],
        settings: Settings,
        seed: Sequence[int],
        privacy: SamplePrivacy | None = None,
    ) -> float:
        """Trains for some epochs with a new optimizer.

        Args:
            data: arrays of the samples.
            settings: epochs, batch size, learning rate.
            seed: seed for the sample order; not used with `privacy`.
            privacy: clips the gradient of each sample, and adds noise.

        Returns:
            The mean loss of the last epoch; NaN if all its labels are ignored.

        Raises:
            InputError: the arrays do not match the model.
            DivergenceError: the loss is NaN or infinite.
        """
        count = self.count(data)
        if privacy is not None:
            check_private(self.module)
        # The optimizer state starts anew in each round, because the server averages only parameters.
        optimizer = Optimizer(str(self._optimizer_file), self.module)
        if settings.learning_rate is not None:
            optimizer.set_learning_rate(settings.learning_rate)
        # Noise and batches that others could reproduce would hide nothing, so they are seeded with the system's
        # entropy.
        random = np.random.default_rng(seed if privacy is None else None)
        steps = 0
        self.module.train()
        mean = float("nan")
        for _ in range(settings.epochs):
            total = weight = 0.0
            draw = _shuffled if privacy is None else _poisson
            batches = draw(count, settings.batch_size, random)
            for rows in batches:
                if privacy is None:
                    loss, counted = self._loss([array[rows] for array in data])
                else:
                    size = min(settings.batch_size, count)
                    loss, counted = private_step(self.module, self.state, data, rows, size, privacy, random)
                # If all labels of a batch are ignored, its loss is 0/0 and its gradient zero.
                if counted and not np.isfinite(loss):
                    raise DivergenceError(
                        f"Training a client: the loss of step {steps + 1} is {loss}. Lower the learning rate."
                    )
                optimizer.step()
                self.module.lazy_reset_grad()
                total += loss * counted if counted else 0.0
                weight += counted
                steps += 1
            mean = self._over_all(total, weight)
        return mean

    def evaluate(
        self, data: Sequence[Array], batch_size: int, metrics: Mapping[str, Metric]
    ) -> tuple[int, dict[str, float]]:
        """Computes the loss and the metrics over all samples.

        Returns:
            The number of samples, and the values by name, e.g. {"loss": 0.7, "accuracy": 0.9}.
        """
        count = self.count(data)
        targets = len(self.module.manifest.targets)
        total = weight = 0.0
        collected: list[list[Array]] = []
        self.module.eval()
        for start in range(0, count, batch_size):
            batch = [array[start : start + batch_size] for array in data]
            results = self.module(*batch)
            outputs = list(results) if isinstance(results, tuple) else [results]
            counted = self._weight(batch)
            # If all labels of a batch are ignored, its loss is 0/0.
            total += float(outputs[0]) * counted if counted else 0.0
            weight += counted
            # Metrics get all samples at once: a median or an AUROC is not a mean over batches.
            if metrics:
                collected.append(outputs[1:])
        values = {"loss": self._over_all(total, weight)}
        whole = [np.concatenate(parts) for parts in zip(*collected, strict=True)]
        for name, metric in metrics.items():
            values[name] = float(metric(whole, list(data[len(data) - targets :])))
        return count, values

    def _loss(self, batch: Sequence[Array]) -> tuple[float, float]:
        """Computes the gradients of a batch.

        Returns:
            The batch's loss, and the loss's weight in a mean over batches.
        """
        return loss_of(self.module(*batch)), self._weight(batch)

    def _weight(self, batch: Sequence[Array]) -> float:
        """Returns the weight of a batch's loss in the loss over all batches.

        It is 1 if the loss is a sum. For a mean, it is the number of samples or non-ignored labels, or the sum of their
        weights.
        """
        manifest = self.module.manifest
        return 1.0 if manifest.loss_mean is None else manifest.loss_mean.count(manifest.arguments, batch)

    def _over_all(self, total: float, weight: float) -> float:
        """Returns the loss over all batches: a sum if the loss of a batch is a sum, else a weighted mean.

        Args:
            total: sum of the batches' losses, each multiplied by its weight.
            weight: sum of the weights. If it is 0, because all labels are ignored, the mean is NaN.
        """
        if self.module.manifest.loss_mean is None:
            return total
        return total / weight if weight else float("nan")

    def count(self, data: Sequence[Array]) -> int:
        """Returns the number of samples.

        Raises:
            InputError: the number of arrays is wrong, their lengths differ, or they are empty.
        """
        names = self.module.input_names()
        if len(data) != len(names):
            raise InputError(
                f"The data of a client must hold {len(names)} arrays ({', '.join(names)}), received {len(data)}."
            )
        # With different lengths, training would pair the wrong samples, up to the length of the shortest array.
        sizes = {name: len(array) for name, array in zip(names, data, strict=True)}
        if len(set(sizes.values())) != 1 or not next(iter(sizes.values())):
            raise InputError(
                f"The arrays of a client must have the same number of samples, at least one; received {sizes}."
            )
        return len(data[0])


def _shuffled(count: int, batch_size: int, random: np.random.Generator) -> Iterator[Array]:
    """Yields the row indices of each batch of an epoch, in random order; the last batch may be smaller."""
    # Drawn once per epoch, from a generator that is determined by client, round and seed.
    order = random.permutation(count)
    for start in range(0, count, batch_size):
        yield order[start : start + batch_size]


def _poisson(count: int, batch_size: int, random: np.random.Generator) -> Iterator[Array]:
    """Yields the row indices of each batch of an epoch, drawn by Poisson sampling.

    Each batch contains each sample with the same probability. The accountant's epsilon is valid for Poisson sampling,
    not for shuffled batches.
    """
    rate = min(1.0, batch_size / count)
    for _ in range(private_batches(count, batch_size)):
        yield np.flatnonzero(random.random(count) < rate)
