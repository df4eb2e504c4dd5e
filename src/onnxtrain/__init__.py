"""Trains ONNX models on stock ONNX Runtime: a training step is itself an ordinary ONNX model.

Importing this package imports nothing heavy: the names in `__all__` are loaded lazily. A device that only trains needs
`onnxtrain.api`, which imports numpy, onnxruntime and safetensors.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# For type checkers and editors, which don't evaluate `__getattr__`.
if TYPE_CHECKING:
    from onnxtrain.api import (
        CheckpointState,
        LinearLRScheduler,
        Module,
        Optimizer,
        register_custom_ops_library,
    )
    from onnxtrain.artifacts import LossType, OptimType, generate_artifacts
    from onnxtrain.autodiff import differentiate, local_rules, register_body, register_gradient
    from onnxtrain.errors import OnnxTrainError
    from onnxtrain.estimators import OnnxClassifier, OnnxRegressor
    from onnxtrain.functional import (
        check_gradients,
        check_op,
        hessian_vector_product,
        jvp,
        per_sample_gradients,
        vjp,
    )
    from onnxtrain.images import ImageFolder
    from onnxtrain.planning import PlanChoice, plan_training
    from onnxtrain.recipe import Recipe
    from onnxtrain.surgery import (
        add_classes,
        lower_training_ops,
        make_batch_dynamic,
        replace_head,
        restore_dropout,
    )
    from onnxtrain.trainer import (
        Callback,
        CSVLogger,
        EarlyStopping,
        History,
        ModelCheckpoint,
        ReduceLROnPlateau,
        TensorBoardLogger,
        Trainer,
        WandbLogger,
        average_models,
        pack_tokens,
    )

__version__ = "0.1.0"

__all__ = [
    "CSVLogger",
    "Callback",
    "CheckpointState",
    "EarlyStopping",
    "History",
    "ImageFolder",
    "LinearLRScheduler",
    "LossType",
    "ModelCheckpoint",
    "Module",
    "OnnxClassifier",
    "OnnxRegressor",
    "OnnxTrainError",
    "OptimType",
    "Optimizer",
    "PlanChoice",
    "Recipe",
    "ReduceLROnPlateau",
    "TensorBoardLogger",
    "Trainer",
    "WandbLogger",
    "__version__",
    "add_classes",
    "average_models",
    "check_gradients",
    "check_op",
    "differentiate",
    "generate_artifacts",
    "hessian_vector_product",
    "jvp",
    "local_rules",
    "lower_training_ops",
    "make_batch_dynamic",
    "pack_tokens",
    "per_sample_gradients",
    "plan_training",
    "register_body",
    "register_custom_ops_library",
    "register_gradient",
    "replace_head",
    "restore_dropout",
    "vjp",
]

# For each public name, the module that defines it, e.g. "api" for "Module".
_HOME = {
    name: module
    for module, names in {
        "api": "CheckpointState LinearLRScheduler Module Optimizer register_custom_ops_library",
        "artifacts": "LossType OptimType generate_artifacts",
        "autodiff": "differentiate local_rules register_body register_gradient",
        "errors": "OnnxTrainError",
        "estimators": "OnnxClassifier OnnxRegressor",
        "functional": "check_gradients check_op hessian_vector_product jvp per_sample_gradients vjp",
        "images": "ImageFolder",
        "planning": "PlanChoice plan_training",
        "recipe": "Recipe",
        "surgery": "add_classes lower_training_ops make_batch_dynamic replace_head restore_dropout",
        "trainer": "CSVLogger Callback EarlyStopping History ModelCheckpoint ReduceLROnPlateau TensorBoardLogger "
        "Trainer WandbLogger average_models pack_tokens",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    # Cached: Python calls `__getattr__` only for missing names, so the next access is as fast as for any other name.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
