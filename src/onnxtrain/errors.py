"""Defines all exceptions that onnxtrain raises deliberately.

::

    OnnxTrainError (RuntimeError)
    ├── ModelError (ValueError)          the model cannot be used, or a model file cannot be written
    │   ├── ModelLoadError               file missing, truncated, not ONNX, external data missing
    │   └── UnsupportedOpsetError        opset or IR version that stock runtimes or the converter don't support
    ├── DifferentiationError (ValueError)
    │   ├── NoGradientRule               an op on the path from the loss to a parameter has no rule
    │   └── ShapeRequired                a rule needs a static size that the model leaves symbolic
    ├── GraphBuildError (ValueError)     a training graph cannot be built with these settings
    │   └── NothingToTrain               no parameter is left to train
    ├── RuleDefinitionError (ValueError) a gradient rule was registered incorrectly (a programming error)
    ├── CheckpointError                  a checkpoint cannot be read or written, or doesn't fit the model
    ├── AdapterMismatchError (ValueError) a LoRA adapter is damaged, incomplete, or for another model
    ├── InputError                       an argument at run time has the wrong dtype, shape, number, name or range
    ├── TrainingStateError               calls in the wrong order (step before a gradient, eval without eval model)
    ├── WorkersError                     another worker of a distributed training run has failed or ended
    ├── DivergenceError (ArithmeticError) the loss is NaN or infinite
    ├── MissingPackageError (ModuleNotFoundError) a required optional package is not installed
    ├── CompatError (ImportError)        `compat.install()` would shadow the real package
    └── ORTModuleFallbackException       a module or graph cannot run in ONNX Runtime; see `onnxtrain.ortmodule`

onnxruntime-training raised RuntimeError for nearly everything, so `except RuntimeError` clauses written for it catch
all of these. Unknown parameter and property names raise :class:`KeyError`, as for any mapping. Each message says what
was being done, what was received, and what to do next.
"""

from __future__ import annotations

from onnxtrain._printable import printable

__all__ = [
    "AdapterMismatchError",
    "CheckpointError",
    "CompatError",
    "DifferentiationError",
    "DivergenceError",
    "GraphBuildError",
    "InputError",
    "MissingPackageError",
    "ModelError",
    "ModelLoadError",
    "NoGradientRule",
    "NothingToTrain",
    "OnnxTrainError",
    "RuleDefinitionError",
    "ShapeRequired",
    "TrainingStateError",
    "UnsupportedOpsetError",
    "WorkersError",
]


# All are RuntimeErrors, like onnxruntime-training's errors. Many are also the matching built-in exception, for
# code that doesn't know this package.
class OnnxTrainError(RuntimeError):
    """Base class for all exceptions that this package raises deliberately.

    Messages may quote names from external files: `str` returns them on a single line, with control characters escaped.
    `args` holds the original texts.
    """

    def __str__(self) -> str:
        # Messages of onnx's checker and of ONNX Runtime have several lines.
        return printable(super().__str__().strip().replace("\n", " "))


class ModelError(OnnxTrainError, ValueError):
    """The model cannot be used for training, or a model file cannot be written."""


class ModelLoadError(ModelError):
    """The file or its external data is missing, or the file is truncated or not an ONNX model."""


class UnsupportedOpsetError(ModelError):
    """The opset or IR version is newer than stock runtimes accept, or cannot be converted."""


class DifferentiationError(OnnxTrainError, ValueError):
    """The gradient graph cannot be built."""


class NoGradientRule(DifferentiationError):
    """An op on the path from the loss to a parameter or input has no VJP rule."""


class ShapeRequired(DifferentiationError):
    """A rule needs a static size that the model leaves symbolic."""


class GraphBuildError(OnnxTrainError, ValueError):
    """A training graph cannot be built with these settings, e.g. because the loss does not match the outputs."""


class NothingToTrain(GraphBuildError):
    """No parameter is left to train."""


class RuleDefinitionError(OnnxTrainError, ValueError):
    """A gradient rule already exists, or names an op, input or output that the ONNX schema doesn't have."""


class CheckpointError(OnnxTrainError):
    """A checkpoint is missing, corrupt, or belongs to a different model."""


class AdapterMismatchError(OnnxTrainError, ValueError):
    """A LoRA adapter is missing, damaged or incomplete, or belongs to a different model."""


class InputError(OnnxTrainError):
    """An input passed at run time has an unknown name or a wrong dtype, shape or value, or an input is missing."""


class TrainingStateError(OnnxTrainError):
    """A call came too early or from the wrong thread, e.g. an optimizer step before any gradient."""


class DivergenceError(OnnxTrainError, ArithmeticError):
    """The loss became NaN or infinite."""


class WorkersError(OnnxTrainError):
    """Another worker of a distributed training run has failed, has ended, or does not answer."""


class MissingPackageError(OnnxTrainError, ModuleNotFoundError):
    """A required optional package is not installed; the message says how to install it."""


class CompatError(OnnxTrainError, ImportError):
    """The compatibility layer cannot be installed."""
