"""The interface of an engine to the worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ADAMW", "Engine", "Job"]

ADAMW = {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}


@dataclass(frozen=True)
class Job:
    """The task of a process.

    Attributes:
        case: name of the case.
        files: folder with the case's artifacts and batch.
        threads: how many.
        options: of the engine.
    """

    case: str
    files: Path
    threads: int
    options: Mapping[str, str]

    @property
    def device(self) -> str:
        """The device: "cpu" or "cuda"."""
        return self.options.get("device", "cpu")


@dataclass(frozen=True)
class Engine:
    """One training step in two halves.

    Attributes:
        gradients: forward and backward; returns the loss.
        update: the optimizer's step at a learning rate.
        versions: of the packages it runs on.
        whole: whether `update` is the whole step, and `gradients` only what its loss was.
    """

    gradients: Callable[[], float]
    update: Callable[[float], None]
    versions: dict[str, str]
    whole: bool = False
