"""Engines in processes of their own, which take turns."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steps.engines import EngineSpec

__all__ = ["EngineProcess", "EngineStopped", "Settings", "prepare"]

BENCHMARKS = Path(__file__).parents[1]
PAUSE_S = 0.25
"""Between turns, so that threads which still spin for work come to rest."""


class EngineStopped(Exception):
    """An engine's process ended; the message is the end of what it wrote."""


@dataclass(frozen=True)
class Settings:
    """Settings of all engines.

    Attributes:
        threads: how many.
        files: folder of the artifacts of all cases, and of compiled code.
        pythons: by the names that engines call theirs.
        device: "cpu" or "cuda".
    """

    threads: int
    files: Path
    pythons: Mapping[str, Path]
    device: str = "cpu"


def _environment(settings: Settings, cache: Path, spec: EngineSpec | None = None) -> dict[str, str]:
    """Variables of a process. Packages on this one's PYTHONPATH are nothing to another Python."""
    paths = [str(BENCHMARKS), str(BENCHMARKS.parent / "src")]
    if spec is None or not spec.python:
        paths.insert(0, os.environ.get("PYTHONPATH", ""))
    return (
        os.environ
        | {name: str(settings.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
        | dict(spec.environment if spec else {})
    )


def prepare(case: str, settings: Settings, again: bool) -> dict[str, Any]:
    """Writes the artifacts of a case unless they are there; returns what is known of them."""
    folder = settings.files / case
    about = folder / "about.json"
    if again or not about.exists():
        command = [sys.executable, "-m", "steps.prepare", case, folder]
        environment = _environment(settings, folder)
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise EngineStopped(f"preparing {case}: {_tail(done.stderr)}")
    return json.loads(about.read_text())


class EngineProcess:
    """An engine in a process of its own.

    Args:
        spec: the engine.
        case: name of the case.
        settings: of the run.
        cache: folder of compiled code; a new one compiles afresh.

    Raises:
        EngineStopped: it ended before its first steps were done.
    """

    def __init__(self, spec: EngineSpec, case: str, settings: Settings, cache: Path) -> None:
        files = settings.files / case
        python = settings.pythons[spec.python]
        options = [f"{key}={value}" for key, value in {**spec.options, "device": settings.device}.items()]
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  # lives as long as the process
        self._process = subprocess.Popen(
            [python, "-m", "steps.worker", spec.module, case, files, str(settings.threads), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=_environment(settings, cache, spec),
        )
        self.first = self._read()

    def measure(self, steps: int) -> dict[str, Any]:
        """Returns the times of so many steps, after a pause."""
        time.sleep(PAUSE_S)
        assert self._process.stdin is not None
        try:
            print(steps, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise EngineStopped(self._end()) from None
        return self._read()

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()
        self._stderr.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineStopped(self._end())
        return json.loads(line)

    def _end(self) -> str:
        self._process.communicate()
        self._stderr.seek(0)
        return _tail(self._stderr.read())


def _tail(text: str) -> str:
    """The message of the exception that a process ended with, or the last line that it wrote."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    messages = [line for line in lines if re.match(r"[A-Za-z_.]+(Error|Exception|Refused)\b", line)]
    return (messages or lines or ["it ended without a word"])[-1][:300]
