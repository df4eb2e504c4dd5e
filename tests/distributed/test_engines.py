"""Engines for several workers under ORTModule: two and four processes train as one process of eager PyTorch does.

A world of processes takes seconds to start, so that each test starts one and checks all of its trainings.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from distributed.nets import NETS, Result, difference, in_one_process, on_whole_batches, optimizer_of
from distributed.options import ENCODER, ONE_MATRIX, PERCEPTRON, STEPS
from distributed.tools import TOOLS
from distributed.world import run_jobs, torchrun
from onnxtrain.ortmodule import ORTModule

pytestmark = [pytest.mark.torch, pytest.mark.slow]

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


def _differences(results: dict[str, Result], world: int) -> dict[str, float]:
    references = {net: in_one_process(NETS[net], world) for net in {job.split("/")[1] for job in results}}
    return {job: difference(result, references[job.split("/")[1]]) for job, result in results.items()}


@pytest.mark.parametrize(("world", "jobs"), [(2, ON_TWO), (4, ON_FOUR)])
def test_workers_equal_one_process(world: int, jobs: list[str], tmp_path: Path) -> None:
    results = run_jobs(world, tmp_path, *jobs)
    differences = _differences(results, world)
    assert {job: value for job, value in differences.items() if not value < CLOSE} == {}
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


IN_ONE = functools.cache(lambda: in_one_process(PERCEPTRON, 2, STEPS))
BESIDE_EAGER = (
    *(
        "static graph",
        "unused parameters",
        "unused, static",
        "bucket views",
        "all-reduce hook",
        "float16 hook",
    ),
    *("PowerSGD hook", "sharded optimizer", "offloaded", "kept after forward"),
)
BESIDE_ONE = ("parallel layers", "dtensor", "resumed ddp", "resumed fully_shard", "resumed fsdp1")
ACCUMULATED = ("no_sync of ddp", "no_sync inside", "no_sync of fsdp1", "no_sync of fully_shard")


def _accumulated_in_one() -> Result:
    module = PERCEPTRON.module()
    sgd = optimizer_of(module)
    losses = []
    for index, batch in enumerate(PERCEPTRON.batches(STEPS)):
        loss = module(*batch)
        (loss / 2).backward()
        losses.append(loss.item())
        if index % 2:
            sgd.step()
            sgd.zero_grad()
    return {"losses": losses, "state": module.state_dict()}


def _resumed_in_one(folder: Path, losses: list[float]) -> Result:
    """Go on in one process from what two workers have saved after half of the steps."""
    model = ORTModule(PERCEPTRON.module())
    sgd = optimizer_of(model)
    state, of_optimizer = get_state_dict(model, sgd)
    dcp.load({"model": state, "optimizer": of_optimizer}, checkpoint_id=folder, no_dist=True)
    set_state_dict(model, sgd, model_state_dict=state, optim_state_dict=of_optimizer)
    losses = losses[: STEPS // 2]
    for batch in PERCEPTRON.batches(STEPS)[STEPS // 2 :]:
        sgd.zero_grad()
        loss = model(*batch)
        loss.backward()
        sgd.step()
        losses.append(loss.item())
    return {"losses": losses, "state": model.state_dict()}


# PyTorch warns of a checkpoint that is loaded in one process, which is what is wanted.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_options_of_the_engines(tmp_path: Path) -> None:
    results = run_jobs(2, tmp_path, *BESIDE_EAGER, *BESIDE_ONE, *ACCUMULATED, "bfloat16")
    differences = {job: difference(results[job]["ours"], results[job]["theirs"]) for job in BESIDE_EAGER}
    differences |= {job: difference(results[job], IN_ONE()) for job in BESIDE_ONE}
    differences |= {job: difference(results[job], _accumulated_in_one()) for job in ACCUMULATED}
    for job in BESIDE_ONE:
        if "folder" in results[job]:
            resumed = _resumed_in_one(results[job]["folder"], results[job]["losses"])
            differences[f"{job}, in one process"] = difference(resumed, IN_ONE())
    assert {job: value for job, value in differences.items() if not value < CLOSE} == {}
    # The hooks do something.
    plain = results["all-reduce hook"]["ours"]
    assert difference(results["float16 hook"]["ours"], plain) > 1e-6
    assert difference(results["PowerSGD hook"]["ours"], in_one_process(ONE_MATRIX, 2, STEPS)) > 1e-6
    # In bfloat16 the order of a sum decides about digits: both are as far from float32.
    bfloat16, exact = results["bfloat16"], in_one_process(ENCODER, 2, STEPS)
    assert 0 < difference(bfloat16["ours"], exact) < 2 * difference(bfloat16["theirs"], exact)
    for job in (*ACCUMULATED, "parallel layers"):
        assert results[job]["report"].runs_in_onnxruntime, f"{job}: {results[job]['report']}"
    refused = str(results["dtensor"]["report"])
    assert "up.weight, up.bias, down.weight and 1 more are DTensors" in refused
    assert "docs/many-machines.md#tensor-parallel-layers" in refused


def test_state_dicts_have_the_names_of_the_plain_module(tmp_path: Path) -> None:
    """Of DistributedDataParallel around and inside: get and set, with the optimizer, and from one worker to all."""
    jobs = ("states of ddp", "states of ddp inside")
    results = run_jobs(2, tmp_path, *jobs, "synchronised BatchNorm")
    for job in jobs:
        result = results[job]
        assert result["same"], job
        ours, theirs = result["stepped"]
        assert list(ours) == list(ENCODER.module().state_dict()), job
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=0, atol=CLOSE, msg=f"{job}: {name}")
        assert result["told"] == [], job
        assert result["sent"] == 1.0, job
    # PyTorch has it for CUDA only, and says so under ORTModule, too.
    refused = results["synchronised BatchNorm"]
    assert refused["ours"] == refused["theirs"]
    assert "expected input tensor to be on GPU" in refused["ours"]


def test_tools_that_bring_their_own_loop(tmp_path: Path) -> None:
    tools = tuple(TOOLS)
    results = run_jobs(2, tmp_path, *tools, "refused by lightning")
    assert "`fsdp` requires a GPU accelerator" in results["refused by lightning"]["error"]
    reference = on_whole_batches(NETS["gpt2"])
    differences = {tool: difference(results[tool], reference) for tool in tools}
    assert {tool: value for tool, value in differences.items() if not value < CLOSE} == {}


def test_torchrun_restarts_a_killed_worker(tmp_path: Path) -> None:
    torchrun(2, "--max-restarts", "1", "-m", "distributed.elastic", tmp_path)
    done = torch.load(tmp_path / "results.pt", weights_only=False)
    assert done["restarts"] == 1
    assert done["steps before"] == STEPS // 2
    assert difference(done["result"], IN_ONE()) < CLOSE


PAGE = Path(__file__).parents[2] / "docs/many-machines.md"
PROGRAMS = re.findall(
    r"^## ([^\n]*)$(?:(?!^## ).)*?^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL
)


@pytest.mark.parametrize("program", [text for _, text in PROGRAMS], ids=[heading for heading, _ in PROGRAMS])
def test_the_programs_of_the_page_run(program: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(program)
    torchrun(2, "train.py", cwd=tmp_path)


def test_every_program_of_the_page_is_found() -> None:
    assert len(PROGRAMS) == PAGE.read_text().count("```python\n") == 5
