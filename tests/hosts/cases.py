"""Nets with their artifacts, batches and feeds, and how tests of hosts run programs that train them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np

from onnxtrain import api
from onnxtrain.artifacts import generate_artifacts

from .nets import LEARNING_RATE, STEPS, Net, write_feeds

HOSTS = Path(__file__).parents[2] / "examples" / "hosts"
TOLERANCE = 1e-5

# Runs a program with arguments, e.g. host(artifacts, feeds, "--from", checkpoint).
Host = Callable[..., subprocess.CompletedProcess[str]]


def losses_of(host: Host, *arguments: object) -> list[float]:
    """Run a program and return the losses that it printed."""
    done = host(*arguments)
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


class Case:
    """The artifacts of a net, its batches, and what Python makes of them."""

    def __init__(self, net: Net, folder: Path) -> None:
        self.net, self.artifacts = net, folder / "artifacts"
        arguments = {"optimizer": "adamw"} | net.arguments
        generate_artifacts(
            net.model(),
            loss="cross_entropy",
            artifact_directory=self.artifacts,
            additional_output_names=["logits"],
            profile="portable",
            **arguments,
        )
        self.manifest = json.loads((self.artifacts / "manifest.json").read_text())
        rng = np.random.default_rng(0)
        self.batches = [net.batch(rng) for _ in range(STEPS)]
        self.feeds = folder / "feeds"
        write_feeds(self.feeds, self.manifest, self.batches)

    def train(
        self, checkpoint: Path | None = None, *, seed: int = 0, batches: list[list[np.ndarray]] | None = None
    ) -> tuple[list[float], api.CheckpointState]:
        """Train in Python with the on-device API."""
        state = api.CheckpointState.load_checkpoint(checkpoint or self.artifacts / "checkpoint")
        module = api.Module(self.artifacts / "training_model.onnx", state, seed=seed)
        optimizer = api.Optimizer(self.artifacts / "optimizer_model.onnx", module)
        optimizer.set_learning_rate(LEARNING_RATE)
        losses = []
        for batch in self.batches if batches is None else batches:
            module.lazy_reset_grad()
            losses.append(float(module(*batch)[0]))
            optimizer.step()
        return losses, state
