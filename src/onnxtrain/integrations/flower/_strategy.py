"""Wraps a Flower strategy to reject and record invalid updates before the strategy sees them."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from onnxtrain._printable import get_logger, printable
from onnxtrain.errors import InputError
from onnxtrain.integrations.flower._client import FINGERPRINT
from onnxtrain.integrations.flower._exchange import expected_arrays, read_arrays, require_finite
from onnxtrain.runtime.manifest import Manifest

_log = get_logger("onnxtrain.flower")

# Maximum length of a reason, which quotes untrusted input.
_REASON_LENGTH = 500


@dataclass(frozen=True)
class RefusedUpdate:
    """A client's reply that :class:`CheckedStrategy` rejected.

    Attributes:
        round: number of the round, from 1.
        node: the client's node id in Flower.
        stage: "train" or "evaluate".
        reason: why it was rejected, e.g. "'fc.weight' holds NaN or infinity in 3 of 640 elements".
    """

    round: int
    node: int
    stage: str
    reason: str


class CheckedStrategy(Strategy):
    """Wraps a Flower strategy to reject updates with wrong names, shapes or dtypes, NaN, or invalid sample counts.

    `strategy` may be any Flower strategy, e.g. `FedAvg()`, `FedAdam()`, or a wrapper for differential privacy. This
    check does not protect against malicious updates that look valid: for that, use one of Flower's robust strategies,
    e.g. `Krum()`.

    Flower weights each update by the number of samples that the client reports. Two limits apply: an update whose
    weight exceeds `max_examples` is rejected; a weight above `max_ratio` times the round's median, or above the total
    weight of all other clients, is lowered to that limit, with a warning.

    Args:
        strategy: the strategy to wrap, which averages the valid updates.
        manifest: manifest of the model, `Module.manifest`.
        weighted_by: name of the metric with a client's weight, which must be a whole number.
        max_examples: maximum weight that a client may claim, e.g. 10000. Default: no limit.
        max_ratio: maximum weight of an update as a multiple of the median weight of the round, e.g. 10.0; `math.inf`
            disables both relative limits.

    Attributes:
        refused: the clients' replies that have been rejected so far.

    Raises:
        InputError: `strategy` is not a Flower strategy, or a limit is out of range.
    """

    def __init__(
        self,
        strategy: Strategy,
        manifest: Manifest,
        *,
        weighted_by: str = "num-examples",
        max_examples: int | None = None,
        max_ratio: float = 10.0,
    ) -> None:
        if not isinstance(strategy, Strategy):
            raise InputError(
                "CheckedStrategy: expected a strategy of flwr.serverapp.strategy, e.g. FedAvg(), received "
                f"{type(strategy).__name__}."
            )
        if max_examples is not None and (
            isinstance(max_examples, bool) or not isinstance(max_examples, int) or max_examples < 1
        ):
            raise InputError(
                f"CheckedStrategy: max_examples must be a positive integer or None, received {max_examples!r}."
            )
        if isinstance(max_ratio, bool) or not isinstance(max_ratio, int | float) or not max_ratio >= 1:
            raise InputError(f"CheckedStrategy: max_ratio must be a number >= 1, received {max_ratio!r}.")
        self.strategy = strategy
        self.refused: list[RefusedUpdate] = []
        self._expected = expected_arrays(manifest)
        self._fingerprint = manifest.fingerprint
        self._weighted_by = weighted_by
        self._max_examples = math.inf if max_examples is None else max_examples
        self._max_ratio = max_ratio

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Configures training with the wrapped strategy, and sends the model's fingerprint to the clients."""
        # The strategy passes this config on unchanged.
        config[FINGERPRINT] = self._fingerprint
        return self.strategy.configure_train(server_round, arrays, config, grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Configures evaluation with the wrapped strategy, and sends the model's fingerprint to the clients."""
        config[FINGERPRINT] = self._fingerprint
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Averages the valid updates.

        Returns:
            The average and the metrics. Both are None if there are no valid updates; the average is None if it is not
            finite.
        """
        kept = self._kept(server_round, replies, "train", self._check_update)
        # Not every strategy supports a round without any replies.
        if not any(not message.has_error() for message in kept):
            return None, None
        arrays, metrics = self.strategy.aggregate_train(server_round, kept)
        if arrays is None:
            return None, metrics
        arrays = self._in_own_dtypes(arrays)
        # Updates of 3e38 are finite, but their sums and squares are not.
        try:
            for name, array in arrays.items():
                require_finite(name, array.numpy())
        except ValueError as error:
            _log.warning("Round %d: kept the model as it was: the average of %s", server_round, error)
            return None, metrics
        return arrays, metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Returns the average metrics of the clients with evaluation samples.

        Returns:
            The metrics, or None if no such client sent a valid reply.
        """
        kept = self._kept(server_round, replies, "evaluate", self._check_metrics)
        if not any(not message.has_error() for message in kept):
            return None
        return self.strategy.aggregate_evaluate(server_round, kept)

    def summary(self) -> None:
        """Logs the settings of the strategy."""
        self.strategy.summary()

    def _in_own_dtypes(self, arrays: ArrayRecord) -> ArrayRecord:
        """Casts the aggregated parameters to the dtypes of the model's messages, e.g. from float64 to float32."""
        # Some of Flower's strategies (1.42), e.g. FedAdam, compute them in float64.
        return ArrayRecord(
            {
                name: FlowerArray(array.numpy().astype(self._expected[name].dtype, copy=False))
                for name, array in arrays.items()
            }
        )

    def _kept(
        self, server_round: int, replies: Iterable[Message], stage: str, check: Callable[[Message], None]
    ) -> list[Message]:
        """Returns the replies to pass on to the strategy: valid replies, with limited weights, and error reports.

        Valid replies with the weight 0 are dropped. Replies whose records or metrics differ from those of most clients
        are rejected.

        Args:
            server_round: number of the round.
            replies: the clients' replies.
            stage: "train" or "evaluate".
            check: raises an error if a reply is invalid; such replies are recorded in `refused`.
        """
        answers = []
        good: list[Message] = []
        for message in replies:
            answers.append(message)
            if message.has_error():
                # Flower's strategies log the error.
                reason = (message.error.reason or "")[:_REASON_LENGTH]
                message.error = Error(message.error.code, printable(reason))
                continue
            try:
                check(message)
            # The content is untrusted: any exception while reading it means that the reply is invalid.
            except Exception as error:
                reason = str(error) if type(error) is ValueError else f"it cannot be read ({error!r})"
                self._refuse(server_round, message, stage, reason)
                continue
            # A client without evaluation samples sends the weight 0, and no metrics.
            if self._metrics(message)[self._weighted_by]:
                good.append(message)
        # Flower aggregates nothing, or raises, if one reply has different metrics than the rest.
        common = Counter(map(self._layout, good)).most_common(1)
        for message in good:
            if self._layout(message) != common[0][0]:
                self._refuse(
                    server_round, message, stage, "its records and metrics are not those of most clients"
                )
        good = [message for message in good if self._layout(message) == common[0][0]]
        self._limit_weights(server_round, good)
        left = set(map(id, good))
        return [message for message in answers if message.has_error() or id(message) in left]

    def _refuse(self, server_round: int, message: Message, stage: str, reason: str) -> None:
        """Records and logs a rejected reply."""
        # Recorded as well as logged, because programs don't read logs.
        refused = RefusedUpdate(server_round, message.metadata.src_node_id, stage, reason[:_REASON_LENGTH])
        self.refused.append(refused)
        _log.warning(
            "Round %d: rejected the reply of client %d: %s", server_round, refused.node, refused.reason
        )

    def _limit_weights(self, server_round: int, messages: list[Message]) -> None:
        """Lowers weights above `max_ratio` times the median, or above the total of all other weights."""
        weights = [int(self._metrics(message)[self._weighted_by]) for message in messages]
        if len(weights) < 2 or self._max_ratio == math.inf:
            return
        # The lower median: with two clients, the mean of both would let the client with the larger claim decide.
        most = int(statistics.median_low(weights) * self._max_ratio)
        limited = [min(weight, most) for weight in weights]
        # In a small round, ten times the median may be most of the average.
        heaviest = max(range(len(limited)), key=limited.__getitem__)
        limited[heaviest] = min(limited[heaviest], sum(limited) - limited[heaviest])
        for message, weight, lowered in zip(messages, weights, limited, strict=True):
            if weight == lowered:
                continue
            self._metrics(message)[self._weighted_by] = lowered
            _log.warning(
                "Round %d: lowered '%s' of client %d from %d to %d: no client may have more than %g times the median, "
                "or more than all others together. If the number is right, set max_ratio=math.inf.",
                *(
                    server_round,
                    self._weighted_by,
                    message.metadata.src_node_id,
                    weight,
                    lowered,
                    self._max_ratio,
                ),
            )

    def _layout(self, message: Message) -> Hashable:
        """Returns the structure that all replies must share: names of records and metrics, lengths of lists."""
        metrics = self._metrics(message)
        return (
            tuple(message.content.array_records),
            tuple(message.content.metric_records),
            frozenset(
                (name, len(value) if isinstance(value, list) else None) for name, value in metrics.items()
            ),
        )

    def _check_update(self, message: Message) -> None:
        """Raises ValueError if an update is invalid."""
        records = list(message.content.array_records.values())
        if len(records) != 1:
            raise ValueError(f"it holds {len(records)} records of arrays, expected one")
        self._check_metrics(message)
        read_arrays(records[0], self._expected)

    def _check_metrics(self, message: Message) -> None:
        """Raises ValueError if the fingerprint, the weight or a metric of a reply is invalid."""
        for config in message.content.config_records.values():
            if config.get(FINGERPRINT, self._fingerprint) != self._fingerprint:
                raise ValueError(f"it belongs to another model, with the fingerprint {config[FINGERPRINT]!r}")
        if len(message.content.metric_records) != 1:
            raise ValueError(
                f"it holds {len(message.content.metric_records)} records of metrics, expected one"
            )
        # The weight determines the influence of an update: an infinite or negative weight would take over the average.
        metrics = self._metrics(message)
        weight = metrics.get(self._weighted_by)
        least = 0 if not message.content.array_records else 1
        if (
            isinstance(weight, bool)
            or not isinstance(weight, int | float)
            or not least <= weight <= self._max_examples
            or math.isinf(weight)
            or weight != int(weight)
        ):
            raise ValueError(
                f"its '{self._weighted_by}' is {weight!r}, expected a whole number from {least} to "
                f"{self._max_examples:g}"
            )
        # Metrics are averaged too; Flower's records contain numbers and lists of numbers.
        for name, value in metrics.items():
            numbers = value if isinstance(value, list) else [value]
            if not all(math.isfinite(number) for number in numbers):
                raise ValueError(f"its metric {name!r} is {value}")

    @staticmethod
    def _metrics(message: Message) -> MetricRecord:
        return next(iter(message.content.metric_records.values()))
