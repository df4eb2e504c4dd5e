"""docs/many-machines.md: its programs run on two workers, and its table has what was run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from distributed.world import torchrun

PAGE = Path(__file__).parents[2] / "docs" / "many-machines.md"


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_programs_of_the_page_run_on_two_workers(tmp_path: Path) -> None:
    torchrun(2, "-m", "distributed.page", PAGE, tmp_path)
    assert (tmp_path / "done-0").exists()
    assert (tmp_path / "done-1").exists()
    # One process loads what two have saved.
    net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    weights = net.state_dict()
    dcp.load({"model": weights}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    first = {name: value.clone() for name, value in weights.items()}
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    assert all(0 < (first[name] - value).abs().max() < 0.1 for name, value in net.state_dict().items())
    # The program before trained the same net by another optimizer.
    assert list(torch.load(tmp_path / "trained.pt")) == [
        "weight",
        "bias",
    ]  # of accelerate's program, the last
