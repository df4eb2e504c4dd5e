"""Trains: the part of :class:`Trainer` that changes the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

from onnxtrain._words import argument
from onnxtrain.errors import InputError
from onnxtrain.trainer._callbacks import Callback, Events, callback_list
from onnxtrain.trainer._checks import check_integer
from onnxtrain.trainer._fit.datasets import Data, Validation, fit_datasets, weigh, weighed_dataset
from onnxtrain.trainer._fit.learning_rate_range import LearningRateRange, find_range
from onnxtrain.trainer._fit.loop import FitLoop
from onnxtrain.trainer._properties import TrainerProperties
from onnxtrain.trainer._run.history import History
from onnxtrain.trainer._run.position import Plan
from onnxtrain.trainer._show.report import make_report
from onnxtrain.trainer._workers.events import WorkerEvents
from onnxtrain.trainer.data import (
    ClassWeightedSource,
    ClassWeights,
    Options,
    TransformFunction,
    warn_of_fixed_batch,
)

if TYPE_CHECKING:
    from onnxtrain.trainer._trainer import Trainer


class Training(TrainerProperties):
    """Methods of :class:`Trainer` that train."""

    def stop_training(self) -> None:
        """Ends the fit under way after the current epoch; for callbacks and other threads."""
        workers = self._state.workers
        # Workers end a fit together, after the epoch in which one of them was asked to.
        if workers is not None:
            workers.stop_asked = True
        else:
            self._state.position.history.stopped = "early"

    def abandon_fit(self) -> None:
        """Forgets that a fit was interrupted: the next fit is a new one and may have other arguments.

        Raises:
            TrainingStateError: a fit is under way in another thread.
        """
        self._state.abandon()

    def fit(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        epochs: int = 1,
        batch_size: int | None = None,
        validation: Validation = None,
        callbacks: Iterable[Callback] | None = (),
        shuffle: bool = True,
        accumulate: int = 1,
        schedule_epochs: int | None = None,
        verbose: bool = True,
        sample_weight: Any = None,
        transform: TransformFunction | None = None,
        validation_transform: TransformFunction | None = None,
        steps_per_epoch: int | None = None,
        drop_last: bool = False,
        class_weight: ClassWeights = None,
        stratify: bool = False,
        evaluate_every: int | None = None,
    ) -> History:
        """Trains, and returns the record of all epochs so far.

        Ctrl-C finishes the step, saves the state and returns with `history.stopped == "interrupted"`; the
        same call, also after :meth:`resume`, then does the rest. A second Ctrl-C raises KeyboardInterrupt
        at once.

        Args:
            inputs: samples along axis 0; for several inputs a list in the model's order or a dict by name.
                Floating-point data is cast to the model's type. Or a frame of pandas or polars; a data set that gives
                samples by index (PyTorch's, Hugging Face's); a DataLoader; an iterable of batches
                `(inputs, targets)`, `(inputs, targets, sample_weight)` or dicts by name; a function that returns one.
            targets: as many samples; integers for class labels. None if the model needs none, or the data brings them.
                Of a frame also names of columns.
            epochs: passes over the data, in addition to the epochs of earlier fits.
            batch_size: samples per batch, 32 by default; the last batch may be smaller. A model that was
                exported with a fixed batch takes that size, and the samples beyond the last full batch are left
                out of an epoch, with a warning; with shuffling other samples are left out in each epoch.
            validation: `(inputs, targets)` or `(inputs, targets, sample_weight)` to evaluate after each epoch, other
                data that brings its targets, or the fraction of the samples to split off at random, e.g. 0.1.
            callbacks: see :class:`Callback`.
            shuffle: take the samples in a new random order in each epoch.
            accumulate: batches per optimizer step; the gradient is that of the mean loss over all their samples.
            schedule_epochs: spread one schedule over several calls of `fit`: total epochs of these calls, counted from
                the trainer's first epoch, e.g. 10 for two fits of 5 epochs. Default: each call runs the schedule from
                start to end.
            verbose: show a progress bar (or a line per epoch if standard error is no terminal).
            sample_weight: a weight w for each sample: the loss is sum(w·l) / sum(w), over all batches of a step.
                Metrics count each sample once.
            transform: augmentation, a function `(inputs, targets) -> (inputs, targets)` of the arrays of a batch,
                called in training only; a third argument, or one named `rng`, is a numpy Generator.
            validation_transform: the same for the batches of `validation`, e.g. to convert `uint8` images as
                `transform` does, without augmentation.
            steps_per_epoch: optimizer steps that make an epoch; required for a stream that does not end.
            drop_last: leave out an incomplete last batch of each epoch.
            class_weight: weight of each class in the training loss, for data with one class label per sample: a dict
                by class, e.g. `{1: 10.0}` (1 for the others), one weight per class, or "balanced" for n / (k * n_c),
                where n_c of n samples are of the class c, one of k. Multiplies `sample_weight`. Validation and metrics
                do not weigh classes.
            stratify: split off the same fraction of each class for `validation=0.1`.
            evaluate_every: evaluate on the validation data after every so many optimizer steps, too, e.g. 500, and
                record it in `history.evaluations`; see :meth:`Callback.on_evaluation`.

        Raises:
            InputError: data or arguments do not fit; nothing has been trained.
            DivergenceError: the loss became NaN or infinite; the last good state has been restored and saved.
            TrainingStateError: a fit of this trainer is under way, in another thread or around this call.
        """
        arguments = locals()
        epochs = check_integer(argument("epochs"), epochs)
        accumulate = check_integer(argument("accumulate"), accumulate)
        if steps_per_epoch is not None:
            steps_per_epoch = check_integer(argument("steps_per_epoch"), steps_per_epoch)
        if evaluate_every is not None:
            evaluate_every = check_integer(argument("evaluate_every"), evaluate_every)
            if validation is None:
                raise InputError(
                    f"{argument('evaluate_every', evaluate_every)} needs data to evaluate on: pass "
                    f"{argument('validation')}."
                )
        called_back = callback_list(callbacks)
        # Sources count batches, users count steps.
        limit = None if steps_per_epoch is None else steps_per_epoch * accumulate
        user_data = Data.of_arguments(arguments, limit)
        state = self._state
        with state.fitting():
            data, held_out = fit_datasets(state, user_data)
            held_out_size = None
            if held_out is not None:
                held_out_size = validation if isinstance(validation, float) else held_out.samples or 0
            # The plan is made of numbers, not of the data: a resumed process gives other objects with the same
            # content.
            plan = Plan(
                samples=data.samples,
                batch_size=data.batch_size,
                accumulate=accumulate,
                shuffle=bool(shuffle),
                epochs=epochs,
                validation=held_out_size,
                schedule_epochs=schedule_epochs,
                steps_per_epoch=steps_per_epoch,
                drop_last=user_data.drop_last,
                weighted=data.weighted,
                transform=transform is not None,
                class_weight=data.weights.tolist() if isinstance(data, ClassWeightedSource) else None,
                stratify=user_data.stratify,
                evaluate_every=evaluate_every,
            )
            state.position.check(plan)
            state.check_schedule(plan, None if data.batches is None else -(-data.batches // accumulate))
            weigh(state, data, held_out, for_fit=True)
            state.validating, state.training_data = held_out is not None, data
            warn_of_fixed_batch(state.run.batch_size, data.samples)
            trainer, workers = cast("Trainer", self), state.workers
            if workers is None:
                events = Events(called_back, trainer)
            else:
                workers.check_fixed_batch(state.run.batch_size)
                events = WorkerEvents(called_back, trainer, workers, state)
            report = make_report(verbose and (workers is None or workers.leads))
            try:
                FitLoop(state, data, held_out, plan, events, report).run()
            except BaseException as error:
                # Loggers close their files for KeyboardInterrupt and SystemExit, too.
                events.call(Callback.on_exception, error)
                raise
            finally:
                # Data may be large; the trainer keeps none of it.
                state.training_data = None
        return self.history

    def check_data(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        batch_size: int | None = None,
        validation: Validation = None,
        sample_weight: Any = None,
        transform: TransformFunction | None = None,
        validation_transform: TransformFunction | None = None,
        drop_last: bool = False,
        class_weight: ClassWeights = None,
        stratify: bool = False,
    ) -> None:
        """Raises the InputError that :meth:`fit` would raise for this data; changes nothing.

        Of a stream the first batch is checked. An iterator is not read, as it can be read once.
        """
        if not isinstance(inputs, Iterator):
            fit_datasets(self._state, Data.of_arguments(locals()))

    def find_learning_rate(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        start: float = 1e-7,
        stop: float = 10.0,
        steps: int = 100,
        batch_size: int | None = None,
        transform: TransformFunction | None = None,
    ) -> LearningRateRange:
        """Measures the loss over rising learning rates and suggests a rate to train with (Smith's range test).

        One step is taken with each rate, from `start` to `stop` in equal ratios, until the loss is four times its
        lowest value. The trainer is then put back to the state before the test: set `trainer.learning_rate` to the
        rate of your choice.

        Args:
            inputs: as for :meth:`fit`.
            targets: as for :meth:`fit`.
            start: lowest rate.
            stop: highest rate.
            steps: number of rates.
            batch_size: samples per step, as for :meth:`fit`.
            transform: augmentation, as for :meth:`fit`.

        Raises:
            InputError: the data or the rates do not fit.
        """
        if self._state.workers is not None:
            self._state.workers.require_one("Finding a learning rate")
        options = Options(batch_size, training=True)
        data = weighed_dataset(self._state, inputs, targets, None, options, transform)
        return find_range(self._state, data, start, stop, steps)
