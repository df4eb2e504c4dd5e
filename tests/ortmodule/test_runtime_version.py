"""ORTModule says which onnxruntime it needs where that is newer than what the rest of the package runs with."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from onnxruntime.capi import _pybind_state as binding  # noqa: E402

from onnxtrain.ortmodule import ORTModule, ORTModuleInitException  # noqa: E402

pytestmark = pytest.mark.torch


def test_an_onnxruntime_without_dlpack_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the wheels of 1.20 are; newer ones are made to look like them."""
    monkeypatch.delattr(binding.OrtValueVector, "to_dlpacks", raising=False)
    with pytest.raises(ORTModuleInitException, match=r"install onnxruntime 1\.21 or newer"):
        ORTModule(torch.nn.Linear(2, 1))
