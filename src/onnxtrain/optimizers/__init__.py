"""Builds the ONNX model of one optimizer step, the `optimizer_model.onnx` of a training run.

Not to be confused with `onnxtrain.optim`, the PyTorch optimizer of onnxruntime-training.

>>> from onnxtrain.optimizers import AdamW, ClipGradNorm, ParameterSpec, build_optimizer_model
>>> optimizer = AdamW(weight_decay=0.01, clip_grad=ClipGradNorm(1.0))
>>> [moment.name for moment in optimizer.state_spec()]
['momentum0', 'momentum1']
>>> model = build_optimizer_model(optimizer, [ParameterSpec("w", "float32", (784, 10))])
"""

from __future__ import annotations

# The first import: if onnx is missing, its error message says what to install.
import onnxtrain._desk  # noqa: F401  # isort: skip

from onnxtrain._dialects import advice
from onnxtrain._names import OPTIMIZERS as OPTIMIZER_NAMES
from onnxtrain.errors import GraphBuildError

from ._adafactor import Adafactor
from ._adam import Adam, AdamW, SparseAdam
from ._base import Moment, MomentSpec, Optimizer, ParameterGroup, StepInputs
from ._build import build_optimizer_model, manifest_entry
from ._clipping import ClipGradNorm, ClipGradValue, GradientClipping
from ._gradient_descent import SGD, Adagrad, RMSprop
from ._lion import Lion
from ._muon import Muon
from ._nadam import NAdam
from ._plan import ParameterSpec, moment_dtype
from ._prodigy import Prodigy
from ._rates import with_learning_rate_scales

__all__ = [
    "OPTIMIZERS",
    "SGD",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "ClipGradNorm",
    "ClipGradValue",
    "GradientClipping",
    "Lion",
    "Moment",
    "MomentSpec",
    "Muon",
    "NAdam",
    "Optimizer",
    "ParameterGroup",
    "ParameterSpec",
    "Prodigy",
    "RMSprop",
    "SparseAdam",
    "StepInputs",
    "build_optimizer_model",
    "make_optimizer",
    "manifest_entry",
    "moment_dtype",
    "with_learning_rate_scales",
]

OPTIMIZERS: dict[str, type[Optimizer]] = {name: globals()[kind] for name, kind in OPTIMIZER_NAMES.items()}
"""Maps each name that :func:`make_optimizer`, `Trainer` and `--optimizer` accept to its optimizer class."""


def make_optimizer(spec: str | Optimizer) -> Optimizer:
    """Converts the name of an optimizer to an Optimizer with default settings; returns an Optimizer unchanged.

    Args:
        spec: a key of :data:`OPTIMIZERS`, e.g. "sgd", or an Optimizer.

    Raises:
        GraphBuildError: there is no optimizer with that name.

    Example:
        >>> make_optimizer("sgd").state_spec()
        ()
    """
    if isinstance(spec, Optimizer):
        return spec
    if not isinstance(spec, str) or spec not in OPTIMIZERS:
        known = f"one of {', '.join(sorted(OPTIMIZERS))}, or an Optimizer object"
        meant = advice("optimizer", spec, OPTIMIZERS)
        raise GraphBuildError(
            f"choosing an optimizer: received {spec!r}; {f'{meant}, or' if meant else 'give'} {known}"
        )
    return OPTIMIZERS[spec]()
