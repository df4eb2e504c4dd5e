"""Reads pairs and triples of texts from files, frames and lists."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from onnxtrain._words import argument
from onnxtrain.errors import InputError

SUFFIXES = (".csv", ".tsv", ".jsonl")
"""Suffixes of files that :meth:`TextPairs.read` reads."""

_SCORES = ("score", "similarity", "similarity_score", "scores", "label", "labels")
_WEIGHTS = ("sample_weight", "weight")
_ANCHORS = ("anchor", "query", "question", "text1", "sentence1", "sentence_0", "text_1", "sentence_1")
_SECONDS = (
    "positive",
    "answer",
    "passage",
    "document",
    "text2",
    "sentence2",
    "sentence_1",
    "text_2",
    "sentence_2",
)


class TextRow(NamedTuple):
    """One sample.

    Attributes:
        texts: an anchor, its positive and any number of negatives; or two texts.
        score: similarity of two texts, e.g. 0.8; None if the data has no scores.
        weight: weight of the sample; None if the data has no weights.
    """

    texts: tuple[str, ...]
    score: float | None = None
    weight: float | None = None


class TextPairs:
    """Pairs or triples of texts, with optional scores and weights.

    Args:
        texts: samples, each a tuple of the same number of texts: (anchor, positive), (anchor, positive, negative) or
            (text, text).
        scores: similarity of the two texts of each sample, e.g. 0 to 1.
        weights: non-negative weight of each sample.
        source: name of the data in error messages.

    Raises:
        InputError: there are no samples, samples differ in length, a text is empty or not a string, or a score is not a
            number.

    Example:
        >>> pairs = TextPairs([("How old?", "Ten years."), ("How far?", "A mile.")])
        >>> len(pairs), pairs[1].texts
        (2, ('How far?', 'A mile.'))
    """

    def __init__(
        self,
        texts: Sequence[Sequence[str]],
        scores: Sequence[float] | None = None,
        weights: Sequence[float] | None = None,
        *,
        source: str = "pairs",
    ) -> None:
        self.source = source
        self.texts = [tuple(row) for row in texts]
        if not self.texts:
            raise self._error("it has no samples")
        self.width = len(self.texts[0])
        if self.width < 2:
            raise self._error(f"sample 1 has {self.width} texts; pass pairs or triples of texts")
        for number, row in enumerate(self.texts, 1):
            if len(row) != self.width:
                raise self._error(f"sample {number} has {len(row)} texts, and sample 1 has {self.width}")
            for text in row:
                if not isinstance(text, str) or not text.strip():
                    shown = "an empty text" if isinstance(text, str) else f"{text!r} in place of a text"
                    raise self._error(f"sample {number} has {shown}; remove the sample")
        self.scores = None if scores is None else self._numbers("score", scores)
        self.weights = None if weights is None else self._numbers("weight", weights)

    def _error(self, problem: str) -> InputError:
        return InputError(f"Reading texts from {self.source}: {problem}.")

    def _numbers(self, word: str, values: Sequence[Any]) -> list[float]:
        if len(values) != len(self.texts):
            raise self._error(f"there are {len(values)} {word}s for {len(self.texts)} samples")
        numbers = []
        for number, value in enumerate(values, 1):
            try:
                parsed = float(value)
            except (TypeError, ValueError):
                parsed = math.nan
            if not math.isfinite(parsed):
                raise self._error(f"the {word} of sample {number} is {value!r}, which is not a number")
            numbers.append(parsed)
        return numbers

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> TextRow:
        return TextRow(
            self.texts[index],
            None if self.scores is None else self.scores[index],
            None if self.weights is None else self.weights[index],
        )

    def __getitems__(self, indices: Sequence[int]) -> list[TextRow]:
        return [self[index] for index in indices]

    def digest(self) -> str:
        """Returns a SHA-256 digest of all texts, scores and weights."""
        content = hashlib.sha256()
        for index in range(len(self)):
            content.update(json.dumps(self[index]).encode())
        return content.hexdigest()

    @classmethod
    def read(
        cls, path: str | os.PathLike[str], columns: Sequence[str] | None = None, weight: str | None = None
    ) -> TextPairs:
        """Reads a .csv or .tsv file with a header, or a .jsonl file with one object or list per line.

        Args:
            path: the file, in UTF-8.
            columns: names of the columns with the texts: anchor, positive and negatives. Default: columns with names
                such as anchor, positive and negative; or all columns but scores and weights, if there are two or three.
                A column "score", "similarity" or "label" contains the scores.
            weight: name of the column with the weights. Default: "sample_weight" or "weight", if there is one.

        Raises:
            InputError: the file cannot be read, or it is unclear which columns are texts.
        """
        return cls.of_rows(_rows(Path(path)), columns, weight, source=f"'{path}'")

    @classmethod
    def read_column(cls, path: str | os.PathLike[str], columns: Sequence[str] | None = None) -> list[str]:
        """Reads one column of texts, e.g. to embed them.

        Args:
            path: see :meth:`read`.
            columns: name of the column, in a list. Default: the only column, or "text".

        Raises:
            InputError: the file cannot be read, or it is unclear which column to read.
        """
        rows = _rows(Path(path))
        names = list(rows[0]) if rows and isinstance(rows[0], Mapping) else []
        chosen = list(columns) if columns else names if len(names) == 1 else [n for n in names if n == "text"]
        if len(chosen) != 1 or chosen[0] not in names:
            raise InputError(
                f"Reading texts from '{path}': it has the columns {', '.join(names) or 'of no name'}. Name the one "
                f"with the texts: {argument('columns')}."
            )
        texts = [row.get(chosen[0]) if isinstance(row, Mapping) else None for row in rows]
        if wrong := next((n for n, text in enumerate(texts, 1) if not isinstance(text, str)), None):
            raise InputError(f"Reading texts from '{path}': row {wrong} has no text '{chosen[0]}'.")
        return [str(text) for text in texts]

    def take(self, indices: Sequence[int]) -> TextPairs:
        """Returns the samples with these indices."""
        rows = self.__getitems__(indices)
        return TextPairs(
            [row.texts for row in rows],
            None if self.scores is None else [row.score or 0.0 for row in rows],
            None if self.weights is None else [row.weight or 0.0 for row in rows],
            source=self.source,
        )

    @classmethod
    def of_rows(
        cls,
        rows: Sequence[Any],
        columns: Sequence[str] | None = None,
        weight: str | None = None,
        *,
        source: str = "pairs",
    ) -> TextPairs:
        """Returns samples from rows: dicts by column, or tuples of texts, whose last entry may be a score.

        For the arguments, see :meth:`read`.
        """
        if not rows or not isinstance(rows[0], Mapping):
            if columns or weight:
                raise InputError(
                    f"Reading texts from {source}: its rows have no names, so there are no columns to choose."
                )
            scored = bool(rows) and len(rows[0]) == 3 and _is_number(rows[0][2])
            if not scored:
                return cls(rows, source=source)
            if ragged := next((n for n, row in enumerate(rows, 1) if len(row) != 3), None):
                raise InputError(
                    f"Reading texts from {source}: sample {ragged} has {len(rows[ragged - 1])} entries, not 3."
                )
            return cls([row[:2] for row in rows], [row[2] for row in rows], source=source)
        names = list(rows[0])
        for number, row in enumerate(rows, 1):
            if not isinstance(row, Mapping) or set(row) != set(names):
                raise InputError(
                    f"Reading texts from {source}: sample {number} does not have the columns {', '.join(names)}."
                )
        return cls.of_columns(
            {name: [row[name] for row in rows] for name in names}, columns, weight, source=source
        )

    @classmethod
    def of_columns(
        cls,
        table: Mapping[str, Sequence[Any]],
        columns: Sequence[str] | None = None,
        weight: str | None = None,
        *,
        source: str = "pairs",
    ) -> TextPairs:
        """Returns samples from columns by name. For the arguments, see :meth:`read`."""
        names = list(table)
        if missing := [
            name for name in [*(columns or ()), *([weight] if weight else [])] if name not in names
        ]:
            raise InputError(
                f"Reading texts from {source}: there is no column {', '.join(missing)}; it has {', '.join(names)}."
            )
        score = next((name for name in _SCORES if name in names and name not in (columns or ())), None)
        weight = weight or next(
            (name for name in _WEIGHTS if name in names and name not in (columns or ())), None
        )
        chosen = list(columns) if columns else _text_columns(table, {score, weight}, source)
        return cls(
            list(zip(*(table[name] for name in chosen), strict=True)),
            None if score is None else table[score],
            None if weight is None else table[weight],
            source=source,
        )


def _text_columns(table: Mapping[str, Sequence[Any]], others: set[str | None], source: str) -> list[str]:
    """Chooses the columns with texts: by their names, or all of two or three columns that are not numbers."""
    names = [name for name in table if name not in others]
    anchor = next((name for name in _ANCHORS if name in names), None)
    second = next((name for name in _SECONDS if name in names and name != anchor), None)
    if anchor and second:
        third = [name for name in names if name.startswith("negative") or name in ("text3", "sentence3")]
        return [anchor, second, *third]
    numbers = [name for name in names if all(_is_number(value) for value in table[name])]
    if len(names) in (2, 3) and not numbers:
        return names
    raise InputError(
        f"Reading texts from {source}: it has the columns {', '.join(table)}. Name those with the anchor, the positive "
        f"and any negatives: {argument('columns')}."
    )


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _rows(path: Path) -> list[Any]:
    """Reads the rows of a .csv, .tsv or .jsonl file; raises InputError if that fails."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(
            f"Reading texts from '{path}': pass a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file."
        )
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            return list(
                _json_rows(lines)
                if suffix == ".jsonl"
                else _csv_rows(lines, "\t" if suffix == ".tsv" else ",")
            )
    except (OSError, csv.Error, ValueError) as error:
        raise InputError(f"Reading texts from '{path}': {error}.") from error


def _csv_rows(lines: Any, delimiter: str) -> Iterator[dict[str, str]]:
    """Yields the rows of a table with a header; raises ValueError for a row with the wrong number of fields."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header = next(reader, [])
    if len(set(header)) != len(header):
        raise ValueError(f"several columns have the same name: {', '.join(header)}")
    for row in reader:
        # Blank lines, e.g. at the end of a file.
        if not row:
            continue
        if len(row) != len(header):
            raise ValueError(
                f"line {reader.line_num} has {len(row)} fields, and the header has {len(header)}"
            )
        yield dict(zip(header, row, strict=True))


def _json_rows(lines: Any) -> Iterator[Any]:
    """Yields the objects and lists of a JSON Lines file; raises ValueError for another line."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        if not isinstance(row, dict | list):
            raise ValueError(f"line {number} is neither an object nor a list of texts")
        yield row
