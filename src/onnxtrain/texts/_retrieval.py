"""Measures how well embeddings find texts: recall, reciprocal rank, nDCG, and correlation with scores."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from onnxtrain.errors import InputError

Array = np.ndarray[Any, Any]

# Similarities that are computed at a time, in bytes.
_BLOCK = 1 << 25
_MOST = 10


def unit_rows(rows: Array) -> Array:
    """Divides each row by its length; zeros stay zeros."""
    lengths = np.sqrt(np.square(rows, dtype=np.float64).sum(axis=1, keepdims=True))
    result: Array = (rows / np.maximum(lengths, 1e-12)).astype(np.float32)
    return result


def retrieval_metrics(
    queries: Array, corpus: Array, relevant: Sequence[Collection[int]], ks: Sequence[int] = (1, 5, 10)
) -> dict[str, float]:
    """Computes recall at several ranks, the mean reciprocal rank, and nDCG of the first ten results.

    For each query, the corpus is ranked by cosine similarity; equally similar texts keep their order. Memory does not
    grow with the number of queries times the size of the corpus.

    Args:
        queries: embeddings of the queries, float [queries, dim].
        corpus: embeddings of the texts to find, float [texts, dim].
        relevant: for each query, the indices of the texts that it should find, at least one.
        ks: ranks, e.g. (1, 5, 10).

    Returns:
        "recall@1", ...: share of a query's relevant texts among the first k results; "mrr": 1 / rank of the first
        relevant text; "ndcg@10". All are means over the queries, 0 to 1.

    Raises:
        InputError: a query has no relevant text, or an index or shape does not match.

    Example:
        >>> corpus = np.eye(3)
        >>> retrieval_metrics(np.array([[0.9, 0.1, 0.0], [0.9, 0.1, 0.0]]), corpus, [[0], [1]], ks=(1, 2))
        {'recall@1': 0.5, 'recall@2': 1.0, 'mrr': 0.75, 'ndcg@10': 0.815...}
    """
    if (
        queries.ndim != 2
        or corpus.ndim != 2
        or queries.shape[1] != corpus.shape[1]
        or len(relevant) != len(queries)
    ):
        raise InputError(
            f"Measuring retrieval: the queries have shape {list(queries.shape)}, the corpus {list(corpus.shape)}, and "
            f"there are relevant texts for {len(relevant)} queries."
        )
    counts = np.array([len(set(entry)) for entry in relevant])
    if not counts.size or not counts.all():
        raise InputError("Measuring retrieval: each query needs at least one relevant text.")
    owner = np.repeat(np.arange(len(queries)), counts)
    found = np.concatenate([sorted(set(entry)) for entry in relevant]).astype(np.int64)
    if found.min() < 0 or found.max() >= len(corpus):
        raise InputError(f"Measuring retrieval: relevant texts must be indices from 0 to {len(corpus) - 1}.")
    ranks = _ranks(unit_rows(queries), unit_rows(corpus), owner, found)

    def per_query(values: Array) -> Array:
        return np.bincount(owner, values, len(queries))

    values = {f"recall@{k}": float((per_query(ranks <= k) / counts).mean()) for k in ks}
    first = np.full(len(queries), np.inf)
    np.minimum.at(first, owner, ranks)
    discounts = 1 / np.log2(np.arange(2, _MOST + 2))
    gains = np.where(ranks <= _MOST, 1 / np.log2(1 + ranks), 0)
    ideal = np.cumsum(discounts)[np.minimum(counts, _MOST) - 1]
    return values | {
        "mrr": float((1 / first).mean()),
        f"ndcg@{_MOST}": float((per_query(gains) / ideal).mean()),
    }


def _ranks(queries: Array, corpus: Array, owner: Array, found: Array) -> Array:
    """Returns the rank, from 1, of each relevant text among all texts for its query.

    NaN similarities rank last, so that broken embeddings do not look perfect.
    """
    ranks = np.empty(len(found))
    size = max(1, _BLOCK // (4 * len(corpus)))
    places = np.arange(len(corpus))
    for start in range(0, len(found), size):
        part = slice(start, start + size)
        scores = np.nan_to_num(queries[owner[part]] @ corpus.T, nan=-np.inf)
        own = scores[np.arange(len(scores)), found[part]][:, None]
        before = (scores > own) | ((scores == own) & (places < found[part, None]))
        ranks[part] = 1 + before.sum(axis=1)
        ranks[part][np.isneginf(own[:, 0])] = len(corpus)
    return ranks


def similarity_metrics(first: Array, second: Array, scores: Sequence[float]) -> dict[str, float]:
    """Computes the correlation of cosine similarities with scores.

    Args:
        first: embeddings, float [pairs, dim].
        second: embeddings of the texts that they are compared with, [pairs, dim].
        scores: similarity of each pair according to the data.

    Returns:
        "pearson" and "spearman", from -1 to 1; NaN if all scores or all similarities are equal.
    """
    similarities = (unit_rows(first).astype(np.float64) * unit_rows(second)).sum(axis=1)
    wanted = np.asarray(scores, np.float64)
    return {
        "pearson": _correlation(similarities, wanted),
        "spearman": _correlation(_mean_ranks(similarities), _mean_ranks(wanted)),
    }


def _correlation(a: Array, b: Array) -> float:
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size else float("nan")


def _mean_ranks(values: Array) -> Array:
    """Returns the rank of each value; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]
