"""Trains artifacts by the on-device API from a command line, as the example hosts do (docs/devices/own-host.md).

python python_host.py ARTIFACTS FEEDS [CHECKPOINT_OUT] [--from FILE]... [--delta] prints one loss per line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ["ONNXTRAIN_KERNELS"] = "off"

import numpy as np

from onnxtrain import api
from onnxtrain.errors import CheckpointError, InputError, OnnxTrainError


def load(base: Path, files: list[Path]) -> api.CheckpointState:
    """Loads checkpoints and deltas one after the other: a delta is loaded on top of the last checkpoint."""
    state = api.CheckpointState.load_checkpoint(base)
    for file in files:
        try:
            state, base = api.CheckpointState.load_checkpoint(file), file
        except CheckpointError as error:
            if "it is a delta" not in str(error):
                raise
            state = api.CheckpointState.load_checkpoint(base, delta=file)
    return state


def train(artifacts: Path, feeds: Path, checkpoint_out: Path | None, start: list[Path], delta: bool) -> None:
    """Prints the losses, and writes the checkpoint."""
    settings = json.loads((feeds / "feeds.json").read_text())
    fields = np.dtype([(x["name"], x["dtype"], tuple(x["shape"])) for x in settings["feeds"]])
    data = (feeds / "feeds.bin").read_bytes()
    if len(data) != settings["steps"] * fields.itemsize:
        raise InputError(f"feeds.bin has {len(data)} bytes")
    state = load(artifacts / "checkpoint", start)
    module = api.Module(artifacts / "training_model.onnx", state, seed=settings.get("seed", 0))
    optimizer = api.Optimizer(artifacts / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(settings["learning_rate"])
    if module.input_names() != list(fields.names):
        raise InputError(f"feeds.json lists {fields.names}, the model takes {module.input_names()}")
    # numpy has no array of batches without samples.
    for index in range(settings["steps"]):
        batch = (
            np.frombuffer(data, fields, 1, index * fields.itemsize)[0]
            if fields.itemsize
            else np.zeros((), fields)
        )
        module.lazy_reset_grad()
        results = module(*(np.array(batch[name]) for name in fields.names))
        print(float(results[0] if isinstance(results, tuple) else results))
        optimizer.step()
    if checkpoint_out is not None:
        api.CheckpointState.save_checkpoint(
            state, checkpoint_out, include_optimizer_state=True, trainable_only=delta
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("artifacts", type=Path)
    parser.add_argument("feeds", type=Path)
    parser.add_argument("checkpoint_out", type=Path, nargs="?")
    parser.add_argument("--from", type=Path, action="append", default=[], dest="start")
    parser.add_argument("--delta", action="store_true")
    try:
        train(**vars(parser.parse_intermixed_args()))
    except OnnxTrainError as error:
        sys.exit(f"{type(error).__name__}: {error}")
