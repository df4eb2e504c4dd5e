"""Compare trainings on several workers with those of one process, or of the same engine in eager PyTorch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from distributed import nets
from distributed.nets import NETS, Result, difference, in_one_process, optimizer_of, train_on
from distributed.options import ENCODER, ONE_MATRIX, PERCEPTRON, STEPS
from distributed.tools import HALF
from onnxtrain.ortmodule import ORTModule

BESIDE_EAGER = (
    *("static graph", "unused parameters", "unused, static", "bucket views"),
    *("all-reduce hook", "float16 hook", "PowerSGD hook"),
    *("sharded optimizer", "offloaded", "kept after forward"),
)
BESIDE_ONE = ("parallel layers", "dtensor", "resumed ddp", "resumed fully_shard", "resumed fsdp1")
ACCUMULATED = ("no_sync of ddp", "no_sync inside", "no_sync of fsdp1", "no_sync of fully_shard")
OPTIONS = (*BESIDE_EAGER, *BESIDE_ONE, *ACCUMULATED, "bfloat16")
STATES = ("states of ddp", "states of ddp inside")

Results = dict[str, Any]
"""The results of jobs on worker 0, by the name of the job."""


@functools.cache
def perceptron_in_one_process() -> Result:
    return in_one_process(PERCEPTRON, 2, STEPS)


def of_engines(results: Results, world: int) -> dict[str, float]:
    """Return the difference from one process for each job `ENGINE/NET`."""
    references = {net: in_one_process(NETS[net], world) for net in {job.split("/")[1] for job in results}}
    return {job: difference(result, references[job.split("/")[1]]) for job, result in results.items()}


def of_tools(results: Results, world: int) -> dict[str, float]:
    """Return the difference from one process for each job `TOOL/NET`: of the whole training, and of what was saved.

    Where PyTorch does not say whose running statistics are saved, these are compared with the tool around the plain
    module, which is in the result as "beside".
    """
    differences = {}
    for job, result in results.items():
        net = NETS[job.split("/")[1]]
        for name, key, steps in ((job, "state", nets.STEPS), (f"{job}, saved", "saved", HALF)):
            theirs = in_one_process(net, world, steps)
            losses, state = theirs["losses"], theirs["state"]
            if "beside" in result:
                statistics = dict(net.module().named_buffers())
                state = {
                    name: result["beside"][key][name] if name in statistics else value
                    for name, value in state.items()
                }
            ours = {"losses": result["losses"][:steps], "state": result[key]}
            differences[name] = difference(ours, {"losses": losses, "state": state})
    return differences


def accumulated_in_one_process() -> Result:
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


def resumed_in_one_process(folder: Path, losses: list[float]) -> Result:
    """Go on in one process from what several workers have saved after half of the steps."""
    model = ORTModule(PERCEPTRON.module())
    sgd = optimizer_of(model)
    state, of_optimizer = get_state_dict(model, sgd)
    dcp.load({"model": state, "optimizer": of_optimizer}, checkpoint_id=folder, no_dist=True)
    set_state_dict(model, sgd, model_state_dict=state, optim_state_dict=of_optimizer)
    rest = train_on(model, sgd, PERCEPTRON.batches(STEPS)[STEPS // 2 :])
    return {"losses": losses[: STEPS // 2] + rest, "state": model.state_dict()}


def of_options(results: Results) -> dict[str, float]:
    """Return the differences of the jobs of BESIDE_EAGER, BESIDE_ONE and ACCUMULATED."""
    alone = perceptron_in_one_process()
    differences = {job: difference(results[job]["ours"], results[job]["theirs"]) for job in BESIDE_EAGER}
    differences |= {job: difference(results[job], alone) for job in BESIDE_ONE}
    differences |= {job: difference(results[job], accumulated_in_one_process()) for job in ACCUMULATED}
    for job in BESIDE_ONE:
        if "folder" in results[job]:
            resumed = resumed_in_one_process(results[job]["folder"], results[job]["losses"])
            differences[f"{job}, in one process"] = difference(resumed, alone)
    return differences


def check_options(results: Results, world: int) -> None:
    """Check that hooks and precision do something, and what is reported."""
    plain = results["all-reduce hook"]["ours"]
    assert difference(results["float16 hook"]["ours"], plain) > 1e-6
    assert difference(results["PowerSGD hook"]["ours"], in_one_process(ONE_MATRIX, world, STEPS)) > 1e-6
    # In bfloat16 the order of a sum decides about digits: both are as far from float32.
    bfloat16, exact = results["bfloat16"], in_one_process(ENCODER, world, STEPS)
    assert 0 < difference(bfloat16["ours"], exact) < 2 * difference(bfloat16["theirs"], exact)
    for job in (*ACCUMULATED, "parallel layers"):
        assert results[job]["report"].runs_in_onnxruntime, f"{job}: {results[job]['report']}"
    refused = str(results["dtensor"]["report"])
    assert "up.weight, up.bias, down.weight and 1 more are DTensors" in refused
    assert "docs/pytorch/with-other-tools.md#tensor-parallel-layers" in refused


def of_states(results: Results) -> dict[str, float]:
    """Return the differences of the jobs of STATES from eager PyTorch; check names, and what worker 0 has sent."""
    differences = {}
    for job in STATES:
        result = results[job]
        assert result["same"], job
        ours, theirs = result["stepped"]
        assert list(ours) == list(ENCODER.module().state_dict()), job
        differences[job] = difference({"losses": [0.0], "state": ours}, {"losses": [0.0], "state": theirs})
        assert result["told"] == [], job
        assert result["sent"] == 1.0, job
    return differences
