"""DistributedDataParallel around an ORTModule; `test_engines.py` has the other nets, engines and numbers of workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.nets import NETS, difference, in_one_process
from distributed.world import run_jobs

pytestmark = pytest.mark.torch


def test_two_workers_equal_one_process(tmp_path: Path) -> None:
    result = run_jobs(2, tmp_path, "ddp/convolutions")["ddp/convolutions"]
    assert difference(result, in_one_process(NETS["convolutions"], 2)) < 1e-5
    assert result["report"].runs_in_onnxruntime, str(result["report"])
