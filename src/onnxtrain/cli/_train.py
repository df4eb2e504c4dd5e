"""Runs `onnxtrain train`: starts or resumes a run, trains, and exports the model."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import onnxtrain
from onnxtrain.cli._artifacts import check_loss, prepared
from onnxtrain.cli._callbacks import SAVES, chosen_callbacks, chosen_transform, prepare_for_transform
from onnxtrain.cli._classes import chosen_class_weight, chosen_metrics, positive_remark
from onnxtrain.cli._config import RUN_FILE, write_config
from onnxtrain.cli._data import Arrays, assign, to_arrays
from onnxtrain.cli._declared import flag
from onnxtrain.cli._find_rate import check_find_rate, print_rate
from onnxtrain.cli._images import chosen_images, require_folder
from onnxtrain.cli._integer_weights import note_masters, with_masters
from onnxtrain.cli._interrupts import uninterrupted
from onnxtrain.cli._loss import fit_targets, label_targets
from onnxtrain.cli._network import (
    check_network,
    made_network,
    standardizes_target,
    with_epochs,
    with_loss,
)
from onnxtrain.cli._options import TextOptions
from onnxtrain.cli._output import INTERRUPTED, info
from onnxtrain.cli._recipe import chosen_recipe
from onnxtrain.cli._remember import (
    BEGUN,
    data_file,
    digest,
    paths_outside,
    recall,
    recall_text,
    remember,
    require_options,
    saved_encoder,
)
from onnxtrain.cli._remember import PROPERTY as OPTIONS
from onnxtrain.cli._result import TRAINED, Fitted, chosen_limit, print_result
from onnxtrain.cli._settings import number_or_text, split_settings
from onnxtrain.cli._table_report import print_table_summary
from onnxtrain.cli._tables import chosen_encoder, fit_encoder
from onnxtrain.cli._texts import Loaded, chosen_tokenizer, load_train_data, measured
from onnxtrain.cli._train_options import ScheduleOptions, TrainOptions, WorkerOptions
from onnxtrain.cli._workers import chosen_strategy, leads
from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.images import ImageFolder
from onnxtrain.passes import canonicalize, load_model
from onnxtrain.runtime.artifact_folder import keep_inside
from onnxtrain.runtime.manifest import InputSpec
from onnxtrain.schedules import SCHEDULES, Schedule
from onnxtrain.tables import PROPERTY as ENCODER
from onnxtrain.tables import Dialect, Table, TableEncoder, table_suffix
from onnxtrain.texts import TextPairs
from onnxtrain.trainer import EarlyStopping, Trainer
from onnxtrain.trainer._fit.freezing import Freezing
from onnxtrain.trainer._fit.schedule import named_schedule
from onnxtrain.trainer._fit.texts import text_recipe
from onnxtrain.trainer._run.files import CHECKPOINT, holds_run, is_run_file, require_free
from onnxtrain.trainer.data._layout import WEIGHT


class _CommandTrainer(Trainer):
    """Trainer of a new run, whose first checkpoint says that a command created the run."""

    _first_properties: ClassVar[Mapping[str, str]] = {OPTIONS: BEGUN}


def train(options: TrainOptions, given: frozenset[str], *, finished: bool = False) -> None:
    """Runs `onnxtrain train` in this process, alone or as one of several workers.

    Args:
        options: options of the command.
        given: names of the options that were given on the command line or in an options file.
        finished: True to skip training and only write the results, because the workers were restarted after the last
            epoch had been saved.
    """
    if not options.rate.find_lr:
        _train(options, given, finished=finished)
        return
    check_find_rate(options)
    if resumed_directory(options) is not None:
        _train(options, given)
        return
    # The models of a new run are needed to take steps, and nothing of it is kept.
    with tempfile.TemporaryDirectory(prefix="onnxtrain-find-lr-", ignore_cleanup_errors=True) as folder:
        _train(replace(options, output=Path(folder) / "run"), given)


def _train(options: TrainOptions, given: frozenset[str], *, finished: bool = False) -> None:
    """Runs the command; for the arguments, see :func:`train`."""
    resumed, find_lr = resumed_directory(options), options.rate.find_lr
    resuming = resumed is not None
    data: Loaded | None = None
    if not resuming:
        check_network(options)
        data = load_train_data(options)
        if isinstance(data, Table):
            options = with_epochs(options, given, len(data))
    directory = resumed or _new_directory(options)
    # If the command fails, a resumed run is not changed, and a new run leaves no files.
    encoder: TableEncoder | None = None
    with nullcontext() if resuming or not leads() else _removed_on_failure(directory):
        if resumed is not None:
            trainer = Trainer.resume(
                resumed,
                device=options.device,
                threads=options.threads,
                strategy=chosen_strategy(options.workers),
            )
            require_options(trainer, resumed)
            options = replace(options, data=data_file(trainer, options))
            encoder = saved_encoder(trainer, resumed)
            data = load_train_data(
                options,
                text=recall_text(trainer, options),
                like=None if encoder is None else encoder.dialect_,
            )
            arrays = _arrays(data, encoder, trainer)
            weights = _table_weights(data, encoder)
            # The code below reads the options of the run, not the defaults of this command.
            options = recall(trainer, options, given, _digest(data, arrays | weights))
        path = _data(options)
        assert data is not None
        callbacks = chosen_callbacks(
            options.callbacks, directory, options.epochs, options.validation is not None
        )
        transform = chosen_transform(options.callbacks)
        # Loaded before the models are built, so that a wrong file is reported immediately.
        held_out = _validation_data(options, None if encoder is None else encoder.dialect_)
        if not resuming:
            options.table.check()
            if not isinstance(data, ImageFolder):
                require_folder(options.images, path)
            if isinstance(data, Table):
                network = options.net.network is not None
                encoder = chosen_encoder(options.table, data, options.sample_weight, network=network)
                if network:
                    options = with_loss(options, encoder, data)
                encoder.scale_target = standardizes_target(options)
            trainer = _begin(options, encoder, data, directory)
            encoder = _fitted_encoder(encoder, trainer, data, options)
            arrays = _arrays(data, encoder, trainer)
            weights = _table_weights(data, encoder)
        sample_weight = (
            None if isinstance(data, TextPairs) else _sample_weight(arrays | weights, options, encoder)
        )
        validation: Any = held_out
        x: Any
        y: Any
        if isinstance(data, ImageFolder):
            if isinstance(held_out, dict | Table):
                raise InputError(
                    f"--validation is '{options.validation}', but --data is a folder of images: pass a folder, "
                    "too, or a fraction."
                )
            x, y = chosen_images(options.images, data), None
        elif isinstance(data, TextPairs):
            # Pairs contain their targets and weights.
            x, y = data, None
        else:
            x, y = _assign(trainer, _without_weights(arrays, options), path)
            if held_out is not None and not isinstance(held_out, float | TextPairs):
                others = _arrays(held_out, encoder, trainer)
                validation = _assign(trainer, others, Path(str(options.validation)))
            if transform is not None:
                x, y = prepare_for_transform(x, y)
        classes = data.classes if isinstance(data, ImageFolder) else encoder.classes_ if encoder else None
        class_weight = chosen_class_weight(options.class_weight, classes)
        datasets: dict[str, Any] = {
            "batch_size": options.batch_size,
            "validation": validation,
            "sample_weight": sample_weight,
            "transform": transform,
            "drop_last": options.drop_last,
            "class_weight": class_weight,
            "stratify": options.stratify,
        }
        # Checked before the run is written.
        trainer.check_data(x, y, **datasets)
        chosen_limit(options)
        if frozen_until := trainer._frozen_until(callbacks):
            Freezing(trainer._state, frozen_until)
        if isinstance(data, Table) and encoder is not None and not resuming:
            print_table_summary(data, encoder, _labels(trainer, arrays))
        # Printed before training, so that users notice a wrong class before a long run.
        if remark := positive_remark(trainer, classes):
            info(remark)
        if find_lr:
            print_rate(trainer, x, y, datasets, callbacks, options)
            return
        # An interrupted fit is resumed with its saved learning rate and options.
        if not trainer.resumes_fit:
            trainer.learning_rate = options.rate.learning_rate
            remember(trainer, options, _digest(data, arrays | weights))
            # Saved, so that the run can be resumed even if the process is killed in the first epoch.
            trainer.save(trainer.directory)
            # A resumed run keeps the options file of its first command.
            if not resuming and leads():
                keep_inside(trainer.directory / RUN_FILE, trainer.directory)
                write_config(options, trainer.directory / RUN_FILE, onnxtrain.__version__)
    # Replaces the trainer's own hint, which is Python code.
    again = resume_options(options).replace("{", "{{").replace("}", "}}")
    trainer.resume_hint = f"onnxtrain train {{}}{again} resumes it."
    before = None
    if isinstance(data, TextPairs) and not resuming and leads() and options.limit_batches is None:
        before = measured(trainer, data, options, validation)
        info("Before training: " + ", ".join(f"{name} {value:.4g}" for name, value in before.items()))
    history = (
        trainer.history
        if finished
        else trainer.fit(
            x,
            y,
            epochs=options.epochs,
            callbacks=callbacks,
            shuffle=not options.no_shuffle,
            accumulate=options.accumulate,
            schedule_epochs=options.rate.schedule_epochs,
            steps_per_epoch=options.steps_per_epoch,
            limit_batches=chosen_limit(options),
            evaluate_every=options.evaluate_every,
            **datasets,
        )
    )
    if history.stopped == "interrupted":
        # The exit code tells scripts that the run was interrupted.
        sys.exit(INTERRUPTED)
    early = next((callback for callback in callbacks if isinstance(callback, EarlyStopping)), None)
    averaged = options.callbacks.regularize.swa_start is not None
    print_result(
        Fitted(
            trainer,
            x,
            y,
            validation,
            encoder,
            early,
            averaged,
            classes,
            before,
            data if isinstance(data, Table) else None,
        ),
        options,
        directory,
    )


def _arrays(data: Loaded, encoder: TableEncoder | None, trainer: Trainer) -> Arrays:
    """Returns the arrays of training or validation data by name; {} for images and texts, which are read in batches."""
    if isinstance(data, ImageFolder):
        if encoder is not None:
            raise InputError(f"The run was trained on a table; '{data.root}' is a folder. Pass a table.")
        return {}
    return to_arrays(data, encoder, trainer.manifest, label_targets(trainer))


def _digest(data: Loaded, arrays: Arrays) -> str:
    """Returns a digest of the training data, by which a resumed run knows it."""
    return data.digest() if isinstance(data, ImageFolder | TextPairs) else digest(arrays)


def _assign(trainer: Trainer, arrays: Arrays, path: Path) -> tuple[Any, Any]:
    x, y = assign(trainer.manifest.inputs, trainer.manifest.targets, arrays, path)
    return x, fit_targets(trainer, y)


def _table_weights(data: Loaded, encoder: TableEncoder | None) -> Arrays:
    """Returns a dict with the sample weights of a table; an empty dict if the data has no weight column."""
    weights = encoder.sample_weights(data) if isinstance(data, Table) and encoder is not None else None
    return {} if weights is None else {WEIGHT: weights}


def _sample_weight(arrays: Arrays, options: TrainOptions, encoder: TableEncoder | None) -> Any:
    """Returns the sample weights; None if `--sample-weight` is not given.

    Raises:
        InputError: there is no such array.
    """
    if options.sample_weight is None:
        return None
    # `_table_weights` stores the column of a table under the trainer's name for weights.
    name = options.sample_weight if encoder is None else WEIGHT
    if _data(options).is_dir():
        raise InputError(
            "--sample-weight is a column of a table or an array; images of a folder have no weights."
        )
    if name not in arrays:
        raise InputError(
            f"--sample-weight is '{options.sample_weight}', but '{options.data}' contains "
            f"{', '.join(arrays)}."
        )
    return arrays[name]


def _without_weights(arrays: Arrays, options: TrainOptions) -> Arrays:
    """Removes the sample weights from `arrays`, because `assign` would report them as unused. Returns a new dict."""
    return {name: array for name, array in arrays.items() if name != options.sample_weight}


def _data(options: TrainOptions) -> Path:
    """Returns the file to train on, which the command has required for a new run and found for a resumed one."""
    assert options.data is not None
    return options.data


def resume_options(options: TrainOptions) -> str:
    """Returns the options to pass again when the run is resumed, e.g. " --log log.csv --workers 2"; often "".

    They are the paths outside of the run's directory, and the options that depend on the machine: the device and the
    workers.
    """
    again = {**vars(options.workers), "device": options.device}
    defaults = {**{entry.name: entry.default for entry in fields(WorkerOptions)}, "device": "cpu"}
    words = [
        flag(name) if value is True else f"{flag(name)} {shlex.quote(str(value))}"
        for name, value in again.items()
        if value != defaults[name]
    ]
    # A folder is read only if it is passed.
    if options.data is not None and options.data.is_dir():
        words.insert(0, f"{flag('data')} {shlex.quote(str(options.data))}")
    return paths_outside(options, run_directory(options)) + "".join(f" {word}" for word in words)


def run_directory(options: TrainOptions) -> Path:
    """Returns the directory of the resumed run; for a new run, `--output` or a name with "-trained".

    It is the name of the model, or with `--network` that of the data.
    """
    if (resumed := resumed_directory(options)) is not None:
        return resumed
    named = options.source or _data(options)
    stem = named.name[: -len((options.source is None and table_suffix(named)) or named.suffix) or None]
    return options.output or named.with_name(f"{stem}-trained")


def resumed_directory(options: TrainOptions) -> Path | None:
    """Returns the directory of the run that the command resumes; None if it starts a new run."""
    return options.source if options.source is not None and options.source.is_dir() else None


def _new_directory(options: TrainOptions) -> Path:
    """Returns the directory of a new run, after checking that the run can be written to it.

    Raises:
        CheckpointError: the directory already contains a run, or a file with the name of one of a run's files.
        InputError: the directory has the suffix .onnx.
    """
    directory = run_directory(options)
    if directory.suffix.lower() == ".onnx":
        raise InputError(
            f"--output is '{directory}', but a run is a directory, in which trained.onnx is the model. "
            "Pass a name without .onnx."
        )
    if not leads() or options.overwrite:
        return directory
    if holds_run(directory) and (directory / CHECKPOINT).exists():
        raise CheckpointError(
            f"The directory '{directory}' already contains a training run. Resume it with onnxtrain train "
            f"{shlex.quote(str(directory))}, choose another directory with --output, or replace the "
            "run with --overwrite."
        )
    require_free(
        directory,
        f"Starting a training run in '{directory}'",
        (RUN_FILE, TRAINED, SAVES),
        " with --output, or replace files with these names with --overwrite",
    )
    return directory


@contextmanager
def _removed_on_failure(directory: Path) -> Iterator[None]:
    """Context manager that removes a new run's files from `directory` if its block raises an exception.

    The command can then be repeated with the same directory. Files that existed before the block are kept, as are
    files that do not belong to a run.
    """
    existed = directory.is_dir()
    before = set(directory.iterdir()) if existed else set()
    try:
        yield
    except BaseException:
        # A second Ctrl-C would leave half of the files behind.
        with uninterrupted():
            # Only files of a run are removed, because other programs may have written files in the meantime.
            for path in set(directory.iterdir()) - before if directory.is_dir() else ():
                if is_run_file(path.name) or path.name == RUN_FILE:
                    path.unlink()
            if not existed:
                with suppress(OSError):
                    directory.rmdir()
        raise


def _labels(trainer: Trainer, arrays: Arrays) -> np.ndarray[Any, Any] | None:
    """Returns the class index of each sample from the encoded `arrays`; None if the target has no classes."""
    targets = label_targets(trainer)
    return arrays[targets[0].name] if targets and targets[0].class_labels is not None else None


def _begin(
    options: TrainOptions,
    encoder: TableEncoder | None,
    data: Loaded,
    directory: Path,
) -> Trainer:
    """Creates the trainer of a new run, which builds the models.

    Args:
        options: options of the command.
        encoder: encoder of the table; None if the data is not a table.
        data: the training data.
        directory: directory of the run.
    """
    # Class names are needed before the models are built, because --positive may be one of them.
    classes: list[str] | None = None
    if isinstance(data, ImageFolder):
        classes = data.classes
    elif isinstance(data, Table) and encoder is not None:
        classes = encoder.find_classes(data)
    metrics, positive = chosen_metrics(options.metric, options.positive, classes)
    recipe = chosen_recipe(options, mixed=chosen_transform(options.callbacks) is not None)
    if isinstance(data, Table) and encoder is not None and (options.source is None or encoder.scale_target):
        # The network depends on the encoding, and so does the scale of the target.
        _fit_to_rows(encoder, data, None, options)
        recipe = replace(recipe, target_scale=encoder.target_scale_)
    integers = False
    if options.source is not None:
        model, integers = with_masters(prepared(options.source, options.model, seed=options.seed), recipe)
        recipe = text_recipe(recipe, model, options.source)
        check_loss(canonicalize(model), options.model.loss)
    elif isinstance(data, Table) and encoder is not None:
        model = load_model(made_network(options, recipe, encoder, data))
    else:
        raise InputError(f"--network makes a network for a table; '{options.data}' is not a table.")
    trainer = _CommandTrainer(
        model,
        recipe=recipe,
        learning_rate=options.rate.learning_rate,
        scheduler=_schedule(options.rate),
        warmup_steps=options.rate.warmup,
        warmup_ratio=options.rate.warmup_ratio,
        ema_decay=options.callbacks.regularize.ema_decay,
        metrics=metrics,
        positive=positive,
        tokenizer=chosen_tokenizer(options, recipe),
        directory=directory,
        overwrite=options.overwrite,
        seed=options.seed,
        device=options.device,
        threads=options.threads,
        strategy=chosen_strategy(options.workers),
    )
    if integers:
        note_masters(trainer)
    # The files of Hugging Face and timm are beside the model's file.
    if options.source is not None:
        trainer._state.image_origin = options.source.absolute()
    return trainer


def _schedule(options: ScheduleOptions) -> Schedule | None:
    """Creates the schedule from `--schedule` and `--schedule-option`; returns None if `--schedule` is not given.

    Raises:
        InputError: there is no such schedule or parameter, or `--schedule-option` is given without `--schedule`.
    """
    if options.schedule is None:
        if options.schedule_option:
            raise InputError("--schedule-option is given without --schedule.")
        return None
    schedule = SCHEDULES.get(options.schedule)
    # A single value of a list parameter, e.g. milestones=30, has to become a list.
    lists = (
        {entry.name for entry in fields(schedule) if str(entry.type).startswith("list")}
        if schedule
        else set()
    )
    parameters: dict[str, Any] = {}
    for name, value in split_settings("--schedule-option", options.schedule_option).items():
        numbers = [number_or_text(part) for part in value.split(",") if part]
        parameters[name] = numbers if name in lists or len(numbers) != 1 else numbers[0]
    return named_schedule(options.schedule, parameters)


def _validation_data(options: TrainOptions, like: Dialect | None) -> float | Loaded | None:
    text, fraction = options.validation, _validation_fraction(options.validation)
    if text is None or fraction is not None:
        return fraction
    path = Path(text)
    # What was given for a training file in text does not concern validation data in .parquet.
    how = options.text if table_suffix(path) not in (None, ".parquet") else TextOptions()
    return load_train_data(options, path, text=how, like=like)


def _validation_fraction(text: str | None) -> float | None:
    """Converts the value of `--validation` to a fraction; returns None if it is a file, or not given."""
    # A number is always a fraction; a file with such a name has to be given as ./0.1.
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _fitted_encoder(
    encoder: TableEncoder | None, trainer: Trainer, data: Loaded, options: TrainOptions
) -> TableEncoder | None:
    """Fits a new run's table encoder to the training table, and stores the encoder in the run.

    Args:
        encoder: the unfitted encoder; None if the data is not a table.
        trainer: trainer of the run.
        data: the training data.
        options: options of the command.

    Returns:
        The fitted encoder; None if the data is not a table.

    Raises:
        InputError: the data is not a table although table options were given, or the table does not match the encoder
            or the model.
    """
    if not isinstance(data, Table) or encoder is None:
        if given := options.table.given():
            raise InputError(
                f"{', '.join(given)} are for tables (.csv, .tsv, .parquet); '{options.data}' is not a table."
            )
        return None
    _fit_to_rows(encoder, data, label_targets(trainer), options)
    trainer.state.properties[ENCODER] = encoder.to_json()
    return encoder


def _fit_to_rows(
    encoder: TableEncoder, data: Table, targets: Sequence[InputSpec] | None, options: TrainOptions
) -> None:
    """Fits an encoder to the rows that are trained on; `targets` are those of the model, None before there is one."""
    fit_encoder(
        encoder,
        data,
        targets,
        validation=_validation_fraction(options.validation),
        seed=options.seed,
        stratify=options.stratify,
    )
