"""Run Python in a process of its own, with this package on its path."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import onnxtrain

SOURCE = Path(onnxtrain.__file__).parents[1]
TESTS = Path(__file__).parent


def python(
    *arguments: str | Path,
    code: int | None = 0,
    path: Iterable[str | Path] = (SOURCE,),
    cwd: Path | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Return what a Python process printed.

    Args:
        arguments: of Python, e.g. "-c", "print(1)".
        code: the exit code that it has to end with; None allows any.
        path: where modules are looked for first.
        cwd: the directory that it runs in.
        environment: further variables, e.g. OMP_NUM_THREADS="1".
    """
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))} | environment,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    assert code is None or done.returncode == code, f"exit code {done.returncode}: {done.stderr[-3000:]}"
    return done
