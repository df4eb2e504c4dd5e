"""Run the programs of a page, one after the other, on a worker that torchrun has started: PAGE FOLDER."""

from __future__ import annotations

import gc
import os
import re
import sys
from pathlib import Path


def main(page: Path, folder: Path) -> None:
    os.chdir(folder)
    programs = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    for index, program in enumerate(programs):
        # The workers find each other by torchrun's store, where the addresses of the program before still stand.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(index)
        exec(compile(program, str(page), "exec"), {"__name__": "__main__"})
        gc.collect()
    # Lightning leaves its process group to the end of the process.
    import torch.distributed as dist

    dist.destroy_process_group()
    (folder / f"done-{os.environ['RANK']}").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
