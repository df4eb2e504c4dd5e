"""`mine_hard_negatives` beside a search through all texts in plain Python, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxtrain.errors import InputError
from onnxtrain.texts import TextPairs, mine_hard_negatives

RNG = np.random.default_rng(0)
ANCHORS = [f"question {i}" for i in range(12)]
ANSWERS = [f"answer {i}" for i in range(30)]
OTHERS = [f"other {i}" for i in range(200)]
PLACES = {text: RNG.standard_normal(6) for text in [*ANCHORS, *ANSWERS, *OTHERS]}
# Anchors with one, two and three positives; the pairs are no list of all anchors in order.
PAIRS = [(ANCHORS[i % 12], ANSWERS[i]) for i in range(30)]


def embed(texts: list[str]) -> np.ndarray:
    assert len(set(texts)) == len(texts)
    return np.array([PLACES[text] for text in texts]).astype(np.float32)


def similarity(a: str, b: str) -> float:
    x, y = PLACES[a], PLACES[b]
    return float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))


def brute_force(
    corpus: list[str], count: int, first: int, last: int, allowed: Any, *, triplets: bool = False
) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for anchor, positive in PAIRS:
        positives = {p for a, p in PAIRS if a == anchor}
        others = [text for text in corpus if text != anchor and text not in positives]
        ranked = sorted(others, key=lambda text: -similarity(anchor, text))[first:last]
        own = similarity(anchor, positive)
        negatives = [text for text in ranked if allowed(similarity(anchor, text), own)][:count]
        if triplets:
            rows += [(anchor, positive, negative) for negative in negatives]
        elif len(negatives) == count:
            rows.append((anchor, positive, *negatives))
    return rows


@pytest.mark.parametrize(
    "corpus", [None, [*OTHERS, *ANSWERS, *ANCHORS, *OTHERS[:5]]], ids=["positives", "corpus"]
)
@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({}, lambda score, own: True),
        ({"range_min": 4, "range_max": 9, "num_negatives": 2}, lambda score, own: True),
        ({"margin": 0.1, "num_negatives": 1, "range_max": 150}, lambda score, own: score <= own - 0.1),
        ({"margin": -0.5, "num_negatives": 2}, lambda score, own: score <= own + 0.5),
        (
            {"relative_margin": 0.05, "num_negatives": 1, "range_max": 230},
            lambda score, own: score <= own * 0.95,
        ),
        ({"min_score": 0.2, "max_score": 0.7}, lambda score, own: 0.2 <= score <= 0.7),
        (
            {"triplets": True, "max_score": 0.3, "range_min": 2, "range_max": 180},
            lambda score, own: score <= 0.3,
        ),
    ],
)
def test_negatives_are_those_of_a_search_through_all_texts(
    corpus: list[str] | None, options: dict[str, Any], allowed: Any
) -> None:
    count, first = options.get("num_negatives", 3), options.get("range_min", 0)
    last = options.get("range_max", first + 10 * count)
    expected = brute_force(
        ANSWERS if corpus is None else list(dict.fromkeys(corpus)),
        count,
        first,
        last,
        allowed,
        triplets=options.get("triplets", False),
    )
    assert len(expected) > 3
    mined = mine_hard_negatives(embed, PAIRS, corpus, **options)
    assert mined.texts == expected


def test_random_negatives_are_drawn_from_the_range() -> None:
    drawn = {
        seed: mine_hard_negatives(
            embed, PAIRS, OTHERS, range_min=5, range_max=25, sampling="random", seed=seed
        ).texts
        for seed in (0, 0, 1)
    }
    again = mine_hard_negatives(
        embed, PAIRS, OTHERS, range_min=5, range_max=25, sampling="random", seed=0
    ).texts
    assert drawn[0] == again != drawn[1]
    ranges = {row[:2]: set(row[2:]) for row in brute_force(OTHERS, 20, 5, 25, lambda score, own: True)}
    counts: dict[str, int] = {}
    for row in [*drawn[0], *drawn[1]]:
        assert set(row[2:]) <= ranges[row[:2]]
        assert len(set(row[2:])) == 3
        for text in row[2:]:
            counts[text] = counts.get(text, 0) + 1
    # Not the first of the range alone.
    assert len(counts) > 60


def test_equal_texts_keep_the_order_of_the_corpus_in_any_block(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = {"a": [1.0, 0.0], "p": [1.0, 0.1]} | {f"t{i}": [1.0, 0.5 * (i // 10)] for i in range(60)}

    def look_up(texts: list[str]) -> np.ndarray:
        return np.array([vectors[text] for text in texts])

    corpus = [f"t{i}" for i in range(60)]
    expected = [("a", "p", *corpus[4:15])]
    assert mine_hard_negatives(look_up, [("a", "p")], corpus, num_negatives=11, range_min=4).texts == expected
    whole = mine_hard_negatives(embed, PAIRS, OTHERS).texts
    monkeypatch.setattr("onnxtrain.texts._mining._BLOCK", 4 * len(OTHERS) * 5)
    assert mine_hard_negatives(embed, PAIRS, OTHERS).texts == whole


def test_rows_keep_their_weights_and_lose_their_old_negatives() -> None:
    pairs = TextPairs([(a, p, "other 0") for a, p in PAIRS], weights=[float(i) for i in range(30)])
    mined = mine_hard_negatives(embed, pairs, ANSWERS, num_negatives=1, margin=0.2)
    expected = brute_force(ANSWERS, 1, 0, 10, lambda score, own: score <= own - 0.2)
    assert mined.texts == expected
    assert mined.weights == [float(ANSWERS.index(row[1])) for row in expected]
    # Negatives of the pairs belong to the default corpus.
    assert any("other 0" in row for row in mine_hard_negatives(embed, pairs).texts)


def test_broken_embeddings_are_never_negatives() -> None:
    def broken(texts: list[str]) -> np.ndarray:
        rows = embed(texts)
        rows[[text in ("other 0", "other 1") for text in texts]] = np.nan
        return rows

    mined = mine_hard_negatives(broken, PAIRS, OTHERS[:6], num_negatives=4, range_max=6)
    assert len(mined) == len(PAIRS)
    assert all(set(row[2:]) == set(OTHERS[2:6]) for row in mined.texts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_negatives": 0}, "num_negatives must be an integer from 1"),
        ({"range_min": -1}, "range_min must be an integer from 0"),
        ({"range_max": 2}, r"range_max must be an integer from range_min \+ num_negatives = 3"),
        ({"margin": float("nan")}, "margin must be a number from -2 to 2"),
        ({"max_score": "1"}, "max_score must be a number"),
        ({"sampling": "best"}, "sampling is 'best'"),
        ({"corpus": "one"}, "corpus must be a list of texts, received a single text"),
        ({"corpus": []}, "received no texts"),
        ({"corpus": ["a", ""]}, "entry 1 of the corpus is ''"),
        ({"max_score": -1.0}, "no pair of pairs has 3 negatives among the 30 texts"),
        ({"model": lambda texts: np.zeros(3)}, "not one embedding per text"),
        ({"model": lambda texts: {"a": 1}}, "returned dict"),
        ({"pairs": TextPairs([("a", "b")], [0.5])}, "have scores"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        mine_hard_negatives(**{"model": embed, "pairs": PAIRS} | options)
