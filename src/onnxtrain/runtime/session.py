"""Inference sessions of the three models, with their manifest."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path

import onnxruntime as ort

from onnxtrain.errors import ModelLoadError
from onnxtrain.runtime.atomic import finish_interrupted
from onnxtrain.runtime.device import Device
from onnxtrain.runtime.external_data import check_external_data
from onnxtrain.runtime.kernels import function_names, register_kernels
from onnxtrain.runtime.manifest import METADATA_KEY, Manifest, parse_manifest
from onnxtrain.runtime.session_settings import SessionSettings, suit_training

ModelSource = str | os.PathLike[str] | bytes
# What onnxruntime says of a model that is newer than itself.
_NEWER_MODEL = (
    (
        "opset",
        re.compile(r"Opset (\d+) is under development.*domain ai\.onnx is till opset (\d+)", re.DOTALL),
    ),
    ("IR version", re.compile(r"Unsupported model IR version: (\d+), max supported IR version: (\d+)")),
)
# What onnxruntime says where an optimizer of its own breaks a model, and which one that is.
#
# 1.20 to 1.24 merge a Transpose into a product of float64, and have no kernel for that. 1.20 cannot fold what
# computes with values without elements. 1.32 lets a QuantizeLinear that it adds itself say int8, and makes uint8 of
# it.
_FAILING_OPTIMIZERS = {
    "MatmulTransposeFusion": "MatmulTransposeFusion",
    "CanRemoveNodeAndMergeEdges": "ConstantFolding",
    "output_dtype INT8 does not match": "QDQS8ToU8Transformer",
}


def describe(model: ModelSource, role: str) -> str:
    """Returns how messages call `model`: its role and path."""
    return f"{role} ({len(model)} bytes)" if isinstance(model, bytes) else f"{role} '{os.fspath(model)}'"


def open_session(
    model: ModelSource, role: str, device: Device, options: ort.SessionOptions | None
) -> ort.InferenceSession:
    """Returns a session of `model`, a path or the bytes of an ONNX file; `role` is for messages.

    Raises:
        ModelLoadError: Missing, truncated, not ONNX, or not accepted by this onnxruntime.
    """
    source = describe(model, role)
    if not isinstance(model, bytes):
        path = Path(os.fspath(model))
        try:
            finish_interrupted(path)
        except OSError as error:
            raise ModelLoadError(f"Loading {source}: {error}") from error
        if not path.is_file():
            raise ModelLoadError(
                f"Loading {source}: there is no such file (working directory '{Path.cwd()}')."
            )
        model = str(path)
    try:
        check_external_data(model)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"Loading {source}: {error}") from error
    try:
        return _session(model, device, options or SessionSettings().options())
    except Exception as error:  # onnxruntime's own exceptions share no base class but Exception
        raise ModelLoadError(
            f"Loading {source} in onnxruntime {ort.__version__} failed: {_reason(error, device)}"
        ) from error


class _StrictSession(ort.InferenceSession):  # type: ignore[misc]  # onnxruntime has no types
    """A session that fails where others print that they do, and try again with other execution providers.

    onnxruntime can be asked not to by an argument since 1.23 only.
    """

    @property
    def _enable_fallback(self) -> bool:
        return False

    @_enable_fallback.setter
    def _enable_fallback(self, enabled: bool) -> None:
        pass


def _session(model: str | bytes, device: Device, options: ort.SessionOptions) -> ort.InferenceSession:
    """Returns a session, without an optimizer for which this onnxruntime turns out to be broken."""
    if device.type == "cpu":
        register_kernels(options, function_names(model))
    suit_training(options)
    make = functools.partial(_StrictSession, model, options, providers=device.providers)
    try:
        session = make()
    except Exception as error:
        failing = [optimizer for text, optimizer in _FAILING_OPTIMIZERS.items() if text in str(error)]
        if not failing:
            raise
        session = make(disabled_optimizers=failing)
    rest_threads(session)
    return session


def rest_threads(session: ort.InferenceSession) -> None:
    """Has the threads of a new session rest until its first run.

    They start by looking for work, which takes a core for some 35 ms each: from those that open the next session, or
    compute the first step. Where they stop at the end of a run, they do so at that of one that fails as well.
    """
    if session.get_session_options().intra_op_num_threads == 1:
        return
    with contextlib.suppress(RuntimeError):  # no output is asked for
        session.run_with_iobinding(session.io_binding())


def _is_missing_kernel(error: Exception) -> bool:
    return type(error).__name__ == "NotImplemented"  # onnxruntime exports its exceptions nowhere


def _reason(error: Exception, device: Device) -> str:
    """Returns why onnxruntime has refused a model, and what to do."""
    for kind, pattern in _NEWER_MODEL:
        if found := pattern.search(str(error)):
            return (
                f"the model is of {kind} {found[1]}, and this onnxruntime runs up to {found[2]}. Install a newer "
                "onnxruntime, or export the model with opset 21, which every supported onnxruntime runs, and "
                "generate the artifacts from that."
            )
    if _is_missing_kernel(error):
        return (
            f"{error}. This build lacks a kernel for these dtypes on device '{device}'; use a float32 model."
        )
    return f"{error}. The file may be truncated or corrupt; generate the artifacts again."


def open_training_session(
    model: ModelSource, role: str, device: Device, options: ort.SessionOptions | None
) -> tuple[ort.InferenceSession, Manifest]:
    """Returns a session of one of the three models of a training run, and its manifest.

    Raises:
        ModelLoadError: See :func:`open_session`; also when the model has no manifest.
    """
    session = open_session(model, role, device, options)
    source = describe(model, role)
    with _texts_of(source):
        text = session.get_modelmeta().custom_metadata_map.get(METADATA_KEY)
    if text is None:
        raise ModelLoadError(
            f"Loading {source}: it has no metadata property '{METADATA_KEY}', so it is not a model for "
            "training. Make one with onnxtrain.artifacts.generate_artifacts."
        )
    return session, parse_manifest(text, source)


@contextlib.contextmanager
def _texts_of(source: str) -> Iterator[None]:
    """Turns a name that is no text, which onnxruntime lets pass, into a ModelLoadError."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ModelLoadError(
            f"Loading {source}: a name in it is not UTF-8 ({error}). The file is corrupt; generate the artifacts "
            "again."
        ) from error


def require_values(session: ort.InferenceSession, source: str, inputs: set[str], outputs: set[str]) -> None:
    """Raises ModelLoadError unless the graph has exactly these inputs and outputs."""
    with _texts_of(source):
        actual_inputs = {i.name for i in session.get_inputs()}
        actual_outputs = {o.name for o in session.get_outputs()}
    missing = sorted(inputs - actual_inputs) + sorted(outputs - actual_outputs)
    extra = sorted(actual_inputs - inputs) + sorted(actual_outputs - outputs)
    if missing or extra:
        raise ModelLoadError(
            f"Loading {source}: the graph does not have the inputs and outputs that its manifest gives it "
            f"for this role (missing: {missing[:5]}, unexpected: {extra[:5]}). Is it another of the run's "
            "models?"
        )
