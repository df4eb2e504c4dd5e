"""Collects the settings of a run, for loggers and model cards."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxtrain.trainer._trainer import Trainer


def run_settings(trainer: Trainer) -> dict[str, Any]:
    """Collects the settings of the trainer and of the fit under way, or of the last one, by name."""
    state = trainer._state
    plan = {} if trainer.last_fit is None else dataclasses.asdict(trainer.last_fit)
    optimizer = trainer.manifest.optimizer
    return {
        **dataclasses.asdict(state.settings),
        **plan,
        "optimizer": None if optimizer is None else optimizer.type,
        "optimizer_settings": {} if optimizer is None else dict(optimizer.settings),
        "learning_rate": trainer.learning_rate,
        "seed": state.position.seed,
    }
