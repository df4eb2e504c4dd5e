"""Run jobs on several workers, which are processes of this machine that torchrun starts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fresh_process import SOURCE, TESTS, python


def torchrun(
    size: int,
    *arguments: str | Path,
    path: Iterable[str | Path] = (SOURCE, TESTS),
    cwd: Path | None = None,
) -> str:
    """Run a program on `size` workers; return what they printed.

    Args:
        size: the number of workers.
        *arguments: of torchrun, e.g. "--max-restarts", "1", "program.py".
        path: where modules are looked for first.
        cwd: the directory that they run in.

    Raises:
        AssertionError: a worker failed, by an exception or a signal; torchrun has ended the others.
    """
    done = python(
        *("-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost"),
        *("--nproc-per-node", str(size), *arguments),
        path=path,
        cwd=cwd,
        code=None,
        # One thread each, as there are more workers than processors. The network of the machine is left alone.
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        CUDA_VISIBLE_DEVICES="",
        HF_HUB_OFFLINE="1",
    )
    said = done.stdout + done.stderr
    # After the last failure torchrun prints a traceback of its own functions.
    assert done.returncode == 0, (
        f"exit code {done.returncode}: {said.rpartition('Traceback')[0][-8000:] or said}"
    )
    return said


def run_jobs(size: int, folder: Path, *jobs: str) -> dict[str, Any]:
    """Run jobs of `distributed.worker` by name; return what each gives on the worker of rank 0."""
    torchrun(size, "-m", "distributed.worker", folder, *jobs)
    return torch.load(folder / "results.pt", weights_only=False)
