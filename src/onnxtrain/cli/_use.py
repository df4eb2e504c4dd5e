"""Runs `onnxtrain evaluate`, `predict` and `export`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onnxtrain._words import argument
from onnxtrain.cli._classes import (
    class_names,
    class_report,
    confusion_matrix_if_small,
    metric_labels,
    report_rows,
)
from onnxtrain.cli._command_options import EvaluateOptions, ExportOptions, PredictOptions
from onnxtrain.cli._data import Arrays, assign, load_data, to_arrays
from onnxtrain.cli._declared import flag
from onnxtrain.cli._evaluate_model import score_model
from onnxtrain.cli._evaluate_texts import compares_texts, score_pairs
from onnxtrain.cli._export import export_model
from onnxtrain.cli._images import (
    check_figure,
    model_image_predictions,
    prepared_images,
    require_folder,
    run_image_predictions,
    save_mistakes,
    table_of,
)
from onnxtrain.cli._loss import fit_targets, label_targets
from onnxtrain.cli._options import TextOptions
from onnxtrain.cli._output import heading, print_json, print_next, print_table, summary_table, table
from onnxtrain.cli._predict_model import model_predictions
from onnxtrain.cli._prediction_file import print_prediction_command, write_file
from onnxtrain.cli._remember import saved_encoder
from onnxtrain.cli._texts import evaluate_texts, evaluates_texts, print_text_values, write_embeddings
from onnxtrain.errors import InputError, ModelError
from onnxtrain.images import ImageFolder
from onnxtrain.losses import loss_class, make_loss
from onnxtrain.runtime.artifact_folder import keep_inside
from onnxtrain.runtime.calibration import StoredCalibration
from onnxtrain.runtime.device import CPU
from onnxtrain.runtime.session import open_session
from onnxtrain.tables import Table, TableEncoder
from onnxtrain.texts._pairs import SUFFIXES
from onnxtrain.trainer import Trainer
from onnxtrain.trainer._fit.calibration import stored_calibration
from onnxtrain.trainer._fit.images import image_classes
from onnxtrain.trainer._metrics.probabilities import probabilities, probabilities_of


def evaluate_run(options: EvaluateOptions) -> None:
    """Prints the loss and metrics of a run or an .onnx file on a dataset, for a classifier also a report per class."""
    check_figure(options.mistakes)
    has_loss = True
    x: Any
    y: Any = None
    if not options.data.is_dir():
        require_folder(options.images, options.data)
    if options.source.is_dir():
        _refuse_model_options(options)
        if options.max_length or options.tokenizer:
            raise InputError(
                f"--max-length and --tokenizer are for .onnx files; the run '{options.source}' contains its tokenizer."
            )
        trainer, encoder = open_run(options.source)
        if evaluates_texts(trainer, options.data):
            _refuse_mistakes_of_texts(options)
            evaluate_texts(trainer, options)
            return
        x, y = run_data(trainer, encoder, options.data, options.text)
        classes = image_classes(trainer._state) if encoder is None else encoder.classes_
    elif compares_texts(options):
        _refuse_mistakes_of_texts(options)
        print_text_values(options, score_pairs(options))
        return
    else:
        if given := [name for name in ("text_columns", "max_length", "tokenizer") if getattr(options, name)]:
            raise InputError(
                f"{', '.join(map(flag, given))}: for texts, pass a {', '.join(SUFFIXES)} file and a loss that compares "
                "them, e.g. --loss info_nce."
            )
        trainer, classes, x, y, has_loss = score_model(options)
    values = trainer.evaluate(x, y, batch_size=options.batch_size)
    if not has_loss:
        # Loss and metrics come from one function, which knows no metrics without a loss.
        del values["loss"]
    names = class_names(trainer, classes)
    matrix = confusion_matrix_if_small(trainer, x, y, names, options.batch_size)
    report = None if matrix is None or names is None else class_report(matrix, names)
    if options.mistakes is not None:
        if options.source.is_dir():
            keep_inside(options.mistakes, options.source)
        save_mistakes(trainer, x, y, names, options.mistakes, options.batch_size)
    if options.json:
        document: dict[str, Any] = {
            "directory" if options.source.is_dir() else "model": str(options.source),
            "data": str(options.data),
            **values,
        }
        if matrix is not None:
            document |= {"classes": report, "confusion_matrix": matrix.tolist()}
        if options.mistakes is not None:
            document["mistakes"] = str(options.mistakes)
        print_json(document)
        return
    labels = metric_labels(trainer, classes, list(values))
    rows = [(labels[key], f"{value:,.6g}") for key, value in values.items()]
    print_table(heading(f"{options.source} on {options.data.name}"), summary_table(None, rows))
    if options.mistakes is not None:
        print_table(f"Worst mistakes: {options.mistakes}")
    if matrix is not None and names is not None and report is not None:
        _print_classes(names, matrix, report)
    print_prediction_command(options.source, trainer.manifest.targets)


def run_data(
    trainer: Trainer, encoder: TableEncoder | None, path: Path, text: TextOptions
) -> tuple[Any, Any]:
    """Loads inputs and targets for a run; for a folder of images, the folder and None.

    Args:
        trainer: trainer of the run.
        encoder: the run's table encoder; None if it has none.
        path: path of the data.
        text: options for tables in text.
    """
    data = load_data(path, text, None if encoder is None else encoder.dialect_)
    if isinstance(data, ImageFolder):
        return data, None
    arrays = to_arrays(data, encoder, trainer.manifest, label_targets(trainer))
    x, y = assign(trainer.manifest.inputs, trainer.manifest.targets, arrays, path)
    return x, fit_targets(trainer, y)


def _refuse_mistakes_of_texts(options: EvaluateOptions) -> None:
    if options.mistakes is not None:
        raise InputError(f"--mistakes plots images; '{options.data}' contains texts.")


def _print_classes(names: Sequence[str], matrix: Any, report: Sequence[dict[str, Any]]) -> None:
    columns = ("class", "samples", "share", "precision", "recall", "f1")
    print_table(table("Classes", columns, report_rows(report), right=(1, 2, 3, 4, 5)))
    counts = [(name, *(f"{count:,}" for count in row)) for name, row in zip(names, matrix, strict=True)]
    # As in scikit-learn, rows are true classes.
    predicted = ("true class", *(f"as {name}" for name in names))
    matrix_table = table(None, predicted, counts, right=range(1, 1 + len(names)))
    print_table(heading("Confusion matrix: rows are true classes, columns are predicted ones"), matrix_table)


def _refuse_model_options(options: EvaluateOptions | PredictOptions) -> None:
    """Raises InputError for options of `evaluate MODEL` and `predict MODEL` that a run has stored."""
    names = ("loss", "loss_option", "loss_input", "metric")
    given = [flag(name) for name in names if getattr(options, name, None)]
    if found := given or options.images.given():
        own = (
            "a loss and metrics of its own"
            if given
            else "the size, mean and standard deviation of its training"
        )
        raise InputError(
            f"{' and '.join(found)}: '{options.source}' is a run, which has {own}. "
            f"Leave {'it' if len(found) == 1 else 'them'} out, or pass an .onnx file."
        )


def export_run(options: ExportOptions) -> None:
    """Exports a run's trained model, including the encoding of table columns unless `--network` is given."""
    trainer, encoder = open_run(options.directory)
    if options.include_preprocessing and encoder is not None:
        raise InputError(
            "--include-preprocessing is for runs on images; a run on a table is exported with its columns as inputs, "
            "unless --network is given. Leave it out."
        )
    names = export_model(
        trainer,
        None if options.network else encoder,
        options.output,
        options.outputs or None,
        include_preprocessing=options.include_preprocessing,
    )
    if options.json:
        print_json({"directory": str(options.directory), "model": str(options.output), "outputs": names})
        return
    print_table(f"Trained model: {options.output} (outputs: {', '.join(names)})")
    print_prediction_command(options.output, trainer.manifest.targets)


def write_predictions(options: PredictOptions) -> None:
    """Writes the predictions of a run or of an .onnx file for each sample to a file.

    Raises:
        InputError: the suffix of the output is unknown, the data does not match the model, or there are no
            probabilities to write.
        ModelError: the output cannot be written.
    """
    source, path, output = options.source, options.data, options.output
    if not path.is_dir():
        require_folder(options.images, path)
    if source.is_dir():
        _refuse_model_options(options)
    if source.is_dir() and path.suffix.lower() in (*SUFFIXES, ".txt"):
        trainer, _ = open_run(source)
        if evaluates_texts(trainer, path):
            write_embeddings(trainer, options)
            return
    # Checked first, because the model may take long.
    suffix = output.suffix.lower()
    if suffix not in (".npz", ".csv", ".parquet"):
        raise InputError(f"--output is '{output}'; choose an .npz, .csv or .parquet file.")

    def load(encoder: TableEncoder | None) -> Arrays | Table:
        data = load_data(path, options.text, None if encoder is None else encoder.dialect_)
        if options.id and not isinstance(data, Table):
            raise InputError(
                f"--id names columns of a table (.csv, .tsv, .parquet); '{path}' is not a table."
            )
        assert not isinstance(data, ImageFolder)
        return data

    columns: Arrays = {}
    data: Arrays | Table | None = None
    if path.is_dir():
        if options.id:
            raise InputError(f"--id names columns of a table (.csv, .tsv, .parquet); '{path}' is a folder.")
        folder = prepared_images(options.images, path)
        predictions, columns = _image_predictions(source, folder, options.batch_size)
    elif source.is_dir():
        trainer, encoder = open_run(source)
        data = load(encoder)
        predictions = _run_predictions(trainer, encoder, data, path, options.batch_size)
    else:
        values, encoder, data, calibration = model_predictions(source, load, path, options.batch_size)
        if options.loss is not None or (calibration is not None and encoder is None):
            values |= _classes_of(values, options.loss, source, calibration)
        predictions = _Predictions(values, None if encoder is None else encoder.classes_, encoder)
    if options.probabilities:
        predictions = predictions._replace(outputs=_only_probabilities(predictions, source))
    if isinstance(data, Table):
        columns = _ids(data, options.id, predictions.encoder)
    try:
        if source.is_dir():
            keep_inside(output, source)
        write_file(output, columns, predictions.outputs, predictions.classes)
    except OSError as error:
        raise ModelError(f"Writing the predictions to '{output}' failed: {error}.") from error
    samples = len(next(iter(predictions.outputs.values())))
    if options.json:
        shapes = {name: list(array.shape) for name, array in predictions.outputs.items()}
        print_json({"predictions": str(output), "samples": samples, "id": list(columns), "outputs": shapes})
        return
    names = ", ".join([*columns, *predictions.outputs])
    print_table(f"Predictions for {samples:,} samples: {output} ({names})")
    if source.is_dir():
        print_next("export", source, "-o", "model.onnx")
    else:
        print_next("evaluate", source, "--data", "FILE")


def _classes_of(
    outputs: Arrays, loss: str | None, source: Path, calibration: StoredCalibration | None
) -> Arrays:
    """Computes class probabilities and, if samples have one class each, the predicted class from a model's outputs.

    Args:
        outputs: outputs of an .onnx file, of which the first one with floating-point numbers has the scores.
        loss: name of the loss that the model was trained with; None for a calibrated model, whose file says it.
        source: path of the model, for error messages.
        calibration: calibration of the model; None if it was not calibrated.

    Raises:
        InputError: the loss does not define probabilities, or there are no scores.
    """
    if loss is not None:
        activation = type(make_loss(loss)).activation
    else:
        assert calibration is not None
        activation = calibration.activation
    scores = None if calibration is None else outputs.get(calibration.output)
    if scores is None:
        scores = next((array for array in outputs.values() if array.dtype.kind == "f"), None)
    probability = None
    if scores is not None and (scores.ndim > 1 or activation == "sigmoid"):
        probability = probabilities_of(activation, scores, 1 if calibration is None else calibration.axis)
    if (scores is None or probability is None) and loss is None:
        return {}
    if scores is None or probability is None:
        raise InputError(
            f"Predicting with '{source}': {argument('loss', loss)} does not define class probabilities for its outputs."
            " Leave it out to write the outputs alone."
        )
    found = {"probability": probability.astype(scores.dtype)}
    decided = None if calibration is None else calibration.decided(scores)
    if decided is not None:
        found["class"] = decided
    elif activation == "sigmoid":
        if scores.ndim == 1 or (scores.ndim == 2 and scores.shape[1] == 1):
            found["class"] = (scores.reshape(-1) > 0).astype(np.int64)
    elif scores.ndim == 2:
        found["class"] = scores.argmax(axis=1)
    return {name: array for name, array in found.items() if name not in outputs}


def _only_probabilities(predictions: _Predictions, source: Path) -> Arrays:
    """Returns the class probabilities as a dict with one array, whose key is the name of the output.

    Args:
        predictions: predictions of a run or model.
        source: path of the run or model, for error messages.

    Raises:
        InputError: the predictions contain no probabilities.
    """
    encoder = predictions.encoder
    name = "probability" if encoder is None else encoder.output_name("probability")
    if name not in predictions.outputs:
        raise InputError(
            f"--probabilities: '{source}' returns {', '.join(predictions.outputs)}, not probabilities. "
            "Pass the directory of a run with a classification loss, a model exported from a run on a table, or the "
            "loss of the model with --loss NAME."
        )
    return {name: predictions.outputs[name]}


def _ids(data: Table, asked: Sequence[str] | None, encoder: TableEncoder | None) -> Arrays:
    """Returns the columns of a table that identify its rows, by name. They are written before the predictions.

    Args:
        data: the table.
        asked: values of `--id`; None to use the id columns of the run.
        encoder: the run's table encoder; None if it has none.
    """
    if asked:
        names = [name for text in asked for name in ([text] if text in data.columns else text.split(","))]
    else:
        names = [name for name in (encoder.id if encoder is not None else ()) if name in data.columns]
    return {name: data.column(name).to_numpy(dtype=object) for name in names}


def open_run(directory: Path) -> tuple[Trainer, TableEncoder | None]:
    """Opens the run in a directory.

    Returns:
        The trainer, and the table encoder, which is None for a run on arrays.
    """
    trainer = Trainer.resume(directory)
    return trainer, saved_encoder(trainer, directory)


class _Predictions(NamedTuple):
    """Predictions for the samples of a dataset.

    Attributes:
        outputs: outputs by name, [samples, ...].
        classes: names of the classes in the order of their indices; None if classes have no names.
        encoder: table encoder of the run or model; None if it has none.
    """

    outputs: Arrays
    classes: list[str] | None
    encoder: TableEncoder | None


def _image_predictions(
    source: Path, folder: ImageFolder, batch_size: int | None
) -> tuple[_Predictions, Arrays]:
    """Computes the predictions of a run or model for a folder of images.

    Args:
        source: directory of the run, or path of the model.
        folder: the images.
        batch_size: samples per batch; None for the default.

    Returns:
        The predictions, and the column with the paths of the images.
    """
    names: list[str] | None
    if source.is_dir():
        trainer, encoder = open_run(source)
        if encoder is not None:
            raise InputError(
                f"The run '{source}' was trained on a table; '{folder.root}' is a folder. Pass a table."
            )
        found = run_image_predictions(trainer, folder, batch_size)
        named = image_classes(trainer._state)
        names = class_names(trainer, named)
        outputs = _with_classes(trainer, found.outputs, None, names if named is not None else None)
        found = found._replace(outputs=outputs)
    else:
        session = open_session(source, "model", CPU, None)
        found, names = model_image_predictions(session, source, folder, batch_size)
    columns, outputs = table_of(found)
    return _Predictions(outputs, names, None), columns


def _run_predictions(
    trainer: Trainer,
    encoder: TableEncoder | None,
    data: Arrays | Table,
    path: Path,
    batch_size: int | None,
) -> _Predictions:
    """Computes the predictions of a run, including `probability` and `class` if the loss is a classification loss.

    Args:
        trainer: trainer of the run.
        encoder: table encoder of the run; None if it has none.
        data: the samples.
        path: path of the data, for messages.
        batch_size: samples per batch; None for the default of `Trainer.predict`.
    """
    manifest = trainer.manifest
    arrays = to_arrays(data, encoder, manifest, ())
    # Targets in the file are ignored, so their shapes are not checked.
    targets = {"y", *(spec.name for spec in manifest.targets)}
    x, _ = assign(manifest.inputs, (), {name: arrays[name] for name in arrays if name not in targets}, path)
    result = trainer.predict(x, batch_size=batch_size)
    outputs = result if isinstance(result, dict) else {trainer.outputs[0]: result}
    names = class_names(trainer, None if encoder is None else encoder.classes_)
    named = names if encoder is not None and encoder.classes_ is not None else None
    if outputs.get(trainer.prediction or "") is None or not manifest.targets:
        return _Predictions(outputs, None, encoder)
    return _Predictions(_with_classes(trainer, outputs, encoder, named), named, encoder)


def _with_classes(
    trainer: Trainer, outputs: Arrays, encoder: TableEncoder | None, names: Sequence[str] | None
) -> Arrays:
    """Adds the arrays `probability` and `class` to the outputs of a run, if its loss is a classification loss.

    Args:
        trainer: trainer of the run.
        outputs: outputs by name, [samples, ...].
        encoder: the run's table encoder; None if it has none.
        names: names of the classes; None for class indices.
    """
    scores = outputs.get(trainer.prediction or "")
    if scores is None or not trainer.manifest.targets:
        return outputs
    labels = label_targets(trainer)[0].class_labels
    probability = probabilities(trainer.loss_name, scores, labels.axis if labels is not None else 1)
    chosen = _chosen(trainer, scores)
    if chosen is not None and names is not None:
        chosen = np.array(names)[chosen]
    # In the dtype of the logits, as the exported model returns them.
    probability = None if probability is None else probability.astype(scores.dtype)
    result = dict(outputs)
    for kind, array in (("probability", probability), ("class", chosen)):
        name = kind if encoder is None else encoder.output_name(kind)
        if array is not None and name not in result:
            result[name] = array
    return result


def _chosen(trainer: Trainer, scores: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Computes predicted class indices from logits, according to the run's loss.

    Args:
        trainer: trainer of the run, which determines the loss and the class axis.
        scores: the logits.

    Returns:
        The class index of each sample; None if samples do not have exactly one class each.
    """
    labels = label_targets(trainer)[0].class_labels
    calibration = stored_calibration(trainer._state)
    decided = None if calibration is None else calibration.decided(scores)
    if decided is not None:
        return decided
    if loss_class(trainer.loss_name).activation == "sigmoid":
        single = scores.ndim == 1 or (scores.ndim == 2 and scores.shape[1] == 1)
        return (scores.reshape(-1) > 0).astype(np.int64) if single else None
    if labels is None or scores.ndim != 2 or labels.count not in (None, scores.shape[1]):
        return None
    return np.asarray(scores.argmax(axis=1))
