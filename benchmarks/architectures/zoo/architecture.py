"""An architecture of the sweep: a function that makes a small one, and its batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["ARCHITECTURES", "Architecture", "architecture"]

Batch = dict[str, Any]

# A torchvision for CUDA cannot load its compiled operators beside a CPU PyTorch; its Python part asks for two of them.
for _name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{_name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")


@dataclass(frozen=True)
class Architecture:
    """A network with random weights.

    Attributes:
        name: unique, as in "family/name".
        make: returns the module, in training mode.
        batches: returns the keyword arguments of each training step.
    """

    name: str
    make: Callable[[], nn.Module]
    batches: Callable[[], list[Batch]]


ARCHITECTURES: dict[str, Architecture] = {}


def architecture(name: str, make: Callable[[], nn.Module], batches: Callable[[], list[Batch]]) -> None:
    """Adds an architecture to the list."""
    assert name not in ARCHITECTURES, f"{name} is there twice"
    ARCHITECTURES[name] = Architecture(name, make, batches)
