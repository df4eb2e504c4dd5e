"""Defines the host profiles: for each, how models are rewritten for its hosts, and what these cannot run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.op_facts import RANDOM_OPS
from onnxtrain.passes.portable import Obstacle, find_obstacles, make_portable


@dataclass(frozen=True)
class HostProfile:
    """A kind of host that artifacts are made for, and how models are adapted to it.

    Attributes:
        drawn: random ops of the training model that draw from one of its inputs instead, so that all hosts draw the
            same numbers, e.g. {"Dropout"}.
        rewrite: rewrites a finished model for the hosts; may modify it.
        obstacles: returns the nodes of a rewritten model that a host cannot run.
    """

    drawn: frozenset[str]
    rewrite: Callable[[ir.Model], ir.Model]
    obstacles: Callable[[ir.Model], list[Obstacle]]


PROFILES: Mapping[str, HostProfile] = {
    # Dropout keeps its kernel, which the on-device API seeds before each run.
    "default": HostProfile(RANDOM_OPS - {"Dropout"}, lambda model: model, lambda model: []),
    "portable": HostProfile(RANDOM_OPS, make_portable, find_obstacles),
}
"""Profiles by name. `Profile` in `recipe.py` lists the same names."""
