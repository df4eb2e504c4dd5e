"""Retrieval metrics against scikit-learn, scipy and brute force."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import ndcg_score, top_k_accuracy_score

from onnxtrain.errors import InputError
from onnxtrain.texts import _retrieval, retrieval_metrics, similarity_metrics


def embeddings(seed: int, queries: int, texts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns queries, texts, and their cosine similarities."""
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((queries, 5)), rng.standard_normal((texts, 5))
    similarity = (a / np.linalg.norm(a, axis=1, keepdims=True)) @ (
        b / np.linalg.norm(b, axis=1, keepdims=True)
    ).T
    return a, b, similarity


@pytest.mark.parametrize("block", [1, 1000, 1 << 25])
def test_one_relevant_text_per_query(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_retrieval, "_BLOCK", block)
    a, b, similarity = embeddings(0, 60, 20)
    labels = np.random.default_rng(1).integers(0, 20, 60)
    values = retrieval_metrics(a, b, [[label] for label in labels], ks=(1, 3, 10))
    for k in (1, 3, 10):
        wanted = top_k_accuracy_score(labels, similarity, k=k, labels=np.arange(20))
        assert values[f"recall@{k}"] == pytest.approx(wanted)
    relevance = np.eye(20)[labels]
    assert values["ndcg@10"] == pytest.approx(ndcg_score(relevance, similarity, k=10))
    ranks = [list(np.argsort(-row)).index(label) + 1 for row, label in zip(similarity, labels, strict=True)]
    assert values["mrr"] == pytest.approx(np.mean(1 / np.array(ranks)))


def test_several_relevant_texts_per_query() -> None:
    a, b, similarity = embeddings(2, 30, 25)
    rng = np.random.default_rng(3)
    relevant = [rng.choice(25, rng.integers(1, 15), replace=False).tolist() for _ in range(30)]
    values = retrieval_metrics(a, b, relevant)
    relevance = np.zeros((30, 25))
    for row, entry in zip(relevance, relevant, strict=True):
        row[entry] = 1
    assert values["ndcg@10"] == pytest.approx(ndcg_score(relevance, similarity, k=10))
    for k in (1, 5, 10):
        found = [
            len(set(np.argsort(-row)[:k]) & set(entry)) / len(entry)
            for row, entry in zip(similarity, relevant, strict=True)
        ]
        assert values[f"recall@{k}"] == pytest.approx(np.mean(found))
    first = [
        1 / (1 + min(list(np.argsort(-row)).index(index) for index in entry))
        for row, entry in zip(similarity, relevant, strict=True)
    ]
    assert values["mrr"] == pytest.approx(np.mean(first))


def test_equal_embeddings_find_only_the_first_text() -> None:
    values = retrieval_metrics(np.ones((4, 3)), np.ones((4, 3)), [[0], [1], [2], [3]])
    assert values["recall@1"] == 0.25
    assert values["mrr"] == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)


def test_nan_embeddings_find_nothing_first() -> None:
    corpus = np.eye(4)
    corpus[1] = np.nan
    values = retrieval_metrics(np.full((2, 4), np.nan), corpus, [[0], [1]], ks=(1,))
    assert values == {"recall@1": 0.0, "mrr": 0.25, "ndcg@10": pytest.approx(1 / np.log2(5))}


@pytest.mark.parametrize(
    ("relevant", "message"),
    [
        ([[0], []], "each query needs"),
        ([[0], [7]], "indices from 0 to 2"),
        ([[0]], "relevant texts for 1 queries"),
    ],
)
def test_what_does_not_fit_is_refused(relevant: list[list[int]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        retrieval_metrics(np.ones((2, 3)), np.ones((3, 3)), relevant)


def test_correlations_are_those_of_scipy() -> None:
    a, b, _ = embeddings(4, 30, 30)
    scores = np.random.default_rng(5).integers(0, 6, 30) / 5
    cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    values = similarity_metrics(a, b, scores.tolist())
    assert values["pearson"] == pytest.approx(stats.pearsonr(cosines, scores)[0], abs=1e-6)
    assert values["spearman"] == pytest.approx(stats.spearmanr(cosines, scores)[0])
    assert np.isnan(similarity_metrics(a, b, [0.5] * 30)["spearman"])
