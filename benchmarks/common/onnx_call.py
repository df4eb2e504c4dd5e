"""Calls a session with OrtValues, as ORTModule does.

Programs of the other folders put this folder on their path.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as binding

from onnxtrain.runtime.kernels import register_kernels
from onnxtrain.runtime.session_settings import SessionSettings

__all__ = ["OnnxCall"]


class OnnxCall:
    """A model with its inputs; results are new in each call.

    Args:
        path: the model.
        inputs: arrays by the name of the input; the session reads their memory.
        threads: of the session.
        profile: True to time the nodes, see `nodes`.
    """

    def __init__(
        self, path: Path, inputs: Mapping[str, np.ndarray], threads: int, profile: bool = False
    ) -> None:
        model = onnx.load(path)
        options = SessionSettings(threads=threads).options()
        options.enable_profiling, options.profile_file_prefix = profile, str(path.with_suffix(""))
        register_kernels(options, [function.name for function in model.functions])
        self._session = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self._inputs = [value.name for value in self._session.get_inputs()]
        self._outputs = [value.name for value in self._session.get_outputs()]
        self._values = [ort.OrtValue.ortvalue_from_numpy(inputs[name]) for name in self._inputs]
        self._feeds = binding.OrtValueVector()
        for value in self._values:
            self._feeds.push_back(value._ortvalue)
        self._devices = [ort.OrtDevice.make("cpu", 0)._get_c_device()] * len(self._outputs)
        self._options = ort.RunOptions()

    def __call__(self) -> binding.OrtValueVector:
        """Returns the outputs, as OrtValues."""
        # `run_with_ort_values` (1.32) takes 26 us more.
        results = binding.OrtValueVector()
        self._session._sess.run_with_ortvaluevector(
            self._options, self._inputs, self._feeds, self._outputs, results, self._devices
        )
        return results

    def values(self) -> dict[str, np.ndarray]:
        """Returns the outputs by name."""
        results = self()
        return {name: results[i].numpy().copy() for i, name in enumerate(self._outputs)}

    def nodes(self, runs: int = 10) -> list[tuple[float, str]]:
        """Returns the least microseconds and the op of each node, slowest first; ends the profile."""
        for _ in range(runs):
            self()
        path = Path(self._session.end_profiling())
        times = defaultdict(list)
        for event in json.loads(path.read_text()):
            if event["name"].endswith("_kernel_time"):
                times[event["args"]["op_name"], event["name"]].append(event["dur"])
        path.unlink()
        return sorted(((min(us), op) for (op, _), us in times.items()), reverse=True)
