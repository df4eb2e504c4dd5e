"""The lock of a checkpoint state, and the thread that its gradients belong to."""

from __future__ import annotations

import os
import threading
from types import TracebackType

from onnxtrain.errors import TrainingStateError

# Number of forks between the process that imported this module and this process.
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_count_fork)


class ProcessLock:
    """Lock of something that a process has one of. In a forked process it is free, whoever held it in the parent."""

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
    """Lets one thread at a time use a checkpoint state and everything that was made from it.

    Use it in a `with` statement. The lock is reentrant: a thread that holds the lock may take it again. Threads that
    wait get their turn: a thread that releases the lock and takes it again at once goes behind those that wait, which
    `threading.RLock` does not promise.

    >>> lock = StateLock()
    >>> with lock, lock:
    ...     lock.depth
    2
    """

    __slots__ = ("_depth", "_forks", "_held", "_next")

    def __init__(self) -> None:
        self._next = (
            threading.Lock()
        )  # held by the thread that waits for `_held`; the others wait for `_next`
        self._held = threading.RLock()
        self._depth = 0
        self._forks = _forks

    @property
    def depth(self) -> int:
        """How many `with` statements of this thread hold the lock; 0 if this thread does not hold it."""
        return self._depth if self._is_mine() else 0

    def _is_mine(self) -> bool:
        # Not documented, but what threading.Condition asks of an RLock.
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
        except BaseException:  # Ctrl-C while this thread waits, or when it has just got the lock
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
        """Takes the lock over in a forked process, in which only the thread that forked lives on.

        Raises:
            TrainingStateError: Another thread held the lock when the process was forked.
        """
        mine = self._is_mine()
        if self._depth and not mine:
            raise TrainingStateError(
                "This process was forked while another thread of its parent was in the middle of a step, so the "
                "state that this process has a copy of may be half changed. Load the checkpoint anew in this process, "
                "or fork while no other thread uses the state."
            )
        # A thread of the parent may have held one of the two without having begun anything.
        self._next, self._held, self._forks = threading.Lock(), threading.RLock(), _forks
        if mine:
            self._held.acquire()


class GradientOwner:
    """Tells which thread the gradients of a state belong to, and refuses steps of other threads that would mix them.

    A training step is several calls: the module's, which computes gradients, the optimizer's, and the one that resets
    the gradients. What another thread does between these calls cannot be told from what it should have done before or
    after them, so it is an error unless both threads hold the lock of the state from the first call to the last.

    Args:
        lock: The lock of the state; it is held whenever a method is called.
    """

    __slots__ = ("_lock", "_shared", "_thread", "_used")

    def __init__(self, lock: StateLock) -> None:
        self._lock = lock
        self._thread: threading.Thread | None = None  # the one that computed the gradients
        self._shared = False  # whether that thread held the lock around the call
        self._used = True  # whether an optimizer step or a reset came after them

    def check_replace(self, doing: str) -> None:
        """Raises TrainingStateError if this thread must not replace the gradients."""
        if not self._used:
            self._require(doing)

    def check_add(self, doing: str) -> None:
        """Raises TrainingStateError if this thread must not add to the gradients."""
        self._require(doing, even_if_ended=True)

    def replaced(self) -> None:
        """Records that this thread has computed new gradients."""
        self._thread, self._shared, self._used = threading.current_thread(), self._held_outside(), False

    def added(self) -> None:
        """Records that this thread has added to the gradients."""
        self._used = False

    def check_use(self, doing: str) -> None:
        """Raises TrainingStateError if this thread must not update the parameters from the gradients."""
        self._require(doing)

    def used(self) -> None:
        """Records that this thread has updated the parameters from the gradients."""
        self._used = True

    def reset(self, doing: str) -> None:
        """Lets this thread give the gradients up, or raises TrainingStateError."""
        if not self._used:
            self._require(doing)
        self._used = True

    def _held_outside(self) -> bool:
        """Whether the caller of a method of Module or Optimizer holds the lock, beside the method itself."""
        return self._lock.depth > 1

    def _require(self, doing: str, *, even_if_ended: bool = False) -> None:
        """Raises TrainingStateError if the gradients are another thread's.

        Args:
            doing: What is about to be done, for the message.
            even_if_ended: Also if that thread has ended, so that nothing can come between its calls any more.
        """
        owner = self._thread
        if owner is None or owner is threading.current_thread() or (self._shared and self._held_outside()):
            return
        if not owner.is_alive() and not even_if_ended:
            return
        raise TrainingStateError(
            f"{doing} in thread '{threading.current_thread().name}': the gradients are those of thread '{owner.name}', "
            "which has not reset them, so the steps of the two threads would be mixed. Hold the lock from the training "
            "call to the reset, in each thread: with module.lock: module(...); optimizer.step(); "
            "module.lazy_reset_grad()."
        )
