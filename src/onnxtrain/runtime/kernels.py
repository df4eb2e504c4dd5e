"""Registers native kernels with sessions if the package `onnxtrain-kernels` is installed.

Models call functions of the domain `onnxtrain`. If a native kernel of the same name is registered, ONNX Runtime runs
it instead of the function body, which consists of standard ops. The environment variable `ONNXTRAIN_KERNELS` is `off`
(run function bodies), `on` (raise an error if there are no kernels) or `auto`, the default.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import warnings
import weakref
from collections.abc import Iterable, Mapping

import onnxruntime as ort

from onnxtrain.errors import InputError
from onnxtrain.runtime import onnx_proto as proto
from onnxtrain.runtime import onnx_wire as wire
from onnxtrain.runtime.kernel_advice import advise
from onnxtrain.runtime.lock import ProcessLock

VARIABLE = "ONNXTRAIN_KERNELS"
# Environment variable with the instruction set that the kernels use, e.g. "avx2".
LEVEL = "ONNXTRAIN_KERNELS_LEVEL"
LEVELS = ("baseline", "avx2", "avx512")
"""Values of `ONNXTRAIN_KERNELS_LEVEL`; `kernels/csrc/processor.cpp` lists the instructions of each."""
FUNCTIONS = 5
"""Version of the functions in domain `onnxtrain`; kernels of another version compute something else."""

# Each distinct convolution of a model has functions of its own with a number in the name: "ConvolutionGradient3_float".
# At most four digits, because an untrusted model must not request a billion names.
_NUMBERED_NAME = re.compile(r"(.+?)(\d{1,4})_(float)")
# For each numbered name, the count that the library registers unless the session config entry specifies another.
_NUMBERED = {
    f"Convolution{form}{kind}#_float": count
    for form, counts in {"": (64, 16, 16), "Bfloat16": (64, 16, 16), "Transpose": (16, 4, 4)}.items()
    for kind, count in zip(("Gradient", "WeightGradient", "InputGradient"), counts, strict=True)
} | {
    "DepthwiseConvolution#_float": 16,
    "WindowSpread#_float": 4,
    "Elementwise#_float": 64,
    "GatherRows#_float": 16,
    "ScatterRows#_float": 16,
    "SumOfSquares#_float": 1,
}
# One function per number of parameters that are updated by one call.
_NUMBERED |= {
    f"{step}Steps#_float": 1
    for step in (
        *("Adam", "AdamW", "ClippedAdam", "ClippedAdamW", "SGD", "Momentum", "Nesterov", "Adagrad", "Lion"),
        *("RMSprop", "CenteredRMSprop", "RMSpropMomentum", "CenteredRMSpropMomentum"),
    )
}
# For each session options object, the number of names of each kind after each registration of the library. ONNX Runtime
# does not tell what has been registered. Weak, so that the options can be freed.
_registered: weakref.WeakKeyDictionary[ort.SessionOptions, list[dict[str, int]]] = weakref.WeakKeyDictionary()
# Two threads may open sessions with the same options, and registering one name twice makes a session fail ("Domain
# already set in registry").
_registering = ProcessLock()


def kernel_library() -> str | None:
    """Returns the path of the library with native CPU kernels for the functions of domain `onnxtrain`.

    Returns:
        The path. None if the environment variable `ONNXTRAIN_KERNELS` is `off`, or if it is `auto` (the default) and no
        usable library is installed. ONNX Runtime then runs the function bodies.

    Raises:
        InputError: `ONNXTRAIN_KERNELS` is not on, off or auto; or it is `on`, but no usable library is installed.
    """
    setting = _setting()
    if setting == "off":
        return None
    path, problem = _installed()
    if path is None and setting == "on":
        raise InputError(f"{VARIABLE}=on, but {problem}. Install onnxtrain[kernels], or set {VARIABLE}=off.")
    return path


def _setting() -> str:
    """Returns the value of the environment variable `ONNXTRAIN_KERNELS`: "auto", "on" or "off"."""
    setting = os.environ.get(VARIABLE, "").strip().lower() or "auto"
    if setting not in ("auto", "on", "off"):
        raise InputError(f"{VARIABLE}='{setting}': expected 'auto' (the default), 'on' or 'off'.")
    return setting


def describe_kernels() -> str:
    """Returns version and instruction set of the kernels that sessions use, or why they use none.

    For example, "0.1.0 (avx2)" or "none (pip install onnxtrain-kernels)".
    """
    # Imported late: only the command line asks.
    from importlib import metadata

    try:
        path = kernel_library()
    except InputError as error:
        return f"none ({error})"
    if path is None:
        problem = f"{VARIABLE}=off" if _setting() == "off" else _installed()[1]
        return f"none ({'pip install onnxtrain-kernels' if problem == _NOT_INSTALLED else problem})"
    try:
        version = metadata.version("onnxtrain-kernels")
    except metadata.PackageNotFoundError:
        version = "of unknown version"
    level = importlib.import_module("onnxtrain_kernels").level()
    return f"{version} ({level})" if level else "none (this processor lacks instructions that they need)"


_NOT_INSTALLED = "package onnxtrain-kernels is not installed"


@functools.cache
def _installed() -> tuple[str | None, str]:
    """Looks for an installed library of native kernels.

    Returns:
        The path of the library and an empty string, or None and the reason why there is no usable library.
    """
    # By name: the package is optional, and type checkers need not have it.
    try:
        kernels = importlib.import_module("onnxtrain_kernels")
    except ImportError:
        return None, _NOT_INSTALLED
    if kernels.FUNCTIONS != FUNCTIONS:
        problem = (
            f"the installed onnxtrain-kernels implements version {kernels.FUNCTIONS} of the functions, but "
            f"this onnxtrain needs version {FUNCTIONS}"
        )
        warnings.warn(f"{problem}: training runs without native kernels", RuntimeWarning, stacklevel=4)
        return None, problem
    try:
        return str(kernels.library()), ""
    except FileNotFoundError as error:
        return None, str(error)


def register_kernels(options: ort.SessionOptions, names: Iterable[str] | None = None) -> None:
    """Registers the native kernels for a model's functions with session options.

    If the kernels are not installed, advises to install them.

    May be called again with the same options for another model.

    Args:
        options: the session options; modified in place.
        names: names of the functions in the model, e.g. ["Convolution_float", "ConvolutionGradient0_float"]. The
            functions of each distinct convolution have a number in their names; kernels are registered for numbers from
            0 to the highest in `names`. None for the library's default numbers, e.g. 0 to 63 for ConvolutionGradient.

    Raises:
        InputError: see :func:`kernel_library`.
    """
    path = kernel_library()
    if path is None:
        if names and _setting() == "auto" and _installed()[1] == _NOT_INSTALLED:
            advise([*names])
        return
    with _registering:
        _register(options, names, path)


def _register(options: ort.SessionOptions, names: Iterable[str] | None, path: str) -> None:
    """Registers native kernels with session options, except for kernels that are already registered with them.

    The caller must hold the lock `_registering`.

    Args:
        options: the session options; modified in place.
        names: names of the functions in the model; None for the library's default numbers, see
            :func:`register_kernels`.
        path: path of the library.
    """
    # Only the names that the model needs: ONNX Runtime creates a schema for each, which takes about 20 microseconds.
    # Without the default names, 192 at that time, opening a small model took 2.7 ms instead of 10.6.
    kernels = importlib.import_module("onnxtrain_kernels")
    _warn_of_level(os.environ.get(LEVEL), path)
    numbers = _registered.get(options)
    if names is None:
        if numbers is None:
            options.register_custom_ops_library(path)
            _registered[options] = [_NUMBERED]
        return
    # Options that were used for a smaller model get the missing names, because no name may be registered twice.
    before = numbers[-1] if numbers else dict.fromkeys(_NUMBERED, 0)
    ranges = {stem: (before[stem], end) for stem, end in _needed_numbers(names).items() if end > before[stem]}
    if numbers and not ranges:
        return
    # ONNX Runtime warns if an entry is set again, so each registration uses a separate entry.
    entry = f"{kernels.NUMBERED}.{len(numbers)}" if numbers else kernels.NUMBERED
    options.add_session_config_entry(entry, _config_entry(ranges))
    options.register_custom_ops_library(path)
    _registered[options] = [*(numbers or []), before | {stem: end for stem, (_, end) in ranges.items()}]


def function_names(model: str | bytes) -> list[str] | None:
    """Returns the names of the functions in a model (a path or bytes); None if it is not an ONNX model."""
    if isinstance(model, bytes):
        return _function_names(model)
    # Imported here, because a device may run models that are given as bytes. Memory-mapped, so that weights are not
    # read.
    import mmap

    try:
        with open(model, "rb") as file:
            return _function_names(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    # Not an error here, because ONNX Runtime, which opens the file next, has a better message.
    except (OSError, ValueError):
        return None


def _function_names(model: wire.Bytes) -> list[str] | None:
    """Returns the names of the functions in a serialized model; None if `model` is not a valid ONNX model."""
    try:
        functions = wire.messages(model, proto.MODEL_FUNCTION)
        first_names = (
            next((f.payload for f in wire.parse(body) if f.number == proto.FUNCTION_NAME), b"")
            for body in functions
        )
        return [bytes(name).decode(errors="replace") for name in first_names]
    except ValueError:
        return None


def _needed_numbers(names: Iterable[str]) -> dict[str, int]:
    """Returns how many numbered kernels to register for each kind of numbered function.

    For example, a model that calls "ConvolutionGradient2_float" needs the numbers 0 to 2, so the result is
    {"ConvolutionGradient#_float": 3}.
    """
    needed: dict[str, int] = {}
    for name in names:
        match = _NUMBERED_NAME.fullmatch(name)
        if match and (stem := f"{match[1]}#_{match[3]}") in _NUMBERED:
            needed[stem] = max(needed.get(stem, 0), int(match[2]) + 1)
    return needed


def _config_entry(ranges: Mapping[str, tuple[int, int]]) -> str:
    """Formats half-open ranges of function numbers as a session config entry, e.g. "Convolution=0:3"."""
    return ",".join(f"{stem.partition('#')[0]}={begin}:{end}" for stem, (begin, end) in ranges.items())


@functools.cache
def _warn_of_level(wanted: str | None, path: str) -> None:
    """Warns, once per level, if native kernels cannot run, or cannot use the instruction set that the user requested.

    Args:
        wanted: value of `ONNXTRAIN_KERNELS_LEVEL`, e.g. "avx2"; None if it is not set.
        path: path of the library, for the message.
    """
    level = importlib.import_module("onnxtrain_kernels").level()
    if not level:
        warnings.warn(
            f"The native kernels of '{path}' need instructions that this processor does not support "
            "(x86-64-v2): training runs without native kernels",
            RuntimeWarning,
            stacklevel=4,
        )
    elif wanted and wanted != level:
        reason = (
            "the package has no kernels of this level, or the processor lacks some of its instructions"
            if wanted in LEVELS
            else f"there is no such level; expected one of {', '.join(map(repr, LEVELS))}"
        )
        warnings.warn(
            f"{LEVEL}='{wanted}': {reason}. Using the kernels of level '{level}'",
            RuntimeWarning,
            stacklevel=4,
        )
