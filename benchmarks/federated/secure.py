"""Trains with Flower's secure aggregation, in its engine, and compares the result with plain averaging.

Five clients; the server sees the sum of their updates alone. Prints the accuracy of both, and the largest difference of
a parameter after the first round, and exits with 1 where it is more than the rounding of the sum allows. Later rounds
train from parameters that were rounded by chance.

Usage: python secure.py [--rounds 3]
Needs what simulate.py needs.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import digits
import numpy as np
from flwr.app import Context
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from onnxtrain.api import CheckpointState
from onnxtrain.integrations.flower import ClientData, secure_client, trained_arrays

CLIENTS = 5
CLIPPING = 4.0
LARGEST_WEIGHT = 10_000
STEPS = 1 << 22
"""Numbers that Flower rounds to within the range from -CLIPPING to CLIPPING."""


def trained(secure: bool, folder: Path, rounds: int) -> list[np.ndarray]:
    """Returns the parameters behind the last round."""
    x, y = digits.samples()
    parts = np.array_split(np.arange(len(x) - digits.TEST), CLIENTS)

    def data(context: Context) -> ClientData:
        own = parts[context.node_config["partition-id"]]
        return ClientData((x[own], y[own]))

    client = ClientApp(
        client_fn=secure_client(folder, data, batch_size=16, learning_rate=0.2),
        mods=[secaggplus_mod] if secure else [],
    )
    initial = [
        a.numpy() for a in trained_arrays(CheckpointState.load_checkpoint(folder / "checkpoint")).values()
    ]
    found: list[Any] = []
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        legacy = LegacyContext(
            context=context,
            config=ServerConfig(num_rounds=rounds),
            strategy=FedAvg(
                fraction_evaluate=0.0,
                min_available_clients=CLIENTS,
                initial_parameters=ndarrays_to_parameters(initial),
            ),
        )
        secret = SecAggPlusWorkflow(
            num_shares=CLIENTS,
            reconstruction_threshold=3,
            clipping_range=CLIPPING,
            quantization_range=STEPS,
            max_weight=LARGEST_WEIGHT,
        )
        workflow = DefaultWorkflow(fit_workflow=secret) if secure else DefaultWorkflow()
        workflow(grid, legacy)
        found.append(legacy.state.array_records["parameters"].to_numpy_ndarrays())

    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=CLIENTS,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}},
    )
    return list(found[0])


def main() -> None:
    """Trains both ways and compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    logging.getLogger("flwr").setLevel(logging.ERROR)
    folder = digits.artifacts(Path(tempfile.mkdtemp()))
    samples, labels = digits.samples()
    x, y = samples[-digits.TEST :], labels[-digits.TEST :]
    names = list(trained_arrays(CheckpointState.load_checkpoint(folder / "checkpoint")))
    for secure in (True, False):
        p = dict(zip(names, trained(secure, folder, rounds), strict=True))
        logits = np.maximum(x @ p["w1"].T + p["b1"], 0) @ p["w2"].T + p["b2"]
        label = "secure" if secure else "plain"
        print(f"{label}: accuracy {(logits.argmax(1) == y).mean():.4f} after {rounds} rounds")
    first = [trained(secure, folder, 1) for secure in (True, False)]
    worst = max(float(np.abs(a - b).max()) for a, b in zip(*first, strict=True))
    # A client multiplies its numbers by its share of the largest weight, and rounds each up or down by chance; the sum
    # of all clients is divided by the sum of the shares.
    shares = (len(samples) - digits.TEST) / LARGEST_WEIGHT
    allowed = CLIENTS * 2 * CLIPPING / STEPS / shares
    print(f"largest difference of a parameter after one round: {worst:.2e} (allowed: {allowed:.2e})")
    sys.exit(worst > allowed)


if __name__ == "__main__":
    main()
