"""Reads pairs of texts for `train` and `evaluate`, embeds texts for `predict`, and measures retrieval."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.cli._command_options import EvaluateOptions, PredictOptions
from onnxtrain.cli._data import Arrays, load_data
from onnxtrain.cli._options import TextOptions
from onnxtrain.cli._output import heading, print_json, print_table, summary_table
from onnxtrain.cli._remember import PROPERTY as OPTIONS
from onnxtrain.cli._saved_run import saved_properties
from onnxtrain.cli._train_options import TrainOptions
from onnxtrain.errors import InputError, ModelError
from onnxtrain.images import ImageFolder
from onnxtrain.losses import LOSSES, EmbeddingLoss
from onnxtrain.passes import save_model
from onnxtrain.recipe import Recipe
from onnxtrain.runtime.artifact_folder import keep_inside
from onnxtrain.runtime.atomic import replace_file
from onnxtrain.tables import Dialect, Table
from onnxtrain.texts import TextPairs, TextTokenizer, add_pooling
from onnxtrain.texts._pairs import SUFFIXES
from onnxtrain.texts._settings import PROPERTY, model_folder, open_tokenizer
from onnxtrain.trainer import Trainer
from onnxtrain.trainer._fit.datasets import Data, fit_datasets
from onnxtrain.trainer._fit.texts import text_metrics, text_settings
from onnxtrain.trainer.data._samples import SampleSource

Loaded = Arrays | Table | ImageFolder | TextPairs


def load_train_data(
    options: TrainOptions,
    path: Path | None = None,
    *,
    text: TextOptions | None = None,
    like: Dialect | None = None,
) -> Loaded:
    """Loads training or validation data: pairs of texts if the loss compares texts, else arrays, a table or images.

    Args:
        options: options of the command.
        path: file or folder to load; None for `--data`.
        text: how to read the text file of a table; None for the options of the command.
        like: dialect of the table that a run was trained on, for what the file leaves open.

    Raises:
        InputError: the file is missing or damaged, or options for texts are given with other data.
    """
    path = path or options.data
    assert path is not None
    if path.suffix.lower() in SUFFIXES and _trains_texts(options):
        assert options.source is not None
        if options.source.is_dir() and options.tokenizing.tokenizer is not None:
            raise InputError(
                f"--tokenizer is for new runs; the run in '{options.source}' contains its tokenizer."
            )
        columns, weight = options.texts.text_columns, options.sample_weight
        if options.source.is_dir():
            saved = _saved_options(options.source)
            columns, weight = columns or saved.get("text_columns"), weight or saved.get("sample_weight")
        return TextPairs.read(path, split_columns(columns), weight)
    tokenizer = [] if options.tokenizing.tokenizer is None else ["--tokenizer"]
    # Token ids of a run on texts may also be arrays.
    if (given := options.texts.given() + tokenizer) and not _trains_texts(options):
        raise InputError(
            f"{', '.join(given)} are for texts: a {', '.join(SUFFIXES)} file and a loss over texts, e.g. --loss "
            "info_nce."
        )
    return load_data(path, options.text if text is None else text, like)


def _trains_texts(options: TrainOptions) -> bool:
    if options.source is None:
        return False
    if options.source.is_dir():
        properties = saved_properties(options.source)
        return properties is not None and PROPERTY in properties
    return issubclass(LOSSES.get(options.model.loss or "", object), EmbeddingLoss)


def _saved_options(directory: Path) -> dict[str, Any]:
    """Returns the options that a run stores; an empty dict if it has none. `recall` reports damaged ones."""
    properties = saved_properties(directory)
    try:
        saved = (
            json.loads(str(properties[OPTIONS]))["options"] if properties and OPTIONS in properties else None
        )
    except (ValueError, KeyError, TypeError):
        saved = None
    return saved if isinstance(saved, dict) else {}


def split_columns(texts: Sequence[str] | None) -> list[str] | None:
    """Splits the values of `--text-columns` at commas, e.g. ["question", "answer"]; returns None for no value."""
    names = [name.strip() for text in texts or () for name in text.split(",") if name.strip()]
    return names or None


def chosen_tokenizer(options: TrainOptions, recipe: Recipe) -> TextTokenizer | None:
    """Returns the tokenizer of `--tokenizer`, or the one beside the model; None for a loss over other data.

    Raises:
        InputError: the file is missing or damaged.
    """
    if not isinstance(recipe.loss, EmbeddingLoss) or options.source is None:
        return None
    limit, folder = options.texts.max_length, model_folder(options.source)
    if options.tokenizing.tokenizer is not None:
        return open_tokenizer(options.tokenizing.tokenizer, folder, limit)
    return TextTokenizer.beside(folder, limit)


def measured(trainer: Trainer, pairs: TextPairs, options: TrainOptions, validation: Any) -> dict[str, float]:
    """Returns the metrics of embeddings of the validation data, or of the training data if there is no validation.

    Args:
        trainer: trainer of the run.
        pairs: the training data.
        options: options of the command.
        validation: fraction of the training data, or other pairs; None for no validation.

    Returns:
        Metrics by name; the names begin with "val_" if they are of validation data.
    """
    data = Data(pairs, batch_size=options.batch_size, validation=validation)
    source, held_out = fit_datasets(trainer._state, data)
    used = source if held_out is None else held_out
    # Both are opened from pairs of texts.
    assert isinstance(used, SampleSource)
    chosen = used.dataset if used.chosen is None else used.dataset.take(used.chosen.tolist())
    values = text_metrics(trainer._state, chosen, options.batch_size)
    return {f"{'' if held_out is None else 'val_'}{name}": value for name, value in values.items()}


def include_pooling(trainer: Trainer, path: Path) -> None:
    """Adds the output `sentence_embedding` to an exported model, pooled as in training."""
    settings = text_settings(trainer._state)
    if settings is None:
        return
    pooling = "mean" if settings.pooling == "auto" else settings.pooling
    save_model(add_pooling(path, pooling, normalize=settings.normalize, output=settings.output), path)


def evaluates_texts(trainer: Trainer, path: Path) -> bool:
    """True if a run was trained on texts, and a file may contain texts."""
    return text_settings(trainer._state) is not None and path.suffix.lower() in (*SUFFIXES, ".txt")


def evaluate_texts(trainer: Trainer, options: EvaluateOptions) -> None:
    """Prints the loss and the metrics of embeddings on a file with pairs of texts."""
    saved = _saved_options(options.source)
    columns = split_columns(options.text_columns or saved.get("text_columns"))
    pairs = TextPairs.read(options.data, columns)
    # Metrics count each sample once, as for other data.
    pairs = TextPairs(pairs.texts, pairs.scores, source=pairs.source)
    print_text_values(options, trainer.evaluate(pairs, batch_size=options.batch_size))


def print_text_values(options: EvaluateOptions, values: Mapping[str, float]) -> None:
    """Prints the loss and the metrics of embeddings that `evaluate` has computed."""
    if options.json:
        kind = "directory" if options.source.is_dir() else "model"
        print_json({kind: str(options.source), "data": str(options.data), **values})
        return
    rows = [(name, f"{value:,.6g}") for name, value in values.items()]
    print_table(heading(f"{options.source} on {options.data.name}"), summary_table(None, rows))


def write_embeddings(trainer: Trainer, options: PredictOptions) -> None:
    """Writes the embeddings of the texts in a file, float32 [texts, dim], as an .npy or .npz file.

    Raises:
        InputError: the file has several columns of texts, or the output has another suffix.
        ModelError: the output cannot be written.
    """
    output = options.output
    suffix = output.suffix.lower()
    if suffix not in (".npy", ".npz"):
        raise InputError(f"--output is '{output}'; embeddings of texts are written to an .npy or .npz file.")
    texts = read_texts(options.data, split_columns(options.text_columns))
    embeddings = trainer.predict(texts, batch_size=options.batch_size)
    assert isinstance(embeddings, np.ndarray)
    try:
        keep_inside(output, options.source)
        with replace_file(output) as file:
            if suffix == ".npy":
                np.save(file, embeddings)
            else:
                np.savez(file, embedding=embeddings)
    except OSError as error:
        raise ModelError(f"Writing the embeddings to '{output}' failed: {error}.") from error
    if options.json:
        print_json({"predictions": str(output), "samples": len(texts), "shape": list(embeddings.shape)})
        return
    print_table(f"Embeddings of {len(texts):,} texts: {output} (float32 {list(embeddings.shape)})")


def read_texts(path: Path, columns: list[str] | None) -> list[str]:
    """Reads one column of texts from a table, or the lines of a .txt file."""
    try:
        if path.suffix.lower() == ".txt":
            texts = path.read_text(encoding="utf-8-sig").splitlines()
        else:
            texts = TextPairs.read_column(path, columns)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"Reading texts from '{path}': {error}.") from error
    if not texts or not all(text.strip() for text in texts):
        raise InputError(f"Reading texts from '{path}': {'a text is empty' if texts else 'there are none'}.")
    return texts
