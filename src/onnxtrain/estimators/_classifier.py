"""Defines `OnnxClassifier`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils.multiclass import _check_partial_fit_first_call, check_classification_targets

from onnxtrain.estimators._base import OnnxEstimator
from onnxtrain.runtime.dtypes import Array
from onnxtrain.trainer import Callback
from onnxtrain.trainer._metrics.probabilities import probabilities
from onnxtrain.trainer.data import balanced_weights

if TYPE_CHECKING:
    from onnxtrain.passes import ModelSource
    from onnxtrain.recipe import LossSpec, OptimizerSpec, Recipe


class OnnxClassifier(ClassifierMixin, OnnxEstimator):  # type: ignore[misc]  # scikit-learn has no annotations
    """scikit-learn classifier that trains an ONNX model.

    Without a model, it trains a multilayer perceptron. Features are not scaled: put a `StandardScaler` before the
    classifier.

    Args:
        model: model to fine-tune: path of an `.onnx` file, `ModelProto` or `onnx_ir.Model`, with one input [batch, ...]
            and logits [batch, classes] as its first output. If the number of logits differs from the number of classes,
            the last linear layer is replaced (:func:`onnxtrain.replace_head`). A final Softmax or Sigmoid is removed,
            with a warning. None builds a perceptron.
        hidden_layer_sizes: sizes of the perceptron's hidden layers, e.g. (100,); () for a linear model.
        loss: loss for class labels, e.g. `CrossEntropyLoss(label_smoothing=0.1)`; None for "cross_entropy".
        optimizer: as for :class:`onnxtrain.Trainer`.
        learning_rate: learning rate, e.g. 1e-3; with a schedule, its highest value.
        epochs: number of passes over the data.
        batch_size: number of samples per training step and per prediction run.
        dtype: dtype of the perceptron, "float32" or "float64". Default: float32 if X is float32, else float64. The
            dtype of a model that you pass does not change.
        class_weight: weight of each class in the loss: "balanced" for n / (k * n_c), where n is the number of samples,
            k the number of classes and n_c the number of samples in the class (with `sample_weight`, n and n_c are sums
            of weights); or a dict that maps classes to weights, 1 for missing classes. None for equal weights.
        validation: fraction of the samples to hold out for validation after each epoch, e.g. 0.1, stratified by class.
            None for no validation.
        patience: stop after this many consecutive epochs in which the validation loss (training loss if `validation` is
            None) did not improve, and keep the weights of the best epoch. None to train all epochs.
        early_stopping: True to hold out `validation_fraction` of the samples, stratified by class, and to stop once the
            accuracy on them has not improved by `tol` for more than `n_iter_no_change` consecutive epochs. The weights
            of the epoch with the best score are kept, as in scikit-learn's `MLPClassifier`.
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
        classes_: class labels, in the order of the logits.
        n_features_in_: number of features, `X.shape[1]`.
        feature_names_in_: names of the features, if X was a data frame whose column names are strings.
        history_: record of the epochs, :class:`onnxtrain.History`.
        n_iter_: number of epochs trained.
        validation_scores_: accuracy on the held-out samples after each epoch; None without `early_stopping`.
        best_validation_score_: best of `validation_scores_`; None without `early_stopping`.
        onnx_model_: trained model, as the bytes of an `.onnx` file.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> from sklearn.pipeline import make_pipeline
        >>> from sklearn.preprocessing import StandardScaler
        >>> X, y = load_iris(return_X_y=True)
        >>> classifier = make_pipeline(StandardScaler(), OnnxClassifier(random_state=0))
        >>> classifier.fit(X, y).score(X, y) > 0.9
        True
    """

    classes_: Array

    # Repeated here, because scikit-learn reads the parameters from the signature of this class.
    def __init__(
        self,
        model: ModelSource | None = None,
        *,
        hidden_layer_sizes: Sequence[int] = (100,),
        loss: LossSpec = None,
        optimizer: OptimizerSpec = "adamw",
        learning_rate: float = 1e-3,
        epochs: int = 200,
        batch_size: int = 128,
        dtype: str | None = None,
        class_weight: Mapping[Any, float] | str | None = None,
        validation: float | None = None,
        patience: int | None = None,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        tol: float = 1e-4,
        warm_start: bool = False,
        callbacks: Sequence[Callback] | None = None,
        trainer_options: Mapping[str, Any] | None = None,
        fit_options: Mapping[str, Any] | None = None,
        device: str = "cpu",
        threads: int | None = None,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__(
            model,
            hidden_layer_sizes=hidden_layer_sizes,
            loss=loss,
            optimizer=optimizer,
            learning_rate=learning_rate,
            epochs=epochs,
            batch_size=batch_size,
            dtype=dtype,
            validation=validation,
            patience=patience,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            n_iter_no_change=n_iter_no_change,
            tol=tol,
            warm_start=warm_start,
            callbacks=callbacks,
            trainer_options=trainer_options,
            fit_options=fit_options,
            device=device,
            threads=threads,
            random_state=random_state,
            verbose=verbose,
            recipe=recipe,
        )
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Trains the model.

        Args:
            X: samples, float [samples, features]; for a model that you pass, any shape with the samples along axis 0.
            y: class labels [samples], numbers or strings.
            sample_weight: weight of each sample, float [samples]; a weight of 2 counts as two equal samples.

        Returns:
            The estimator.

        Raises:
            ValueError: X or y is not finite or has the wrong shape, or y is continuous.
            InputError: the model has several inputs or a fixed batch size, or the data don't match its input.
        """
        X, y = self._validated(X, y, reset=not self._continues)
        check_classification_targets(y)
        # The loss expects class indices 0, 1, 2, ...; labels may be strings or any integers.
        classes, labels = np.unique(y, return_inverse=True)
        if self._continues and not np.array_equal(classes, self.classes_):
            raise ValueError(
                f"warm_start=True needs the classes of the previous call to fit, {self.classes_.tolist()}, received "
                f"{classes.tolist()}."
            )
        self.classes_ = classes
        sample_weight = self._with_class_weight(X, labels, sample_weight)
        self._fit_model(
            X,
            labels.astype(np.int64),
            sample_weight,
            len(self.classes_),
            "cross_entropy",
            # Cross-entropy applies the softmax itself; `nll` expects log-probabilities, which a Softmax doesn't give.
            logits=True,
            stratify=self.validation is not None,
        )
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Trains for one epoch on these samples, and keeps the optimizer state for the next call.

        After :meth:`fit`, it continues from the fitted weights, with a new optimizer state.

        Args:
            X: samples, as for :meth:`fit`.
            y: class labels [samples]; not all classes have to occur.
            classes: all class labels; required in the first call, unless the classifier is fitted.
            sample_weight: weight of each sample, float [samples].

        Returns:
            The estimator.

        Raises:
            ValueError: `classes` is missing in the first call or differs from that of earlier calls, a label is not
                among the classes, `class_weight` is "balanced", or `early_stopping` is True.
        """
        first = not self.__sklearn_is_fitted__()
        if self.class_weight == "balanced":
            raise ValueError(
                "class_weight='balanced' needs all samples, which partial_fit does not have. Pass a dict of weights, "
                "e.g. from sklearn.utils.class_weight.compute_class_weight."
            )
        _check_partial_fit_first_call(self, classes)
        X, y = self._validated(X, y, reset=first)
        check_classification_targets(y)
        if len(unknown := np.setdiff1d(y, self.classes_)):
            raise ValueError(
                f"y has the labels {unknown.tolist()}, but the classes are {self.classes_.tolist()}."
            )
        labels = np.searchsorted(self.classes_, y)
        sample_weight = self._with_class_weight(X, labels, sample_weight)
        self._fit_once(
            X,
            labels.astype(np.int64),
            sample_weight,
            len(self.classes_),
            "cross_entropy",
            logits=True,
        )
        return self

    def _validation_score(self, y: Array, scores: Array, weight: Array | None) -> float:
        return float(accuracy_score(y, scores.argmax(axis=1), sample_weight=weight))

    def _with_class_weight(self, X: Any, labels: Array, sample_weight: Any) -> Array | None:
        """Returns the sample weights times those of the classes; None if all are 1. `labels` are class indices."""
        weights: Array | None = self._checked_weight(sample_weight, X)
        if self.class_weight is None:
            return weights
        of_class: Array = self._class_weights(labels, weights)[labels]
        return of_class if weights is None else weights * of_class

    def _class_weights(self, labels: Array, sample_weight: Array | None) -> Array:
        """Returns the weight of each class, in the order of `classes_`.

        Args:
            labels: class index of each sample.
            sample_weight: weight of each sample, which "balanced" takes into account; None for equal weights.

        Raises:
            ValueError: `class_weight` is invalid or names an unknown class.
        """
        if self.class_weight == "balanced":
            return balanced_weights(labels, len(self.classes_), sample_weight)
        if not isinstance(self.class_weight, Mapping):
            raise ValueError(
                f"class_weight must be 'balanced', a dict or None, received {self.class_weight!r}."
            )
        classes = self.classes_.tolist()
        # A misspelled class would otherwise silently have the weight 1.
        if unknown := [name for name in self.class_weight if name not in classes]:
            raise ValueError(f"class_weight names {unknown}, but the classes are {classes}.")
        return np.array([self.class_weight.get(name, 1.0) for name in classes])

    def predict_proba(self, X: Any) -> Array:
        """Returns the probability of each class for each sample.

        Args:
            X: samples, in the form passed to :meth:`fit`.

        Returns:
            float [samples, classes], with columns in the order of `classes_`.

        Raises:
            NotFittedError: the estimator has not been fitted.
            ValueError: X does not match the model.
        """
        scores = self._scores(X)
        result = probabilities(self._loss_name, scores)
        assert result is not None
        return result.astype(scores.dtype)

    def predict(self, X: Any) -> Array:
        """Returns the predicted class of each sample.

        Args:
            X: samples, in the form passed to :meth:`fit`.

        Returns:
            Labels [samples], from `classes_`.

        Raises:
            NotFittedError: the estimator has not been fitted.
            ValueError: X does not match the model.
        """
        scores = self._scores(X)
        labels: Array = self.classes_[scores.argmax(axis=1)]
        return labels
