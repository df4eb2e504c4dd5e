"""What can be set about an ORTModule: :class:`DebugOptions` and the environment variables.

| variable | meaning |
|---|---|
| `ORTMODULE_LOG_LEVEL` | a name of :class:`LogLevel`; overrides `DebugOptions.log_level` |
| `ORTMODULE_SAVE_ONNX_PATH` | a folder; overrides `DebugOptions.save_path` |
| `ORTMODULE_FALLBACK_POLICY` | see :class:`FallbackPolicy`; overrides `DebugOptions.fallback_policy` |

Other variables of this prefix steered parts of onnxruntime-training that do not exist here; a warning names
them, and what to do instead.
"""

from __future__ import annotations

import enum
import logging
import os
from pathlib import Path

from onnxtrain.ortmodule._exceptions import (
    ORTModuleDeviceException,
    ORTModuleFallbackException,
    ORTModuleInitException,
    ORTModuleIOError,
    ORTModuleONNXModelException,
    ORTModuleTorchModelException,
)
from onnxtrain.ortmodule._variables import (
    FALLBACK_POLICY,
    LOG_LEVEL,
    SAVE_ONNX_PATH,
    warn_of_ignored_variables,
)


class LogLevel(enum.IntEnum):
    """How much is logged, with the old package's names and numbers.

    The logger is `onnxtrain.ortmodule`; where neither it nor one above it has a handler, it writes to stderr. That a
    graph runs in PyTorch is a warning of the module `warnings`, which no level silences.
    """

    VERBOSE = 0
    DEVINFO = 1
    INFO = 2
    WARNING = 3
    ERROR = 4
    FATAL = 5

    @property
    def onnxruntime_severity(self) -> int:
        """The value for `SessionOptions.log_severity_level`.

        ONNX Runtime says one level less than onnxtrain: its warnings (nodes that a GPU leaves to the CPU, for example)
        come with INFO, its many lines of information with DEVINFO.
        """
        return (0, 1, 2, 3, 3, 4)[self.value]

    @property
    def logging_level(self) -> int:
        """The level of Python's `logging`."""
        return (5, logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)[self.value]


def module_logger(level: LogLevel) -> logging.Logger:
    """Returns a logger with a level of its own and the handlers of `onnxtrain.ortmodule`, or stderr without any."""
    logger = logging.Logger("onnxtrain.ortmodule", level.logging_level)
    logger.parent = logging.getLogger(logger.name)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
    return logger


class FallbackPolicy(enum.Flag):
    """For which causes a graph may run in PyTorch, with a warning, instead of raising.

    The variable `ORTMODULE_FALLBACK_POLICY` takes `ENABLE`, `DISABLE`, or names joined by `|`, each with or
    without the prefix `FALLBACK_`: `FALLBACK_UNSUPPORTED_ONNX_MODEL|FALLBACK_UNSUPPORTED_DATA`.

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
        """The policy that `text` names.

        Raises:
            ValueError: a name is unknown.
        """
        policy = cls.DISABLE
        for part in text.split("|"):
            name = part.strip().upper().removeprefix("FALLBACK_")
            if name not in cls.__members__:
                raise ValueError(
                    f"reading the fallback policy {text!r}: {part.strip()!r} is unknown; "
                    f"use {', '.join(cls.__members__)}, joined by '|'"
                )
            policy |= cls[name]
        return policy

    def allows(self, error: ORTModuleFallbackException) -> bool:
        """Whether what raised `error` may run in PyTorch."""
        for kind, flag in _CAUSES:
            if isinstance(error, kind):
                return flag in self
        return self is FallbackPolicy.ENABLE


_CAUSES: tuple[tuple[type[ORTModuleFallbackException], FallbackPolicy], ...] = (
    (ORTModuleDeviceException, FallbackPolicy.UNSUPPORTED_DEVICE),
    (ORTModuleIOError, FallbackPolicy.UNSUPPORTED_DATA),
    (ORTModuleTorchModelException, FallbackPolicy.UNSUPPORTED_TORCH_MODEL),
    (ORTModuleONNXModelException, FallbackPolicy.UNSUPPORTED_ONNX_MODEL),
    (ORTModuleInitException, FallbackPolicy.BAD_INITIALIZATION),
)


class DebugOptions:
    """What an ORTModule logs and saves, and whether it may fall back to PyTorch.

    Each value can be overridden from outside by an environment variable; see the head of this module.

    Args:
        log_level: how much the graphs of this module log: at INFO what was compiled, its nodes and times; at DEVINFO
            also its operators; at VERBOSE the captured graph too. See also `LogLevel.onnxruntime_severity`.
        save_onnx: whether to write every graph to `save_path`, as
            `{onnx_prefix}_..._{training|inference}.onnx`.
        onnx_prefix: the beginning of these file names.
        save_path: a folder; the current one if empty.
        config: accepted for compatibility; must be None.
        fallback_policy: for which causes a graph may run in PyTorch.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `save_onnx` without an `onnx_prefix`; a folder that does not exist; an environment
            variable whose value has no meaning.

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
    ) -> None:
        _require_type("log_level", log_level, LogLevel)
        _require_type("save_onnx", save_onnx, bool)
        _require_type("onnx_prefix", onnx_prefix, str)
        _require_type("save_path", save_path, (str, os.PathLike))
        _require_type("fallback_policy", fallback_policy, FallbackPolicy)
        if config is not None:
            raise TypeError(f"DebugOptions: config must be None, received {type(config).__name__}")
        if save_onnx and not onnx_prefix:
            raise ValueError("save_onnx=True needs a non-empty onnx_prefix: it begins the names of the files")
        self._save_onnx = save_onnx
        self._onnx_prefix = onnx_prefix
        self._log_level = _log_level(log_level)
        self._save_path = Path(os.environ.get(SAVE_ONNX_PATH) or save_path or ".")
        if save_onnx and not self._save_path.is_dir():
            raise ValueError(f"save_onnx=True: {str(self._save_path)!r} is not a folder; make it first")
        text = os.environ.get(FALLBACK_POLICY)
        self._fallback_policy = FallbackPolicy.parse(text) if text else fallback_policy
        warn_of_ignored_variables()

    @property
    def log_level(self) -> LogLevel:
        """How much is logged."""
        return self._log_level

    @property
    def save_onnx(self) -> bool:
        """Whether every graph is written to a file."""
        return self._save_onnx

    @property
    def onnx_prefix(self) -> str:
        """The beginning of the names of these files."""
        return self._onnx_prefix

    @property
    def save_path(self) -> Path:
        """The folder of these files."""
        return self._save_path

    @property
    def fallback_policy(self) -> FallbackPolicy:
        """For which causes a graph may run in PyTorch."""
        return self._fallback_policy

    def __repr__(self) -> str:
        return (
            f"DebugOptions(log_level={self.log_level.name}, save_onnx={self.save_onnx}, "
            f"onnx_prefix={self.onnx_prefix!r}, save_path={str(self.save_path)!r}, "
            f"fallback_policy={self.fallback_policy.name})"
        )


def _require_type(name: str, value: object, kind: type | tuple[type, ...]) -> None:
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise TypeError(
            f"DebugOptions: {name} must be {' or '.join(k.__name__ for k in kinds)}, "
            f"received {type(value).__name__} ({value!r})"
        )


def _log_level(default: LogLevel) -> LogLevel:
    text = os.environ.get(LOG_LEVEL)
    if not text:
        return default
    if text.upper() not in LogLevel.__members__:
        raise ValueError(f"{LOG_LEVEL}={text!r} is unknown; use one of {', '.join(LogLevel.__members__)}")
    return LogLevel[text.upper()]
