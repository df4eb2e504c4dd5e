"""Measures what a round costs the server of a federation: seconds of its processor, and memory, by answers and sizes.

The answers are made up, so that no client runs: a linear layer of so many parameters, each answer with other numbers.
Flower hands all answers of a round to the strategy at once; each is checked, then FedAvg averages them. Seconds are
those of the server's thread, which do not count while the machine does something else; memory is the largest growth of
the resident memory during a round. The median of the rounds counts.

Usage: python server.py [--rounds 3] [--results results/server.json]
Needs `pip install 'onnxtrain[build,flower]' scikit-learn`; memory is read on Linux.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "common"))

import numpy as np
import onnx
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity
from peak_memory import peak_bytes, reset_peak
from simulate import note_rounds

from onnxtrain import generate_artifacts
from onnxtrain.integrations.flower import run_federation

RESULTS = Path(__file__).parent / "results" / "server.json"
CASES = [(2_410, 50), (2_410, 500), (2_410, 5_000), (1_000_000, 50), (1_000_000, 500)]
"""Parameters of the net, and answers of a round."""
INPUTS = 10


def artifacts(parameters: int) -> Path:
    """Writes the artifacts of a linear layer."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21]>
        linear (float[n, {INPUTS}] x) => (float[n, {parameters // INPUTS}] y) {{ y = MatMul(x, w) }}""")
    weight = np.zeros((INPUTS, parameters // INPUTS), np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    folder = Path(tempfile.mkdtemp())
    generate_artifacts(model, loss="cross_entropy", optimizer="sgd", artifact_directory=folder)
    return folder


class Answers(Grid):
    """Gives the answers of clients that do not exist.

    Args:
        parameters: elements of an answer.
        clients: number of clients.
    """

    def __init__(self, parameters: int, clients: int) -> None:
        # A run of Flower's engines sets these; messages hold them.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self._shape, self._clients = (INPUTS, parameters // INPUTS), clients
        self._random = np.random.default_rng(0)
        self.before = 0

    def get_node_ids(self) -> Iterable[int]:
        return range(1, self._clients + 1)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        answers = []
        gc.collect()
        reset_peak()
        self.before = peak_bytes()
        for message in messages:
            message.metadata._message_id = f"to {message.metadata.dst_node_id}"  # a reply needs it
            values = self._random.standard_normal(self._shape, np.float32)
            content = RecordDict(
                {
                    "arrays": ArrayRecord({"w": Array(values)}),
                    "metrics": MetricRecord({"num-examples": 12, "loss": 1.0}),
                }
            )
            answers.append(Message(content, reply_to=message))
        return answers

    def _absent(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("strategies use send_and_receive alone")

    set_run = create_message = push_messages = pull_messages = get_nodes = _absent
    run = property(_absent)


def measure(parameters: int, clients: int, rounds: int) -> dict[str, float]:
    """Runs some rounds."""
    grid = Answers(parameters, clients)
    found: list[dict[str, float]] = []
    peaks = []
    end = note_rounds(grid, found)
    receive = grid.send_and_receive

    def noted(messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        # Called for training, then, without a message, for evaluation: then the answers are averaged.
        messages = list(messages)
        if not messages:
            peaks.append(peak_bytes() - grid.before)
        return receive(messages, timeout=timeout)

    grid.send_and_receive = noted
    run_federation(
        grid,
        artifacts(parameters),
        FedAvg(fraction_evaluate=0.0, min_available_nodes=clients),
        rounds=rounds,
    )
    end()
    return {
        "parameters": parameters,
        "answers": clients,
        "bytes_up": found[0]["bytes_up"],
        "server_s": round(statistics.median(one["server_s"] for one in found), 4),
        "memory": int(statistics.median(peaks)),
    }


def main() -> None:
    """Measures all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    rows = []
    for case in CASES:
        rows.append(measure(*case, options.rounds))
        print(json.dumps(rows[-1]), flush=True)
    options.results.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
