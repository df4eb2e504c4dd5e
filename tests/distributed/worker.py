"""Run jobs on one worker that torchrun has started: `python -m distributed.worker FOLDER JOB...`.

A job is the name of an option, or `ENGINE/NET`, or `TOOL/NET`. Each runs in a folder of its own below the folder, to
which the worker of rank 0 writes results.pt.
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

from distributed.ended import leave_at_once


def run(job: str) -> Any:
    from distributed.engines import ENGINES, train
    from distributed.nets import NETS

    engine, _, net = job.partition("/")
    if engine in ENGINES:
        return train(NETS[net], ENGINES[engine])
    from distributed.options import OPTIONS
    from distributed.tools import TOOLS, refused_by_lightning

    if net:
        return TOOLS[engine](NETS[net])
    return (OPTIONS | {"refused by lightning": refused_by_lightning})[job]()


def main(folder: Path, jobs: list[str]) -> None:
    # A worker that waits for one that has failed ends after this time, if torchrun has not ended it before.
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
    torch.set_num_threads(1)
    results = {}
    for job in jobs:
        place = folder / job.replace("/", ", ")
        place.mkdir(exist_ok=True)
        os.chdir(place)
        results[job] = run(job)
    if dist.get_rank() == 0:
        torch.save(results, folder / "results.pt")
    # A reducer that outlives its process group can wait for the group's thread with the GIL in its hand.
    gc.collect()
    dist.destroy_process_group()
    leave_at_once()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
