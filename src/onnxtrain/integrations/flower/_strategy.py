"""Wraps a Flower strategy: updates that cannot be right are refused, and named, before the strategy sees them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from onnxtrain.errors import InputError
from onnxtrain.integrations.flower._client import FINGERPRINT
from onnxtrain.integrations.flower._exchange import expected_arrays, find_fault
from onnxtrain.runtime.manifest import Manifest

_log = logging.getLogger("onnxtrain.flower")


@dataclass(frozen=True)
class RefusedUpdate:
    """An answer of a client that was left out.

    Attributes:
        round: number of the round, from 1.
        node: Flower's number of the client.
        stage: "train" or "evaluate".
        reason: what was wrong with it, e.g. "'fc.weight' holds NaN or infinity in 3 of 640 elements".
    """

    round: int
    node: int
    stage: str
    reason: str


class CheckedStrategy(Strategy):
    """A Flower strategy that refuses updates with wrong names, shapes or dtypes, NaN, or counts that cannot be.

    `strategy` may be any of Flower's, e.g. `FedAvg()`, `FedAdam()`, or a wrapper for differential privacy. It does not
    protect against updates that look like others: for these use one of Flower's robust strategies, e.g. `Krum()`.

    Args:
        strategy: the strategy that averages.
        manifest: manifest of the model, `Module.manifest`.
        weighted_by: name of the metric that holds a client's weight.
        max_examples: largest weight that a client may claim; by default there is no limit.

    Attributes:
        refused: the updates that were left out so far.
    """

    def __init__(
        self,
        strategy: Strategy,
        manifest: Manifest,
        *,
        weighted_by: str = "num-examples",
        max_examples: int | None = None,
    ) -> None:
        if not isinstance(strategy, Strategy):
            raise InputError(
                "CheckedStrategy: expected a strategy of flwr.serverapp.strategy, e.g. FedAvg(), received "
                f"{type(strategy).__name__}."
            )
        self.strategy = strategy
        self.refused: list[RefusedUpdate] = []
        self._expected = expected_arrays(manifest)
        self._fingerprint = manifest.fingerprint
        self._weighted_by = weighted_by
        self._max_examples = math.inf if max_examples is None else max_examples

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Does what the strategy does, and tells the clients which model it is."""
        # The strategy sends this config as it is.
        config[FINGERPRINT] = self._fingerprint
        return self.strategy.configure_train(server_round, arrays, config, grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Does what the strategy does, and tells the clients which model it is."""
        config[FINGERPRINT] = self._fingerprint
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Averages the updates that are right; (None, None) if none is."""
        kept = self._kept(server_round, replies, "train", self._fault_of_update)
        # Not every strategy bears a round without any answer.
        if not any(not message.has_error() for message in kept):
            return None, None
        arrays, metrics = self.strategy.aggregate_train(server_round, kept)
        return (None if arrays is None else self._in_own_dtypes(arrays)), metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Averages the metrics of the clients that have samples for evaluation; None if none has."""
        kept = self._kept(server_round, replies, "evaluate", self._fault_of_metrics)
        # A client without samples says so by the weight 0, and has no metrics.
        kept = [m for m in kept if m.has_error() or self._metrics(m)[self._weighted_by] != 0]
        if not any(not message.has_error() for message in kept):
            return None
        return self.strategy.aggregate_evaluate(server_round, kept)

    def summary(self) -> None:
        """Logs the settings of the strategy."""
        self.strategy.summary()

    def _in_own_dtypes(self, arrays: ArrayRecord) -> ArrayRecord:
        """Returns the averages in the dtypes of the model."""
        # Some of Flower's strategies (1.42), e.g. FedAdam, compute them in float64.
        return ArrayRecord(
            {
                name: FlowerArray(array.numpy().astype(self._expected[name].dtype, copy=False))
                for name, array in arrays.items()
            }
        )

    def _kept(
        self, server_round: int, replies: Iterable[Message], stage: str, find: Callable[[Message], str | None]
    ) -> list[Message]:
        """Returns the answers in which `find` finds no fault; answers that say an error are the strategy's affair."""
        kept = []
        for message in replies:
            reason = None if message.has_error() else find(message)
            if reason is None:
                kept.append(message)
                continue
            # Kept for the caller as well as logged: a log is not read by programs.
            refused = RefusedUpdate(server_round, message.metadata.src_node_id, stage, reason)
            self.refused.append(refused)
            _log.warning("Round %d: refused the answer of client %d: %s", server_round, refused.node, reason)
        return kept

    def _fault_of_update(self, message: Message) -> str | None:
        """Describes what is wrong with an update; None if nothing is."""
        records = list(message.content.array_records.values())
        if len(records) != 1:
            return f"it holds {len(records)} records of arrays, expected one"
        # The arrays come as bytes, which need not be those of an array.
        try:
            arrays = {name: array.numpy() for name, array in records[0].items()}
        except Exception as error:
            return f"its arrays cannot be read ({type(error).__name__}: {error})"
        return self._fault_of_metrics(message) or find_fault(arrays, self._expected)

    def _fault_of_metrics(self, message: Message) -> str | None:
        """Describes what is wrong with the fingerprint, the weight or a metric of an answer; None if nothing is."""
        for config in message.content.config_records.values():
            if config.get(FINGERPRINT, self._fingerprint) != self._fingerprint:
                return f"it belongs to another model, with the fingerprint {config[FINGERPRINT]}"
        if len(message.content.metric_records) != 1:
            return f"it holds {len(message.content.metric_records)} records of metrics, expected one"
        # The weight decides how much an update counts: an infinite or a negative one takes the average over.
        metrics = self._metrics(message)
        weight = metrics.get(self._weighted_by)
        least = 0 if not message.content.array_records else 1
        if (
            not isinstance(weight, int | float)
            or not least <= weight <= self._max_examples
            or math.isinf(weight)
        ):
            return f"its '{self._weighted_by}' is {weight!r}, expected {least} to {self._max_examples:g}"
        # Metrics are averaged, too; Flower's records hold numbers and lists of numbers.
        for name, value in metrics.items():
            numbers = value if isinstance(value, list) else [value]
            if not all(math.isfinite(number) for number in numbers):
                return f"its metric '{name}' is {value}"
        return None

    @staticmethod
    def _metrics(message: Message) -> MetricRecord:
        return next(iter(message.content.metric_records.values()))
