"""Joins the group of workers described by environment variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from onnxtrain.distributed._communicator import Communicator, Solo
from onnxtrain.distributed._strategy import DataParallel
from onnxtrain.errors import InputError, MissingPackageError


def join_group(strategy: DataParallel) -> Communicator:
    """Joins the group of workers; a process that was started without a launcher is a group of one.

    `torchrun`, `onnxtrain train --workers`, :func:`launch` and Ray set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    SLURM sets SLURM_PROCID and SLURM_NTASKS; its job script must set MASTER_ADDR and MASTER_PORT. An existing PyTorch
    process group is reused.

    Raises:
        InputError: environment variables are missing or not numbers, or the backend is "nccl" but there is no GPU.
        MissingPackageError: a launcher has started this process, but PyTorch is not installed.
        WorkersError: the other workers did not join in time.
    """
    place = read_place(os.environ)
    # The program may already have created a process group through Ray Train, accelerate or torch.distributed.
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
    """Reads the rank and the number of workers; returns None if no launcher has set them.

    >>> read_place({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "29500"})
    (1, 4)

    Raises:
        InputError: variables are missing or not numbers.
    """
    for rank_name, size_name in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank_name not in environment or size_name not in environment:
            continue
        rank_text, size_text = environment[rank_name], environment[size_name]
        if not rank_text.isdecimal() or not size_text.isdecimal() or not 0 <= int(rank_text) < int(size_text):
            raise InputError(
                f"Joining the other workers: {rank_name} is {rank_text!r} and {size_name} {size_text!r}; they must be "
                "the rank of this worker, counted from 0, and the number of workers."
            )
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
        # SLURM also sets its variables in interactive shells and in jobs with a single task.
        if missing and int(size_text) == 1:
            return None
        if missing:
            raise InputError(
                f"Joining the other {int(size_text) - 1} workers: {' and '.join(missing)} are not set. Set them to the "
                "host name of worker 0 and a free port there, e.g. MASTER_PORT=29500, or start with torchrun."
            )
        return int(rank_text), int(size_text)
    return None


def threads_of_worker() -> int | None:
    """Returns the number of threads for this worker, its share of the machine's cores.

    Returns None if there is no other worker on the machine.
    """
    # Set by torchrun and our launchers. If every worker had threads for all cores, they would slow each other down.
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not local.isdecimal() or int(local) < 2:
        return None
    return max(1, len(os.sched_getaffinity(0)) // int(local)) if hasattr(os, "sched_getaffinity") else 1


def _has_group() -> bool:
    """True if the program has initialized a PyTorch process group. Does not import PyTorch."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and bool(distributed.is_initialized())
