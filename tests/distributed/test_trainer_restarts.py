"""Workers that are killed: the others are stopped, all are started again, and the run ends as without a kill."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from distributed import trainer_jobs as jobs
from onnxtrain.distributed import DataParallel, launch
from onnxtrain.errors import WorkersError

pytestmark = pytest.mark.torch


def test_killed_workers_lose_and_double_no_sample(tmp_path: Path) -> None:
    """Worker 1 is killed in steps 2 and 5, and worker 0 in step 17, of 28 steps in 4 epochs of 50 samples."""
    alone = jobs.killed(tmp_path / "alone", ())
    (tmp_path / "killed").mkdir()
    # Saved in steps 3, 6, ..., in the middle of epochs of 7 steps. Step 2 is before the first save.
    strategy = DataParallel(save_steps=3, shard_optimizer=True)
    results = launch(
        jobs.killed, tmp_path / "killed", ((1, 2), (1, 5), (0, 17)), strategy, workers=2, restarts=3
    )
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == ["0-17", "1-2", "1-5", "run"]
    for result in results:
        # Saved after step 15; in the epoch's 15th step the save of its end is in step 14.
        assert result["resumed at"] == 15
        assert result["step"] == alone["step"] == 28
        for ours, theirs in zip(result["epochs"], alone["epochs"], strict=True):
            assert ours["seen_samples"] == ours["different_samples"] == 50
            assert ours.keys() == theirs.keys()
            np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-5, atol=1e-5)
        for name, value in alone["parameters"].items():
            np.testing.assert_allclose(result["parameters"][name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_error_after_all_restarts_names_the_worker(tmp_path: Path) -> None:
    with pytest.raises(WorkersError, match=r"Worker 1 of 2 ended with exit code -9, after 0 restarts"):
        launch(jobs.killed, tmp_path, ((1, 2),), "ddp", workers=2)
