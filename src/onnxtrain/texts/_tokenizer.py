"""Converts texts to token ids with a `tokenizer.json` file."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain._words import argument
from onnxtrain.errors import InputError, MissingPackageError

Array = np.ndarray[Any, Any]

FILE = "tokenizer.json"
# Tokenizers without a limit store a huge one.
_NO_LIMIT = 10**6
# These models number positions from behind the id of the padding token.
_POSITIONS_BEHIND_PADDING = (
    *("camembert", "data2vec-text", "ibert", "longformer", "luke", "mluke", "mpnet", "roberta"),
    *("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)
_PADDING = ("[PAD]", "<pad>", "<|padding|>", "<|endoftext|>", "</s>")


class TextTokenizer:
    """Converts texts to token ids, with the package `tokenizers`.

    Args:
        tokenizer: path of a `tokenizer.json` file, or a `tokenizers.Tokenizer`, which is copied.
        max_length: number of tokens at which texts are truncated, e.g. 128. Default: the limit in the file, if any.

    Raises:
        InputError: the file is missing or is not a tokenizer, or `max_length` is too small.
        MissingPackageError: `tokenizers` is not installed.
    """

    def __init__(self, tokenizer: str | os.PathLike[str] | Any, max_length: int | None = None) -> None:
        source = "the tokenizer"
        if isinstance(tokenizer, str | os.PathLike):
            path = Path(tokenizer)
            path = path / FILE if path.is_dir() else path
            source = f"the tokenizer '{path}'"
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(
                    f"Reading {source}: {error}. Pass the path of a tokenizer.json file."
                ) from error
        elif hasattr(tokenizer, "backend_tokenizer"):
            # A fast tokenizer of transformers.
            text = tokenizer.backend_tokenizer.to_str()
        elif hasattr(tokenizer, "to_str"):
            text = tokenizer.to_str()
        else:
            raise InputError(
                f"The tokenizer is a {type(tokenizer).__name__}; pass the path of a tokenizer.json file or a "
                "tokenizers.Tokenizer."
            )
        self._open(text, max_length, source)

    @classmethod
    def from_json(
        cls, text: str, max_length: int | None = None, source: str = "the tokenizer"
    ) -> TextTokenizer:
        """Returns the tokenizer in the text of a `tokenizer.json` file; `source` names it in error messages."""
        result = cls.__new__(cls)
        result._open(text, max_length, source)
        return result

    @classmethod
    def beside(cls, folder: Path, max_length: int | None = None) -> TextTokenizer | None:
        """Returns the tokenizer of the model in a folder; None if there is no `tokenizer.json`.

        Args:
            folder: folder with the files of a Hugging Face or sentence-transformers model.
            max_length: see :class:`TextTokenizer`. Default: the limit in `sentence_bert_config.json`,
                `tokenizer_config.json` or `tokenizer.json`, at most the number of positions in `config.json`.
        """
        if not (folder / FILE).is_file():
            return None
        positions = positions_beside(folder) if max_length is None else None
        for name, key in (
            ("sentence_bert_config.json", "max_seq_length"),
            ("tokenizer_config.json", "model_max_length"),
        ):
            limit = read_json(folder / name).get(key) if (folder / name).is_file() else None
            if max_length is None and isinstance(limit, int | float) and 0 < limit < _NO_LIMIT:
                max_length = int(limit)
        result = cls(folder / FILE, max_length)
        if positions is not None:
            result._truncate_at(positions)
        return result

    def _open(self, text: str, max_length: int | None, source: str) -> None:
        try:
            module = importlib.import_module("tokenizers")
        except ModuleNotFoundError as error:
            raise MissingPackageError(
                "Training on texts needs tokenizers, which is not installed: pip install 'onnxtrain[text]'"
            ) from error
        if max_length is not None and (type(max_length) is not int or max_length < 1):
            raise InputError(
                f"{argument('max_length', max_length)}: pass a positive number of tokens, e.g. 128."
            )
        # The package raises plain Exceptions.
        try:
            tokenizer = module.Tokenizer.from_str(text)
            limit = max_length or (tokenizer.truncation or {}).get("max_length")
            tokenizer.no_padding()
            tokenizer.no_truncation()
            if limit is not None:
                tokenizer.enable_truncation(limit)
        except Exception as error:
            raise InputError(f"Opening {source}: {error}. Pass a tokenizer.json file.") from error
        self._text = text
        self._tokenizer = tokenizer
        self.max_length: int | None = limit
        stored = json.loads(text).get("padding") or {}
        known = (tokenizer.token_to_id(name) for name in _PADDING)
        self._padding = int(stored.get("pad_id", next((index for index in known if index is not None), 0)))

    @property
    def json(self) -> str:
        """Text of the `tokenizer.json` file."""
        return self._text

    def _truncate_at(self, length: int) -> None:
        """Truncates texts at this number of tokens, unless they are truncated at fewer tokens already."""
        if self.max_length is None or self.max_length > length:
            # By the tokenizer, which keeps the special tokens at the end.
            self._tokenizer.enable_truncation(length)
            self.max_length = length

    def arrays(
        self, texts: Sequence[str], names: Sequence[str], length: int | None = None
    ) -> dict[str, Array]:
        """Tokenizes texts, and pads them to the longest one.

        Args:
            texts: the texts.
            names: inputs of the model, of "input_ids", "attention_mask", "token_type_ids" and "position_ids".
            length: length to truncate and pad to, for a model with a fixed number of tokens.

        Returns:
            int64 arrays [texts, tokens] by name.

        Raises:
            InputError: a text has no tokens, or texts of several lengths need padding that the model does not mask.
        """
        if length is not None:
            self._truncate_at(length)
        encoded = self._encoded(texts)
        counts = np.array([len(entry.ids) for entry in encoded])
        if not counts.all():
            raise InputError(f"the text {texts[int(np.argmin(counts))][:40]!r} has no tokens; remove it.")
        size = length or int(counts.max())
        if "attention_mask" not in names and int(counts.min()) < size:
            raise InputError(
                f"the texts have {counts.min()} to {size} tokens, but the model has no input 'attention_mask' to mask "
                "padding. Export the model with this input."
            )
        mask = (np.arange(size) < counts[:, None]).astype(np.int64)
        result = {"attention_mask": mask, "position_ids": np.broadcast_to(np.arange(size), mask.shape).copy()}
        for name, fill in (("input_ids", self._padding), ("token_type_ids", 0)):
            result[name] = np.full(mask.shape, fill, np.int64)
        for row, (entry, count) in enumerate(zip(encoded, counts.tolist(), strict=True)):
            result["input_ids"][row, :count] = entry.ids
            result["token_type_ids"][row, :count] = entry.type_ids
        return {name: result[name] for name in names}

    def _encoded(self, texts: Sequence[str]) -> list[Any]:
        wrong = next((text for text in texts if not isinstance(text, str)), None)
        if wrong is not None:
            raise InputError(f"a text is {wrong!r}, which is not a string.")
        try:
            return list(self._tokenizer.encode_batch(list(texts)))
        except Exception as error:
            raise InputError(f"tokenizing the texts: {error}") from error


INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
"""Names of the model inputs that a tokenizer provides."""


def positions_beside(folder: Path) -> int | None:
    """Returns the number of tokens for which a model has positions, by its `config.json`, e.g. 512.

    Args:
        folder: folder of a Hugging Face model.

    Returns:
        The number; None if it is unknown.

    Raises:
        InputError: the file is damaged.
    """
    path = folder / "config.json"
    config = read_json(path) if path.is_file() else {}
    positions, padding = config.get("max_position_embeddings"), config.get("pad_token_id")
    if type(positions) is not int or positions < 1:
        return None
    if config.get("model_type") in _POSITIONS_BEHIND_PADDING:
        # The padding token of all of them is 1 by default.
        positions -= 1 + (padding if type(padding) is int else 1)
    return max(positions, 1)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that contains an object.

    Raises:
        InputError: the file cannot be read, or is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"Reading '{path}': {error}.") from error
    if not isinstance(content, dict):
        raise InputError(f"Reading '{path}': it is not a JSON object.")
    return content
