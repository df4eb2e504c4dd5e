"""Joins the group of workers that the environment variables of this process describe."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from onnxtrain.distributed._communicator import Communicator, Solo
from onnxtrain.distributed._strategy import DataParallel
from onnxtrain.errors import InputError, MissingPackageError


def join_group(strategy: DataParallel) -> Communicator:
    """Joins the other workers; a process that was started alone is a group of one.

    `torchrun`, `onnxtrain train --workers`, :func:`launch` and Ray set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    SLURM sets SLURM_PROCID and SLURM_NTASKS, and the job's script the other two. A process group of PyTorch that
    exists already is used.

    Raises:
        InputError: variables are missing or no numbers.
        MissingPackageError: there are other workers, and PyTorch is not installed.
        WorkersError: the other workers did not come.
    """
    place = read_place(os.environ)
    # A program may have made a process group itself: that of Ray Train, accelerate or torch.distributed.
    if place is None and not _has_group():
        return Solo()
    try:
        from onnxtrain.distributed._torch_group import TorchGroup
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "Training on several workers: they exchange gradients through PyTorch, which is not installed. Install "
            "it: pip install 'onnxtrain[torch]'."
        ) from error
    return TorchGroup(strategy, place)


def read_place(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Reads number and count of the workers; None for a process that was started alone.

    >>> read_place({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "29500"})
    (1, 4)

    Raises:
        InputError: variables are missing or no numbers.
    """
    for rank_name, size_name in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank_name not in environment or size_name not in environment:
            continue
        rank_text, size_text = environment[rank_name], environment[size_name]
        if not rank_text.isdecimal() or not size_text.isdecimal() or not 0 <= int(rank_text) < int(size_text):
            raise InputError(
                f"Joining the other workers: {rank_name} is {rank_text!r} and {size_name} {size_text!r}; they must be "
                "the number of this worker, counted from 0, and the number of all workers."
            )
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
        # SLURM sets its variables in shells and in jobs of one task, too.
        if missing and int(size_text) == 1:
            return None
        if missing:
            raise InputError(
                f"Joining the other {int(size_text) - 1} workers: {' and '.join(missing)} are not set. Set them to a "
                "host name of worker 0 and to a free port there, e.g. MASTER_PORT=29500, or start by torchrun."
            )
        return int(rank_text), int(size_text)
    return None


def threads_of_worker() -> int | None:
    """Computes the threads of a worker: its share of the cores of this machine; None if it is alone there."""
    # Set by torchrun and by our launchers. Workers with threads for all cores would slow one another down.
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not local.isdecimal() or int(local) < 2:
        return None
    return max(1, len(os.sched_getaffinity(0)) // int(local)) if hasattr(os, "sched_getaffinity") else 1


def _has_group() -> bool:
    """Checks if the program has made a process group of PyTorch, without importing PyTorch."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and bool(distributed.is_initialized())
