"""Opens ONNX Runtime sessions for the models of a run, and reads their manifests."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import onnxruntime as ort

from onnxtrain._words import argument
from onnxtrain.errors import ModelLoadError
from onnxtrain.runtime.atomic import finish_interrupted
from onnxtrain.runtime.custom_ops import add_custom_ops
from onnxtrain.runtime.device import Device
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.external_data import check_external_data
from onnxtrain.runtime.function_calls import check_function_calls
from onnxtrain.runtime.kernels import function_names, register_kernels
from onnxtrain.runtime.manifest import METADATA_KEY, Manifest, parse_manifest
from onnxtrain.runtime.session_settings import SessionSettings, suit_training
from onnxtrain.runtime.store import alias, to_array, to_storage

ModelSource = str | os.PathLike[str] | bytes
# Messages of onnxruntime about a model that is too new: what is new, and the pattern of the message.
_NEWER_MODEL = (
    (
        "opset",
        re.compile(r"Opset (\d+) is under development.*domain ai\.onnx is till opset (\d+)", re.DOTALL),
    ),
    ("IR version", re.compile(r"Unsupported model IR version: (\d+), max supported IR version: (\d+)")),
)
# Parts of onnxruntime's messages when one of its graph optimizers has broken a model, and the optimizer. 1.20 to 1.24
# fuse a Transpose into a float64 product, for which they have no kernel. 1.20 cannot fold constants computed from empty
# tensors. 1.32 adds a QuantizeLinear to int8, and then makes its zero point uint8.
_FAILING_OPTIMIZERS = {
    "MatmulTransposeFusion": "MatmulTransposeFusion",
    "CanRemoveNodeAndMergeEdges": "ConstantFolding",
    "output_dtype INT8 does not match": "QDQS8ToU8Transformer",
}


def describe(model: ModelSource, role: str) -> str:
    """Returns the role and path of a model for error messages, e.g. "eval model 'run/eval_model.onnx'"."""
    return f"{role} ({len(model)} bytes)" if isinstance(model, bytes) else f"{role} '{os.fspath(model)}'"


def open_session(
    model: ModelSource, role: str, device: Device, options: ort.SessionOptions | None
) -> ort.InferenceSession:
    """Opens an ONNX Runtime session for a model, after checking its external data and function calls.

    Args:
        model: path of an ONNX file, or its bytes.
        role: role of the model in error messages, e.g. "eval model".
        device: device that runs the session.
        options: session options; None for the options of a default :class:`SessionSettings`.

    Raises:
        ModelLoadError: the model is missing, truncated, not an ONNX model, or rejected by the installed onnxruntime.
    """
    source = describe(model, role)
    if not isinstance(model, bytes):
        path = Path(os.fspath(model))
        # A killed save may not have renamed the model yet.
        try:
            finish_interrupted(path)
        except OSError as error:
            raise ModelLoadError(f"Loading {source}: {error}") from error
        if not path.is_file():
            raise ModelLoadError(
                f"Loading {source}: there is no such file (working directory '{Path.cwd()}')."
            )
        model = str(path)
    # Before ONNX Runtime opens the model, because some versions read files outside its directory.
    try:
        check_external_data(model)
        check_function_calls(model)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"Loading {source}: {error}") from error
    try:
        return _session(model, device, options or SessionSettings().options())
    # onnxruntime's exceptions have no common base class but Exception.
    except Exception as error:
        raise ModelLoadError(
            f"Loading {source} in onnxruntime {ort.__version__} failed: {_reason(error, device)}"
        ) from error


def run_on_arrays(
    session: ort.InferenceSession, outputs: Sequence[str], feeds: Mapping[str, Array | ort.OrtValue]
) -> list[Array]:
    """Runs a session on arrays or OrtValues, and returns the `outputs` as arrays.

    bfloat16 inputs may be arrays with the dtype of `ml_dtypes`; bfloat16 outputs become float32, because numpy has no
    bfloat16.
    """
    if all(value.type != "tensor(bfloat16)" for value in (*session.get_inputs(), *session.get_outputs())):
        return list(session.run(list(outputs), dict(feeds)))
    values = {
        name: value if isinstance(value, ort.OrtValue) else alias(*to_storage(value, f"Input '{name}'"))
        for name, value in feeds.items()
    }
    return [to_array(result) for result in session.run_with_ort_values(list(outputs), values)]


class _StrictSession(ort.InferenceSession):  # type: ignore[misc]  # onnxruntime has no types
    """A session that raises an error if it cannot be created, instead of trying other execution providers."""

    # onnxruntime has an argument for this since 1.23. Before, it printed a banner on stdout, and could run a module on
    # the CPU although the user requested CUDA.

    @property
    def _enable_fallback(self) -> bool:
        return False

    @_enable_fallback.setter
    def _enable_fallback(self, enabled: bool) -> None:
        pass


def _session(model: str | bytes, device: Device, options: ort.SessionOptions) -> ort.InferenceSession:
    """Creates a session. If a graph optimizer of onnxruntime breaks the model, tries again without that optimizer."""
    # The kernels are for the CPU.
    if device.type == "cpu":
        register_kernels(options, function_names(model))
    add_custom_ops(options)
    suit_training(options)
    make = functools.partial(_StrictSession, model, options, providers=device.providers)
    # First with all optimizers, because a broken model is only detected afterwards.
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
    """Puts the threads of a new session to sleep until its first run, instead of letting them spin."""
    # New threads spin for about 35 ms, which takes the cores from whoever opens the next session or computes the first
    # step. With `session.force_spinning_stop` they sleep after each run, even after one that fails.
    if session.get_session_options().intra_op_num_threads == 1:
        return
    # A run without outputs fails immediately, which is sufficient.
    with contextlib.suppress(RuntimeError):
        session.run_with_iobinding(session.io_binding())


def _reason(error: Exception, device: Device) -> str:
    """Converts onnxruntime's exception for a rejected model to an explanation and advice."""
    # Otherwise a model that is too new would be reported as a corrupt file.
    for kind, pattern in _NEWER_MODEL:
        if match := pattern.search(str(error)):
            return (
                f"the model has {kind} {match[1]}, but this onnxruntime supports at most {match[2]}. "
                "Install a newer onnxruntime, or export the model with opset 21, which every supported "
                "onnxruntime runs, and generate the artifacts again."
            )
    if "Training mode does not support BN" in str(error):
        return (
            f"onnxruntime has no training-mode BatchNormalization kernel for '{device}'. Generate the "
            f"artifacts with {argument('profile', 'portable')}, which normalizes with other ops, or train "
            "on the CPU."
        )
    if missing := re.search(r"(\S+?):(\w+)\(-?\d+\) is not a registered function/op", str(error)):
        return (
            f"onnxruntime has no op {missing[2]!r} of the domain {missing[1]!r}. Register the library that has a "
            "kernel for it, onnxtrain.register_custom_ops_library(path), or write it in standard ops, "
            f'onnxtrain.register_body("{missing[1]}", "{missing[2]}", ...). See the guide "Use a custom op".'
        )
    # By name, because onnxruntime does not export its exceptions.
    if type(error).__name__ == "NotImplemented":
        return (
            f"{error}. This build lacks a kernel for these dtypes on device '{device}'; use a float32 model."
        )
    return f"{error}. The file may be truncated or corrupt; generate the artifacts again."


def open_training_session(
    model: ModelSource, role: str, device: Device, options: ort.SessionOptions | None
) -> tuple[ort.InferenceSession, Manifest]:
    """Opens a session of the training, eval or optimizer model of a run, and reads its manifest.

    Raises:
        ModelLoadError: see :func:`open_session`, the model has no manifest, or a file with its weights has been
            replaced.
    """
    session = open_session(model, role, device, options)
    source = describe(model, role)
    with _texts_of(source):
        text = session.get_modelmeta().custom_metadata_map.get(METADATA_KEY)
    if text is None:
        raise ModelLoadError(
            f"Loading {source}: it has no metadata property '{METADATA_KEY}', so it is not a training "
            "artifact. Generate artifacts with onnxtrain.artifacts.generate_artifacts."
        )
    manifest = parse_manifest(text, source)
    if manifest.data_files and not isinstance(model, bytes):
        # Imported here, because most models have no data files.
        from onnxtrain.runtime.data_files import check_data_files

        try:
            check_data_files(model, manifest.data_files)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"Loading {source}: {error}") from error
    return session, manifest


@contextlib.contextmanager
def _texts_of(source: str) -> Iterator[None]:
    """Context manager for reading names from a session: raises ModelLoadError if a name is not UTF-8.

    Args:
        source: role and path of the model for the error message, e.g. "eval model 'run/eval_model.onnx'".
    """
    # onnxruntime loads models with such names, but its Python binding fails to return them.
    try:
        yield
    except UnicodeDecodeError as error:
        raise ModelLoadError(
            f"Loading {source}: a name in it is not UTF-8 ({error}). The file is corrupt; generate the artifacts "
            "again."
        ) from error


def require_values(session: ort.InferenceSession, source: str, inputs: set[str], outputs: set[str]) -> None:
    """Raises ModelLoadError unless the names of a model's inputs and outputs are exactly `inputs` and `outputs`."""
    with _texts_of(source):
        actual_inputs = {i.name for i in session.get_inputs()}
        actual_outputs = {o.name for o in session.get_outputs()}
    missing = sorted(inputs - actual_inputs) + sorted(outputs - actual_outputs)
    extra = sorted(actual_inputs - inputs) + sorted(actual_outputs - outputs)
    if missing or extra:
        raise ModelLoadError(
            f"Loading {source}: its inputs and outputs do not match its manifest for this role (missing: "
            f"{missing[:5]}, unexpected: {extra[:5]}). Check that it is not another model of the run."
        )
