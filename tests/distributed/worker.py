"""Run jobs on one worker that torchrun has started: `python -m distributed.worker FOLDER JOB...`.

A job is the name of an option or a tool, or `ENGINE/NET`. Jobs run in the folder, to which
the worker of rank 0 writes results.pt.
"""

from __future__ import annotations

import datetime
import gc
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run(job: str) -> Any:
    from distributed.engines import ENGINES, train
    from distributed.nets import NETS

    engine, _, net = job.partition("/")
    if net:
        return train(NETS[net], ENGINES[engine])
    from distributed.options import OPTIONS
    from distributed.tools import TOOLS, refused_by_lightning

    return (OPTIONS | TOOLS | {"refused by lightning": refused_by_lightning})[job]()


def main(folder: Path, jobs: list[str]) -> None:
    # A worker that waits for one that has failed ends after this time, if torchrun has not ended it before.
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
    torch.set_num_threads(1)
    os.chdir(folder)
    results = {job: run(job) for job in jobs}
    if dist.get_rank() == 0:
        torch.save(results, "results.pt")
    # A reducer that outlives its process group can wait for the group's thread with the GIL in its hand.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
