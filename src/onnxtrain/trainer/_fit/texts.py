"""Embeds texts with the models of a run, and measures how well the embeddings find texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain._words import argument
from onnxtrain.artifacts import loss_for
from onnxtrain.errors import InputError
from onnxtrain.losses import EmbeddingLoss, embedding_output
from onnxtrain.passes import ModelSource, load_model
from onnxtrain.recipe import Recipe
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.manifest import InputSpec
from onnxtrain.texts import TextPairs, TextTokenizer, retrieval_metrics, similarity_metrics
from onnxtrain.texts._pooling import pool_rows
from onnxtrain.texts._settings import PROPERTY, TextSettings, loss_with_pooling, model_folder, open_tokenizer
from onnxtrain.trainer._fit.state import TrainingState
from onnxtrain.trainer.data import Layout
from onnxtrain.trainer.data._texts import check_text_inputs, require_tokenizer


def text_recipe(recipe: Recipe, model: ModelSource, source: Path | None) -> Recipe:
    """Fills in what a loss over texts needs: the output with the embeddings, and the pooling beside the model.

    Args:
        recipe: the training settings; returned unchanged for other losses.
        model: the model.
        source: path of its file; None if the model is an object.

    Raises:
        InputError: a file beside the model is damaged.
    """
    loss = loss_for(recipe.loss)
    if not isinstance(loss, EmbeddingLoss):
        return recipe
    loaded = load_model(model)
    names = list(recipe.loss_input_names or [str(value.name) for value in loaded.graph.outputs])
    output = embedding_output(names)
    if source is not None:
        loss = loss_with_pooling(loss, loaded, output, model_folder(source))
    return dataclasses.replace(
        recipe, loss=loss, loss_input_names=recipe.loss_input_names or ([output] if output else None)
    )


def text_properties(
    recipe: Recipe, source: Path | None, tokenizer: Any, max_length: int | None
) -> dict[str, str]:
    """Returns the checkpoint property of a run on texts; no property for other losses.

    Args:
        recipe: the recipe from :func:`text_recipe`.
        source: path of the model's file; None if the model is an object.
        tokenizer: tokenizer that the user passed; None for the one beside the model.
        max_length: number of tokens at which texts are truncated; None for the limit of the tokenizer.

    Raises:
        InputError: the tokenizer is damaged, or the loss is not one over texts although a tokenizer was passed.
    """
    loss = loss_for(recipe.loss)
    if not isinstance(loss, EmbeddingLoss):
        if tokenizer is not None or max_length is not None:
            raise InputError(
                f"{argument('tokenizer' if max_length is None else 'max_length')} is for losses over texts, e.g. "
                f"{argument('loss', 'info_nce')}; leave it out."
            )
        return {}
    if recipe.loss_input_names is None:
        return {}
    folder = None if source is None or tokenizer is not None else model_folder(source)
    settings = TextSettings.of(loss, list(recipe.loss_input_names), folder, max_length)
    if tokenizer is not None:
        opened = (
            tokenizer
            if isinstance(tokenizer, TextTokenizer)
            else open_tokenizer(tokenizer, None if source is None else model_folder(source), max_length)
        )
        settings = dataclasses.replace(settings, tokenizer=opened)
    return {PROPERTY: settings.to_json()}


def text_settings(state: TrainingState) -> TextSettings | None:
    """Returns the settings of a run on texts; None for other runs."""
    # Parsing a tokenizer takes up to a second, so it is done once.
    properties = state.run.state.properties
    text = str(properties[PROPERTY]) if PROPERTY in properties else None
    if text is None:
        return None
    known = state.__dict__.get("_texts")
    if known is None or known[0] != text:
        known = state.__dict__["_texts"] = (text, TextSettings.from_json(text, str(state.directory)))
    settings: TextSettings = known[1]
    return settings


def embed(state: TrainingState, texts: Sequence[str], batch_size: int | None = None) -> Array:
    """Returns the embeddings of texts, float32 [texts, dim], computed in inference mode.

    Args:
        state: the trainer's state.
        texts: the texts.
        batch_size: texts per batch, 32 by default.

    Raises:
        InputError: the run has no tokenizer, or a text has no tokens.
    """
    settings, layout = _settings_and_layout(state)

    def compute(arrays: Sequence[Array]) -> Array:
        outputs = state.run.predict([layout.cast(arrays)])
        return outputs[settings.output or next(iter(outputs))]

    with state.averaged():
        return embed_with(compute, texts, settings, layout.inputs, batch_size)


def embed_with(
    compute: Callable[[Sequence[Array]], Array],
    texts: Sequence[str],
    settings: TextSettings,
    inputs: Sequence[InputSpec],
    batch_size: int | None = None,
) -> Array:
    """Returns the embeddings of texts by a function that runs a model, float32 [texts, dim].

    Args:
        compute: returns the model's output for a batch: one int64 array [texts, tokens] per input.
        texts: the texts.
        settings: tokenizer and pooling.
        inputs: inputs of the model.
        batch_size: texts per batch, 32 by default.

    Raises:
        InputError: there is no tokenizer, the model has other inputs than tokenizers provide, or a text has no tokens.
    """
    tokenizer = require_tokenizer(settings.tokenizer)
    names, length = _names_and_length(inputs)
    # Texts of similar lengths share a batch, which needs less padding.
    distinct = sorted(set(texts), key=len)
    size = batch_size or 32
    parts = []
    for start in range(0, len(distinct), size):
        arrays = tokenizer.arrays(distinct[start : start + size], names, length)
        rows = compute([arrays[name] for name in names])
        mask = arrays.get("attention_mask")
        parts.append(pool_rows(rows, mask, settings.pooling, normalize=settings.normalize))
    places = {text: index for index, text in enumerate(distinct)}
    result: Array = np.concatenate(parts)[[places[text] for text in texts]]
    return result


def text_arrays(state: TrainingState, texts: Sequence[str]) -> list[Array]:
    """Returns the inputs of the inference model for texts, in its order; for the errors, see :func:`embed`."""
    settings, layout = _settings_and_layout(state)
    names, length = _names_and_length(layout.inputs)
    arrays = require_tokenizer(settings.tokenizer).arrays(texts, names, length)
    return list(layout.cast([arrays[name] for name in names]))


def _settings_and_layout(state: TrainingState) -> tuple[TextSettings, Layout]:
    """Returns how a run embeds texts, and the inputs of its inference model."""
    settings = text_settings(state)
    if settings is None:
        raise InputError("The run was not trained on texts, so it does not tokenize them. Pass arrays.")
    return settings, Layout.of(state.run.manifest, predicting=True)


def _names_and_length(inputs: Sequence[InputSpec]) -> tuple[list[str], int | None]:
    """Returns the names of a model's inputs, all for tokens, and the length of a fixed axis of tokens."""
    check_text_inputs(inputs)
    shape = inputs[0].shape
    return [spec.name for spec in inputs], shape[1] if shape is not None and isinstance(
        shape[1], int
    ) else None


def text_metrics(state: TrainingState, pairs: TextPairs, batch_size: int | None = None) -> dict[str, float]:
    """Returns :func:`pair_metrics` of the embeddings by the models of a run.

    Args:
        state: the trainer's state.
        pairs: the samples.
        batch_size: texts per batch, 32 by default.
    """
    scored = state.run.manifest.targets[0].dtype.storage.kind == "f"
    return pair_metrics(lambda texts: embed(state, texts, batch_size), pairs, scored=scored)


def pair_metrics(
    embed: Callable[[Sequence[str]], Array], pairs: TextPairs, *, scored: bool
) -> dict[str, float]:
    """Returns metrics of the embeddings of pairs: correlation with their scores, or else retrieval metrics.

    For retrieval, each distinct first text is a query. The corpus is all other texts; those paired with a query are
    relevant, negatives are not.

    Args:
        embed: returns the embeddings of texts, float32 [texts, dim].
        pairs: the samples.
        scored: True if the loss compares the texts with scores.
    """
    first = _column(pairs, 0)
    if scored and pairs.scores is not None:
        rows = embed([*first, *_column(pairs, 1)])
        return similarity_metrics(rows[: len(first)], rows[len(first) :], pairs.scores)
    queries = list(dict.fromkeys(first))
    corpus = list(dict.fromkeys(text for column in range(1, pairs.width) for text in _column(pairs, column)))
    places = {text: index for index, text in enumerate(corpus)}
    relevant: dict[str, set[int]] = {query: set() for query in queries}
    for row in pairs.texts:
        relevant[row[0]].add(places[row[1]])
    embeddings = embed([*queries, *corpus])
    return retrieval_metrics(
        embeddings[: len(queries)], embeddings[len(queries) :], [relevant[query] for query in queries]
    )


def _column(pairs: TextPairs, index: int) -> list[str]:
    return [row[index] for row in pairs.texts]
