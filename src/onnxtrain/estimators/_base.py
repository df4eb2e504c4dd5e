"""Defines the estimators' base class, which trains a model with `Trainer` and keeps it in memory as ONNX bytes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted

from onnxtrain.errors import InputError
from onnxtrain.estimators._perceptron import perceptron
from onnxtrain.passes import canonicalize, load_model
from onnxtrain.recipe import filled_recipe
from onnxtrain.runtime.atomic import replace_file
from onnxtrain.runtime.device import parse_device
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.session import open_session, run_on_arrays
from onnxtrain.runtime.session_settings import SessionSettings
from onnxtrain.runtime.store import require_unmasked
from onnxtrain.surgery import replace_head
from onnxtrain.surgery._replace import drop_final_probabilities
from onnxtrain.trainer import Callback, EarlyStopping, Trainer

if TYPE_CHECKING:
    from onnxtrain.passes import ModelSource
    from onnxtrain.recipe import LossSpec, OptimizerSpec, Recipe


class OnnxEstimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no annotations
    """Base class for the estimators; its constructor only stores the arguments, as scikit-learn requires."""

    # All arguments are named: scikit-learn reads an estimator's parameters from the constructor's signature.
    # `check_estimator` also requires that nothing is checked or converted here, because `set_params` bypasses the
    # constructor.
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
        validation: float | None = None,
        patience: int | None = None,
        callbacks: Sequence[Callback] | None = None,
        trainer_options: Mapping[str, Any] | None = None,
        fit_options: Mapping[str, Any] | None = None,
        device: str = "cpu",
        threads: int | None = None,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
        recipe: Recipe | None = None,
    ) -> None:
        self.model = model
        self.hidden_layer_sizes = hidden_layer_sizes
        self.loss = loss
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.epochs = epochs
        self.batch_size = batch_size
        self.dtype = dtype
        self.validation = validation
        self.patience = patience
        self.callbacks = callbacks
        self.trainer_options = trainer_options
        self.fit_options = fit_options
        self.device = device
        self.threads = threads
        self.random_state = random_state
        self.verbose = verbose
        self.recipe = recipe

    def _validated(self, x: Any, *y: Any, **settings: Any) -> Any:
        """Checks samples and, if given, targets as scikit-learn's own estimators do; returns them as arrays.

        Args:
            x: the samples.
            y: the targets; omitted for prediction.
            settings: additional arguments of scikit-learn's `validate_data`.
        """
        # scikit-learn would silently drop masks.
        for name, value in zip("Xy", (x, *y), strict=False):
            require_unmasked(name, value)
        # A perceptron takes rows of features. The user's model may take images or sequences.
        settings |= {"ensure_2d": self.model is None, "allow_nd": self.model is not None}
        try:
            from sklearn.utils.validation import validate_data
        except ImportError:  # scikit-learn before 1.6
            checked = self._validate_data(x, *y, **settings)
        else:
            checked = validate_data(self, x, *y, **settings)
        # scikit-learn counts features only if it requires two axes.
        if self.model is not None:
            self._count_features(checked[0] if y else checked, reset=bool(y))
        return checked

    def _checked_weight(self, weight: Any, x: Array) -> Array | None:
        """Checks sample weights as scikit-learn does; returns them as float64 [samples], or None if there are none."""
        if weight is None:
            return None
        require_unmasked("sample_weight", weight)
        checked: Array = _check_sample_weight(weight, x, dtype=np.float64)
        return checked

    def _count_features(self, x: Array, *, reset: bool) -> None:
        """Stores the number of features, or compares it with the stored number.

        Args:
            x: checked samples.
            reset: True to store the number, False to compare.

        Raises:
            ValueError: the number differs from the stored one.
        """
        features = x.shape[1] if x.ndim > 1 else 1
        if reset:
            self.n_features_in_ = features
        elif features != self.n_features_in_:
            raise ValueError(
                f"X has {features} features, but {type(self).__name__} is expecting {self.n_features_in_} features as "
                "input."
            )

    def _fit_model(
        self,
        x: Array,
        y: Array,
        weight: Any,
        outputs: int,
        default_loss: str,
        *,
        logits: bool,
        **options: Any,
    ) -> None:
        """Trains on checked data, and keeps the trained model.

        Args:
            x: samples.
            y: targets in the form that the loss expects.
            weight: sample weights; None for equal weights.
            outputs: number of classes or of target variables, which is the number of outputs the model must have.
            default_loss: name of the loss to use if neither `loss` nor `recipe` specifies one.
            logits: True if the loss expects logits, so that a final Softmax or Sigmoid of the model must be removed.
            options: additional arguments of :meth:`Trainer.fit`.
        """
        # Drawn once per fit: with an integer `random_state`, all fits are equal; a RandomState gives each fit another
        # seed.
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        model, self._dtype = self._prepared(x, outputs, seed, logits=logits)
        recipe = filled_recipe(type(self), self.recipe, {"loss": self.loss, "optimizer": self.optimizer})
        # Not None, which tells a Trainer that the model computes its own loss.
        loss = default_loss if recipe.loss is None else recipe.loss
        # Without a recipe its other fields may be among `trainer_options`.
        how: dict[str, Any] = (
            {"loss": loss, "optimizer": self.optimizer}
            if self.recipe is None
            else {"recipe": replace(recipe, loss=loss)}
        )
        trainer = Trainer(
            model,
            **how,
            learning_rate=self.learning_rate,
            seed=seed,
            device=self.device,
            threads=self.threads,
            **(self.trainer_options or {}),
        )
        # A copy, because the list is a parameter of the estimator, which fitting must not modify.
        callbacks = list(self.callbacks or ())
        if self.patience is not None:
            # Without validation data, only the training loss is recorded.
            monitor = "loss" if self.validation is None else "val_loss"
            callbacks.append(EarlyStopping(monitor, self.patience, restore_best=True))
        options |= {"sample_weight": weight, "validation": self.validation, "verbose": bool(self.verbose)}
        options |= {"epochs": self.epochs, "batch_size": self.batch_size, "callbacks": callbacks}
        self.history_ = trainer.fit(_cast(x, self._dtype), y, **options | dict(self.fit_options or {}))
        # As in scikit-learn's own iterative estimators; fewer than `epochs` after early stopping.
        self.n_iter_ = len(self.history_)
        self._output, self._loss_name = str(trainer.prediction), trainer.loss_name
        # Keep only the model, which suffices for predictions: the trainer has files, and sessions that cannot be
        # pickled.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            trainer.export(Path(folder) / "model.onnx")
            self.onnx_model_ = (Path(folder) / "model.onnx").read_bytes()
        self._open()

    def _prepared(self, x: Array, outputs: int, seed: int, *, logits: bool) -> tuple[Any, Any]:
        """Builds a perceptron or loads the user's model, and adapts the model to the number of outputs.

        Args:
            x: checked samples.
            outputs: number of outputs per sample.
            seed: seed of new weights.
            logits: True to remove a final Softmax or Sigmoid.

        Returns:
            The model, and the dtype of its input.

        Raises:
            InputError: the model has several inputs, or a fixed batch size.
            ValueError: `hidden_layer_sizes` is invalid.
        """
        if self.model is None:
            hidden = self.hidden_layer_sizes
            if isinstance(hidden, int | str) or any(
                not isinstance(n, int | np.integer) or n < 1 for n in hidden
            ):
                raise ValueError(
                    f"hidden_layer_sizes must contain positive integers, e.g. (100,), received {hidden!r}."
                )
            # As in scikit-learn's own perceptrons: float32 for float32 data, else float64.
            dtype = np.dtype(self.dtype or (np.float32 if x.dtype == np.float32 else np.float64))
            return perceptron(x.shape[1], [int(n) for n in hidden], outputs, dtype, seed), dtype
        model = canonicalize(load_model(self.model))
        if len(model.graph.inputs) != 1:
            names = ", ".join(str(value.name) for value in model.graph.inputs)
            raise InputError(
                f"{type(self).__name__} supports models with one input, received {names}. Use Trainer."
            )
        value = model.graph.inputs[0]
        if value.shape is not None and value.shape.rank() and isinstance(value.shape[0], int):
            raise InputError(
                f"{type(self).__name__}: the model has a fixed batch size of {value.shape[0]}. Pass "
                "model=onnxtrain.make_batch_dynamic(model)."
            )
        # An output with more axes (segmentation) has no width; `replace_head` raises an error that says so.
        if _width(model.graph.outputs[0]) != outputs:
            model = replace_head(model, outputs, seed=seed, logits=logits)
        elif logits:
            drop_final_probabilities(model)
        assert value.dtype is not None
        return model, np.dtype(value.dtype.numpy())

    def _open(self) -> None:
        """Opens the inference session of the trained model."""
        options = None if self.threads is None else SessionSettings(threads=self.threads).options()
        self._session: ort.InferenceSession = open_session(
            self.onnx_model_, "model", parse_device(self.device), options
        )

    def _scores(self, X: Any) -> Array:
        """Checks samples, and returns the output of the trained model for each one, e.g. its logits."""
        check_is_fitted(self)
        x = _cast(self._validated(X, reset=False), self._dtype)
        # The session is opened in `fit`: `check_estimator` requires that predictions don't change attributes.
        name = self._session.get_inputs()[0].name
        # In batches, because the activations of all samples at once may not fit into memory.
        parts = [
            run_on_arrays(self._session, [self._output], {name: x[first : first + self.batch_size]})[0]
            for first in range(0, len(x), self.batch_size)
        ]
        return np.concatenate(parts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the trained model as an ordinary `.onnx` file for inference, with the original inputs and outputs.

        A classifier's outputs are logits, not probabilities, in the order of `classes_`.

        Args:
            path: file to write, e.g. "model.onnx".

        Raises:
            NotFittedError: the estimator has not been fitted.
            OSError: the file cannot be written.
        """
        check_is_fitted(self)
        # An existing file is replaced atomically, even if the process is killed.
        with replace_file(Path(path)) as file:
            file.write(self.onnx_model_)

    def __getstate__(self) -> dict[str, Any]:
        # Sessions cannot be pickled; `__setstate__` opens a new one.
        return {name: value for name, value in super().__getstate__().items() if name != "_session"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # An estimator may be pickled before it is fitted, e.g. by `GridSearchCV` with several processes.
        if "onnx_model_" in self.__dict__:
            self._open()

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "onnx_model_")


def _width(value: ir.Value) -> int | None:
    """Returns the number of outputs per sample; None unless the output is [samples, N] with a known N."""
    shape = value.shape
    return shape[1] if shape is not None and shape.rank() == 2 and isinstance(shape[1], int) else None


def _cast(x: Array, dtype: np.dtype[Any]) -> Array:
    """Casts checked samples to the dtype of the model's input.

    Raises:
        ValueError: a value is too large for the dtype, or is a fraction but the dtype is an integer type.
    """
    # A cast would silently truncate fractions in what should be token ids.
    if dtype.kind in "iu" and x.dtype.kind == "f" and not (x == np.floor(x)).all():
        raise ValueError(f"The model takes {dtype.name}, but the samples contain fractions.")
    with np.errstate(over="ignore"):
        result = np.ascontiguousarray(x, dtype)
    # float64 values beyond 3.4e38 become infinite in float32.
    if dtype.kind not in "iub" and not np.isfinite(result).all():
        raise ValueError(f"The samples contain values too large for {dtype.name}; scale them.")
    return result
