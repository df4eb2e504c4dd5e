"""Differentiates the ai.onnx.ml ops that scikit-learn converters emit, with respect to their inputs.

The ops' parameters are attributes, which are never trained. All outputs are float32.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff._bodies import defbody
from onnxtrain.autodiff._node import NodeView, Signature
from onnxtrain.autodiff._registry import nondifferentiable, vjp
from onnxtrain.autodiff.rules.contrib._shared import unsupported
from onnxtrain.emitter import Emitter

_ML = "ai.onnx.ml"

nondifferentiable(
    *(
        "Binarizer",
        "CategoryMapper",
        "DictVectorizer",
        "LabelEncoder",
        "OneHotEncoder",
    ),
    reason="it looks up or compares: its derivative is zero, or its input is not a number",
    domain=_ML,
)
nondifferentiable(
    *("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor"),
    reason="trees are piecewise constant: their derivative is zero almost everywhere",
    domain=_ML,
)


@defbody("Scaler", _ML, "X", "Y", offset=None, scale=None)
def scaler(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes Scaler: Y = (X - offset) · scale, with one offset and scale per feature, or one pair for all."""
    x = _to_float32(op, n.X)
    offset, scale = (
        np.asarray(n.attr(name) or [default]) for name, default in (("offset", 0.0), ("scale", 1.0))
    )
    return op.Mul(op.Sub(x, op.const(offset, like=x)), op.const(scale, like=x))


@defbody("Normalizer", _ML, "X", "Y", norm="MAX")
def normalizer(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes Normalizer: divides each row of X by its norm; rows with zero norm are unchanged."""
    x, kind = _to_float32(op, n.X), _string(n, "norm")
    reduce = {"MAX": op.ReduceMax, "L1": op.ReduceL1, "L2": op.ReduceL2}[kind]
    norm = reduce(x, [-1], keepdims=1)
    return op.Div(x, op.Where(op.Equal(norm, 0.0), op.const(1.0, like=x), norm))


@defbody(
    "Imputer", _ML, "X", "Y",
    imputed_value_floats=None, imputed_value_int64s=None, replaced_value_float=0.0, replaced_value_int64=0,
)  # fmt: skip
def imputer(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes Imputer: replaces missing values with constants."""
    missing = n.attr("replaced_value_float")
    # NaN, the usual marker of a missing value, doesn't equal itself.
    is_missing = op.IsNaN(n.X) if np.isnan(missing) else op.Equal(n.X, missing)
    return op.Where(is_missing, op.const(np.asarray(n.attr("imputed_value_floats")), like=n.X), n.X)


@defbody("FeatureVectorizer", _ML, "X", "Y", inputdimensions=None)
def feature_vectorizer(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes FeatureVectorizer: concatenates all inputs along the last axis."""
    return op.Concat(*(_to_float32(op, value) for value in n.inputs if value is not None), axis=-1)


@defbody("ArrayFeatureExtractor", _ML, "X Y", "Z")
def array_feature_extractor(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes ArrayFeatureExtractor: selects features by index; for a vector X, the result has one row."""
    chosen = op.Gather(n.X, op.Reshape(n.Y, [-1]), axis=-1)
    return op.Unsqueeze(chosen, [0]) if n.rank(n.X) == 1 else chosen


@defbody(
    "LinearRegressor", _ML, "X", "Y", coefficients=None, intercepts=None, post_transform="NONE", targets=1
)
def linear_regressor(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes LinearRegressor: Y = transform(X · coefficientsᵀ + intercepts)."""
    y = _linear(op, n, n.attr("targets"))
    return _transformed(op, n, y)


def _linear(op: Emitter, n: NodeView, rows: int) -> ir.Value:
    """Returns X · coefficientsᵀ + intercepts, for coefficients with `rows` rows."""
    weight = np.asarray(n.attr("coefficients"), np.float32).reshape(rows, -1).T
    y = op.MatMul(_to_float32(op, n.X), op.const(weight))
    intercepts = n.attr("intercepts")
    return op.Add(y, op.const(np.asarray(intercepts, np.float32))) if intercepts else y


def _transformed(op: Emitter, n: NodeView, y: ir.Value) -> ir.Value:
    """Applies the attribute `post_transform` to y.

    Raises:
        NoGradientRule: the transform is not NONE, SOFTMAX or LOGISTIC.
    """
    kind = _string(n, "post_transform")
    if kind == "SOFTMAX":
        return op.Softmax(y, axis=-1)
    if kind == "LOGISTIC":
        return op.Sigmoid(y)
    if kind != "NONE":
        raise unsupported(n, f"the post_transform {kind}")
    return y


def _class_rows(n: NodeView) -> int:
    """Returns the number of classes, which must equal the number of rows of coefficients.

    Raises:
        NoGradientRule: the numbers differ, or there are fewer than two classes.
    """
    # Two classes may share one row of coefficients; this case is not implemented.
    labels = len(n.attr("classlabels_ints") or n.attr("classlabels_strings") or [])
    rows = len(n.attr("intercepts") or []) or labels
    if rows != labels or rows < 2:
        raise unsupported(n, f"{labels} classes from {rows} rows of coefficients")
    return rows


def _classifier_shapes(op: Emitter, n: NodeView) -> list[ir.Value]:
    """Emits standard ops with outputs of the shapes and dtypes of LinearClassifier's outputs, for shape inference.

    The ops never run.

    Returns:
        Stand-ins for the labels and the scores.
    """
    # The class labels are in one of two attributes: integers or strings.
    labels = ir.DataType.INT64 if n.attr("classlabels_ints") else ir.DataType.STRING
    scores = _transformed(op, n, _linear(op, n, _class_rows(n)))
    return [op.Cast(op.ArgMax(scores, axis=-1, keepdims=0), to=labels), scores]


@vjp(
    "LinearClassifier",
    wrt=("X",),
    outputs=("Z",),
    domain=_ML,
    signature=Signature(
        ("X",),
        ("Y", "Z"),
        attributes={
            "classlabels_ints": None,
            "classlabels_strings": None,
            "coefficients": None,
            "intercepts": None,
            "multi_class": 0,
            "post_transform": "NONE",
        },
    ),
    shapes=_classifier_shapes,
)
def linear_classifier(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """VJP of LinearClassifier with respect to X: Z = transform(X · coefficientsᵀ + intercepts).

    The labels Y have no cotangent.
    """
    rows, kind = _class_rows(n), _string(n, "post_transform")
    if kind == "SOFTMAX":
        ct = op.Mul(op.Sub(ct, op.ReduceSum(op.Mul(ct, n.out.Z), [-1], keepdims=1)), n.out.Z)
    elif kind == "LOGISTIC":
        ct = op.Mul(ct, op.Mul(n.out.Z, op.Sub(1.0, n.out.Z)))
    elif kind != "NONE":
        raise unsupported(n, f"the post_transform {kind}")
    weight = np.asarray(n.attr("coefficients"), np.float32).reshape(rows, -1)
    ct_x = op.MatMul(ct, op.const(weight))
    return ct_x if n.X.dtype in (None, ir.DataType.FLOAT) else op.Cast(ct_x, to=n.X.dtype)


def _to_float32(op: Emitter, x: ir.Value) -> ir.Value:
    """Casts to float32, the dtype of all outputs of ai.onnx.ml ops."""
    return x if x.dtype in (None, ir.DataType.FLOAT) else op.Cast(x, to=ir.DataType.FLOAT)


def _string(n: NodeView, name: str) -> str:
    """Returns a string attribute as str."""
    value = n.attr(name)
    return value.decode() if isinstance(value, bytes) else str(value)
