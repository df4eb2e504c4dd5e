"""ORTModule says which onnxruntime it needs where that is newer than what the rest of the package runs with."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest

torch = pytest.importorskip("torch")

from onnxtrain.ortmodule import ORTModule, ORTModuleInitException  # noqa: E402

pytestmark = pytest.mark.torch

LOWEST = (Path(__file__).parents[1] / "oldest-ortmodule.txt").read_text().split("==")[1].strip()


@pytest.mark.parametrize("version", ["1.20.0", "1.28.1"])
def test_an_older_onnxruntime_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", version)
    with pytest.raises(
        ORTModuleInitException, match=f"needs onnxruntime 1.30 or newer; installed is {version}"
    ):
        ORTModule(torch.nn.Linear(2, 1))


def test_the_lowest_version_is_the_one_that_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", LOWEST)
    ORTModule(torch.nn.Linear(2, 1))
