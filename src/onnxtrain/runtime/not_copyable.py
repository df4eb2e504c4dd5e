"""Prevents copying and pickling of objects whose copies would train the original's tensors."""

from __future__ import annotations

from typing import Any, ClassVar


class NotCopyable:
    """Base class for objects that own sessions, or tensors that are trained in place. Copying them raises TypeError.

    A shallow copy would share the tensors, so training the copy would train the original. Sessions can be neither
    copied nor pickled.
    """

    _instead: ClassVar[str] = (
        "Save the state with CheckpointState.save_checkpoint(state, path, include_optimizer_state=True), "
        "load it with CheckpointState.load_checkpoint(path), and create a new Module and Optimizer from "
        "it."
    )
    """Advice at the end of the error message."""

    _shown_as: ClassVar[str] = ""
    """Name of the object in the error message; "" for its class name."""

    # Called by `copy.copy`, `copy.deepcopy` and `pickle`, unless a subclass has its own.
    def __reduce__(self) -> tuple[Any, ...]:
        kind = self._shown_as or type(self).__name__
        raise TypeError(
            f"A {kind} can be neither copied nor pickled: a copy would update the original's tensors. "
            f"{self._instead}"
        )
