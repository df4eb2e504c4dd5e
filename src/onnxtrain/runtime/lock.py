"""Synchronizes the threads of a process that use the same checkpoint state and its gradients."""

from __future__ import annotations

import os
import threading
from types import TracebackType

from onnxtrain.errors import TrainingStateError

# Number of forks since this module was imported.
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


# Windows has no fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class ProcessLock:
    """Lock for a per-process resource, e.g. a registry. A forked child process starts with the lock released.

    A plain `threading.Lock` would remain locked in the child if another thread held it during the fork.
    """

    __slots__ = ("_forks", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forks = _forks

    def __enter__(self) -> ProcessLock:
        if self._forks != _forks:
            self._lock, self._forks = threading.Lock(), _forks
        self._lock.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


class StateLock:
    """Lets one thread at a time use a checkpoint state and the modules and optimizers created from it.

    Use it in a `with` statement. The lock is reentrant. Unlike `threading.RLock`, it is fair: a thread that releases
    the lock and immediately acquires it again must wait for its turn.

    >>> lock = StateLock()
    >>> with lock, lock:
    ...     lock.depth
    2
    """

    __slots__ = ("_depth", "_forks", "_held", "_next")

    def __init__(self) -> None:
        # Fairness requires two locks. The first waiting thread holds `_next` and waits for `_held`; all others wait for
        # `_next`, including the thread that has just released `_held`.
        self._next = threading.Lock()
        self._held = threading.RLock()
        self._depth = 0
        self._forks = _forks

    @property
    def depth(self) -> int:
        """Number of nested `with` statements in which this thread holds the lock; 0 if it does not hold the lock."""
        return self._depth if self._is_mine() else 0

    def _is_mine(self) -> bool:
        # Undocumented, but threading.Condition relies on it.
        return bool(self._held._is_owned())  # type: ignore[attr-defined]

    def __enter__(self) -> StateLock:
        if self._forks != _forks:
            self._enter_fork()
        if self._is_mine():
            self._depth += 1
            return self
        try:
            with self._next:
                self._held.acquire()
            self._depth = 1
        # Ctrl-C may occur while this thread waits, or when it has just acquired the lock; the lock must be free
        # afterwards.
        except BaseException:
            if self._is_mine():
                self._held.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._held.release()

    def _enter_fork(self) -> None:
        """Adapts the lock to a forked process, in which only the thread that called fork exists.

        Raises:
            TrainingStateError: another thread held the lock when the process was forked.
        """
        mine = self._is_mine()
        if self._depth and not mine:
            raise TrainingStateError(
                "This process was forked while another thread of its parent was in the middle of a step, "
                "so this process's copy of the state may be inconsistent. Load the checkpoint again in "
                "this process, or fork while no other thread uses the state."
            )
        # A thread of the parent may have held one of the two locks without having started anything.
        self._next, self._held, self._forks = threading.Lock(), threading.RLock(), _forks
        if mine:
            self._held.acquire()


class GradientOwner:
    """Records which thread computed the gradients of a state, and prevents other threads from using them by mistake.

    A training step consists of several calls: `module(...)`, `optimizer.step()` and `module.lazy_reset_grad()`. If
    another thread made one of these calls in between, it would use or overwrite the first thread's gradients. Such a
    call raises TrainingStateError, unless both threads hold the lock of the state from their first call to their last.

    Args:
        lock: lock of the state. It must be held when a method is called.
    """

    __slots__ = ("_lock", "_shared", "_thread", "_used")

    def __init__(self, lock: StateLock) -> None:
        self._lock = lock
        # The thread that computed the gradients.
        self._thread: threading.Thread | None = None
        # True if that thread held the lock around its call, and so shares the gradients with other threads that do.
        self._shared = False
        # True after an optimizer step with the gradients, or a reset: a new training step then loses nothing.
        self._used = True

    def check_replace(self, doing: str) -> None:
        """Raises TrainingStateError if this thread would replace another thread's gradients before they are used.

        Args:
            doing: beginning of the message, e.g. "A training step".
        """
        if not self._used:
            self._require(doing)

    def check_add(self, doing: str) -> None:
        """Raises TrainingStateError if this thread would add to another thread's gradients.

        Args:
            doing: beginning of the message, e.g. "A training step".
        """
        self._require(doing, even_if_ended=True)

    def replaced(self) -> None:
        """Records that this thread has computed new gradients."""
        self._thread, self._shared, self._used = threading.current_thread(), self._held_outside(), False

    def added(self) -> None:
        """Records that this thread has added to the gradients."""
        self._used = False

    def check_use(self, doing: str) -> None:
        """Raises TrainingStateError if an optimizer step in this thread would use another thread's gradients.

        Args:
            doing: beginning of the message, e.g. "Optimizer.step()".
        """
        self._require(doing)

    def used(self) -> None:
        """Records that this thread has used the gradients to update the parameters."""
        self._used = True

    def reset(self, doing: str) -> None:
        """Records that this thread discards the gradients.

        Args:
            doing: beginning of the error message, e.g. "Module.lazy_reset_grad()".

        Raises:
            TrainingStateError: the gradients belong to another thread, and no optimizer step has used them yet.
        """
        if not self._used:
            self._require(doing)
        self._used = True

    def _held_outside(self) -> bool:
        """True if this thread already held the lock when it called the current method of Module or Optimizer."""
        # The method itself holds it once.
        return self._lock.depth > 1

    def _require(self, doing: str, *, even_if_ended: bool = False) -> None:
        """Raises TrainingStateError if the gradients belong to another thread.

        Args:
            doing: beginning of the message, e.g. "Optimizer.step()".
            even_if_ended: True to raise even if the owning thread has ended.
        """
        owner = self._thread
        if owner is None or owner is threading.current_thread() or (self._shared and self._held_outside()):
            return
        # A thread that has ended makes no more calls, so its gradients may be used. Adding to them would still mix
        # gradients of two threads.
        if not owner.is_alive() and not even_if_ended:
            return
        raise TrainingStateError(
            f"{doing} in thread '{threading.current_thread().name}': the gradients belong to thread "
            f"'{owner.name}', which has not reset them, so the steps of the two threads would mix. In each "
            "thread, hold the lock from the training call to the reset: with module.lock: module(...); "
            "optimizer.step(); module.lazy_reset_grad()."
        )
