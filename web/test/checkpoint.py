"""Loads a checkpoint that another host has written, goes on training on the feeds of its net, and prints the losses.

    python web/test/checkpoint.py NET_FOLDER CHECKPOINT [BASE]

With BASE, a full checkpoint, CHECKPOINT is a delta on top of it. Prints JSON: {"step", "learning_rate", "losses",
"properties"}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["ONNXTRAIN_KERNELS"] = "off"

import numpy as np

from onnxtrain.api import CheckpointState, Module, Optimizer


def main(net: Path, checkpoint: Path, base: Path | None = None) -> None:
    """Prints what training gives from the checkpoint on."""
    state = (
        CheckpointState.load_checkpoint(base, delta=checkpoint)
        if base
        else CheckpointState.load_checkpoint(checkpoint)
    )
    entry = json.loads((net / "feeds.json").read_text())
    module = Module(net / "training_model.onnx", state, net / "eval_model.onnx", seed=entry["seed"])
    optimizer = Optimizer(net / "optimizer_model.onnx", module)
    start = {"step": optimizer.step_count, "learning_rate": optimizer.get_learning_rate()}
    data, position, losses = (net / "feeds.bin").read_bytes(), 0, []
    for _ in range(entry["steps"]):
        arrays = []
        for feed in entry["feeds"]:
            count = int(np.prod(feed["shape"]))
            array = np.frombuffer(data, feed["dtype"], count, position)
            position += array.nbytes
            arrays.append(array.reshape(feed["shape"]))
        losses.append(float(module(*arrays)[0]))
        optimizer.step()
        module.lazy_reset_grad()
    print(json.dumps({**start, "losses": losses, "properties": dict(state.properties)}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
