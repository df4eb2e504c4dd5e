"""Reads the learning rates of single parameters from the manifest of a run."""

from __future__ import annotations

from onnxtrain.runtime.manifest import Manifest
from onnxtrain.selection import match_names


def learning_rate_scales(manifest: Manifest) -> dict[str, float]:
    """Returns the factor of the learning rate for each trained parameter; 1.0 for those without one of their own."""
    names = [spec.name for spec in manifest.trainable]
    scales = dict.fromkeys(names, 1.0)
    groups = None if manifest.optimizer is None else manifest.optimizer.settings.get("groups")
    for group in groups if isinstance(groups, list) else ():
        # The settings of a manifest are any JSON.
        patterns, scale = (
            (group.get("parameters"), group.get("learning_rate_scale"))
            if isinstance(group, dict)
            else ((), None)
        )
        if not isinstance(scale, int | float) or not isinstance(patterns, list):
            continue
        matched = match_names([pattern for pattern in patterns if isinstance(pattern, str)], names)
        # As in the optimizer model, the last group with a factor decides.
        scales |= {name: float(scale) for found in matched.values() for name in found}
    return scales
