"""Jobs of workers whose ports a process that does not belong to them connects to."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.distributed import DataParallel
from onnxtrain.distributed._join import join_group


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.005)


def listening(pid: int) -> list[tuple[str, int]]:
    """Returns the addresses and ports at which a process listens."""
    import psutil

    return [
        tuple(c.laddr) for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN
    ]


def meet(folder: Path) -> dict[str, Any]:
    """Joins, sums and gathers; tells the stranger when it may knock, before worker 1 joins and after it has."""
    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    if attempt == "0" and rank == "0":
        (folder / "joining.new").write_text(str(os.getpid()))
        (folder / "joining.new").rename(folder / "joining")
    if attempt == "0" and rank == "1":
        wait_for(folder / "knocked")
    group = join_group(DataParallel(timeout=5.0))
    listens = group.gather({"worker": listening(os.getpid()), "launcher": listening(os.getppid())})
    if rank == "0":
        (folder / "running.new").write_text(str(os.getpid()))
        (folder / "running.new").rename(folder / "running")
    wait_for(folder / "knocked again")
    total = np.full(1000, group.rank + 1.0)
    group.sum([total])
    return {
        "attempt": attempt,
        "listens": listens,
        "sum": total,
        "ranks": group.gather(group.rank),
        "shared": group.share({"of": group.rank}),
    }


def meet_with_wrong_token(folder: Path) -> str:
    """Joins with a token of its own on worker 1; returns the error."""
    from onnxtrain.errors import WorkersError

    if os.environ["RANK"] == "1":
        os.environ["ONNXTRAIN_WORKERS_TOKEN"] = "0" * 64
    try:
        join_group(DataParallel(timeout=5.0))
    except WorkersError as error:
        return str(error)
    return "joined"
