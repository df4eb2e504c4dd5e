"""Shell completion for option values: names of losses, optimizers, schedules and metrics."""

from __future__ import annotations

from onnxtrain._names import LOSSES, OPTIMIZERS
from onnxtrain.schedules import SCHEDULES


def complete_losses(incomplete: str) -> list[str]:
    """Completes the name of a loss in the shell: returns the names that begin with `incomplete`.

    >>> complete_losses("c")
    ['cross_entropy', 'causal_lm']
    """
    return _beginning(list(LOSSES), incomplete)


def complete_optimizers(incomplete: str) -> list[str]:
    """Completes the name of an optimizer in the shell: returns the names that begin with `incomplete`."""
    return _beginning(list(OPTIMIZERS), incomplete)


def complete_schedules(incomplete: str) -> list[str]:
    """Completes the name of a schedule in the shell: returns the names that begin with `incomplete`."""
    return _beginning(list(SCHEDULES), incomplete)


def complete_metrics(incomplete: str) -> list[str]:
    """Completes the name of a metric in the shell: returns the names that begin with `incomplete`."""
    # Imported here, because importing the trainer takes a second and only this completion needs it.
    from onnxtrain.trainer._metrics.metrics import METRICS

    return _beginning(list(METRICS), incomplete)


def _beginning(names: list[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
