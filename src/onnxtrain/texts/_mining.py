"""Mines hard negatives: texts that are similar to an anchor and not its positive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from onnxtrain.errors import InputError
from onnxtrain.texts._pairs import TextPairs
from onnxtrain.texts._retrieval import unit_rows

Array = np.ndarray[Any, Any]

# Similarities that are computed at a time, in bytes.
_BLOCK = 1 << 25
_DOING = "Mining hard negatives"


class _Predicts(Protocol):
    """A trainer of a model that embeds texts."""

    def predict(self, inputs: Any) -> Any: ...


def mine_hard_negatives(
    model: _Predicts | Callable[[list[str]], Array],
    pairs: TextPairs | Sequence[Sequence[str]],
    corpus: Sequence[str] | None = None,
    *,
    num_negatives: int = 3,
    range_min: int = 0,
    range_max: int | None = None,
    margin: float | None = None,
    relative_margin: float | None = None,
    min_score: float | None = None,
    max_score: float | None = None,
    sampling: Literal["top", "random"] = "top",
    triplets: bool = False,
    seed: int = 0,
) -> TextPairs:
    """Finds for each pair the texts that a model takes for good answers although they are not its positive.

    For each anchor, the texts of the corpus are ranked by cosine similarity, without the anchor itself and the
    positives of all pairs with this anchor; equally similar texts keep their order. Among the ranks `range_min` to
    `range_max`, texts that a margin or a score excludes are dropped, and `num_negatives` of the others are taken. It
    corresponds to `mine_hard_negatives` of sentence-transformers.

    Args:
        model: a :class:`Trainer <onnxtrain.Trainer>` of a model that embeds texts, or a function from a list of texts
            to embeddings, float [texts, dim].
        pairs: pairs (anchor, positive), or rows that also have negatives, which are not kept.
        corpus: texts to choose from. Default: the texts of `pairs` that are not anchors.
        num_negatives: number of negatives per pair. Pairs for which fewer are found are left out.
        range_min: number of the most similar texts to skip, e.g. 10, because they may be unlabelled positives.
        range_max: number of the most similar texts to consider. Default: `range_min + 10 * num_negatives`.
        margin: a negative's similarity must be at least this much less than that of the pair, e.g. 0.05.
        relative_margin: a negative's similarity must be at most this fraction less than 1 of that of the pair, e.g.
            0.05 for 95 % of it.
        min_score: least similarity of a negative.
        max_score: greatest similarity of a negative, e.g. 0.9.
        sampling: "top" for the most similar negatives, or "random".
        triplets: True for a row per negative, e.g. for the loss "triplet"; a pair may then have fewer negatives than
            `num_negatives`. False for a row per pair with all its negatives.
        seed: seed of random sampling.

    Returns:
        Rows (anchor, positive, negative, ...), in the order of `pairs`, with their weights.

    Raises:
        InputError: an argument is out of range, the pairs have scores, the embeddings don't match the texts, or no
            negatives are found.

    Example:
        >>> places = {"a": [1.0, 0.0], "b": [0.9, 0.1], "c": [0.5, 0.5], "d": [0.0, 1.0]}
        >>> embed = lambda texts: np.array([places[text] for text in texts])
        >>> mine_hard_negatives(embed, [("a", "b")], ["b", "c", "d"], num_negatives=2).texts
        [('a', 'b', 'c', 'd')]
    """
    last = _checked_range(num_negatives, range_min, range_max)
    _check_numbers(
        margin=margin, relative_margin=relative_margin, min_score=min_score, max_score=max_score, least=-2.0
    )
    if sampling not in ("top", "random"):
        raise InputError(f"{_DOING}: sampling is {sampling!r}; choose 'top' or 'random'.")
    pairs = pairs if isinstance(pairs, TextPairs) else TextPairs(pairs)
    if pairs.scores is not None:
        raise InputError(
            f"{_DOING}: the pairs of {pairs.source} have scores, so that it is unclear which are positives."
        )
    candidates = _candidates(pairs, corpus)
    anchors = list(dict.fromkeys(row[0] for row in pairs.texts))
    positives = list(dict.fromkeys(row[1] for row in pairs.texts))
    # Each text is embedded once.
    texts = list(dict.fromkeys([*anchors, *positives, *candidates]))
    rows, places = _embedded(model, texts), {text: index for index, text in enumerate(texts)}
    matrix = rows[[places[text] for text in candidates]]
    numbers = {text: index for index, text in enumerate(candidates)}
    excluded: dict[str, set[int]] = {anchor: {numbers.get(anchor, -1)} for anchor in anchors}
    for row in pairs.texts:
        excluded[row[0]].add(numbers.get(row[1], -1))
    ranked = _ranked(
        rows[[places[text] for text in anchors]], matrix, [excluded[text] for text in anchors], last
    )
    of_anchor = dict(zip(anchors, ranked, strict=True))
    random = np.random.default_rng(seed)
    found: list[tuple[str, ...]] = []
    kept: list[int] = []
    for index, (anchor, positive, *_) in enumerate(pairs.texts):
        chosen, scores = of_anchor[anchor]
        chosen, scores = chosen[range_min:], scores[range_min:]
        own = float(rows[places[anchor]] @ rows[places[positive]])
        allowed = np.ones(len(scores), bool)
        if margin is not None:
            allowed &= scores <= own - margin
        if relative_margin is not None:
            allowed &= scores <= own * (1 - relative_margin)
        if min_score is not None:
            allowed &= scores >= min_score
        if max_score is not None:
            allowed &= scores <= max_score
        chosen = chosen[allowed]
        if sampling == "random" and len(chosen) > num_negatives:
            chosen = chosen[np.sort(random.choice(len(chosen), num_negatives, replace=False))]
        negatives = [candidates[number] for number in chosen[:num_negatives]]
        if triplets:
            found += [(anchor, positive, negative) for negative in negatives]
            kept += [index] * len(negatives)
        elif len(negatives) == num_negatives:
            found.append((anchor, positive, *negatives))
            kept.append(index)
    if not found:
        wanted = "a negative" if triplets else f"{num_negatives} negatives"
        raise InputError(
            f"{_DOING}: no pair of {pairs.source} has {wanted} among the {len(candidates)} texts. Allow more of them: "
            "fewer negatives, a greater range_max, smaller margins."
        )
    weights = None if pairs.weights is None else [pairs.weights[index] for index in kept]
    return TextPairs(found, weights=weights, source=f"{pairs.source}, with negatives")


def _checked_range(num_negatives: object, range_min: object, range_max: object) -> int:
    """Returns the number of the most similar texts to consider; raises InputError for numbers out of range."""
    for name, value, least in (("num_negatives", num_negatives, 1), ("range_min", range_min, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{_DOING}: {name} must be an integer from {least}, received {value!r}.")
    assert isinstance(num_negatives, int)
    assert isinstance(range_min, int)
    if range_max is None:
        return range_min + 10 * num_negatives
    if isinstance(range_max, bool) or not isinstance(range_max, int) or range_max < range_min + num_negatives:
        raise InputError(
            f"{_DOING}: range_max must be an integer from range_min + num_negatives = {range_min + num_negatives}, "
            f"received {range_max!r}."
        )
    return range_max


def _check_numbers(*, least: float, **numbers: object) -> None:
    """Raises InputError for a margin or score that is not a number from -2 to 2, the range of differences."""
    for name, value in numbers.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= -least:
            raise InputError(
                f"{_DOING}: {name} must be a number from {least:g} to {-least:g}, received {value!r}."
            )


def _candidates(pairs: TextPairs, corpus: Sequence[str] | None) -> list[str]:
    """Returns the distinct texts to choose from; raises InputError if an entry of the corpus is not a text."""
    if corpus is None:
        return list(dict.fromkeys(text for row in pairs.texts for text in row[1:]))
    if isinstance(corpus, str) or not len(corpus):
        received = "a single text" if isinstance(corpus, str) else "no texts"
        raise InputError(f"{_DOING}: corpus must be a list of texts, received {received}.")
    wrong = next((i for i, text in enumerate(corpus) if not isinstance(text, str) or not text.strip()), None)
    if wrong is not None:
        raise InputError(f"{_DOING}: entry {wrong} of the corpus is {corpus[wrong]!r}, which is not a text.")
    return list(dict.fromkeys(corpus))


def _embedded(model: Any, texts: list[str]) -> Array:
    """Returns the embeddings of texts, each divided by its length, float32 [texts, dim].

    Raises:
        InputError: the model does not return one embedding per text.
    """
    result = model.predict(texts) if hasattr(model, "predict") else model(texts)
    shape = getattr(result, "shape", None)
    if shape is None or len(shape) != 2 or shape[0] != len(texts):
        raise InputError(
            f"{_DOING}: the model returned {type(result).__name__ if shape is None else list(shape)} for {len(texts)} "
            "texts, not one embedding per text, [texts, dim]."
        )
    return unit_rows(np.asarray(result))


def _ranked(
    anchors: Array, corpus: Array, excluded: Sequence[set[int]], count: int
) -> list[tuple[Array, Array]]:
    """Returns for each anchor the `count` most similar texts that are not excluded, and their similarities."""
    ranked: list[tuple[Array, Array]] = []
    size = max(1, _BLOCK // (4 * len(corpus)))
    for start in range(0, len(anchors), size):
        # NaN, of broken embeddings, is similar to nothing.
        scores = np.nan_to_num(anchors[start : start + size] @ corpus.T, nan=-np.inf)
        for row, without in zip(scores, excluded[start : start + size], strict=True):
            row[[number for number in without if number >= 0]] = -np.inf
            # All that tie with the last one are sorted, so that equal similarities keep their order.
            least = np.partition(row, -min(count, len(row)))[-min(count, len(row))]
            near = np.flatnonzero((row >= least) & ~np.isneginf(row))
            chosen = near[np.argsort(-row[near], kind="stable")][:count]
            ranked.append((chosen, row[chosen]))
    return ranked
