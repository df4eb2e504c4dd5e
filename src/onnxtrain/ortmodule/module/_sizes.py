"""Runs a graph with a symbolic batch size, compiled separately for the first sizes, then once for all sizes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from onnxtrain.ortmodule import _torch
from onnxtrain.ortmodule.capture._break_even import BreakEven
from onnxtrain.ortmodule.capture.autograd._gradients import unseen_by_hooks
from onnxtrain.ortmodule.capture.dynamo.patches._inactive_dropout import inactive_dropout
from onnxtrain.ortmodule.capture.dynamo.patches._missing_fakes import missing_fakes
from onnxtrain.ortmodule.capture.dynamo.speedups import without_older_objects
from onnxtrain.ortmodule.capture.graph._batch import Batch
from onnxtrain.ortmodule.module._pytorch_work import unwatched

_SEPARATE_SIZES = 2
"""Number of batch sizes that are compiled separately: the usual size, and the size of the smaller last batch."""

_MAX_GRAPHS = 16
"""Maximum number of graphs for a single size that are kept if the graph for all sizes rejects many sizes."""


Size = tuple[int, ...]
"""A batch size, as returned by `Batch.value`."""


class BySize:
    """Runs a captured graph. For a new batch size, the graph is compiled again, but not captured again.

    A graph for one size compiles and runs faster than a graph for all sizes, because ONNX Runtime and the passes know
    its shapes.

    Args:
        compiled: the graph, compiled for the batch size of the captured call.
        plain: runs the graph in PyTorch.
        break_even: estimates how many calls with other batch sizes PyTorch runs before another compilation pays off.
        size: the batch size of the captured call, e.g. (32,).
        batch: locates the batch size in the arguments of a call.
        compile_for: compiles the graph for the batch size of the given arguments.
        compile_for_all: compiles the graph for all sizes. Returns the compiled graph, and a function that returns True
            if the graph's guards accept a size.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        plain: Callable[..., Any],
        break_even: BreakEven,
        size: Size,
        batch: Batch,
        compile_for: Callable[[Sequence[Any]], Callable[..., Any]],
        compile_for_all: Callable[[], tuple[Callable[..., Any], Callable[[Size], bool]]],
    ) -> None:
        self._by_size = {size: compiled}
        self._plain = plain
        self._break_even = break_even
        self._in_pytorch = 0
        self._size_of = batch.value
        self._compile_for = compile_for
        self._for_all = functools.cache(compile_for_all)
        self._separate_sizes = [size]
        self._sees_many = False

    def __call__(self, *args: Any) -> Any:
        size = self._size_of(args)
        run = self._by_size.get(size)
        if run is None:
            if self._in_pytorch < self._break_even.calls:
                self._in_pytorch += 1
                self._break_even.in_pytorch = True
                return unwatched(self._plain, *args)
            # Dynamo's lock: tracing changes process-wide settings, so only one thread may trace at a time.
            with _torch.compile_lock:
                # Another thread may have compiled the graph in the meantime.
                run = self._by_size.get(size)
                if run is None:
                    with without_older_objects(), as_in_a_capture():
                        run = self._by_size[size] = self._compiled(size, args)
        return run(*args)

    def _compiled(self, size: Size, args: Sequence[Any]) -> Callable[..., Any]:
        """Compiles the graph for a new batch size, or returns the graph for all sizes if enough sizes were seen.

        Args:
            size: the new batch size.
            args: arguments of a call with this batch size.
        """
        if self._sees_many or len(self._separate_sizes) >= _SEPARATE_SIZES:
            self._sees_many = True
            run, holds = self._for_all()
            if holds(size):
                # Each graph takes memory: graphs for one size are dropped, except the first, which runs most batches.
                for other in [other for other in self._separate_sizes[1:] if holds(other)]:
                    self._separate_sizes.remove(other)
                    self._by_size[other] = run
                return run
        if len(self._separate_sizes) >= _MAX_GRAPHS:
            del self._by_size[self._separate_sizes.pop(1)]
        self._separate_sizes.append(size)
        return self._compile_for(args)


@contextlib.contextmanager
def as_in_a_capture() -> Iterator[None]:
    """Context manager that suspends the caller's modes, hooks and transforms, as Dynamo does when it calls a backend.

    Also applies the patches to PyTorch that tracing requires.
    """
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
