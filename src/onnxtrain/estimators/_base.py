"""Defines the estimators' base class, which trains a model with `Trainer` and keeps it in memory as ONNX bytes."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
import weakref
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import numpy_helper
from scipy.sparse import issparse  # type: ignore[import-untyped]
from sklearn.base import BaseEstimator, is_classifier
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted

from onnxtrain.errors import InputError
from onnxtrain.estimators._score_stopping import ScoreStopping
from onnxtrain.estimators._sparse_rows import SparseRows
from onnxtrain.passes import canonicalize, load_model
from onnxtrain.recipe import filled_recipe
from onnxtrain.runtime.atomic import replace_file
from onnxtrain.runtime.device import parse_device
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.session import open_session, run_on_arrays
from onnxtrain.runtime.session_settings import SessionSettings
from onnxtrain.runtime.store import require_unmasked
from onnxtrain.surgery import replace_head
from onnxtrain.surgery._perceptron import perceptron
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
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.tol = tol
        self.warm_start = warm_start
        self.callbacks = callbacks
        self.trainer_options = trainer_options
        self.fit_options = fit_options
        self.device = device
        self.threads = threads
        self.random_state = random_state
        self.verbose = verbose
        self.recipe = recipe

    @property
    def _continues(self) -> bool:
        """True if :meth:`fit` continues from the weights of the previous one."""
        return bool(self.warm_start) and self.__sklearn_is_fitted__()

    def _validated(self, x: Any, *y: Any, reset: bool, **settings: Any) -> Any:
        """Checks samples and, if given, targets as scikit-learn's own estimators do.

        Args:
            x: the samples.
            y: the targets; omitted for prediction.
            reset: True to store the number of features and their names, False to compare them with the stored ones.
            settings: additional arguments of scikit-learn's `validate_data`.

        Returns:
            The samples, an array or a sparse matrix by rows; with targets, a tuple of both.
        """
        # scikit-learn would silently drop masks.
        for name, value in zip("Xy", (x, *y), strict=False):
            require_unmasked(name, value)
        # A perceptron takes rows of features. The user's model may take images or sequences.
        settings |= {"ensure_2d": self.model is None, "allow_nd": self.model is not None, "reset": reset}
        settings["accept_sparse"] = "csr"
        try:
            from sklearn.utils.validation import validate_data
        except ImportError:  # scikit-learn before 1.6
            checked = self._validate_data(x, *y, **settings)
        else:
            checked = validate_data(self, x, *y, **settings)
        # scikit-learn counts features only if it requires two axes.
        if self.model is not None:
            self._count_features(checked[0] if y else checked, reset=reset)
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
        x: Any,
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
        trainer, seed = self._new_trainer(x, outputs, default_loss, logits=logits)
        if self._continues:
            self._load_values(trainer)
        # A copy, because the list is a parameter of the estimator, which fitting must not modify.
        callbacks = list(self.callbacks or ())
        if self.patience is not None:
            # Without validation data, only the training loss is recorded.
            monitor = "loss" if self.validation is None else "val_loss"
            callbacks.append(EarlyStopping(monitor, self.patience, restore_best=True))
        self.validation_scores_: list[float] | None = None
        self.best_validation_score_: float | None = None
        stopping = None
        if self.early_stopping:
            x, y, weight, stopping = self._split_off(x, y, weight, seed)
            callbacks.append(stopping)
            options.pop("stratify", None)
        options |= {"validation": self.validation, "verbose": bool(self.verbose)}
        options |= {"epochs": self.epochs, "batch_size": self.batch_size, "callbacks": callbacks}
        data = self._data(x, y, weight)
        self.history_ = trainer.fit(**data, **options | dict(self.fit_options or {}))
        if stopping is not None:
            self.validation_scores_ = stopping.scores
            self.best_validation_score_ = stopping.best
        self._forget_trainer()
        self._keep(trainer)

    def _fit_once(
        self, x: Any, y: Array, weight: Any, outputs: int, default_loss: str, *, logits: bool
    ) -> None:
        """Trains for one epoch on checked data, with the optimizer state of earlier calls; see :meth:`_fit_model`."""
        if self.early_stopping:
            raise ValueError("partial_fit does not support early_stopping=True")
        trainer = self._continued()
        if trainer is None:
            trainer, _ = self._new_trainer(x, outputs, default_loss, logits=logits)
            if self.__sklearn_is_fitted__():
                self._load_values(trainer)
        options: dict[str, Any] = {
            "batch_size": self.batch_size,
            "callbacks": list(self.callbacks or ()),
            "verbose": bool(self.verbose),
        }
        options |= dict(self.fit_options or {})
        self.history_ = trainer.fit(**self._data(x, y, weight), **options | {"epochs": 1})
        self._trainer = trainer
        self._keep(trainer)

    def _new_trainer(self, x: Any, outputs: int, default_loss: str, *, logits: bool) -> tuple[Trainer, int]:
        """Creates a trainer for the model of the estimator, and returns it with its seed; see :meth:`_fit_model`."""
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
        return trainer, seed

    def _data(self, x: Any, y: Array, weight: Any) -> dict[str, Any]:
        """Returns checked data as arguments of :meth:`Trainer.fit`; sparse samples become dense batch by batch."""
        x = _cast(x, self._dtype)
        if issparse(x):
            return {"inputs": SparseRows(x, y, weight)}
        return {"inputs": x, "targets": y, "sample_weight": weight}

    def _split_off(self, x: Any, y: Array, weight: Any, seed: int) -> tuple[Any, Array, Any, ScoreStopping]:
        """Splits off the validation samples of `early_stopping`, as scikit-learn's perceptrons do.

        Returns:
            Samples, targets and weights to train on, and the callback that stops the training.

        Raises:
            ValueError: `early_stopping` is combined with `validation` or `patience`, or the split is not possible.
        """
        if self.validation is not None or self.patience is not None:
            raise ValueError(
                "early_stopping holds out samples of its own; pass either early_stopping, validation_fraction and "
                "n_iter_no_change, or validation and patience."
            )
        arrays = [x, y] if weight is None else [x, y, weight]
        parts = train_test_split(
            *arrays,
            test_size=self.validation_fraction,
            random_state=seed,
            stratify=y if is_classifier(self) else None,
        )
        held_out = parts[1::2]

        def score(trainer: Trainer) -> float:
            scores = self._predicted(trainer, _cast(held_out[0], self._dtype))
            return self._validation_score(held_out[1], scores, held_out[2] if weight is not None else None)

        stopping = ScoreStopping(score, self.n_iter_no_change, self.tol)
        return parts[0], parts[2], parts[4] if weight is not None else None, stopping

    def _predicted(self, trainer: Trainer, x: Any) -> Array:
        """Returns the scores that a trainer predicts for samples, batch by batch."""
        name, parts = trainer.prediction, []
        for batch in _batches(x, self.batch_size):
            outputs = trainer.predict(batch, batch_size=self.batch_size)
            parts.append(outputs[str(name)] if isinstance(outputs, dict) else outputs)
        return np.concatenate(parts)

    def _validation_score(self, y: Array, scores: Array, weight: Array | None) -> float:
        """Returns the score that `early_stopping` compares; subclasses define it."""
        raise NotImplementedError

    def _load_values(self, trainer: Trainer) -> None:
        """Copies the parameters and statistics of the trained model to a new trainer.

        Raises:
            ValueError: the trained model has other parameters, because its shape was set differently.
        """
        trained = onnx.load_from_string(self.onnx_model_)
        values = {tensor.name: numpy_helper.to_array(tensor) for tensor in trained.graph.initializer}
        for group in (trainer.parameters, trainer.state.statistics):
            for name, parameter in group:
                if name not in values or values[name].shape != parameter.data.shape:
                    raise ValueError(
                        f"{type(self).__name__}: the fitted model cannot be trained further, because it has no "
                        f"parameter {name!r} of shape {list(parameter.data.shape)}. Pass the same model settings and "
                        "the same numbers of features and outputs as before, or warm_start=False."
                    )
                group[name] = values[name]

    def _keep(self, trainer: Trainer) -> None:
        """Keeps what predictions need of a trainer: the trained model."""
        # As in scikit-learn's own iterative estimators; fewer than `epochs` after early stopping.
        self.n_iter_ = len(self.history_)
        self._output, self._loss_name = str(trainer.prediction), trainer.loss_name
        # Keep only the model, which suffices for predictions: the trainer has files, and sessions that cannot be
        # pickled.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            trainer.export(Path(folder) / "model.onnx")
            self.onnx_model_ = (Path(folder) / "model.onnx").read_bytes()
        self._open()

    def _continued(self) -> Trainer | None:
        """Returns the trainer of an earlier :meth:`partial_fit`; None if there is none."""
        if "_saved_run" in self.__dict__:
            folder = tempfile.mkdtemp()
            with zipfile.ZipFile(io.BytesIO(self._saved_run)) as archive:
                archive.extractall(folder)
            self._trainer = Trainer.resume(folder, device=self.device, threads=self.threads)
            weakref.finalize(self._trainer, shutil.rmtree, folder, ignore_errors=True)
            del self._saved_run
        return self.__dict__.get("_trainer")

    def _forget_trainer(self) -> None:
        """Drops the trainer of an earlier :meth:`partial_fit`, because the model has been trained anew."""
        for name in ("_trainer", "_saved_run"):
            self.__dict__.pop(name, None)

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
            run_on_arrays(self._session, [self._output], {name: batch})[0]
            for batch in _batches(x, self.batch_size)
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
        state = dict(super().__getstate__())
        # Sessions and trainers cannot be pickled; `__setstate__` and `_continued` open new ones.
        trainer = state.pop("_trainer", None)
        state.pop("_session", None)
        if trainer is not None:
            state["_saved_run"] = _archived(trainer)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # An estimator may be pickled before it is fitted, e.g. by `GridSearchCV` with several processes.
        if "onnx_model_" in self.__dict__:
            self._open()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "onnx_model_")


def _width(value: ir.Value) -> int | None:
    """Returns the number of outputs per sample; None unless the output is [samples, N] with a known N."""
    shape = value.shape
    return shape[1] if shape is not None and shape.rank() == 2 and isinstance(shape[1], int) else None


def _archived(trainer: Trainer) -> bytes:
    """Returns the files of a run as a zip archive, from which it can be resumed."""
    content = io.BytesIO()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        trainer.save(folder)
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(Path(folder).rglob("*")):
                archive.write(path, path.relative_to(folder))
    return content.getvalue()


def _batches(x: Any, size: int) -> Iterator[Array]:
    """Yields the samples in batches, as arrays."""
    for first in range(0, x.shape[0], size):
        batch = x[first : first + size]
        yield batch.toarray() if issparse(batch) else batch


def _cast(x: Any, dtype: np.dtype[Any]) -> Any:
    """Casts checked samples, an array or a sparse matrix, to the dtype of the model's input.

    Raises:
        ValueError: a value is too large for the dtype, or is a fraction but the dtype is an integer type.
    """
    if issparse(x):
        cast = x.copy()
        cast.data = _cast(x.data, dtype)
        return cast
    # A cast would silently truncate fractions in what should be token ids.
    if dtype.kind in "iu" and x.dtype.kind == "f" and not (x == np.floor(x)).all():
        raise ValueError(f"The model takes {dtype.name}, but the samples contain fractions.")
    with np.errstate(over="ignore"):
        result = np.ascontiguousarray(x, dtype)
    # float64 values beyond 3.4e38 become infinite in float32.
    if dtype.kind not in "iub" and not np.isfinite(result).all():
        raise ValueError(f"The samples contain values too large for {dtype.name}; scale them.")
    return result
