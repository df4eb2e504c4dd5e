"""Simulates a federation of many clients by Flower's engine: skewed data, clients that drop out, stragglers.

Each client has the labels of a Dirichlet(alpha) draw, and at least five samples, most of them 5 to 36. In each round a
share of the clients is asked; of these some die, and some take so long that the server does not wait for them. Prints
accuracy on the server's own samples, bytes of a round and seconds of the server, and writes results/simulation.json.
Which clients Flower asks is drawn anew in each run.

Usage: python simulate.py [--clients 1000] [--rounds 60] [--share 0.05] [--drop 0.1] [--late 0.1] [--alpha 0.3]
    [--seed 0] [--cores 2] [--results results/simulation.json]
Needs `pip install 'onnxtrain[build,flower]' 'flwr[simulation]' scikit-learn`.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import digits
import numpy as np
from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from onnxtrain.integrations.flower import ClientData, FederatedRun, client_app, run_federation

DROPPED, LATE = "this client has dropped out", "this client has answered too late"
RESULTS = Path(__file__).parent / "results" / "simulation.json"


def note_rounds(grid: Grid, rounds: list[dict[str, float]]) -> Callable[[], None]:
    """Makes the grid note the messages and bytes of each round of training, and the seconds of the server after it.

    Returns a function that ends the last round.

    The seconds are those in which the server does not wait for clients: checks, average, evaluation, next messages.
    They are counted on the clock of the server's thread, which stands still while the machine does something else.
    """
    inner = grid.send_and_receive
    last: list[float] = []

    def end() -> None:
        if last and rounds:
            rounds[-1]["server_s"] = round(rounds[-1]["server_s"] + time.thread_time() - last.pop(), 6)

    def noted(messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        sent = list(messages)
        end()
        replies = list(inner(sent, timeout=timeout))
        if sent and sent[0].metadata.message_type == "train":
            reasons = [m.error.reason for m in replies if m.has_error()]
            rounds.append(
                {
                    "asked": len(sent),
                    "answered": sum(not m.has_error() for m in replies),
                    "dropped": sum(DROPPED in reason for reason in reasons),
                    "late": sum(LATE in reason for reason in reasons),
                    "bytes_down": sum(array_bytes(m) for m in sent),
                    "bytes_up": sum(array_bytes(m) for m in replies if not m.has_error()),
                    "server_s": 0.0,
                }
            )
        last.append(time.thread_time())
        return replies

    grid.send_and_receive = noted
    return end


def array_bytes(message: Message) -> int:
    """Counts the bytes of the arrays in a message, in the format of numpy's files, which Flower sends."""
    return sum(len(a.data) for r in message.content.array_records.values() for a in r.values())


def fate(seed: int, client: int, round_number: int, drop: float, late: float) -> str | None:
    """Draws what becomes of a client in a round: DROPPED, LATE or None. The same arguments give the same answer."""
    chance = np.random.default_rng([seed, client, round_number]).random()
    return DROPPED if chance < drop else LATE if chance < drop + late else None


def unreliable(seed: int, drop: float, late: float) -> Any:
    """A mod of the clients: some die, some answer too late, which for the server is the same: an error."""

    def mod(message: Message, context: Context, go_on: Any) -> Message:
        if message.metadata.message_type != "train":
            return go_on(message, context)
        config = next(iter(message.content.config_records.values()))
        drawn = fate(seed, int(context.node_config["partition-id"]), int(config["server-round"]), drop, late)
        if drawn == DROPPED:
            raise ConnectionError(DROPPED)
        answer = go_on(message, context)
        # The work of a late client is done and lost.
        if drawn == LATE:
            raise TimeoutError(LATE)
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
    parser.add_argument("--alpha", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    folder = digits.artifacts(Path(tempfile.mkdtemp()))
    x, y = digits.samples()
    test = (x[-digits.TEST :], y[-digits.TEST :])
    rows = digits.split(y[: -digits.TEST], options.clients, options.alpha, least=5)

    def data(context: Context) -> ClientData:
        own = rows[context.node_config["partition-id"]]
        return ClientData((x[own], y[own]))

    client = client_app(
        folder,
        data,
        epochs=2,
        batch_size=8,
        learning_rate=0.1,
        mods=[unreliable(options.seed, options.drop, options.late)],
    )
    strategy = FedAvg(
        fraction_train=options.share, fraction_evaluate=0.0, min_available_nodes=options.clients
    )
    found: list[FederatedRun] = []
    rounds: list[dict[str, float]] = []
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        end = note_rounds(grid, rounds)
        found.append(
            run_federation(
                grid,
                folder,
                strategy,
                rounds=options.rounds,
                evaluation=test,
                metrics={"accuracy": digits.accuracy},
            )
        )
        end()

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
        "settings": {k: v for k, v in vars(options).items() if k != "results"},
        "samples": int(sum(map(len, rows))),
        "seconds": round(seconds, 1),
        "accuracy": {n: round(a, 4) for n, a in accuracies.items()},
        "rounds": rounds,
        "refused": len(run.refused),
    }
    options.results.parent.mkdir(exist_ok=True)
    options.results.write_text(json.dumps(result, indent=1) + "\n")
    mean = {key: float(np.mean([r[key] for r in rounds])) for key in rounds[0]}
    print(
        f"{options.clients} clients, {result['samples']} samples, {seconds:.0f} s for {options.rounds} rounds"
    )
    print("a round, in the mean:", {key: round(value, 4) for key, value in mean.items()})
    print("accuracy:", {n: a for n, a in result["accuracy"].items() if n % 10 == 0})


if __name__ == "__main__":
    main()
