"""Pools token embeddings, in numpy and in a model that is to return one embedding per text."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.errors import GraphBuildError
from onnxtrain.losses import embedding_output, pool_tokens, unit_rows
from onnxtrain.passes import ModelSource, canonicalize, load_model

Array = np.ndarray[Any, Any]

OUTPUT = "sentence_embedding"
"""Name of the output that :func:`add_pooling` adds."""


def pool_rows(rows: Array, mask: Array | None, pooling: str, *, normalize: bool) -> Array:
    """Pools token embeddings as the losses do; returns float32 [texts, dim].

    Args:
        rows: embeddings [texts, dim], which are not pooled, or token embeddings [texts, tokens, dim].
        mask: 1 for tokens and 0 for padding, [texts, tokens]; None if there is no padding.
        pooling: "mean", "cls", "max" or "last"; "auto" is the mean.
        normalize: True to divide embeddings by their length.
    """
    rows = rows.astype(np.float32)
    if rows.ndim == 3:
        mask = np.ones(rows.shape[:2], np.int64) if mask is None else mask
        if pooling == "cls":
            rows = rows[:, 0]
        elif pooling == "last":
            rows = rows[np.arange(len(rows)), rows.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)]
        elif pooling == "max":
            rows = np.where(mask[..., None] == 1, rows, np.float32(-1e9)).max(axis=1)
        else:
            weights = mask / np.maximum(mask.sum(axis=1, keepdims=True), 1e-9)
            rows = np.einsum("bt,btk->bk", weights.astype(np.float32), rows)
    if normalize:
        rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return rows


def add_pooling(
    model: ModelSource, pooling: str = "mean", *, normalize: bool = False, output: str | None = None
) -> ir.Model:
    """Returns a model in canonical form (opset 21 or newer) with one more output, `sentence_embedding` [batch, dim].

    Args:
        model: path of an `.onnx` file, `ModelProto` or `onnx_ir.Model`; not changed.
        pooling: "mean" over the attention mask, "cls" for the first token, "max", or "last" for the last token.
        normalize: True to divide embeddings by their length.
        output: name of the output with the token embeddings [batch, tokens, dim]. Default: the only output,
            "token_embeddings" or "last_hidden_state".

    Raises:
        GraphBuildError: there is no such output or pooling, the output is not one of token embeddings, or the model
            already has an output `sentence_embedding`.
    """
    copy = canonicalize(load_model(model))
    graph = copy.graph
    names = [str(value.name) for value in graph.outputs]
    name = output or embedding_output(names)
    tokens = next((value for value in graph.outputs if value.name == name), None)
    if tokens is None or OUTPUT in names or len(static_dims(tokens) or ()) != 3:
        raise GraphBuildError(
            f"adding a pooling: name an output with token embeddings [batch, tokens, dim]; the model returns "
            f"{', '.join(f'{value.name} {value.shape}' for value in graph.outputs)}"
        )
    if pooling not in ("mean", "cls", "max", "last"):
        raise GraphBuildError(f"adding a pooling: received {pooling!r}; give 'mean', 'cls', 'max' or 'last'")
    op = Emitter(graph)
    mask = next((value for value in graph.inputs if value.name == "attention_mask"), None)
    result = pool_tokens(op, tokens, mask, pooling)
    result = unit_rows(op, result) if normalize else result
    result.name = op.unique_name(OUTPUT)
    graph.outputs.append(result)
    return copy
