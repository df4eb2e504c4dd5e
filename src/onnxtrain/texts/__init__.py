"""Trains models that embed texts: pairs, hard negatives, tokenizers beside a model, retrieval metrics, pooling."""

from __future__ import annotations

import onnxtrain._desk  # noqa: F401  # isort: skip

from onnxtrain.texts._mining import mine_hard_negatives
from onnxtrain.texts._pairs import TextPairs, TextRow
from onnxtrain.texts._pooling import add_pooling
from onnxtrain.texts._retrieval import retrieval_metrics, similarity_metrics
from onnxtrain.texts._tokenizer import TextTokenizer

__all__ = [
    "TextPairs",
    "TextRow",
    "TextTokenizer",
    "add_pooling",
    "mine_hard_negatives",
    "retrieval_metrics",
    "similarity_metrics",
]
