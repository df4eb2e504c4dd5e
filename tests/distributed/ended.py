"""The check that a worker ends in order."""

from __future__ import annotations

from pathlib import Path


def check_that_gloo_has_ended() -> None:
    """Raises AssertionError if a thread of gloo runs.

    Such a thread may abort the process when Python has ended, on a busy machine (docs/faults-of-others.md).
    """
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert not [name for name in names if "gloo" in name], (
        f"a thread of gloo outlives the process group: {names}. Delete what holds the group, the model or its "
        "optimizer, before destroy_process_group()."
    )
