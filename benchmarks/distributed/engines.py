"""Compare every engine of PyTorch under ORTModule, with every net, with one process of eager PyTorch.

tests/distributed runs a part of this. docs/many-machines.md has the table.

Usage: PYTHONPATH=src:tests python benchmarks/distributed/engines.py [--workers 2 4] [--engines ddp fsdp1]
"""

import argparse
import tempfile
from pathlib import Path

import torch

from distributed.engines import ENGINES
from distributed.nets import NETS, difference, in_one_process
from distributed.world import run_jobs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    options = parser.parse_args()
    print(f"PyTorch {torch.__version__}; largest difference of losses, parameters and buffers after 20 steps")
    for workers in options.workers:
        references = {name: in_one_process(net, workers) for name, net in NETS.items()}
        for engine in options.engines:
            with tempfile.TemporaryDirectory() as folder:
                results = run_jobs(workers, Path(folder), *(f"{engine}/{net}" for net in NETS))
            for name in NETS:
                result = results[f"{engine}/{name}"]
                ran = sum(graph.fallback is None for graph in result["report"])
                print(
                    f"{engine}, {name}, {workers} workers: {difference(result, references[name]):.1e}; "
                    f"{ran} of {len(result['report'])} rows of the report run in ONNX Runtime alone",
                    flush=True,
                )


if __name__ == "__main__":
    main()
