"""Adds each graph to the report at its first call, and warns of fallbacks to PyTorch."""

from __future__ import annotations

import dataclasses
import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import fx

from onnxtrain.ortmodule._exceptions import ORTModuleFallbackException
from onnxtrain.ortmodule._options import FallbackPolicy
from onnxtrain.ortmodule._report import GraphRecord, Report
from onnxtrain.ortmodule._torch import CompileContext


class Derivatives:
    """Warns of computations that PyTorch runs for a graph, e.g. second derivatives, and reports them, once per kind.

    Args:
        name: the name of the graph, e.g. "graph 0".
        plain: the graph, whose number of operators is reported.
        report: receives one record per kind.
        policy: whether the graph may fall back to PyTorch.
    """

    def __init__(self, name: str, plain: fx.GraphModule, report: Report, policy: FallbackPolicy) -> None:
        self._name = name
        self._calls = sum(node.op.startswith("call") for node in plain.graph.nodes)
        self._report = report
        self._policy = policy
        self._said: set[str] = set()

    def announce(self, kind: str, error: ORTModuleFallbackException) -> None:
        """Warns that PyTorch is about to run a computation, unless this kind was announced before.

        Args:
            kind: the kind of computation, e.g. "second derivative" or "overlapping inputs".
            error: why ONNX Runtime doesn't run it.

        Raises:
            ORTModuleFallbackException: `error`, if the policy forbids the fallback.
        """
        if not self._policy.allows(error):
            raise error
        if kind in self._said:
            return
        self._said.add(kind)
        record = GraphRecord(
            f"{self._name}, {kind}", "training", "-", self._calls, fallback_reason=str(error)
        )
        self._report.record(record)
        _warn_of_pytorch(record)


def _warn_of_pytorch(record: GraphRecord) -> None:
    warnings.warn(f"ORTModule: {record.fallback}", stacklevel=3)


_MANY_CAPTURES = 64
"""Number of captures of one function after which a warning is issued. Dynamo gives up after 256."""


def warn_of_many_captures(captures: Counter[Any]) -> None:
    """Warns when a function is captured for the 65th time, because Dynamo gives up after 256 captures.

    Call this function once in each capture: it counts the capture under the function that Dynamo is capturing.

    Args:
        captures: number of captures per function; updated in place.
    """
    current = CompileContext.current_compile_id()
    function = None if current is None else current.frame_id
    captures[function] += 1
    if captures[function] == _MANY_CAPTURES + 1:
        warnings.warn(
            f"ORTModule: a function has been captured {_MANY_CAPTURES} times. The usual cause is a string that "
            "differs in each call, or a number that PyTorch treats as a constant (a bound of clamp, an exponent): pass "
            "such a number as a tensor. Set TORCH_LOGS=recompiles to see the cause",
            stacklevel=2,
        )


class FirstCall:
    """Runs a graph. The first call also adds the graph to the report, and warns if PyTorch runs the graph.

    Args:
        run: runs the graph.
        report: receives the record.
        record: describes the graph.
        start: `time.perf_counter()` at the start of the compilation, in seconds.
        log: receives one line at level INFO.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        report: Report,
        record: GraphRecord,
        start: float,
        log: logging.Logger,
    ) -> None:
        self._run = run
        self._report = report
        self._record: GraphRecord | None = record
        self._start = start
        self._log = log

    def __call__(self, *args: Any) -> Any:
        if self._record is None:
            return self._run(*args)
        # The warning that the graph runs in PyTorch comes after the result: if PyTorch cannot run the graph either, the
        # error is the caller's, and is raised here.
        result = self._run(*args)
        # A nested or concurrent call may have reported the graph already.
        if self._record is not None:
            seconds = time.perf_counter() - self._start
            self._report.record(dataclasses.replace(self._record, first_call_seconds=seconds))
            self._log.info("%s: first call after %.2f s", self._record.name, seconds)
            if self._record.fallback_reason is not None:
                _warn_of_pytorch(self._record)
            self._record = None
        return result
