"""Run a graph that Dynamo has captured for all sizes of the batch: compiled for the first sizes, then for any size."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from onnxtrain.ortmodule import _torch
from onnxtrain.ortmodule.capture.autograd._gradients import unseen_by_hooks
from onnxtrain.ortmodule.capture.dynamo.patches._inactive_dropout import inactive_dropout
from onnxtrain.ortmodule.capture.dynamo.patches._missing_fakes import missing_fakes
from onnxtrain.ortmodule.capture.dynamo.speedups import without_older_objects
from onnxtrain.ortmodule.capture.graph._batch import Batch

_OWN = 2
"""Sizes that have a compiled graph of their own: the batch of the training loop, and its last one, which is smaller."""

_MOST = 16
"""Graphs of one size that are kept, if the graph for all sizes turns out to hold for few of them."""


Size = tuple[int, ...]
"""The size of the batch, as `Batch.value` returns it."""


class BySize:
    """Runs a captured graph, and compiles it when a call brings a new size of the batch, without capturing it again.

    A graph of one size is compiled faster than one of all sizes, and computes faster: ONNX Runtime and the passes know
    its shapes.

    Args:
        compiled: the graph, compiled for the size of the capture.
        size: that size, e.g. (32,).
        batch: tells the size of a call.
        compile_for: compiles the graph for the size of the arguments of a call.
        compile_for_all: compiles the graph for all sizes; returns it, and whether it holds for a size.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        size: Size,
        batch: Batch,
        compile_for: Callable[[Sequence[Any]], Callable[..., Any]],
        compile_for_all: Callable[[], tuple[Callable[..., Any], Callable[[Size], bool]]],
    ) -> None:
        self._by_size = {size: compiled}
        self._size_of = batch.value
        self._compile_for = compile_for
        self._for_all = functools.cache(compile_for_all)
        self._own = [size]
        self._sees_many = False

    def __call__(self, *args: Any) -> Any:
        size = self._size_of(args)
        run = self._by_size.get(size)
        if run is None:
            # Dynamo's lock: tracing changes settings of the whole process, so that one thread traces at a time.
            with _torch.compile_lock:
                # Another thread may have compiled it meanwhile.
                run = self._by_size.get(size)
                if run is None:
                    with without_older_objects(), as_in_a_capture():
                        run = self._by_size[size] = self._compiled(size, args)
        return run(*args)

    def _compiled(self, size: Size, args: Sequence[Any]) -> Callable[..., Any]:
        """Returns the graph, compiled for the size of a call, or for all sizes."""
        if self._sees_many or len(self._own) >= _OWN:
            self._sees_many = True
            run, holds = self._for_all()
            if holds(size):
                # Each graph has memory of its own. The first one stays, which computes most batches.
                for other in [other for other in self._own[1:] if holds(other)]:
                    self._own.remove(other)
                    self._by_size[other] = run
                return run
        if len(self._own) >= _MOST:
            del self._by_size[self._own.pop(1)]
        self._own.append(size)
        return self._compile_for(args)


@contextlib.contextmanager
def as_in_a_capture() -> Iterator[None]:
    """Takes back what the caller has switched on, as Dynamo does for its backends, while the context is open."""
    modes = _torch.pop_function_modes()
    try:
        with (
            unseen_by_hooks(),
            torch.inference_mode(False),
            _torch.temporarily_clear_interpreter_stack(),
            _torch.disable_current_modes(),
            missing_fakes(),
            inactive_dropout(),
        ):
            yield
    finally:
        _torch.push_function_modes(modes)
