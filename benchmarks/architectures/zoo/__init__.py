"""The architectures of the sweep, one module per family of libraries."""

from __future__ import annotations

import importlib
import sys

from zoo.architecture import ARCHITECTURES, Architecture

FAMILIES = {
    "hugging_face": ("transformers",),
    "vision": ("torchvision", "timm", "vit-pytorch", "segmentation-models"),
    "graphs": ("geometric",),
    "generative": ("diffusers", "nflows", "normflows", "torchdiffeq", "pykan"),
    "forecasting": ("darts",),
    "adapters": ("peft",),
    "plain": ("plain",),
}
"""By module: the first parts of the names of its architectures."""

__all__ = ["FAMILIES", "load"]


def load(name: str | None = None) -> dict[str, Architecture]:
    """Returns the architectures whose libraries are installed: all, or those of the family of one name."""
    for family, prefixes in FAMILIES.items():
        if name is None or name.partition("/")[0] in prefixes:
            try:
                importlib.import_module(f"zoo.{family}")
            except ModuleNotFoundError as error:
                print(f"{family}: {error}; its architectures are left out", file=sys.stderr)
    return ARCHITECTURES
