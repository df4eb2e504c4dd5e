"""Defines `OnnxRegressor`."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.metrics import r2_score

from onnxtrain.estimators._base import OnnxEstimator
from onnxtrain.runtime.dtypes import Array


class OnnxRegressor(RegressorMixin, OnnxEstimator):  # type: ignore[misc]  # scikit-learn has no annotations
    """scikit-learn regressor that trains an ONNX model, for one target variable or several.

    Without a model, it trains a multilayer perceptron. Neither features nor targets are scaled: put a `StandardScaler`
    before the regressor, and wrap the regressor in a `TransformedTargetRegressor` if the targets are far from -1 .. 1.

    Args:
        model: model to fine-tune: path of an `.onnx` file, `ModelProto` or `onnx_ir.Model`, with one input [batch, ...]
            and predictions [batch, targets] as its first output. If the number of predictions differs from the number
            of targets, the last linear layer is replaced (:func:`onnxtrain.replace_head`). None builds a perceptron.
        hidden_layer_sizes: sizes of the perceptron's hidden layers, e.g. (100,); () for a linear model.
        loss: regression loss, e.g. "huber"; None for "mse".
        optimizer: as for :class:`onnxtrain.Trainer`.
        learning_rate: learning rate, e.g. 1e-3; with a schedule, its highest value.
        epochs: number of passes over the data.
        batch_size: number of samples per training step and per prediction run.
        dtype: dtype of the perceptron, "float32" or "float64". Default: float32 if X is float32, else float64. The
            dtype of a model that you pass does not change.
        validation: fraction of the samples to hold out for validation after each epoch, e.g. 0.1. None for no
            validation.
        patience: stop after this many consecutive epochs in which the validation loss (training loss if `validation` is
            None) did not improve, and keep the weights of the best epoch. None to train all epochs.
        early_stopping: True to hold out `validation_fraction` of the samples, and to stop once the coefficient of
            determination R² on them has not improved by `tol` for more than `n_iter_no_change` consecutive epochs. The
            weights of the epoch with the best score are kept, as in scikit-learn's `MLPRegressor`.
        validation_fraction: fraction of the samples for `early_stopping`, e.g. 0.1.
        n_iter_no_change: number of epochs without improvement for `early_stopping`.
        tol: smallest improvement of the score that counts for `early_stopping`, e.g. 1e-4.
        warm_start: True to continue a further :meth:`fit` from the weights of the previous one, with a new optimizer
            state.
        callbacks: callbacks of the training run, e.g. `[ReduceLROnPlateau()]`.
        trainer_options: additional arguments of :class:`onnxtrain.Trainer`, e.g. `{"scheduler": "cosine"}`.
        fit_options: additional arguments of :meth:`onnxtrain.Trainer.fit`, e.g. `{"accumulate": 4}`.
        device: "cpu", "cuda" or "cuda:<index>".
        threads: number of threads per op; None for all cores. Use 1 if scikit-learn runs several fits in parallel.
        random_state: seed of the initial weights, shuffling, Dropout and the validation split. An int gives all
            fits the same seed; a `RandomState`, or numpy's global one if None, gives each fit a new seed.
        verbose: True to show a progress bar.
        recipe: an :class:`onnxtrain.Recipe` with the settings, instead of `loss` and `optimizer`.

    Attributes:
        n_features_in_: number of features, `X.shape[1]`.
        feature_names_in_: names of the features, if X was a data frame whose column names are strings.
        n_outputs_: number of target variables.
        history_: record of the epochs, :class:`onnxtrain.History`.
        n_iter_: number of epochs trained.
        validation_scores_: R² on the held-out samples after each epoch; None without `early_stopping`.
        best_validation_score_: best of `validation_scores_`; None without `early_stopping`.
        onnx_model_: trained model, as the bytes of an `.onnx` file.

    Example:
        >>> import numpy as np
        >>> X = np.linspace(-1, 1, 200).reshape(-1, 1)
        >>> regressor = OnnxRegressor(learning_rate=0.01, random_state=0).fit(X, np.sin(3 * X[:, 0]))
        >>> regressor.score(X, np.sin(3 * X[:, 0])) > 0.99
        True
    """

    n_outputs_: int

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Trains the model.

        Args:
            X: samples, float [samples, features]; for a model that you pass, any shape with the samples along axis 0.
            y: targets, float [samples] or [samples, targets].
            sample_weight: weight of each sample, float [samples]; a weight of 2 counts as two equal samples.

        Returns:
            The estimator.

        Raises:
            ValueError: X or y is not finite or has the wrong shape.
            InputError: the model has several inputs or a fixed batch size, or the data don't match its input.
        """
        X, targets, sample_weight = self._samples(X, y, sample_weight, reset=not self._continues)
        self._fit_model(X, targets, sample_weight, self.n_outputs_, "mse", logits=False)
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Trains for one epoch on these samples, and keeps the optimizer state for the next call.

        After :meth:`fit`, it continues from the fitted weights, with a new optimizer state.

        Args:
            X: samples, as for :meth:`fit`.
            y: targets, float [samples] or [samples, targets].
            sample_weight: weight of each sample, float [samples].

        Returns:
            The estimator.

        Raises:
            ValueError: the data has another number of features or targets than in earlier calls, or `early_stopping` is
                True.
        """
        X, targets, sample_weight = self._samples(X, y, sample_weight, reset=not self.__sklearn_is_fitted__())
        self._fit_once(X, targets, sample_weight, self.n_outputs_, "mse", logits=False)
        return self

    def _samples(self, X: Any, y: Any, sample_weight: Any, *, reset: bool) -> tuple[Any, Array, Array | None]:
        """Returns checked samples, targets [samples, targets] and weights.

        Raises:
            ValueError: the data is not valid, or with `reset` False has other numbers of features or targets.
        """
        X, y = self._validated(X, y, reset=reset, multi_output=True, y_numeric=True)
        # The model returns [samples, targets], and the loss expects targets of the same shape.
        targets = y.reshape(len(y), -1)
        if not reset and targets.shape[1] != self.n_outputs_:
            raise ValueError(
                f"y has {targets.shape[1]} targets, but the regressor was fitted to {self.n_outputs_}."
            )
        self._single: bool = y.ndim == 1
        # Predictions are computed in the model's dtype and returned in the targets' dtype, usually float64.
        self._target_dtype = y.dtype if y.dtype.kind == "f" else np.dtype(np.float32)
        self.n_outputs_: int = targets.shape[1]
        return X, targets.astype(np.float64), self._checked_weight(sample_weight, X)

    def _validation_score(self, y: Array, scores: Array, weight: Array | None) -> float:
        return float(r2_score(y, scores, sample_weight=weight))

    def predict(self, X: Any) -> Array:
        """Returns the predicted targets of each sample.

        Args:
            X: samples, in the form passed to :meth:`fit`.

        Returns:
            Predictions [samples] if the targets passed to :meth:`fit` were one-dimensional, else [samples, targets].

        Raises:
            NotFittedError: the estimator has not been fitted.
            ValueError: X does not match the model.
        """
        result = self._scores(X).astype(self._target_dtype)
        return result[:, 0] if self._single else result

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    # Tags for scikit-learn before 1.6.
    def _more_tags(self) -> dict[str, Any]:
        return {"multioutput": True}
