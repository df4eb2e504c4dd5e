"""Leaving a process group."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn


def gloo_threads() -> list[str]:
    """Returns the names of the threads of gloo in this process.

    A thread of gloo that frees a tensor while Python finalizes aborts the process (notes/faults-of-others.md).
    """
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


def leave_at_once() -> NoReturn:
    """Ends this worker without finalizing Python.

    PyTorch 2.13 doesn't end all threads of gloo, e.g. after `fully_shard`: on a busy machine, one of them might abort
    the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
