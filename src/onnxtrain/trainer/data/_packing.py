"""Packs token sequences into rows of equal length, so that no computation is spent on padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from onnxtrain.errors import InputError
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.store import require_unmasked

_IGNORED = -100


def pack_tokens(
    sequences: Sequence[npt.ArrayLike], length: int, *, separator: int | None = None
) -> dict[str, Array]:
    """Concatenates token sequences and splits them into rows of equal length, for training with "causal_lm".

    A token attends to all earlier tokens in its row, even if they belong to other sequences. The loss ignores the
    padding of the last row, and the first token of each sequence, which no earlier token of the sequence predicts.

    Args:
        sequences: sequences of token ids, e.g. [[5, 17, 9], [8, 4]].
        length: tokens per row, e.g. 512.
        separator: token to append to each sequence, e.g. the end-of-text token; it is predicted like other tokens.

    Returns:
        `input_ids` and `labels`, int64 [rows, length], which can be passed to :meth:`Trainer.fit`.

    Raises:
        InputError: there are no tokens, a sequence does not consist of integers, or `length` is less than 2.

    Example:
        >>> rows = pack_tokens([[5, 17, 9], [8, 4]], 4, separator=2)
        >>> rows["input_ids"].tolist()
        [[5, 17, 9, 2], [8, 4, 2, 0]]
        >>> rows["labels"].tolist()
        [[-100, 17, 9, 2], [-100, 4, 2, -100]]
    """
    # A row of one token would have nothing to predict.
    if isinstance(length, bool) or not isinstance(length, int) or length < 2:
        raise InputError(
            f"Packing tokens: length is {length!r}; pass the number of tokens per row, at least 2."
        )
    end = [] if separator is None else [separator]
    parts = []
    for number, sequence in enumerate(sequences):
        require_unmasked(f"Packing tokens: sequence {number}", sequence)
        tokens = np.asarray(sequence)
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise InputError(
                f"Packing tokens: sequence {number} is an array of {tokens.dtype} of shape {list(tokens.shape)}; pass "
                "a list of sequences of integers."
            )
        if tokens.size:
            parts.append(np.concatenate([tokens.astype(np.int64), np.asarray(end, np.int64)]))
    if not parts:
        raise InputError("Packing tokens: there are no tokens in the sequences.")
    tokens = np.concatenate(parts)
    labels = tokens.copy()
    labels[np.cumsum([0, *(len(part) for part in parts[:-1])])] = _IGNORED
    # Padding of the last row.
    missing = -len(tokens) % length
    rows = {
        "input_ids": np.pad(tokens, (0, missing)),
        "labels": np.pad(labels, (0, missing), constant_values=_IGNORED),
    }
    return {name: array.reshape(-1, length) for name, array in rows.items()}
