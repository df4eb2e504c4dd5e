"""Binds a session to the buffers of a store, so that running it copies no parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnxruntime as ort

from onnxtrain.errors import InputError
from onnxtrain.runtime import dtypes
from onnxtrain.runtime.device import Device
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.store import Buffer, alias


class Binding:
    """Runs a session with IO binding: buffers are bound once, arguments and results on each run.

    Args:
        session: the session.
        device: device on which results are allocated.
        arguments: names of the inputs whose values are passed to :meth:`run`, e.g. ["x", "labels"].
        results: names of the outputs that :meth:`run` returns, e.g. ["loss", "logits"].
        loss: name of the result that is a scalar, e.g. "loss"; None if there is none.
        inputs: buffers of all other inputs, e.g. {"fc.weight": Buffer}.
        outputs: buffers of all other outputs, e.g. {"fc.weight_grad": Buffer}.
        doing: what a run is called in error messages, e.g. "The training step".
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        device: Device,
        *,
        arguments: Sequence[str] = (),
        results: Sequence[str] = (),
        loss: str | None = None,
        inputs: Mapping[str, Buffer],
        outputs: Mapping[str, Buffer],
        doing: str,
    ) -> None:
        self._session = session
        self._device = device
        self._arguments = tuple(arguments)
        self._results = tuple(results)
        self._loss = loss
        # The memory of the loss, once it is bound.
        self._scalar: Array | None = None
        self._outputs = dict(outputs)
        self._doing = doing
        self._checked = False
        self._io = session.io_binding()
        # Results first: ONNX Runtime returns outputs in the order in which they were first bound, and `run` expects
        # results to be the first ones.
        self._bind_results()
        for name, buffer in inputs.items():
            self._io.bind_ortvalue_input(name, buffer.value)
        for name, buffer in outputs.items():
            self._io.bind_ortvalue_output(name, buffer.value)

    def _bind_results(self) -> None:
        """Makes ONNX Runtime allocate new memory for the results of the next run."""
        # On each run: otherwise ONNX Runtime overwrites the previous results, which the caller may still hold.
        for name in self._results:
            if self._scalar is None or name != self._loss:
                self._io.bind_output(name, self._device.type, self._device.index)

    def _bind_loss(self, results: Sequence[ort.OrtValue]) -> None:
        """Binds the loss to an array that :meth:`run` copies, if the result of the first run is a scalar on the CPU."""
        # Faster than memory that ONNX Runtime allocates and wraps on each run.
        if self._loss is None or self._device.type != "cpu":
            return
        result = results[self._results.index(self._loss)]
        dtype = dtypes.BY_ORT.get(result.data_type())
        if result.shape() == [] and dtype is not None and dtype.name != "bfloat16":
            self._scalar = np.zeros((), dtype.storage)
            self._io.bind_ortvalue_output(self._loss, alias(self._scalar, dtype))

    def run(self, values: Sequence[Array | ort.OrtValue] = ()) -> list[Array | ort.OrtValue]:
        """Runs the session on one C-contiguous array or OrtValue per argument.

        Returns:
            The results. The loss may be an array; all others are OrtValues.

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
        # onnxruntime's exceptions have no common base class but Exception, and are not exported.
        except Exception as error:
            raise InputError(f"{self._doing} failed in onnxruntime {ort.__version__}: {error}") from error
        # Kernels on a GPU may still be running, and the CPU reads gradients and statistics next.
        if self._device.type != "cpu":
            self._io.synchronize_outputs()
        others = len(self._results) - (self._scalar is not None)
        if self._checked and not others:
            return [] if self._scalar is None else [self._scalar.copy()]
        produced = self._io.get_outputs_as_ortvaluevector()
        results: list[Array | ort.OrtValue] = [
            ort.OrtValue(produced[index]) for index in range(len(self._results))
        ]
        # Only on the first run, because it would take time in each step.
        if not self._checked:
            self._check_addresses(produced)
            self._bind_loss(results)
        elif self._scalar is not None:
            results[self._results.index(self._loss)] = self._scalar.copy()
        return results

    def _check_addresses(self, produced: Sequence[ort.OrtValue]) -> None:
        """Raises RuntimeError if onnxruntime did not write an output to the buffer that is bound to it.

        Args:
            produced: the outputs of a run, results first.
        """
        # The parameter store relies on aliased memory: with a copy, as onnxruntime-web makes, weights or gradients
        # would silently not change.
        for index, (name, buffer) in enumerate(self._outputs.items(), start=len(self._results)):
            if buffer.size and produced[index].data_ptr() != buffer.value.data_ptr():
                raise RuntimeError(
                    f"{self._doing}: onnxruntime {ort.__version__} did not write output '{name}' into the "
                    "memory bound to it. Please report this version."
                )
        self._checked = True
