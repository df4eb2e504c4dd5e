"""Settings of a run on texts: its tokenizer, and how token embeddings are pooled."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxtrain._words import words
from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.losses import EmbeddingLoss, Pooling, embedding_output
from onnxtrain.texts._tokenizer import TextTokenizer, positions_beside, read_json

PROPERTY = "onnxtrain.texts"
"""Name of the checkpoint property with the settings as JSON text."""

# Entries of 1_Pooling/config.json, written by sentence-transformers.
_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
_NAMES: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last"}


@dataclass(frozen=True)
class TextSettings:
    """Tokenizer and pooling of a run on texts.

    Attributes:
        output: name of the model output with embeddings or token embeddings; None if it is unknown.
        pooling: pooling of token embeddings, e.g. "mean"; "auto" is the mean.
        normalize: True to divide embeddings by their length.
        tokenizer: tokenizer of the model; None if there is none beside the model.
    """

    output: str | None = None
    pooling: str = "auto"
    normalize: bool = False
    tokenizer: TextTokenizer | None = None

    def to_json(self) -> str:
        """Returns the settings as JSON text, including the tokenizer."""
        tokenizer = None if self.tokenizer is None else self.tokenizer.json
        limit = None if self.tokenizer is None else self.tokenizer.max_length
        fields = {"output": self.output, "pooling": self.pooling, "normalize": self.normalize}
        return json.dumps({"version": 1, **fields, "tokenizer": tokenizer, "max_length": limit})

    @classmethod
    def from_json(cls, text: str, source: str) -> TextSettings:
        """Restores settings from :meth:`to_json`.

        Args:
            text: the JSON text.
            source: path of the run, for error messages.

        Raises:
            CheckpointError: the text is damaged, or another version wrote it.
        """
        try:
            record = json.loads(text)
            if record["version"] != 1:
                raise ValueError(f"version {record['version']}")
            tokenizer, limit = record["tokenizer"], record["max_length"]
            opened = None if tokenizer is None else TextTokenizer.from_json(str(tokenizer), limit)
            output = record["output"]
            return cls(
                None if output is None else str(output),
                str(record["pooling"]),
                bool(record["normalize"]),
                opened,
            )
        except (KeyError, TypeError, ValueError, InputError) as error:
            raise CheckpointError(
                f"Opening '{source}': its property '{PROPERTY}' is not a record of texts ({error}). It may have been "
                "written by another version of onnxtrain."
            ) from error

    @classmethod
    def of(
        cls, loss: EmbeddingLoss, outputs: Sequence[str], folder: Path | None, max_length: int | None = None
    ) -> TextSettings:
        """Returns the settings of a new run.

        Args:
            loss: loss of the run, whose pooling was filled in by :func:`loss_with_pooling`.
            outputs: names of the values that the loss reads, the embeddings first.
            folder: folder with the tokenizer; None if the model is not a file.
            max_length: number of tokens at which texts are truncated; None for the limit of the tokenizer.
        """
        tokenizer = None if folder is None else TextTokenizer.beside(folder, max_length)
        return cls(embedding_output(outputs) or outputs[0], loss.pooling, loss.normalize, tokenizer)


def open_tokenizer(
    tokenizer: str | os.PathLike[str] | Any, folder: Path | None, max_length: int | None
) -> TextTokenizer:
    """Opens the tokenizer that a user has chosen for a model.

    Args:
        tokenizer: as for :class:`TextTokenizer`.
        folder: folder of the model; None if the model is not a file.
        max_length: number of tokens at which texts are truncated; None for the limit in the file, at most the number of
            positions of the model.

    Raises:
        InputError: a file is missing or damaged.
    """
    result = TextTokenizer(tokenizer, max_length)
    positions = None if max_length is not None or folder is None else positions_beside(folder)
    if positions is not None:
        result._truncate_at(positions)
    return result


def model_folder(path: str | os.PathLike[str]) -> Path:
    """Returns the folder with the tokenizer of a model: its own, or for `onnx/model.onnx` the one above."""
    folder = Path(path).absolute().parent
    above = folder.name == "onnx" and not (folder / "tokenizer.json").is_file()
    return folder.parent if above else folder


def loss_with_pooling(
    loss: EmbeddingLoss, model: ir.Model, output: str | None, folder: Path
) -> EmbeddingLoss:
    """Fills in the pooling that sentence-transformers wrote beside a model, in `1_Pooling` and `modules.json`.

    Args:
        loss: the loss. A pooling other than "auto" is kept.
        model: the model.
        output: name of the output that the loss reads.
        folder: folder of the model.

    Raises:
        InputError: a file is damaged, or its pooling is not supported.
    """
    value = next((value for value in model.graph.outputs if value.name == output), None)
    # A model with an output [batch, dim] contains its pooling and its normalisation.
    pooled = output == "sentence_embedding" or (
        value is not None and value.shape is not None and len(value.shape) == 2
    )
    path = folder / "1_Pooling" / "config.json"
    if pooled or loss.pooling != "auto" or not path.is_file():
        return loss
    return dataclasses.replace(
        loss, pooling=_pooling(read_json(path), path), normalize=loss.normalize or _normalizes(folder)
    )


def _pooling(config: dict[str, Any], path: Path) -> Pooling:
    """Returns the pooling in a file of sentence-transformers, e.g. "mean"."""
    chosen = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    named = _NAMES.get(str(config.get("pooling_mode"))) if "pooling_mode" in config else None
    pooling = named or (_MODES.get(chosen[0]) if len(chosen) == 1 else None)
    if pooling is None:
        received = config.get("pooling_mode") or ", ".join(chosen) or "nothing"
        raise InputError(
            f"Reading '{path}': it asks for {received}. Choose a pooling for training, e.g. "
            f"{words().loss_setting('InfoNCELoss', 'pooling', 'mean')}."
        )
    return pooling


def _normalizes(folder: Path) -> bool:
    """True if `modules.json` contains a module that normalizes embeddings."""
    path = folder / "modules.json"
    try:
        modules = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    except (OSError, ValueError) as error:
        raise InputError(f"Reading '{path}': {error}.") from error
    entries = modules if isinstance(modules, list) else []
    return any(
        str(entry.get("type", "")).endswith("Normalize") for entry in entries if isinstance(entry, dict)
    )
