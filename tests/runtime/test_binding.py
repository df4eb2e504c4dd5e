"""Sessions bound to the parameter store."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxtrain.runtime.binding import Binding
from onnxtrain.runtime.device import CPU
from onnxtrain.runtime.dtypes import BY_NAME
from onnxtrain.runtime.store import Buffer


class Elsewhere:
    """A binding of onnxruntime that leaves the bound memory alone."""

    def __init__(self, binding: ort.IOBinding) -> None:
        self._binding = binding

    def __getattr__(self, name: str) -> object:
        return getattr(self._binding, name)

    def get_outputs_as_ortvaluevector(self) -> list[ort.OrtValue]:
        self._copies = [value.numpy().copy() for value in self._binding.get_outputs()]
        return [ort.OrtValue.ortvalue_from_numpy(copy)._ortvalue for copy in self._copies]


class Session:
    """A session whose bindings are such."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session

    def io_binding(self) -> Elsewhere:
        return Elsewhere(self._session.io_binding())

    def run_with_iobinding(self, io: Elsewhere) -> None:
        self._session.run_with_iobinding(io._binding)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_results_are_in_the_bound_memory_or_it_is_said(elsewhere: bool) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        net (float[2] w) => (float[2] y) { y = Add(w, w) }"""
    )
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    w, y = (Buffer.zeros(BY_NAME["float32"], (2,)) for _ in range(2))
    w.write(np.array([1, 2], np.float32))
    options = {"inputs": {"w": w}, "outputs": {"y": y}, "doing": "A test"}
    binding = Binding(Session(session) if elsewhere else session, CPU, **options)
    if elsewhere:
        with pytest.raises(RuntimeError, match=r"A test: onnxruntime .* did not write output 'y'"):
            binding.run()
    else:
        binding.run()
        np.testing.assert_array_equal(y.read(), [2, 4])
