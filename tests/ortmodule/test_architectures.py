"""A short run of the sweep in `benchmarks/architectures`: these run wholly in ONNX Runtime, and right."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]

PROGRAMS = Path(__file__).parents[2] / "benchmarks" / "architectures"

NAMES = (
    "ActorCritic",
    "DGCNN",
    "DeepKernelGP",
    "DLRM-mean",
    "FourierNeuralOperator",
    "Glow",
    "MixtureOfExperts",
    "MoCo",
    "RepeatedRows",
    "S4D",
    "SpectrogramCNN",
)


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    import measure

    return measure.measure


@pytest.mark.sample(every=2)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_trains_wholly_in_onnxruntime(measure: Any, name: str) -> None:
    found = measure(f"plain/{name}", verbose=False)
    assert found["verdict"] == "wholly", found


def test_the_sweep_finds_what_is_wrong(measure: Any) -> None:
    """The comparison fails for values that are off by a thousandth."""
    module = sys.modules["measure"]
    import torch

    eager = {"0 output 0": torch.randn(5), "0 gradient w": torch.randn(5)}
    exact = {name: value.double() * (1 + 1e-7) for name, value in eager.items()}
    assert not module.compare(dict(eager), eager, exact)["wrong"]
    off = {**eager, "0 gradient w": eager["0 gradient w"] * 1.001}
    assert len(module.compare(off, eager, exact)["wrong"]) == 1
    assert module.compare({**eager, "0 gradient w": None}, eager, exact)["wrong"]
