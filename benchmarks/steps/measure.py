"""Measures one case: first steps, then rounds in which the engines take turns."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steps.engines import ENGINES, EngineSpec
from steps.nets import CASES
from steps.processes import EngineProcess, EngineStopped, Settings

__all__ = ["CONTROL", "LossesDiffer", "measure", "measure_first"]

CONTROL = " again"
"""Suffix of the name of an engine that runs a second time, to show the noise."""
ROUND_MS = 400.0
MOST_STEPS = 200
RANDOM_TOLERANCE = 0.25
"""Largest relative difference of the losses of a net with dropout: each engine draws masks of its own."""


class LossesDiffer(Exception):
    """Engines that start from the same weights did not compute the same."""


def spec_of(name: str) -> EngineSpec:
    return ENGINES[name.removesuffix(CONTROL)]


def measure_first(case: str, engine: str, settings: Settings) -> dict[str, Any]:
    """Returns the first step's time and the losses of a process that finds no compiled code."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        process = EngineProcess(spec_of(engine), case, settings, Path(cache))
        process.close()
        return process.first


def measure(case: str, engines: list[str], settings: Settings, rounds: int) -> dict[str, dict[str, Any]]:
    """Returns losses, memory and times of every engine; {"failed": reason} of one that cannot run the case.

    Args:
        case: name of the case.
        engines: names; the first one is what losses are compared with.
        settings: of all engines.
        rounds: how often each has its turn.

    Raises:
        LossesDiffer: the losses that an engine of ours has in the first steps are not those of the first engine.
        EngineStopped: an engine of ours, or the first one, has failed.
    """
    results: dict[str, dict[str, Any]] = {}
    running: dict[str, EngineProcess] = {}
    try:
        for name in engines:
            try:
                running[name] = EngineProcess(
                    spec_of(name), case, settings, settings.files / case / "compiled"
                )
            except EngineStopped as stopped:
                if spec_of(name).ours or not running:
                    raise EngineStopped(f"{case}, {name}: {stopped}") from None
                results[name] = {"failed": str(stopped)}
        for name, reason in _other_losses(case, running).items():
            results[name] = {"failed": reason}
            running.pop(name).close()
        times = _rounds(running, rounds)
    finally:
        for process in running.values():
            process.close()
    for name, process in running.items():
        results[name] = {
            "losses": process.first["losses"],
            "versions": process.first["versions"],
            "base_mb": process.first["base_mb"],
            **times[name],
        }
    return {name: results[name] for name in engines}


def _other_losses(case: str, running: Mapping[str, EngineProcess]) -> dict[str, str]:
    """Compares losses with those of the first engine; returns the engines of others whose losses differ, and how.

    Raises:
        LossesDiffer: those of an engine of ours differ.
    """
    differing = {}
    names = list(running)
    reference = running[names[0]].first["losses"]
    for name in names[1:]:
        losses = running[name].first["losses"]
        # Of the first loss, as one that has become small is made of rounding.
        distance = (RANDOM_TOLERANCE if CASES[case].net.draws else spec_of(name).tolerance) * abs(
            reference[0]
        )
        if any(abs(ours - theirs) > distance for ours, theirs in zip(losses, reference, strict=True)):
            reason = f"{case}: losses of {name} {losses} differ from {names[0]}'s {reference}"
            if spec_of(name).ours:
                raise LossesDiffer(reason)
            differing[name] = reason
    return differing


def _rounds(running: Mapping[str, EngineProcess], rounds: int) -> dict[str, dict[str, Any]]:
    steps = {name: _steps(process.measure(3)) for name, process in running.items()}
    halves: dict[str, list[dict[str, Any]]] = {name: [] for name in running}
    for _ in range(rounds):
        for name, process in running.items():
            halves[name].append(process.measure(steps[name]))
    return {name: _summary(measured) for name, measured in halves.items()}


def _steps(warm: dict[str, Any]) -> int:
    fastest = min(map(sum, zip(warm["gradients_ms"], warm["update_ms"], strict=True)))
    return max(2, min(MOST_STEPS, round(ROUND_MS / fastest)))


def _summary(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Minimum, median and spread of halves and whole steps, over all rounds, and of each round."""
    gradients, update = ([m[half] for m in measured] for half in ("gradients_ms", "update_ms"))
    step = [[a + b for a, b in zip(g, u, strict=True)] for g, u in zip(gradients, update, strict=True)]
    kinds = {"gradients": gradients, "update": update, "step": step}
    return {f"{kind}_ms": _statistics(rounds) for kind, rounds in kinds.items()} | {
        "peak_mb": measured[-1]["peak_mb"]
    }


def _statistics(rounds: list[list[float]]) -> dict[str, Any]:
    values = sorted(value for times in rounds for value in times)
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return {
        "min": round(values[0], 4),
        "q1": round(quartiles[0], 4),
        "median": round(quartiles[1], 4),
        "q3": round(quartiles[2], 4),
        "count": len(values),
        "round_min": [round(min(times), 4) for times in rounds],
        "round_median": [round(statistics.median(times), 4) for times in rounds],
    }
