"""The native kernels of package `onnxtrain-kernels`, where it is installed.

They take the place of the bodies of onnxtrain's functions in a session; without them ONNX Runtime runs the bodies.
`ONNXTRAIN_KERNELS` is `off` (bodies only), `on` (an error where there are no kernels) or `auto`, the default.
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
from onnxtrain.runtime import onnx_wire as wire
from onnxtrain.runtime.lock import ProcessLock

VARIABLE = "ONNXTRAIN_KERNELS"
LEVEL = "ONNXTRAIN_KERNELS_LEVEL"
FUNCTIONS = 1
"""Version of the functions in domain `onnxtrain` that artifacts contain."""

_FUNCTION, _NAME = 25, 1
"""Field numbers of onnx.proto: functions of a ModelProto, name of a FunctionProto."""
_NUMBERED_NAME = re.compile(r"(.+?)(\d+)_(float)")
# Numbered names, and how many of each the library registers unless the session config entry says otherwise.
_NUMBERED = {
    f"Convolution{dtype}{kind}#_float": count
    for dtype in ("", "Bfloat16")
    for kind, count in (("Gradient", 64), ("WeightGradient", 16), ("InputGradient", 16))
}
# Per options, how many numbered names of each kind they have after each registration of the library.
_registered: weakref.WeakKeyDictionary[ort.SessionOptions, list[dict[str, int]]] = weakref.WeakKeyDictionary()
_registering = ProcessLock()


def kernel_library() -> str | None:
    """Returns the path of the custom op library that sessions on the CPU register; None where bodies are to run.

    Raises:
        InputError: `ONNXTRAIN_KERNELS` is something else, or `on` where no kernels can be used.
    """
    asked = os.environ.get(VARIABLE, "").strip().lower() or "auto"
    if asked not in ("auto", "on", "off"):
        raise InputError(f"{VARIABLE}='{asked}': expected 'auto' (the default), 'on' or 'off'.")
    if asked == "off":
        return None
    path, problem = _installed()
    if path is None and asked == "on":
        raise InputError(f"{VARIABLE}=on, but {problem}. Install onnxtrain[kernels], or set {VARIABLE}=off.")
    return path


@functools.cache
def _installed() -> tuple[str | None, str]:
    """Returns the path of the library, or None and why there is none."""
    try:
        kernels = importlib.import_module("onnxtrain_kernels")
    except ImportError:
        return None, "package onnxtrain-kernels is not installed"
    if kernels.FUNCTIONS != FUNCTIONS:
        problem = (
            f"the installed onnxtrain-kernels computes version {kernels.FUNCTIONS} of the functions, "
            f"and this onnxtrain needs version {FUNCTIONS}"
        )
        warnings.warn(f"{problem}: training runs without native kernels", RuntimeWarning, stacklevel=4)
        return None, problem
    try:
        return str(kernels.library()), ""
    except FileNotFoundError as error:
        return None, str(error)


def register_kernels(options: ort.SessionOptions, names: Iterable[str] | None = None) -> None:
    """Lets the sessions made with these options use the native kernels; options may be used several times.

    Args:
        options: the options; changed in place.
        names: names of the functions in the model, which say how many numbered names are needed, e.g.
            ["Convolution_float", "ConvolutionGradient0_float"]. ONNX Runtime makes a schema of each, which takes some
            20 microseconds. None: not known; the library registers as many as it does by default.
    """
    path = kernel_library()
    if path is None:
        return
    with _registering:
        _register(options, names, path)


def _register(options: ort.SessionOptions, names: Iterable[str] | None, path: str) -> None:
    kernels = importlib.import_module("onnxtrain_kernels")
    _warn_of_level(os.environ.get(LEVEL), path)
    entry = getattr(kernels, "NUMBERED", None)
    if entry is None:
        _warn_of_numbers(names or ())
    needed = None if names is None or entry is None else _numbers(names)
    numbers = _registered.get(options)
    if needed is None:
        if numbers is None:
            options.register_custom_ops_library(path)
            _registered[options] = [_NUMBERED]
        return
    before = numbers[-1] if numbers else dict.fromkeys(_NUMBERED, 0)
    ranges = {stem: (before[stem], end) for stem, end in needed.items() if end > before[stem]}
    if numbers and not ranges:
        return
    # ONNX Runtime warns where an entry is set anew: each registration has one of its own.
    options.add_session_config_entry(f"{entry}.{len(numbers)}" if numbers else entry, _text(ranges))
    options.register_custom_ops_library(path)
    _registered[options] = [*(numbers or []), before | {stem: end for stem, (_, end) in ranges.items()}]


def function_names(model: str | bytes) -> list[str] | None:
    """Returns the names of the functions in a model, a path or the bytes of an ONNX file.

    Returns None where the file is no ONNX model: loading it will say more.
    """
    if isinstance(model, bytes):
        return _function_names(model)
    import mmap  # kept out of the time that a device takes to start

    try:
        with open(model, "rb") as file:
            return _function_names(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    except (OSError, ValueError):
        return None


def _function_names(model: wire.Bytes) -> list[str] | None:
    try:
        functions = wire.messages(model, _FUNCTION)
        first_names = (
            next((f.payload for f in wire.parse(body) if f.number == _NAME), b"") for body in functions
        )
        return [bytes(name).decode(errors="replace") for name in first_names]
    except ValueError:
        return None


def _numbers(names: Iterable[str]) -> dict[str, int]:
    """Returns how many numbers each numbered name needs: {"ConvolutionGradient#_float": 3}."""
    needed: dict[str, int] = {}
    for name in names:
        match = _NUMBERED_NAME.fullmatch(name)
        if match and (stem := f"{match[1]}#_{match[3]}") in _NUMBERED:
            needed[stem] = max(needed.get(stem, 0), int(match[2]) + 1)
    return needed


def _text(ranges: Mapping[str, tuple[int, int]]) -> str:
    """Returns the session config entry: for each numbered name the first number and the one behind the last."""
    return ",".join(f"{stem.partition('#')[0]}={begin}:{end}" for stem, (begin, end) in ranges.items())


@functools.cache
def _warn_of_level(asked: str | None, path: str) -> None:
    """Warns, once per level, where sessions get kernels of another level than the one that was asked for."""
    level_of = getattr(importlib.import_module("onnxtrain_kernels"), "level", None)
    if level_of is None:  # an older version of the package
        return
    level = level_of()
    if not level:
        warnings.warn(
            f"The native kernels of '{path}' need instructions that this processor lacks (x86-64-v2): training runs "
            "without native kernels",
            RuntimeWarning,
            stacklevel=4,
        )
    elif asked and asked != level:
        warnings.warn(
            f"{LEVEL}='{asked}', but there are no kernels of this level or the processor lacks some of its "
            f"instructions: the kernels of level '{level}' are used",
            RuntimeWarning,
            stacklevel=4,
        )


def _warn_of_numbers(names: Iterable[str]) -> None:
    """Warns of functions for which an older version of the kernels has no name."""
    for stem, end in _numbers(names).items():
        if end > _NUMBERED[stem]:
            warnings.warn(
                f"The model has {end} different ops {stem.replace('#', '')}, and the installed onnxtrain-kernels has "
                f"names for {_NUMBERED[stem]}: the others run without native kernels, which takes several times as "
                "long. Install a newer onnxtrain-kernels",
                RuntimeWarning,
                stacklevel=4,
            )
