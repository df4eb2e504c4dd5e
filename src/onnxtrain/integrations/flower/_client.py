"""Creates the `ClientApp` that Flower runs on each device."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from onnxtrain.errors import InputError
from onnxtrain.integrations.flower._exchange import apply_arrays, trained_arrays
from onnxtrain.integrations.flower._privacy import SamplePrivacy, spent_epsilon
from onnxtrain.integrations.flower._work import ClientData, Limits, Metric, Settings, Work, asked_settings

FINGERPRINT = "onnxtrain-fingerprint"
"""Key of the model's fingerprint in the config of messages, both from the server and from the clients."""

_STEPS = "onnxtrain-private-steps"
"""Key of the record in the client's state that counts its DP-SGD steps over all rounds."""


def client_app(
    artifacts: str | os.PathLike[str],
    data: Callable[[Context], ClientData],
    *,
    epochs: int = 1,
    batch_size: int = 32,
    learning_rate: float | None = None,
    seed: int = 0,
    metrics: Mapping[str, Metric] | None = None,
    privacy: SamplePrivacy | None = None,
    limits: Limits | None = None,
    mods: Sequence[Any] = (),
) -> ClientApp:
    """Returns a Flower `ClientApp` that trains and evaluates a model on the client's own data.

    Each round starts from the arrays that the server sends, with a new optimizer state, as in federated averaging
    (McMahan et al. 2017). The reply contains the trained arrays, the number of samples as "num-examples" and the loss
    of the last epoch as "loss". The reply to an evaluation contains "num-examples", "loss" and the metrics.

    The server may set "epochs", "batch-size" and "learning-rate" for a round, in `train_config` of the strategy's
    `start`, up to `limits`.

    Args:
        artifacts: directory with the model's training artifacts, written by `generate_artifacts`. The server must have
            the same artifacts.
        data: returns the client's samples, e.g. `lambda context: ClientData(train=(x, labels))`. It receives Flower's
            `Context`; in a simulation, `context.node_config["partition-id"]` is the client's number.
        epochs: number of epochs per round.
        batch_size: number of samples per step.
        learning_rate: learning rate. Default: the learning rate in the artifacts' checkpoint, if any, else 1e-3.
        seed: seed for the sample order, combined with the client's number and the round.
        metrics: additional evaluation metrics by name, e.g. `{"accuracy": lambda outputs, targets:
            (outputs[0].argmax(1) == targets[0]).mean()}`. A metric receives arrays for all samples: the model's outputs
            except the loss, and the targets. `additional_output_names` adds such outputs to the artifacts.
        privacy: trains with per-sample differential privacy. The reply then contains "epsilon", the budget spent over
            all rounds of this client so far. The loss is not sent, because it is computed without noise. A round that
            would exceed `privacy.max_epsilon` is refused before it begins.
        limits: maximum values that the server may set. Default: `Limits()`. If a value exceeds its limit, the client
            replies with an error, and the round continues without this client.
        mods: Flower mods for this app, e.g. `[fixedclipping_mod]`.

    Raises:
        InputError: a setting is out of range.
    """
    settings = Settings(epochs=epochs, batch_size=batch_size, learning_rate=learning_rate)
    bounds = Limits() if limits is None else limits
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        # An exception in here becomes an error message, and the server continues without this client.
        work, config = _read_message(artifacts, message)
        asked = asked_settings(settings, config, bounds)
        samples = data(context).train
        client = int(cast(int, context.node_config.get("partition-id", context.node_id)))
        round_number = config.get("server-round", 0)
        if not isinstance(round_number, int) or not 0 <= round_number < 2**63:
            raise InputError(
                "Reading a message from the server: 'server-round' must be the number of a round, received "
                f"{round_number!r}."
            )
        count = work.count(samples)
        account = None
        if privacy is not None:
            # Spent before anything is computed from the samples: a round that fails halfway counts fully.
            account = _spend_privacy(context, asked.steps(count), min(1.0, asked.batch_size / count), privacy)
        loss = work.train(samples, asked, (seed, client % 2**63, round_number), privacy)
        # Flower's strategies weight by this number.
        values: dict[str, int | float] = {"num-examples": count}
        # The loss is computed from the samples without noise: sending it would leak what the noise hides.
        values |= {"loss": loss} if account is None else {"epsilon": account}
        return _reply(message, work, MetricRecord(values), trained_arrays(work.state))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        work, config = _read_message(artifacts, message)
        samples = data(context).evaluation
        # Without samples, a weight of 0 excludes this client from the average.
        if not samples or not len(samples[0]):
            return _reply(message, work, MetricRecord({"num-examples": 0}))
        count, values = work.evaluate(
            samples, asked_settings(settings, config, bounds).batch_size, metrics or {}
        )
        return _reply(message, work, MetricRecord({"num-examples": count, **values}))

    return app


def _read_message(artifacts: str | os.PathLike[str], message: Message) -> tuple[Work, ConfigRecord]:
    """Loads the artifacts, and writes the arrays of a message into their state.

    Returns:
        The loaded model, and the message's config.

    Raises:
        InputError: the message does not match the artifacts.
    """
    content = message.content
    records = list(content.array_records.values())
    # Other strategies may send several records, and nothing says which one is the model.
    if len(records) != 1:
        raise InputError(
            f"Reading a message from the server: expected one record of arrays, received {len(records)}."
        )
    config = next(iter(content.config_records.values()), ConfigRecord())
    work = Work(artifacts)
    # A strategy that is not wrapped in CheckedStrategy sends no fingerprint: then names and shapes must suffice.
    fingerprint = config.get(FINGERPRINT, work.module.manifest.fingerprint)
    if fingerprint != work.module.manifest.fingerprint:
        raise InputError(
            f"Reading a message from the server: it is for the model {fingerprint}, but this client has "
            f"{work.module.manifest.fingerprint}. Install the server's artifacts."
        )
    apply_arrays(work.state, records[0])
    return work, config


def _spend_privacy(context: Context, steps: int, rate: float, privacy: SamplePrivacy) -> float:
    """Adds the DP-SGD steps of a round to the number of steps in the client's state.

    Args:
        context: Flower's context, which contains the client's state.
        steps: number of steps in this round.
        rate: sampling rate of this round; if rounds differ, the largest rate applies to all.
        privacy: noise multiplier, delta and maximum epsilon.

    Returns:
        The epsilon spent so far, including this round.

    Raises:
        InputError: the epsilon would exceed `privacy.max_epsilon`. The state does not change.
    """
    record = context.state.config_records.get(_STEPS)
    # If the sampling rates of rounds differ, the largest gives an upper bound for all.
    before, largest = (
        (0, 0.0) if record is None else (int(cast(int, record["steps"])), float(cast(float, record["rate"])))
    )
    steps, rate = before + steps, max(largest, rate)
    epsilon = spent_epsilon(steps, rate, privacy.noise_multiplier, privacy.delta)
    if not epsilon <= privacy.max_epsilon:
        raise InputError(
            f"Training a client: with the {steps - before} steps of this round it would have spent epsilon "
            f"{epsilon:.3g}, more than max_epsilon={privacy.max_epsilon:g} of its SamplePrivacy."
        )
    # Flower keeps this record on the client between rounds.
    context.state[_STEPS] = ConfigRecord({"steps": steps, "rate": rate})
    return epsilon


def _reply(message: Message, work: Work, metrics: MetricRecord, arrays: ArrayRecord | None = None) -> Message:
    """Returns the reply to a message, with the model's fingerprint, the metrics and optionally arrays."""
    records: dict[str, Any] = {
        "metrics": metrics,
        "config": ConfigRecord({FINGERPRINT: work.module.manifest.fingerprint}),
    }
    if arrays is not None:
        records["arrays"] = arrays
    return Message(content=RecordDict(records), reply_to=message)
