"""Models of scikit-learn, LightGBM and XGBoost, by skl2onnx and onnxmltools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnxmltools import convert_lightgbm, convert_xgboost
from onnxmltools.convert.common.data_types import FloatTensorType as ToolFloats
from skl2onnx import convert_sklearn
from skl2onnx.common.data_types import DoubleTensorType, FloatTensorType
from sklearn import (
    calibration,
    cluster,
    compose,
    cross_decomposition,
    decomposition,
    discriminant_analysis,
    ensemble,
    feature_selection,
    gaussian_process,
    linear_model,
    mixture,
    multioutput,
    naive_bayes,
    neighbors,
    neural_network,
    pipeline,
    preprocessing,
    svm,
    tree,
)  # fmt: skip

__all__ = ["make"]

ROWS, COLUMNS = 60, 6
_RBF = gaussian_process.kernels.RBF() + gaussian_process.kernels.WhiteKernel(0.1)

REGRESSORS: dict[str, Callable[[], Any]] = {
    "LinearRegression": linear_model.LinearRegression,
    "Ridge": linear_model.Ridge,
    "Lasso": lambda: linear_model.Lasso(0.01),
    "ElasticNet": lambda: linear_model.ElasticNet(0.01),
    "BayesianRidge": linear_model.BayesianRidge,
    "HuberRegressor": linear_model.HuberRegressor,
    "SGDRegressor": linear_model.SGDRegressor,
    "PoissonRegressor": linear_model.PoissonRegressor,
    "GammaRegressor": linear_model.GammaRegressor,
    "TweedieRegressor": linear_model.TweedieRegressor,
    "TheilSenRegressor": linear_model.TheilSenRegressor,
    "RANSACRegressor": linear_model.RANSACRegressor,
    "MLPRegressor-relu": lambda: neural_network.MLPRegressor(hidden_layer_sizes=(16, 8), max_iter=30),
    "MLPRegressor-tanh": lambda: neural_network.MLPRegressor(
        hidden_layer_sizes=(16,), activation="tanh", max_iter=30
    ),
    "MLPRegressor-logistic": lambda: neural_network.MLPRegressor(
        hidden_layer_sizes=(16,), activation="logistic", max_iter=30
    ),
    "SVR-rbf": svm.SVR,
    "SVR-linear": lambda: svm.SVR(kernel="linear"),
    "LinearSVR": svm.LinearSVR,
    "GaussianProcessRegressor": lambda: gaussian_process.GaussianProcessRegressor(_RBF),
    "KNeighborsRegressor": neighbors.KNeighborsRegressor,
    "DecisionTreeRegressor": lambda: tree.DecisionTreeRegressor(max_depth=4),
    "RandomForestRegressor": lambda: ensemble.RandomForestRegressor(5, max_depth=4),
    "GradientBoostingRegressor": lambda: ensemble.GradientBoostingRegressor(n_estimators=5),
    "HistGradientBoostingRegressor": lambda: ensemble.HistGradientBoostingRegressor(max_iter=5),
    "BaggingRegressor": lambda: ensemble.BaggingRegressor(linear_model.Ridge(), 3),
    "VotingRegressor": lambda: ensemble.VotingRegressor([("a", linear_model.Ridge()), ("b", svm.SVR())]),
    "StackingRegressor": lambda: ensemble.StackingRegressor(
        [("a", linear_model.Ridge()), ("b", svm.LinearSVR())]
    ),
    "scaled Ridge": lambda: pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.Ridge()),
    "polynomial Ridge": lambda: pipeline.make_pipeline(
        preprocessing.PolynomialFeatures(2), linear_model.Ridge()
    ),
    "PCA MLP": lambda: pipeline.make_pipeline(
        preprocessing.StandardScaler(),
        decomposition.PCA(4),
        neural_network.MLPRegressor(hidden_layer_sizes=(8,), max_iter=30),
    ),
    "PLSRegression": lambda: cross_decomposition.PLSRegression(2),
}
CLASSIFIERS: dict[str, Callable[[], Any]] = {
    "LogisticRegression": linear_model.LogisticRegression,
    "LogisticRegressionCV": lambda: linear_model.LogisticRegressionCV(cv=3),
    "SGDClassifier": lambda: linear_model.SGDClassifier(loss="log_loss"),
    "Perceptron": linear_model.Perceptron,
    "RidgeClassifier": linear_model.RidgeClassifier,
    "MLPClassifier": lambda: neural_network.MLPClassifier(hidden_layer_sizes=(16, 8), max_iter=30),
    "SVC": lambda: svm.SVC(probability=True),
    "LinearSVC": svm.LinearSVC,
    "GaussianProcessClassifier": gaussian_process.GaussianProcessClassifier,
    "GaussianNB": naive_bayes.GaussianNB,
    "BernoulliNB": naive_bayes.BernoulliNB,
    "LinearDiscriminantAnalysis": discriminant_analysis.LinearDiscriminantAnalysis,
    "QuadraticDiscriminantAnalysis": lambda: discriminant_analysis.QuadraticDiscriminantAnalysis(
        reg_param=0.1
    ),
    "KNeighborsClassifier": neighbors.KNeighborsClassifier,
    "DecisionTreeClassifier": lambda: tree.DecisionTreeClassifier(max_depth=4),
    "RandomForestClassifier": lambda: ensemble.RandomForestClassifier(5, max_depth=4),
    "AdaBoostClassifier": lambda: ensemble.AdaBoostClassifier(n_estimators=5),
    "CalibratedClassifierCV": lambda: calibration.CalibratedClassifierCV(svm.LinearSVC(), cv=2),
    "OneVsRest": lambda: __import__("sklearn.multiclass").multiclass.OneVsRestClassifier(
        linear_model.LogisticRegression()
    ),
    "VotingClassifier": lambda: ensemble.VotingClassifier(
        [("a", linear_model.LogisticRegression()), ("b", naive_bayes.GaussianNB())], voting="soft"
    ),
    "StackingClassifier": lambda: ensemble.StackingClassifier([("a", linear_model.LogisticRegression())]),
    "scaled MLP": lambda: pipeline.make_pipeline(
        preprocessing.MinMaxScaler(), neural_network.MLPClassifier(hidden_layer_sizes=(8,), max_iter=30)
    ),
    "selected LogisticRegression": lambda: pipeline.make_pipeline(
        feature_selection.SelectKBest(k=3), linear_model.LogisticRegression()
    ),
    "MultiOutputClassifier": lambda: multioutput.MultiOutputClassifier(linear_model.LogisticRegression()),
}
TRANSFORMERS: dict[str, Callable[[], Any]] = {
    "StandardScaler": preprocessing.StandardScaler,
    "MinMaxScaler": preprocessing.MinMaxScaler,
    "MaxAbsScaler": preprocessing.MaxAbsScaler,
    "RobustScaler": preprocessing.RobustScaler,
    "Normalizer": preprocessing.Normalizer,
    "Binarizer": preprocessing.Binarizer,
    "PolynomialFeatures": preprocessing.PolynomialFeatures,
    "PowerTransformer": preprocessing.PowerTransformer,
    "KBinsDiscretizer": lambda: preprocessing.KBinsDiscretizer(4, encode="onehot-dense"),
    "PCA": lambda: decomposition.PCA(3),
    "IncrementalPCA": lambda: decomposition.IncrementalPCA(3),
    "KernelPCA": lambda: decomposition.KernelPCA(3, kernel="rbf"),
    "TruncatedSVD": lambda: decomposition.TruncatedSVD(3),
    "KMeans": lambda: cluster.KMeans(4),
    "MiniBatchKMeans": lambda: cluster.MiniBatchKMeans(4),
    "GaussianMixture": lambda: mixture.GaussianMixture(3),
    "columns": lambda: compose.ColumnTransformer(
        [("a", preprocessing.StandardScaler(), [0, 1, 2]), ("b", preprocessing.MinMaxScaler(), [3, 4, 5])]
    ),
}  # fmt: skip


def make(folder: Path) -> None:
    """Fits and converts the models."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    y = np.abs(x @ rng.standard_normal(COLUMNS) + x[:, 0] ** 2) + 0.1
    labels = np.digitize(x[:, 0] + x[:, 1], [-0.7, 0.7])
    folder = folder / "skl2onnx"
    folder.mkdir(parents=True, exist_ok=True)
    floats = [("x", FloatTensorType([None, COLUMNS]))]
    for kinds, target in ((REGRESSORS, y), (CLASSIFIERS, labels), (TRANSFORMERS, None)):
        for name, new in kinds.items():
            try:
                several = name == "MultiOutputClassifier"
                fitted = new().fit(x, np.stack([target, target > 1], 1) if several else target)
                _save(convert_sklearn(fitted, initial_types=floats, target_opset=18), folder, name, x[:5])
                if kinds is CLASSIFIERS:
                    options = {id(fitted): {"zipmap": False}}
                    proto = convert_sklearn(fitted, initial_types=floats, target_opset=15, options=options)
                    _save(proto, folder, f"{name}-arrays", x[:5])
                elif kinds is REGRESSORS and name in (
                    "Ridge",
                    "MLPRegressor-tanh",
                    "GaussianProcessRegressor",
                ):
                    doubles = [("x", DoubleTensorType([None, COLUMNS]))]
                    _save(
                        convert_sklearn(fitted, initial_types=doubles),
                        folder,
                        f"{name}-float64",
                        x[:5].astype(float),
                    )
            except Exception as error:
                print(f"skl2onnx {name}: {type(error).__name__}: {error}"[:200])
    _boosted(folder.parent / "onnxmltools", x, y, labels)


def _boosted(folder: Path, x: Any, y: Any, labels: Any) -> None:
    from lightgbm import LGBMClassifier, LGBMRegressor
    from xgboost import XGBClassifier, XGBRegressor

    folder.mkdir(parents=True, exist_ok=True)
    kinds: dict[str, Callable[[], Any]] = {
        "LGBMRegressor": lambda: LGBMRegressor(n_estimators=5, verbose=-1).fit(x, y),
        "LGBMClassifier": lambda: LGBMClassifier(n_estimators=5, verbose=-1).fit(x, labels),
        "XGBRegressor": lambda: XGBRegressor(n_estimators=5).fit(x, y),
        "XGBClassifier": lambda: XGBClassifier(n_estimators=5).fit(x, labels),
    }
    for name, fitted in kinds.items():
        convert = convert_lightgbm if name.startswith("LGBM") else convert_xgboost
        try:
            proto = convert(fitted(), initial_types=[("x", ToolFloats([None, COLUMNS]))], target_opset=15)
        except Exception as error:
            print(f"onnxmltools {name}: {type(error).__name__}: {error}"[:200])
        else:
            _save(proto, folder, name, x[:5])


def _save(proto: onnx.ModelProto, folder: Path, name: str, x: Any) -> None:
    path = folder / f"{name.replace(' ', '-')}.onnx"
    onnx.save(proto, path)
    np.savez(path.with_suffix(".npz"), **{proto.graph.input[0].name: x})
