"""Artifacts on disk and the on-device API over them, as a user writes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from on_device import DEVICE
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.artifacts import generate_artifacts


@dataclass
class Run:
    """A module and its optimizer over the artifacts in `directory`."""

    directory: Path
    state: CheckpointState
    module: Module
    optimizer: Optimizer | None

    @classmethod
    def open(cls, directory: Path, checkpoint: Path | None = None, *, error_if_nonfinite: bool = True) -> Run:
        state = CheckpointState.load_checkpoint(checkpoint or directory / "checkpoint")
        module = Module(
            directory / "training_model.onnx",
            state,
            directory / "eval_model.onnx",
            device=DEVICE,
            error_if_nonfinite=error_if_nonfinite,
        )
        optimizer = directory / "optimizer_model.onnx"
        return cls(directory, state, module, Optimizer(optimizer, module) if optimizer.exists() else None)

    @classmethod
    def generate(cls, directory: Path, model: Any, *, error_if_nonfinite: bool = True, **options: Any) -> Run:
        generate_artifacts(model, artifact_directory=directory, **options)
        return cls.open(directory, error_if_nonfinite=error_if_nonfinite)

    def step(self, *batch: Any) -> float:
        """One training step; returns the loss."""
        assert self.optimizer is not None
        self.module.train()
        result = self.module(*batch)
        self.optimizer.step()
        self.module.lazy_reset_grad()
        return float(result[0] if isinstance(result, tuple) else result)
