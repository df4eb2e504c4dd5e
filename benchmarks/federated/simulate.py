"""Simulates a federation of many clients by Flower's engine: skewed data, clients that drop out, stragglers.

Each client has the labels of a Dirichlet(0.3) draw and 5 to 60 samples. In each round a share of the clients is asked;
of these some die, and some take so long that the server does not wait for them. It prints accuracy on the server's own
samples, bytes of a round and seconds of the server, and writes results/simulation.json.

Usage: python simulate.py [--clients 1000] [--rounds 60] [--share 0.05] [--drop 0.1] [--late 0.1] [--cores 2]
Needs `pip install 'onnxtrain[build,flower]' 'flwr[simulation]' scikit-learn`.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import digits
import numpy as np
from flwr.app import Context, Message
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from onnxtrain.integrations.flower import ClientData, FederatedRun, client_app, server_app

RESULTS = Path(__file__).parent / "results" / "simulation.json"


class Measured(FedAvg):
    """FedAvg that notes bytes and seconds of each round."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rounds: list[dict[str, float]] = []

    def configure_train(self, *arguments: Any) -> Any:
        messages = list(super().configure_train(*arguments))
        self._asked, self._sent = len(messages), sum(_bytes(m) for m in messages)
        return messages

    def aggregate_train(self, number: int, replies: Any) -> Any:
        replies = list(replies)
        answered = [m for m in replies if not m.has_error()]
        start = time.perf_counter()
        result = super().aggregate_train(number, replies)
        self.rounds.append(
            {
                "asked": self._asked,
                "answered": len(answered),
                "bytes_down": self._sent,
                "bytes_up": sum(_bytes(m) for m in answered),
                "server_s": time.perf_counter() - start,
            }
        )
        return result


def _bytes(message: Message) -> int:
    return sum(len(a.data) for r in message.content.array_records.values() for a in r.values())


def unreliable(drop: float, late: float) -> Any:
    """A mod of the clients: some die, some answer too late, which for the server is the same: an error."""

    def mod(message: Message, context: Context, go_on: Any) -> Message:
        chance = np.random.default_rng([context.node_id % 2**63, time.time_ns()]).random()
        if message.metadata.message_type == "train" and chance < drop:
            raise ConnectionError("this client has dropped out")
        answer = go_on(message, context)
        if message.metadata.message_type == "train" and chance < drop + late:
            raise TimeoutError("this client has answered too late")
        return answer

    return mod


def main() -> None:
    """Runs the simulation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--drop", type=float, default=0.1)
    parser.add_argument("--late", type=float, default=0.1)
    parser.add_argument("--cores", type=int, default=2)
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    folder = digits.artifacts(Path(tempfile.mkdtemp()))
    x, y = digits.samples()
    test = (x[-digits.TEST :], y[-digits.TEST :])
    rows = digits.split(y[: -digits.TEST], options.clients, 0.3, least=5)

    def data(context: Context) -> ClientData:
        own = rows[context.node_config["partition-id"]]
        return ClientData((x[own], y[own]))

    client = client_app(
        folder,
        data,
        epochs=2,
        batch_size=8,
        learning_rate=0.1,
        mods=[unreliable(options.drop, options.late)],
    )
    strategy = Measured(
        fraction_train=options.share, fraction_evaluate=0.0, min_available_nodes=options.clients
    )
    found: list[FederatedRun] = []
    server = server_app(
        folder,
        strategy,
        rounds=options.rounds,
        evaluation=test,
        metrics={"accuracy": digits.accuracy},
        done=found.append,
    )
    start = time.perf_counter()
    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=options.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": options.cores, "include_dashboard": False},
        },
    )
    (run,) = found
    seconds = time.perf_counter() - start
    accuracies = {number: values["accuracy"] for number, values in run.server.items()}
    result = {
        "settings": vars(options),
        "samples": int(sum(map(len, rows))),
        "seconds": round(seconds, 1),
        "accuracy": {n: round(a, 4) for n, a in accuracies.items()},
        "rounds": strategy.rounds,
        "refused": len(run.refused),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    mean = {key: float(np.mean([r[key] for r in strategy.rounds])) for key in strategy.rounds[0]}
    print(
        f"{options.clients} clients, {result['samples']} samples, {seconds:.0f} s for {options.rounds} rounds"
    )
    print("a round, in the mean:", {key: round(value, 4) for key, value in mean.items()})
    print("accuracy:", {n: a for n, a in result["accuracy"].items() if n % 10 == 0})


if __name__ == "__main__":
    main()
