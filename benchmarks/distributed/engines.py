"""Compare every engine of PyTorch and every tool under ORTModule, with every net, with one process of eager PyTorch.

tests/distributed runs a part of this. notes/distributed.md has the table.

Usage: PYTHONPATH=src:tests python benchmarks/distributed/engines.py [--workers 2 4] [--engines ddp accelerate]
    [--nets encoder] [--options] [--restart]

`--options` runs PyTorch's options with a small net, `--restart` kills a worker that torchrun starts again; each alone
leaves the engines out. accelerate, Hugging Face's Trainer and Lightning need `pip install 'onnxtrain[examples]'`.
"""

import argparse
import tempfile
import warnings
from pathlib import Path

import torch

from distributed.engines import ENGINES
from distributed.expected import (
    OPTIONS,
    STATES,
    check_options,
    of_engines,
    of_options,
    of_states,
    of_tools,
    perceptron_in_one_process,
)
from distributed.nets import NETS, difference
from distributed.tools import TOOLS
from distributed.world import run_jobs, torchrun


def run_engine(engine: str, nets: list[str], workers: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = run_jobs(workers, Path(folder), *(f"{engine}/{net}" for net in nets))
    # A tool has saved half-way and gone on.
    differences = of_tools(results, workers) if engine in TOOLS else of_engines(results, workers)
    for job, value in differences.items():
        report = results[job].get("report") if job in results else None
        ran = [] if report is None else [graph.fallback is None for graph in report]
        rows = f"; {sum(ran)} of {len(ran)} rows of the report run in ONNX Runtime alone" if ran else ""
        print(f"{job}, {workers} workers: {value:.1e}{rows}", flush=True)


def run_options(workers: int) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # PyTorch warns of a checkpoint that is loaded in one process, which is what is wanted.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        results = run_jobs(workers, Path(folder), *OPTIONS, *STATES)
        differences = of_options(results) | of_states(results)
        check_options(results, workers)
    for job, value in differences.items():
        print(f"{job}, {workers} workers: {value:.1e}", flush=True)


def run_restart(workers: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        torchrun(workers, "--max-restarts", "1", "-m", "distributed.elastic", folder)
        done = torch.load(Path(folder) / "results.pt", weights_only=False)
    largest = difference(done["result"], perceptron_in_one_process())
    print(f"restart, {workers} workers: {largest:.1e}; {done['restarts']} restart", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    choices = [*ENGINES, *TOOLS]
    parser.add_argument("--engines", nargs="+", choices=choices)
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=list(NETS))
    parser.add_argument("--options", action="store_true")
    parser.add_argument("--restart", action="store_true")
    options = parser.parse_args()
    engines = options.engines or ([] if options.options or options.restart else choices)
    print(f"PyTorch {torch.__version__}; largest difference of losses, parameters and buffers")
    for workers in options.workers:
        for engine in engines:
            run_engine(engine, options.nets, workers)
        if options.options:
            run_options(workers)
        if options.restart:
            run_restart(workers)


if __name__ == "__main__":
    main()
