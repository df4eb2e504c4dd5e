"""Defines the settings of an ORTModule: :class:`DebugOptions`, and the environment variables that override them.

| variable | example | overrides |
|---|---|---|
| `ORTMODULE_LOG_LEVEL` | `INFO`, a name of :class:`LogLevel` | `DebugOptions.log_level` |
| `ORTMODULE_SAVE_ONNX_PATH` | `/tmp/graphs`, a folder | `DebugOptions.save_path` |
| `ORTMODULE_FALLBACK_POLICY` | `DISABLE`, see :class:`FallbackPolicy` | `DebugOptions.fallback_policy` |
| `ORTMODULE_CAPTURE_ALL` | `1` or `0` | `DebugOptions.capture_all` |

Other variables with the prefix `ORTMODULE_` configured parts of onnxruntime-training that onnxtrain does not have.
If one is set, a warning names it and the alternative.
"""

from __future__ import annotations

import enum
import logging
import os
from pathlib import Path

from onnxtrain._printable import escape_record
from onnxtrain.ortmodule._exceptions import (
    ORTModuleDeviceException,
    ORTModuleFallbackException,
    ORTModuleInitException,
    ORTModuleIOError,
    ORTModuleONNXModelException,
    ORTModuleTorchModelException,
)
from onnxtrain.ortmodule._variables import (
    CAPTURE_ALL,
    FALLBACK_POLICY,
    LOG_LEVEL,
    SAVE_ONNX_PATH,
    warn_of_ignored_variables,
)


class LogLevel(enum.IntEnum):
    """Log levels, with the same names and values as in onnxruntime-training.

    The logger is `onnxtrain.ortmodule`. If neither this logger nor a parent has a handler, messages go to stderr.
    Fallbacks to PyTorch are reported through Python's `warnings` instead, at every level.
    """

    VERBOSE = 0
    DEVINFO = 1
    INFO = 2
    WARNING = 3
    ERROR = 4
    FATAL = 5

    @property
    def onnxruntime_severity(self) -> int:
        """The value for `SessionOptions.log_severity_level`: 0 verbose, 1 info, 2 warning, 3 error, 4 fatal."""
        # Except at VERBOSE, ERROR and FATAL, ONNX Runtime is one level quieter. Otherwise it would warn at the default,
        # WARNING, e.g. of nodes that run on the CPU instead of the GPU, and print many lines at INFO.
        return (0, 1, 2, 3, 3, 4)[self.value]

    @property
    def logging_level(self) -> int:
        """The level of Python's `logging`, e.g. 30 for WARNING."""
        # Python has no counterpart of VERBOSE: 5 is below DEBUG, which is 10.
        return (5, logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)[self.value]


def module_logger(level: LogLevel) -> logging.Logger:
    """Returns a logger with the given level.

    It uses the handlers of the logger `onnxtrain.ortmodule` and its parents or, if they have none, writes to stderr.
    """
    # `logging.getLogger` would return the same object for all modules, which would then share one level.
    logger = logging.Logger("onnxtrain.ortmodule", level.logging_level)
    logger.addFilter(escape_record)
    logger.parent = logging.getLogger(logger.name)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
    return logger


class FallbackPolicy(enum.Flag):
    """Failures after which a graph falls back to PyTorch, with a warning. All other failures raise an exception.

    The environment variable `ORTMODULE_FALLBACK_POLICY` lists names joined by `|`, e.g. `DISABLE` or
    `FALLBACK_UNSUPPORTED_ONNX_MODEL|FALLBACK_UNSUPPORTED_DATA`. The prefix `FALLBACK_` is optional.

    Example:
        >>> FallbackPolicy.DISABLE.allows(ORTModuleONNXModelException("no kernel"))
        False
        >>> FallbackPolicy.parse("FALLBACK_UNSUPPORTED_ONNX_MODEL").allows(ORTModuleONNXModelException("?"))
        True
    """

    DISABLE = 0
    UNSUPPORTED_DEVICE = enum.auto()
    UNSUPPORTED_DATA = enum.auto()
    UNSUPPORTED_TORCH_MODEL = enum.auto()
    UNSUPPORTED_ONNX_MODEL = enum.auto()
    BAD_INITIALIZATION = enum.auto()
    ENABLE = (
        UNSUPPORTED_DEVICE
        | UNSUPPORTED_DATA
        | UNSUPPORTED_TORCH_MODEL
        | UNSUPPORTED_ONNX_MODEL
        | BAD_INITIALIZATION
    )

    @classmethod
    def parse(cls, text: str) -> FallbackPolicy:
        """Parses a policy, e.g. "FALLBACK_UNSUPPORTED_DATA|UNSUPPORTED_DEVICE".

        Raises:
            ValueError: a name is unknown.
        """
        policy = cls.DISABLE
        for part in text.split("|"):
            # onnxruntime-training's names have the prefix; the members of this class don't.
            name = part.strip().upper().removeprefix("FALLBACK_")
            if name not in cls.__members__:
                raise ValueError(
                    f"reading the fallback policy {text!r}: {part.strip()!r} is unknown; "
                    f"use {', '.join(cls.__members__)}, joined by '|'"
                )
            policy |= cls[name]
        return policy

    def allows(self, error: ORTModuleFallbackException) -> bool:
        """True if a graph may fall back to PyTorch after `error`."""
        for kind, flag in _CAUSES:
            if isinstance(error, kind):
                return flag in self
        # An error of the base class has no flag: only a policy that allows all causes allows it.
        return self is FallbackPolicy.ENABLE


_CAUSES: tuple[tuple[type[ORTModuleFallbackException], FallbackPolicy], ...] = (
    (ORTModuleDeviceException, FallbackPolicy.UNSUPPORTED_DEVICE),
    (ORTModuleIOError, FallbackPolicy.UNSUPPORTED_DATA),
    (ORTModuleTorchModelException, FallbackPolicy.UNSUPPORTED_TORCH_MODEL),
    (ORTModuleONNXModelException, FallbackPolicy.UNSUPPORTED_ONNX_MODEL),
    (ORTModuleInitException, FallbackPolicy.BAD_INITIALIZATION),
)


class DebugOptions:
    """Settings of an ORTModule: logging, saving its graphs, and fallback to PyTorch.

    The environment variables `ORTMODULE_LOG_LEVEL`, `ORTMODULE_SAVE_ONNX_PATH`, `ORTMODULE_FALLBACK_POLICY` and
    `ORTMODULE_CAPTURE_ALL` override `log_level`, `save_path`, `fallback_policy` and `capture_all`.

    Args:
        log_level: the log level. INFO logs each compiled graph with its number of nodes and times, DEVINFO also its
            operators, VERBOSE also the captured graph. At WARNING, ONNX Runtime itself logs only errors; at INFO,
            also warnings.
        save_onnx: True to write every graph to `save_path`, e.g. as `net_graph_0_training.onnx`.
        onnx_prefix: the prefix of the file names, e.g. "net"; required if `save_onnx` is True.
        save_path: the folder for the files, e.g. "graphs"; the current folder if empty.
        config: accepted for compatibility with onnxruntime-training; must be None.
        fallback_policy: the failures after which a graph may fall back to PyTorch, e.g.
            `FallbackPolicy.UNSUPPORTED_DATA`.
        capture_all: True to make every new capture in the first call that needs it, e.g. the first call in evaluation
            mode, or with a different batch size or dtype. By default, only the model's first call is captured
            immediately. Later calls that need a new capture run in PyTorch, at most 64 of them, until ONNX Runtime
            would have saved about as much time as the capture takes, as estimated from the size of the graphs.
            Implied by `save_onnx` and by `FallbackPolicy.DISABLE`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `save_onnx` is True, and `onnx_prefix` is empty or the folder does not exist; or an environment
            variable has an unknown value.

    Example:
        >>> DebugOptions(save_onnx=True)
        Traceback (most recent call last):
        ...
        ValueError: save_onnx=True needs a non-empty onnx_prefix: it begins the names of the files
    """

    def __init__(
        self,
        log_level: LogLevel = LogLevel.WARNING,
        save_onnx: bool = False,
        onnx_prefix: str = "",
        save_path: str | os.PathLike[str] = "",
        config: None = None,
        *,
        fallback_policy: FallbackPolicy = FallbackPolicy.ENABLE,
        capture_all: bool = False,
    ) -> None:
        _require_type("log_level", log_level, LogLevel)
        _require_type("save_onnx", save_onnx, bool)
        _require_type("onnx_prefix", onnx_prefix, str)
        _require_type("save_path", save_path, (str, os.PathLike))
        _require_type("fallback_policy", fallback_policy, FallbackPolicy)
        _require_type("capture_all", capture_all, bool)
        if config is not None:
            raise TypeError(f"DebugOptions: config must be None, received {type(config).__name__}")
        # Checked here, because the first graph may be saved hours later.
        if save_onnx and not onnx_prefix:
            raise ValueError("save_onnx=True needs a non-empty onnx_prefix: it begins the names of the files")
        self._save_onnx = save_onnx
        self._onnx_prefix = onnx_prefix
        self._log_level = _log_level(log_level)
        self._save_path = Path(os.environ.get(SAVE_ONNX_PATH) or save_path or ".")
        if save_onnx and not self._save_path.is_dir():
            raise ValueError(f"save_onnx=True: {str(self._save_path)!r} is not a folder; make it first")
        policy_name = os.environ.get(FALLBACK_POLICY)
        self._fallback_policy = FallbackPolicy.parse(policy_name) if policy_name else fallback_policy
        self._capture_all = _flag(CAPTURE_ALL, capture_all)
        warn_of_ignored_variables()

    @property
    def log_level(self) -> LogLevel:
        """The log level: `ORTMODULE_LOG_LEVEL` if set, else the argument."""
        return self._log_level

    @property
    def save_onnx(self) -> bool:
        """True if every graph is written to a file."""
        return self._save_onnx

    @property
    def onnx_prefix(self) -> str:
        """The prefix of file names, e.g. "net" for `net_graph_0_training.onnx`."""
        return self._onnx_prefix

    @property
    def save_path(self) -> Path:
        """The folder for saved graphs: `ORTMODULE_SAVE_ONNX_PATH` if set, else the argument or the current folder."""
        return self._save_path

    @property
    def fallback_policy(self) -> FallbackPolicy:
        """The failures after which a graph may fall back: `ORTMODULE_FALLBACK_POLICY` if set, else the argument."""
        return self._fallback_policy

    @property
    def capture_all(self) -> bool:
        """True if every capture happens in the first call that needs it."""
        return self._capture_all or self.save_onnx or self.fallback_policy is FallbackPolicy.DISABLE

    def __repr__(self) -> str:
        return (
            f"DebugOptions(log_level={self.log_level.name}, save_onnx={self.save_onnx}, "
            f"onnx_prefix={self.onnx_prefix!r}, save_path={str(self.save_path)!r}, "
            f"fallback_policy={self.fallback_policy.name}, capture_all={self.capture_all})"
        )


def _require_type(name: str, value: object, kind: type | tuple[type, ...]) -> None:
    """Raises TypeError if the argument `name` is not an instance of `kind`."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise TypeError(
            f"DebugOptions: {name} must be {' or '.join(k.__name__ for k in kinds)}, "
            f"received {type(value).__name__} ({value!r})"
        )


def _log_level(default: LogLevel) -> LogLevel:
    """Returns the log level in `ORTMODULE_LOG_LEVEL`, or `default` if the variable is not set.

    Raises:
        ValueError: the environment variable has an unknown value.
    """
    level_name = os.environ.get(LOG_LEVEL)
    if not level_name:
        return default
    if level_name.upper() not in LogLevel.__members__:
        raise ValueError(
            f"{LOG_LEVEL}={level_name!r} is unknown; use one of {', '.join(LogLevel.__members__)}"
        )
    return LogLevel[level_name.upper()]


def _flag(variable: str, default: bool) -> bool:
    """Returns the flag in an environment variable, or `default` if the variable is not set.

    Raises:
        ValueError: the environment variable is neither "0" nor "1".
    """
    value = os.environ.get(variable)
    if value is None or value == "":
        return default
    if value not in ("0", "1"):
        raise ValueError(f"{variable}={value!r} is unknown; use 0 or 1")
    return value == "1"
