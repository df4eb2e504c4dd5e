"""Evaluates any .onnx file that embeds texts: computes the embeddings of pairs, and then their loss and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from onnxtrain.cli._command_options import EvaluateOptions
from onnxtrain.cli._evaluate_model import judge
from onnxtrain.cli._loss import make_chosen_loss
from onnxtrain.cli._predict_model import cast_to_input, input_specs, run_in_batches
from onnxtrain.cli._texts import split_columns
from onnxtrain.errors import InputError
from onnxtrain.losses import LOSSES, EmbeddingLoss
from onnxtrain.recipe import Recipe
from onnxtrain.runtime.device import CPU
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.session import open_session
from onnxtrain.texts import TextPairs, TextTokenizer
from onnxtrain.texts._pairs import SUFFIXES
from onnxtrain.texts._settings import TextSettings, model_folder, open_tokenizer
from onnxtrain.trainer._fit.texts import embed_with, pair_metrics, text_recipe
from onnxtrain.trainer.data._texts import check_pairs


def compares_texts(options: EvaluateOptions) -> bool:
    """True if `onnxtrain evaluate MODEL` computes a loss over texts, on a file that may contain them."""
    of_texts = issubclass(LOSSES.get(options.loss or "", object), EmbeddingLoss)
    return of_texts and options.data.suffix.lower() in SUFFIXES


def score_pairs(options: EvaluateOptions) -> dict[str, float]:
    """Returns the loss and the metrics of embeddings of pairs of texts, as `evaluate` of a run computes them.

    The model may be one that cannot be trained, because the loss is computed from its embeddings alone.

    Raises:
        InputError: the data does not match the loss, there is no tokenizer, or it is unclear which output to use.
    """
    pairs = TextPairs.read(options.data, split_columns(options.text_columns))
    loss, settings = _loss_and_settings(options)
    check_pairs(pairs, loss.texts, scored=False)
    rows = _embeddings(options, settings, [text for row in pairs.texts for text in row])
    # The rows are pooled.
    trainer, x = judge({settings.output or "embedding": rows}, replace(loss, pooling="auto"), options.metric)
    target = trainer.manifest.targets[0]
    scored = target.dtype.storage.kind == "f"
    check_pairs(pairs, loss.texts, scored=scored)
    if scored:
        y = np.array(pairs.scores, target.dtype.held)
    else:
        # Equal texts get equal numbers.
        numbers: dict[str, int] = {}
        y = np.array([[numbers.setdefault(text, len(numbers)) for text in row] for row in pairs.texts])
    of_pairs = {name: rows.reshape(len(pairs), pairs.width, -1) for name in x}
    values = trainer.evaluate(of_pairs, {target.name: y}, batch_size=options.batch_size)
    places = {text: index for index, text in enumerate(text for row in pairs.texts for text in row)}
    return values | pair_metrics(lambda texts: rows[[places[text] for text in texts]], pairs, scored=scored)


def _loss_and_settings(options: EvaluateOptions) -> tuple[EmbeddingLoss, TextSettings]:
    """Returns the loss of `--loss`, and how to embed texts for it: from the options and the files beside the model."""
    assert options.loss is not None
    source, folder = options.source, model_folder(options.source)
    asked = list(options.loss_input or ()) or None
    chosen = make_chosen_loss(options.loss, options.loss_option)
    recipe = text_recipe(Recipe(loss=chosen, loss_input_names=asked), source, source)
    loss, names = recipe.loss, recipe.loss_input_names
    assert isinstance(loss, EmbeddingLoss)
    if options.tokenizer is not None:
        tokenizer: TextTokenizer | None = open_tokenizer(options.tokenizer, folder, options.max_length)
    else:
        tokenizer = TextTokenizer.beside(folder, options.max_length)
    return loss, TextSettings(names[0] if names else None, loss.pooling, loss.normalize, tokenizer)


def _embeddings(options: EvaluateOptions, settings: TextSettings, texts: Sequence[str]) -> Array:
    """Returns the embeddings of texts by the model, float32 [texts, dim]."""
    source = options.source
    session = open_session(source, "model", CPU, None)
    inputs = input_specs(session, source)
    outputs = [value.name for value in session.get_outputs()]
    output = settings.output
    if output is None or output not in outputs:
        problem = (
            f"it has no output '{output}'"
            if output
            else "name the output with the embeddings: --loss-input NAME"
        )
        raise InputError(f"Evaluating '{source}': {problem}; its outputs are {', '.join(outputs)}.")

    def compute(arrays: Sequence[Array]) -> Array:
        feeds = [cast_to_input(array, spec) for array, spec in zip(arrays, inputs, strict=True)]
        try:
            return run_in_batches(session, source, [output], inputs, feeds, options.batch_size, check=True)[
                output
            ]
        except InputError:
            raise
        # ONNX Runtime's exceptions have no common base class but Exception.
        except Exception as error:
            raise InputError(
                f"Evaluating '{source}' failed: {error}. The texts of the batch have up to {arrays[0].shape[1]} "
                "tokens. If the model takes fewer, pass their number as --max-length, which truncates longer texts."
            ) from error

    return embed_with(compute, texts, settings, inputs, options.batch_size)
