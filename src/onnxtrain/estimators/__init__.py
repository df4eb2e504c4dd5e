"""scikit-learn estimators that train ONNX models: `OnnxClassifier` and `OnnxRegressor`.

They can be used wherever scikit-learn accepts an estimator: in pipelines, `GridSearchCV`, `cross_val_score`, ...
"""

from __future__ import annotations

import onnxtrain._desk  # noqa: F401  # isort: skip

# Devices and most users of `Trainer` have no scikit-learn; `onnxtrain` imports this package lazily.
try:
    import sklearn as _sklearn  # noqa: F401
except ModuleNotFoundError as error:
    # If scikit-learn itself lacks a package, its own message names that package.
    if error.name != "sklearn":
        raise
    raise ModuleNotFoundError(
        "scikit-learn is not installed; OnnxClassifier and OnnxRegressor need it: pip install 'onnxtrain[sklearn]'",
        name=error.name,
    ) from error

from onnxtrain.estimators._classifier import OnnxClassifier
from onnxtrain.estimators._regressor import OnnxRegressor

__all__ = ["OnnxClassifier", "OnnxRegressor"]
