"""Engines for several workers under ORTModule: two and four processes train as one process of eager PyTorch does.

A world of processes takes seconds to start, so that each test starts one and checks all of its trainings.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import pages
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
from distributed.nets import NETS, difference, in_one_process, on_whole_batches
from distributed.options import STEPS
from distributed.world import run_jobs, torchrun

pytestmark = [pytest.mark.torch, pytest.mark.thorough]

CLOSE = 1e-5
"""The largest difference of a loss, a parameter or a running statistic after 20 steps."""

ON_TWO = [
    *(f"{engine}/{net}" for engine in ("ddp", "fully_shard", "fsdp1") for net in NETS),
    *(
        "ddp inside/encoder",
        "fsdp1 inside/encoder",
        "fully_shard root/encoder",
        "fully_shard outside/encoder",
    ),
]
ON_FOUR = [*(f"{engine}/{net}" for engine in ("ddp", "fully_shard") for net in NETS), "fsdp1/convolutions"]
# benchmarks/distributed/engines.py runs all tools with all nets.
TOOLS_ON_TWO = [
    *("accelerate/encoder", "accelerate, FSDP2/gpt2"),
    *("hugging face/encoder", "hugging face, FSDP/gpt2"),
    *("lightning/encoder", "lightning sharded/gpt2"),
]
TOOLS_ON_FOUR = ["accelerate/gpt2", "hugging face/convolutions", "lightning sharded/encoder"]


@pytest.mark.parametrize(("world", "jobs"), [(2, ON_TWO), (4, ON_FOUR)])
def test_workers_equal_one_process(world: int, jobs: list[str], tmp_path: Path) -> None:
    results = run_jobs(world, tmp_path, *jobs)
    differences = of_engines(results, world)
    assert _far(differences) == {}
    for job, result in results.items():
        report = result["report"]
        # A loop over sharded layers ends the graph at the hooks of each: layers are graphs, the loop is PyTorch's.
        in_loop = job.startswith("fully_shard/") or job == "fully_shard outside/encoder"
        assert in_loop or report.runs_in_onnxruntime, f"{job}: {report}"
        assert any(graph.mode == "training" and graph.fallback is None for graph in report), (
            f"{job}: {report}"
        )
        # Of the engines' own work, such as `fsdp.all_gather_copy_in`, nothing is said.
        assert "c10d" not in str(report), f"{job}: {report}"
        assert "fsdp." not in str(report), f"{job}: {report}"


def test_the_reference_is_training_on_whole_batches() -> None:
    net = NETS["gpt2"]
    assert difference(in_one_process(net, 2), on_whole_batches(net)) < CLOSE
    assert "net.lm_head.weight" in net.module().state_dict()


def _far(differences: dict[str, float]) -> dict[str, float]:
    return {job: value for job, value in differences.items() if not value < CLOSE}


# PyTorch warns of a checkpoint that is loaded in one process, which is what is wanted.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_options_of_the_engines(tmp_path: Path) -> None:
    results = run_jobs(2, tmp_path, *OPTIONS)
    assert _far(of_options(results)) == {}
    check_options(results, 2)


def test_state_dicts_have_the_names_of_the_plain_module(tmp_path: Path) -> None:
    """Of DistributedDataParallel around and inside: get and set, with the optimizer, and from one worker to all."""
    results = run_jobs(2, tmp_path, *STATES, "synchronised BatchNorm")
    assert _far(of_states(results)) == {}
    # PyTorch has it for CUDA only, and says so under ORTModule, too.
    refused = results["synchronised BatchNorm"]
    assert refused["ours"] == refused["theirs"]
    assert "expected input tensor to be on GPU" in refused["ours"]


@pytest.mark.parametrize(("world", "jobs"), [(2, TOOLS_ON_TWO), (4, TOOLS_ON_FOUR)])
def test_tools_that_bring_their_own_loop(world: int, jobs: list[str], tmp_path: Path) -> None:
    """Train, save half-way and resume, with each tool."""
    results = run_jobs(world, tmp_path, *jobs, "refused by lightning")
    assert "`fsdp` requires a GPU accelerator" in results.pop("refused by lightning")["error"]
    assert _far(of_tools(results, world)) == {}


def test_torchrun_restarts_a_killed_worker(tmp_path: Path) -> None:
    torchrun(2, "--max-restarts", "1", "-m", "distributed.elastic", tmp_path)
    done = torch.load(tmp_path / "results.pt", weights_only=False)
    assert done["restarts"] == 1
    assert done["steps before"] == STEPS // 2
    assert difference(done["result"], perceptron_in_one_process()) < CLOSE


PAGE = "docs/pytorch/with-other-tools.md"
SECTIONS = re.findall(
    r"^## ([^\n]*)$(?:(?!^## ).)*?^```python\n(.*?)^```",
    (pages.ROOT / PAGE).read_text(),
    re.MULTILINE | re.DOTALL,
)
IN_ONE_PROCESS = "Hugging Face Trainer"
"""The section whose program runs in one process; the page shows its output."""
PROGRAMS = [(heading, program) for heading, program in SECTIONS if heading != IN_ONE_PROCESS]

THREADS = """
from distributed.ended import gloo_threads, leave_at_once
print(f"gloo's threads: {gloo_threads()}\\n", end="", flush=True)
leave_at_once()
"""
LEAVES_THREADS = {"fully_shard"}
"""Programs after which threads of gloo run, under eager PyTorch 2.13, too (notes/faults-of-others.md)."""


@pytest.mark.parametrize(("heading", "program"), PROGRAMS, ids=[heading for heading, _ in PROGRAMS])
def test_the_programs_of_the_page_run(heading: str, program: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(program + THREADS)
    said = torchrun(2, "train.py", cwd=tmp_path)
    assert said.count("gloo's threads: ") == 2
    assert ("gloo's threads: []" not in said) == (heading in LEAVES_THREADS), said


def test_every_program_of_the_page_is_found() -> None:
    assert len(SECTIONS) == len(pages.read_blocks(PAGE)) == 6
    assert len(PROGRAMS) == 5


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_the_hugging_face_program_prints_what_the_page_shows() -> None:
    block = pages.read_blocks(PAGE)[0]
    assert block.code == dict(SECTIONS)[IN_ONE_PROCESS]
    with pages.workplace(PAGE) as names:
        printed = pages.run_block(block, names)
    assert pages.difference(block.shown, printed, block.marks) is None


def test_a_trainer_ends_the_threads_of_its_process_group(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("""
import atexit
import os
from distributed.ended import gloo_threads

atexit.register(lambda: print(f"at exit: {gloo_threads()}\\n", end="", flush=True))

import numpy as np
from onnxtrain.distributed import DataParallel
from onnxtrain.distributed._torch_group import TorchGroup

group = TorchGroup(DataParallel(), (int(os.environ["RANK"]), 2))
summed = np.ones(1000, np.float32)
group.sum([summed])
assert (summed == 2).all() and gloo_threads()
""")
    assert torchrun(2, "train.py", cwd=tmp_path).count("at exit: []") == 2
