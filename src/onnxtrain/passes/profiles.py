"""Defines the host profiles: how models are rewritten for each kind of host, and which ops the hosts cannot run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.errors import GraphBuildError
from onnxtrain.op_facts import RANDOM_OPS
from onnxtrain.passes.portable import Obstacle, find_obstacles, make_portable


@dataclass(frozen=True)
class HostProfile:
    """A class of hosts that artifacts are built for, and how models are adapted to them.

    Attributes:
        drawn: random ops of the training model to be computed from a seed input, so that all hosts draw the same
            numbers, e.g. {"Dropout"}.
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


def suit_hosts(model: ir.Model, profile: str, role: str) -> ir.Model:
    """Adapts a finished model to the ONNX Runtime builds that a host profile targets, e.g. for browsers and phones.

    Args:
        model: the model; may be modified.
        profile: name of the profile, a key of :data:`PROFILES`. "default" leaves the model unchanged.
        role: role of the model, for error messages, e.g. "eval_model".

    Returns:
        The adapted model.

    Raises:
        GraphBuildError: the adapted model has nodes that some of these builds cannot run, or run differently.
    """
    model = PROFILES[profile].rewrite(model)
    obstacles = PROFILES[profile].obstacles(model)
    if obstacles:
        listed = "; ".join(map(str, obstacles[:3])) + ("; ..." if len(obstacles) > 3 else "")
        raise GraphBuildError(
            f"generate_artifacts with profile={profile!r}: {len(obstacles)} nodes of the {role.replace('_', ' ')} do "
            f"not run on every host: {listed}. Change the model, or leave out profile to train on PCs and servers."
        )
    return model
