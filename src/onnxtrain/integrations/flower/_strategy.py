"""Wraps a Flower strategy: updates that cannot be right are refused, and named, before the strategy sees them."""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from onnxtrain._printable import printable
from onnxtrain.errors import InputError
from onnxtrain.integrations.flower._client import FINGERPRINT
from onnxtrain.integrations.flower._exchange import expected_arrays, read_arrays, require_finite
from onnxtrain.runtime.manifest import Manifest

_log = logging.getLogger("onnxtrain.flower")

# A reason quotes what a stranger has sent.
_REASON_LENGTH = 500


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

    A client states its own number of samples, by which Flower weights its update. The weight is limited twice: more
    than `max_examples` is refused; and what is more than `max_ratio` times the median of the round, or more than all
    other clients have together, is lowered to that, with a warning.

    Args:
        strategy: the strategy that averages.
        manifest: manifest of the model, `Module.manifest`.
        weighted_by: name of the metric that holds a client's weight, a whole number.
        max_examples: largest weight that a client may claim, e.g. 10000; by default there is no limit.
        max_ratio: largest weight of an update as a multiple of the median of the round's weights, e.g. 10.0;
            `math.inf` believes what the clients say.

    Attributes:
        refused: the updates that were left out so far.

    Raises:
        InputError: the strategy is not one of Flower's, or a limit is out of range.
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
        kept = self._kept(server_round, replies, "train", self._check_update)
        # Not every strategy bears a round without any answer.
        if not any(not message.has_error() for message in kept):
            return None, None
        arrays, metrics = self.strategy.aggregate_train(server_round, kept)
        if arrays is None:
            return None, metrics
        arrays = self._in_own_dtypes(arrays)
        # Updates of 3e38 are finite, and their sums and squares are not.
        try:
            for name, array in arrays.items():
                require_finite(name, array.numpy())
        except ValueError as error:
            _log.warning("Round %d: kept the model as it was: the average of %s", server_round, error)
            return None, metrics
        return arrays, metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Averages the metrics of the clients that have samples for evaluation; None if none has."""
        kept = self._kept(server_round, replies, "evaluate", self._check_metrics)
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
        self, server_round: int, replies: Iterable[Message], stage: str, check: Callable[[Message], None]
    ) -> list[Message]:
        """Returns the answers that pass `check`, with limited weights, and those that report an error."""
        answers = []
        good: list[Message] = []
        for message in replies:
            answers.append(message)
            if message.has_error():
                # Flower's strategies log it.
                reason = (message.error.reason or "")[:_REASON_LENGTH]
                message.error = Error(message.error.code, printable(reason))
                continue
            try:
                check(message)
            # The content is a stranger's: whatever cannot be read of it is the stranger's fault.
            except Exception as error:
                reason = str(error) if type(error) is ValueError else f"it cannot be read ({error!r})"
                self._refuse(server_round, message, stage, reason)
                continue
            # A client without samples for evaluation says so by the weight 0, and has no metrics.
            if self._metrics(message)[self._weighted_by]:
                good.append(message)
        # Flower aggregates nothing, or raises, where one answer has other metrics than the rest.
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
        """Records and logs that an answer is left out."""
        # Kept for the caller as well as logged: a log is not read by programs.
        refused = RefusedUpdate(server_round, message.metadata.src_node_id, stage, reason[:_REASON_LENGTH])
        self.refused.append(refused)
        _log.warning(
            "Round %d: refused the answer of client %d: %s", server_round, refused.node, refused.reason
        )

    def _limit_weights(self, server_round: int, messages: list[Message]) -> None:
        """Lowers weights that are more than `max_ratio` times the median, or more than all others together."""
        weights = [int(self._metrics(message)[self._weighted_by]) for message in messages]
        if len(weights) < 2 or self._max_ratio == math.inf:
            return
        # The lower one of two: a mean of both would be up to the client that claims more.
        most = int(statistics.median_low(weights) * self._max_ratio)
        limited = [min(weight, most) for weight in weights]
        # In a small round ten times the median are most of the average.
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
        """Returns what must be equal in all answers: names of records and of metrics, lengths of lists."""
        metrics = self._metrics(message)
        return (
            tuple(message.content.array_records),
            tuple(message.content.metric_records),
            frozenset(
                (name, len(value) if isinstance(value, list) else None) for name, value in metrics.items()
            ),
        )

    def _check_update(self, message: Message) -> None:
        """Raises ValueError if something is wrong with an update."""
        records = list(message.content.array_records.values())
        if len(records) != 1:
            raise ValueError(f"it holds {len(records)} records of arrays, expected one")
        self._check_metrics(message)
        read_arrays(records[0], self._expected)

    def _check_metrics(self, message: Message) -> None:
        """Raises ValueError if something is wrong with the fingerprint, the weight or a metric of an answer."""
        for config in message.content.config_records.values():
            if config.get(FINGERPRINT, self._fingerprint) != self._fingerprint:
                raise ValueError(f"it belongs to another model, with the fingerprint {config[FINGERPRINT]!r}")
        if len(message.content.metric_records) != 1:
            raise ValueError(
                f"it holds {len(message.content.metric_records)} records of metrics, expected one"
            )
        # The weight decides how much an update counts: an infinite or a negative one takes the average over.
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
        # Metrics are averaged, too; Flower's records hold numbers and lists of numbers.
        for name, value in metrics.items():
            numbers = value if isinstance(value, list) else [value]
            if not all(math.isfinite(number) for number in numbers):
                raise ValueError(f"its metric {name!r} is {value}")

    @staticmethod
    def _metrics(message: Message) -> MetricRecord:
        return next(iter(message.content.metric_records.values()))
