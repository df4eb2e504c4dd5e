"""`Trainer` on two and on four workers, beside one process and PyTorch's DistributedDataParallel."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from distributed import trainer_jobs as jobs
from onnxtrain.distributed import launch

pytestmark = pytest.mark.torch

# Sums of float32 in another order, over 20 steps.
TOLERANCE = 1e-5


Results = dict[str, Any]
"""Results by name of the job."""


class Groups(dict[str, list[Results]]):
    """Results of each worker, by name of the group: a group starts when its results are first read.

    Starting a group takes seconds, so each group runs all jobs. A further run is begun by one process, is resumed with
    two workers, then with four.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def __missing__(self, name: str) -> list[Results]:
        strategy, size, before, step = {"two": ("ddp", 2, "one", 4), "four": ("sharded", 4, "two", 3)}[name]
        if before == "one":
            jobs.begin(self.directory / before, 4)
        else:
            self[before]
        shutil.copytree(self.directory / before, self.directory / name)
        self[name] = launch(
            jobs.run_and_resume,
            jobs.STRATEGIES[strategy],
            self.directory / name,
            self.directory / f"{name}-again",
            step,
            workers=size,
        )
        return self[name]


class Runs(NamedTuple):
    """Results of one process, and of groups of workers."""

    alone: Results
    workers: Groups
    directory: Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    directory = tmp_path_factory.mktemp("runs")
    return Runs(jobs.run(), Groups(directory), directory)


GROUPS = ["two", pytest.param("four", marks=pytest.mark.thorough)]


def assert_close(ours: dict[str, Any], expected: dict[str, Any], **tolerance: float) -> None:
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(
            ours[name], value, err_msg=name, **(tolerance or {"rtol": 1e-5, "atol": TOLERANCE})
        )


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("job", [job.__name__ for job in jobs.EQUAL])
def test_workers_equal_one_process(job: str, group: str, runs: Runs) -> None:
    """Losses of each step, records of the epochs with all metrics, evaluation and parameters."""
    expected, workers = runs.alone[job], runs.workers[group]
    # Callbacks see the steps on worker 0.
    np.testing.assert_allclose(workers[0][job]["losses"], expected["losses"], rtol=1e-5, atol=TOLERANCE)
    assert all(not worker[job]["losses"] for worker in workers[1:])
    assert len(expected["losses"]) >= 15
    for worker in workers:
        result = worker[job]
        assert_close(result["parameters"], expected["parameters"])
        for ours, theirs in zip(result["epochs"], expected["epochs"], strict=True):
            assert_close(ours, theirs)
        assert_close(result.get("evaluation", {}), expected.get("evaluation", {}))
        for key in ("stopped", "rate"):
            assert result.get(key) == expected.get(key)


@pytest.mark.parametrize("group", GROUPS)
def test_no_sample_is_lost_or_doubled(group: str, runs: Runs) -> None:
    """Over four epochs the workers together read each of 60 samples four times, and none reads all of them."""
    counts = [worker["counted"]["counts"] for worker in runs.workers[group]]
    np.testing.assert_array_equal(np.sum(counts, axis=0), np.full(60, 4))
    assert all(0 < count.sum() < 240 * 2 / len(counts) for count in counts)


@pytest.mark.parametrize("group", GROUPS)
def test_workers_drop_other_elements_alike_each_time(group: str, runs: Runs) -> None:
    first, second = (runs.workers[group][0]["dropout"][key] for key in ("first", "second"))
    assert first["losses"] == second["losses"]
    # If each worker dropped the elements of worker 0, the first worker's share would still be as in one process.
    assert first["losses"][0] != runs.alone["dropout"]["first"]["losses"][0]
    for worker in runs.workers[group]:
        assert_close(worker["dropout"]["second"]["parameters"], first["parameters"], rtol=0)


@pytest.mark.parametrize("group", GROUPS)
def test_a_fit_without_a_label_that_counts_is_refused_by_all_workers(group: str, runs: Runs) -> None:
    alone = runs.alone["nothing_counted"]
    for worker in [runs.alone, *runs.workers[group]]:
        result = worker["nothing_counted"]
        assert "No parameter was updated" in result["error"]
        assert result["losses"] == []
        assert_close(result["after"], result["before"], rtol=0)
        assert len(result["next"]["epochs"]) == 1
        assert_close(result["next"]["parameters"], alone["next"]["parameters"])


@pytest.mark.parametrize("job", ["batch_norm", "batch_norm_uncounted"])
@pytest.mark.parametrize("group", GROUPS)
def test_batch_norm_is_that_of_pytorch(group: str, job: str, runs: Runs) -> None:
    for worker in [runs.alone, *runs.workers[group]]:
        ours, theirs = (
            dict(worker[job]["parameters"]),
            dict(worker[f"{job}_of_torch"]["parameters"]),
        )
        # A model that was not exported by PyTorch keeps the biased variance of ONNX; a share has 2 * 36 values or more.
        np.testing.assert_allclose(ours.pop("bn.var"), theirs.pop("bn.var"), rtol=1 / 71)
        assert_close(ours, theirs)


@pytest.mark.parametrize("group", GROUPS)
def test_compressed_gradients_are_near(group: str, runs: Runs) -> None:
    """bfloat16 has 8 bits: the trainings differ, but not much."""
    expected = runs.alone["compressed"]
    losses = runs.workers[group][0]["compressed"]["losses"]
    np.testing.assert_allclose(losses, expected["losses"], rtol=1e-2)
    assert losses != expected["losses"]
    for worker in runs.workers[group]:
        assert_close(worker["compressed"]["parameters"], expected["parameters"], rtol=0, atol=1e-2)
        assert_close(
            worker["compressed"]["parameters"], runs.workers[group][0]["compressed"]["parameters"], rtol=0
        )


@pytest.mark.parametrize("group", GROUPS)
def test_all_workers_stop_when_one_diverges(group: str, runs: Runs) -> None:
    last = len(runs.workers[group]) - 1
    for worker in runs.workers[group]:
        result = worker["diverging"]
        assert f"on worker {last}, the loss is inf" in result["message"]
        assert_close(result["parameters"], result["before"], rtol=0)


@pytest.mark.parametrize("group", GROUPS)
def test_share_without_labels_is_named_where_the_loss_is_no_mean_over_labels(group: str, runs: Runs) -> None:
    """One process sees labels that count in the batch, and trains."""
    assert runs.alone["uncounted_beside_a_penalty"]["message"] == "no error"
    first = len(runs.workers[group]) // 2
    for worker in runs.workers[group]:
        result = worker["uncounted_beside_a_penalty"]
        assert f"on worker {first}, all labels 'kind' of its share of a batch are -100" in result["message"]
        assert "append the loss to the scores (loss='cross_entropy')" in result["message"]
        assert_close(result["parameters"], result["before"], rtol=0)


@pytest.mark.parametrize("group", GROUPS)
def test_errors_of_worker_0_reach_all(group: str, runs: Runs) -> None:
    for rank, worker in enumerate(runs.workers[group]):
        unknown, fixed = worker["failing"]["messages"]
        assert unknown.startswith("WorkersError: Worker 0 of" if rank else "GraphBuildError: ")
        assert "body.*" in unknown
        assert "takes exactly 8 samples at a time, but" in fixed


@pytest.mark.thorough
def test_a_checkpoint_is_the_same_for_any_number_of_workers(runs: Runs) -> None:
    """Loaded by all workers and saved again, no bit of the files has changed, moments and position included."""
    for before, name in (("one", "two"), ("two", "four")):
        # First of all, which starts the group.
        results = [worker["resumed"] for worker in runs.workers[name]]
        for file in ("checkpoint", "average"):
            saved, again = (runs.directory / folder / file for folder in (before, f"{name}-again"))
            assert again.read_bytes() == saved.read_bytes()
        for result in results[1:]:
            assert_close(result["loaded"], results[0]["loaded"], rtol=0)


@pytest.mark.thorough
def test_a_run_resumes_with_other_numbers_of_workers(runs: Runs) -> None:
    """One process, two workers, four workers, one process: as one process without interruption."""
    steps = [worker["resumed"]["step"] for group in ("two", "four") for worker in runs.workers[group]]
    assert steps[:2] == steps[:1] * 2
    assert steps[2:] == steps[2:3] * 4
    assert 4 < steps[0] < steps[2] < 15
    last = jobs.resume_run(runs.directory / "four", runs.directory / "last", None)
    straight = jobs.begin(runs.directory / "straight", None)
    assert last["step"] == 15
    assert_close(last["parameters"], jobs.parameters(straight))
    for ours, theirs in zip(last["epochs"], straight.history.epochs, strict=True):
        assert_close(ours, theirs)


@pytest.mark.thorough
def test_moments_are_shared_among_the_workers(runs: Runs) -> None:
    """With `shard_optimizer` each of four parameters has its moments on one of four workers."""
    assert [worker["resumed"]["moments"] for worker in runs.workers["four"]] == [
        {"momentum0": 1, "momentum1": 1}
    ] * 4
    assert [worker["resumed"]["moments"] for worker in runs.workers["two"]] == [
        {"momentum0": 4, "momentum1": 4}
    ] * 2
