"""Runs federated training on the server: sends the model, averages with any Flower strategy, saves the result."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy

from onnxtrain.api import CheckpointState
from onnxtrain.errors import InputError
from onnxtrain.integrations.flower._exchange import apply_arrays, trained_arrays
from onnxtrain.integrations.flower._strategy import CheckedStrategy, RefusedUpdate
from onnxtrain.integrations.flower._work import Metric, Settings, Work, asked_settings
from onnxtrain.runtime.dtypes import Array

# Number of samples per call in the server's evaluation; it doesn't affect the result.
_EVALUATION_BATCH = 256


@dataclass(frozen=True)
class FederatedRun:
    """Result of a federated training run.

    Attributes:
        state: the averaged model.
        train: per round, the clients' training metrics, e.g. `{1: {"loss": 0.7}}`. They are aggregated by the strategy;
            Flower's strategies by default compute a mean weighted by the number of samples. Rounds without valid
            replies are missing.
        clients: per round, the clients' evaluation metrics, aggregated in the same way.
        server: per round, the metrics of the server's own evaluation; round 0 is the model before training.
        refused: replies that were rejected.
    """

    state: CheckpointState
    train: dict[int, dict[str, float]]
    clients: dict[int, dict[str, float]]
    server: dict[int, dict[str, float]]
    refused: list[RefusedUpdate]


def run_federation(
    grid: Grid,
    artifacts: str | os.PathLike[str],
    strategy: Strategy,
    *,
    rounds: int,
    output: str | os.PathLike[str] | None = None,
    evaluation: Sequence[Array] = (),
    metrics: Mapping[str, Metric] | None = None,
    train_config: Mapping[str, int | float] | None = None,
    max_examples: int | None = None,
    max_ratio: float = 10.0,
    timeout: float = 3600.0,
) -> FederatedRun:
    """Runs federated training; call it in the main function of a Flower `ServerApp`.

    Args:
        grid: Flower's connection to the clients.
        artifacts: directory written by `generate_artifacts`, the same as the clients'. Training starts from its
            checkpoint.
        strategy: one of Flower's strategies, e.g. `FedAvg(fraction_train=0.1)`.
        rounds: number of rounds.
        output: directory to which two files are written after each round: the averaged model as `checkpoint`, and only
            its trained values as `checkpoint.delta`. Default: no files are written.
        evaluation: arrays of the server's own samples, inputs then targets; empty for no evaluation on the server.
        metrics: additional metrics of the server's evaluation by name; see `client_app`.
        train_config: settings that override the clients' own settings: "epochs", "batch-size", "learning-rate".
        max_examples: maximum number of samples that a client may claim to have; see `CheckedStrategy`.
        max_ratio: maximum weight of a client as a multiple of the round's median; see `CheckedStrategy`.
        timeout: seconds to wait for the clients in each round.

    Returns:
        The averaged model and the metrics of each round.

    Raises:
        CheckpointError: `artifacts` is not a directory of artifacts.
        InputError: `strategy` is not a Flower strategy, `rounds` is not a positive integer, or a setting is out of
            range.
    """
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise InputError(
            f"Running federated training: rounds must be a positive integer, received {rounds!r}."
        )
    asked_settings(Settings(), train_config or {})
    # The server never trains, so its artifacts may lack the optimizer.
    work = Work(artifacts, trains=False)
    checked = CheckedStrategy(strategy, work.module.manifest, max_examples=max_examples, max_ratio=max_ratio)

    # Flower calls this before the first round and after each round.
    def after_round(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        apply_arrays(work.state, arrays)
        # Round 0 is the model that the artifacts already contain.
        if output is not None and number:
            _save(work.state, Path(output))
        if not evaluation:
            return None
        count, values = work.evaluate(evaluation, _EVALUATION_BATCH, metrics or {})
        return MetricRecord({"num-examples": count, **values})

    # Flower's loop of rounds. It calls the strategy through `checked`, which inspects every reply first.
    result = checked.start(
        grid=grid,
        initial_arrays=trained_arrays(work.state),
        num_rounds=rounds,
        timeout=timeout,
        train_config=ConfigRecord(dict(train_config or {})),
        evaluate_fn=after_round,
    )
    return FederatedRun(
        state=work.state,
        train=_by_round(result.train_metrics_clientapp),
        clients=_by_round(result.evaluate_metrics_clientapp),
        server=_by_round(result.evaluate_metrics_serverapp),
        refused=checked.refused,
    )


def server_app(
    artifacts: str | os.PathLike[str],
    strategy: Strategy,
    *,
    rounds: int,
    done: Callable[[FederatedRun], None] | None = None,
    **options: Any,
) -> ServerApp:
    """Returns a Flower `ServerApp` that runs federated training.

    Args:
        artifacts: see `run_federation`.
        strategy: see `run_federation`.
        rounds: number of rounds.
        done: called with the result when training has ended.
        **options: additional arguments of `run_federation`, e.g. `output="federated"`.
    """
    # Flower calls this function with its connection to the clients.
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        result = run_federation(grid, artifacts, strategy, rounds=rounds, **options)
        if done is not None:
            done(result)

    return app


def _save(state: CheckpointState, folder: Path) -> None:
    """Writes a state as a checkpoint and as a delta."""
    folder.mkdir(parents=True, exist_ok=True)
    # Devices load the delta on top of the checkpoint that they already have.
    CheckpointState.save_checkpoint(state, folder / "checkpoint")
    CheckpointState.save_checkpoint(state, folder / "checkpoint.delta", trainable_only=True)


def _by_round(records: Mapping[int, MetricRecord]) -> dict[int, dict[str, float]]:
    return {number: dict(record) for number, record in records.items()}
