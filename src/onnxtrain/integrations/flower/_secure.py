"""Creates clients for Flower's secure aggregation, which uses the older of Flower's two client APIs (Flower 1.42)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, Context
from flwr.client import Client, NumPyClient

from onnxtrain.errors import InputError
from onnxtrain.integrations.flower._exchange import apply_arrays, trained_arrays
from onnxtrain.integrations.flower._work import ClientData, Metric, Settings, Work
from onnxtrain.runtime.dtypes import Array


def secure_client(
    artifacts: str | os.PathLike[str],
    data: Callable[[Context], ClientData],
    *,
    epochs: int = 1,
    batch_size: int = 32,
    learning_rate: float | None = None,
    seed: int = 0,
    metrics: Mapping[str, Metric] | None = None,
) -> Callable[[Context], Client]:
    """Returns a client function for secure aggregation, for `ClientApp(client_fn=..., mods=[secaggplus_mod])`.

    With secure aggregation (SecAgg+, Bell et al. 2020), the server only sees the sum of the updates. Therefore it
    cannot check individual updates, and `CheckedStrategy` doesn't apply. Flower clips and quantizes the values before
    it sums them: set `clipping_range` of `SecAggPlusWorkflow` above the largest absolute value of any parameter.

    Args:
        artifacts: see `client_app`.
        data: see `client_app`.
        epochs: number of epochs per round.
        batch_size: number of samples per step.
        learning_rate: learning rate. Default: the learning rate in the artifacts' checkpoint, if any, else 1e-3.
        seed: seed for the sample order, combined with the client's number. The order is the same in each round.
        metrics: additional evaluation metrics by name; see `client_app`.

    Raises:
        InputError: a setting is out of range.
    """
    settings = Settings(epochs=epochs, batch_size=batch_size, learning_rate=learning_rate)

    def client(context: Context) -> Client:
        # Flower creates a new client for every message.
        number = int(context.node_config.get("partition-id", context.node_id))
        return _SecureClient(
            artifacts, data(context), settings, (seed, number % 2**63), metrics or {}
        ).to_client()

    return client


class _SecureClient(NumPyClient):
    """A Flower client that trains and evaluates the model of a directory of artifacts.

    The arrays that it exchanges are the trainable parameters, then the running statistics, in the model's order.
    """

    def __init__(
        self,
        artifacts: str | os.PathLike[str],
        data: ClientData,
        settings: Settings,
        seed: Sequence[int],
        metrics: Mapping[str, Metric],
    ) -> None:
        self._work = Work(artifacts)
        self._data, self._settings, self._seed, self._metrics = data, settings, seed, metrics

    def get_parameters(self, config: Mapping[str, Any]) -> list[Array]:
        return [array.numpy() for array in trained_arrays(self._work.state).values()]

    def fit(
        self, parameters: Sequence[Array], config: Mapping[str, Any]
    ) -> tuple[list[Array], int, dict[str, Any]]:
        # The round is unknown here, so the order of samples is the same in each round.
        self._apply(parameters)
        loss = self._work.train(self._data.train, self._settings, self._seed)
        return self.get_parameters({}), len(self._data.train[0]), {"loss": loss}

    def evaluate(
        self, parameters: Sequence[Array], config: Mapping[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        self._apply(parameters)
        # Flower weights by the count: a client without evaluation samples is excluded from the mean.
        if not self._data.evaluation or not len(self._data.evaluation[0]):
            return 0.0, 0, {}
        count, values = self._work.evaluate(self._data.evaluation, self._settings.batch_size, self._metrics)
        # In this API, the loss is separate from the metrics.
        return values.pop("loss"), count, values

    def _apply(self, parameters: Sequence[Array]) -> None:
        """Writes the server's arrays into the state.

        Raises:
            InputError: the arrays do not match the model.
        """
        present = trained_arrays(self._work.state)
        if len(parameters) != len(present):
            raise InputError(
                f"Reading a message from the server: it holds {len(parameters)} arrays, but this client trains "
                f"{len(present)}. Server and clients must hold the same artifacts."
            )
        # Secure aggregation returns sums as float64.
        arrays = [
            FlowerArray(array.astype(own.numpy().dtype, copy=False))
            for array, own in zip(parameters, present.values(), strict=True)
        ]
        apply_arrays(self._work.state, ArrayRecord(dict(zip(present, arrays, strict=True))))
