"""Runs a fit in a single process, or in one of several workers."""

from __future__ import annotations

from dataclasses import replace

from onnxtrain.trainer._fit.loop import FitLoop
from onnxtrain.trainer._fit.step import Fit, Stepper
from onnxtrain.trainer._workers.events import WorkerEvents
from onnxtrain.trainer._workers.group import WorkerGroup
from onnxtrain.trainer._workers.step import WorkerStepper


def run_fit(fit: Fit) -> None:
    """Runs a fit. Workers take steps together, and adopt the changes that callbacks on worker 0 make to the state."""
    workers = fit.state.workers
    group = workers if isinstance(workers, WorkerGroup) else None
    if group is not None:
        fit = replace(fit, events=WorkerEvents(fit.events, group, fit.state))
    try:
        stepper = Stepper(fit) if group is None else WorkerStepper(fit, group)
        FitLoop(fit, stepper).run()
    except BaseException as error:
        # Loggers close their files for KeyboardInterrupt and SystemExit, too.
        fit.events.call("on_exception", error)
        raise
