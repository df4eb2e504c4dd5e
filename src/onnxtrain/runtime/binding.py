"""A session bound to the parameter store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnxruntime as ort

from onnxtrain.errors import InputError
from onnxtrain.runtime.device import Device
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.store import Buffer


class Binding:
    """IO binding of one session: the store's buffers are bound once, arguments and results at each run.

    Args:
        session: The session.
        device: Where results are allocated.
        arguments: Names of the inputs that :meth:`run` is given.
        results: Names of the outputs that :meth:`run` returns.
        inputs: Input name -> buffer that it reads.
        outputs: Output name -> buffer that it is written to.
        doing: What a run is, for messages.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        device: Device,
        *,
        arguments: Sequence[str] = (),
        results: Sequence[str] = (),
        inputs: Mapping[str, Buffer],
        outputs: Mapping[str, Buffer],
        doing: str,
    ) -> None:
        self._session = session
        self._device = device
        self._arguments = tuple(arguments)
        self._results = tuple(results)
        self._outputs = dict(outputs)
        self._doing = doing
        self._checked = False
        self._io = session.io_binding()
        # Bound first: outputs come back in the order in which they were first bound.
        self._bind_results()
        for name, buffer in inputs.items():
            self._io.bind_ortvalue_input(name, buffer.value)
        for name, buffer in outputs.items():
            self._io.bind_ortvalue_output(name, buffer.value)

    def _bind_results(self) -> None:
        # Anew for each run: a binding would reuse the memory of results that the caller still holds.
        for name in self._results:
            self._io.bind_output(name, self._device.type, self._device.index)

    def run(self, values: Sequence[Array | ort.OrtValue] = ()) -> list[ort.OrtValue]:
        """Runs the session on `values`, one C-contiguous array or OrtValue per argument; returns the results.

        Raises:
            InputError: onnxruntime reports an error.
        """
        for name, value in zip(self._arguments, values, strict=True):
            if isinstance(value, np.ndarray):
                self._io.bind_cpu_input(name, value)
            else:
                self._io.bind_ortvalue_input(name, value)
        self._bind_results()
        try:
            self._session.run_with_iobinding(self._io)
        except Exception as error:  # onnxruntime's own exceptions share no base class but Exception
            raise InputError(f"{self._doing} failed in onnxruntime {ort.__version__}: {error}") from error
        if self._device.type != "cpu":
            self._io.synchronize_outputs()
        produced = self._io.get_outputs_as_ortvaluevector()
        if not self._checked:
            self._check_addresses(produced)
        return [ort.OrtValue(produced[index]) for index in range(len(self._results))]

    def _check_addresses(self, produced: Sequence[ort.OrtValue]) -> None:
        """Makes sure, on the first run, that onnxruntime wrote into the bound memory and not elsewhere."""
        for index, (name, buffer) in enumerate(self._outputs.items(), start=len(self._results)):
            if buffer.size and produced[index].data_ptr() != buffer.value.data_ptr():
                raise RuntimeError(
                    f"{self._doing}: onnxruntime {ort.__version__} did not write output '{name}' into the "
                    "memory bound to it. Please report this version."
                )
        self._checked = True
