"""Defines losses over embeddings of texts, with the formulas of sentence-transformers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar, Literal

import onnx_ir as ir

from onnxtrain._settings import require
from onnxtrain.emitter import Emitter

from ._base import TargetSpec
from ._classes import CrossEntropyLoss
from ._embeddings import PAIRS, WITH_NEGATIVES, EmbeddingLoss, dot, unit_rows

# Less than any similarity times its scale; finite, because infinity times 0 is NaN.
_MASKED = -1e9


@dataclass(frozen=True, kw_only=True)
class InfoNCELoss(EmbeddingLoss):
    """In-batch negatives: -log softmax(scale · similarity(anchor, texts of the batch))[own positive].

    Samples are an anchor, its positive and any number of negatives. All positives and negatives of the batch are
    candidates for each anchor, so a larger batch is a harder task. It is MultipleNegativesRankingLoss of
    sentence-transformers (van den Oord et al., 2018, equation 4; Henderson et al., 2017, section 4.4). Candidates are
    the texts of one micro-batch: gradient accumulation and further workers add no negatives.

    Attributes:
        scale: factor of the similarities, the inverse of the temperature; positive, e.g. 20.0 for temperature 0.05.
        similarity: "cosine", or "dot" for inner products.
        symmetric: True to average with the loss in which each positive has to find its anchor among all anchors.
        mask_duplicates: True to leave out candidates that are no negatives of an anchor: the same text as the anchor or
            its positive, and positives of an equal anchor. False counts them as negatives, as sentence-transformers
            does without its sampler NO_DUPLICATES.
        in_batch_negatives: False to choose only among the own positive and the own negatives of each anchor, e.g. mined
            hard negatives. Samples then need at least one negative.
    """

    scale: float = 20.0
    similarity: Literal["cosine", "dot"] = "cosine"
    symmetric: bool = False
    mask_duplicates: bool = True
    in_batch_negatives: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "scale", lambda scale: 0 < scale < float("inf"), "a positive number")
        require(self, "similarity", lambda value: value in ("cosine", "dot"), "'cosine' or 'dot'")
        for name in ("symmetric", "mask_duplicates", "in_batch_negatives"):
            require(self, name, lambda value: isinstance(value, bool), "True or False")
        require(
            self,
            "symmetric",
            lambda value: self.in_batch_negatives or not value,
            "False without in_batch_negatives, because it compares positives with the anchors of the batch",
        )

    def _target(self, scores: ir.Value) -> TargetSpec:
        texts = self.texts if self.in_batch_negatives else WITH_NEGATIVES
        return TargetSpec("texts", ir.DataType.INT64, (PAIRS, texts), groups=texts)

    def _terms(self, op: Emitter, rows: ir.Value, target: ir.Value) -> ir.Value:
        columns = self._columns(op, unit_rows(op, rows) if self.similarity == "cosine" else rows, target)
        anchors = op.Gather(columns, op.const(0), axis=0)
        rest = op.Slice(columns, [1], [sys.maxsize], [0])
        if not self.in_batch_negatives:
            return self._own_terms(op, anchors, rest, target)
        # Positives first: candidate j < pairs is the positive of anchor j.
        candidates = op.Reshape(rest, op.Concat([-1], op.Shape(rows, start=1), axis=0))
        logits = op.Mul(op.MatMul(anchors, op.Transpose(candidates, perm=[1, 0])), self.scale)
        pairs = op.Shape(target, end=1)
        own = op.Range(op.const(0), op.Squeeze(pairs, [0]), op.const(1))
        if self.mask_duplicates:
            logits = op.Where(self._false_negatives(op, target, own), _MASKED, logits)
        terms = _cross_entropy(op, logits, own, "candidates")
        if not self.symmetric:
            return terms
        back = op.Transpose(op.Slice(logits, [0], pairs, [1]), perm=[1, 0])
        return op.Mul(op.Add(terms, _cross_entropy(op, back, own, PAIRS)), 0.5)

    def _own_terms(self, op: Emitter, anchors: ir.Value, rest: ir.Value, texts: ir.Value) -> ir.Value:
        """Returns the loss of each anchor among its own positive and negatives, [pairs].

        Args:
            op: emitter of the graph.
            anchors: embeddings [pairs, dim].
            rest: embeddings of positives and negatives, [texts - 1, pairs, dim].
            texts: a number for each text, [pairs, texts].
        """
        logits = op.Mul(op.Transpose(dot(op, rest, anchors), perm=[1, 0]), self.scale)
        if self.mask_duplicates:
            anchor, positive = (op.Slice(texts, [i], [i + 1], [1]) for i in (0, 1))
            negatives = op.Slice(texts, [2], [sys.maxsize], [1])
            same = op.Or(op.Equal(negatives, anchor), op.Equal(negatives, positive))
            # The first candidate is the positive.
            same = op.Concat(op.Equal(positive, op.Sub(positive, 1)), same, axis=1)
            logits = op.Where(same, _MASKED, logits)
        first = op.Mul(op.Squeeze(op.Slice(texts, [0], [1], [1]), [1]), 0)
        return _cross_entropy(op, logits, first, "candidates")

    def _false_negatives(self, op: Emitter, texts: ir.Value, own: ir.Value) -> ir.Value:
        """Returns True for candidates that are no negatives of an anchor, [pairs, candidates]."""
        anchor, positive = (op.Slice(texts, [i], [i + 1], [1]) for i in (0, 1))
        rest = op.Slice(texts, [1], [sys.maxsize], [1])
        candidate = op.Reshape(op.Transpose(rest, perm=[1, 0]), [1, -1])
        # The anchor that a candidate is the positive of; -1 for negatives, which equals no text.
        owner = op.Transpose(anchor, perm=[1, 0])
        negatives = op.Sub(op.Shape(candidate, start=1), op.Shape(owner, start=1))
        owner = op.Pad(owner, op.Concat([0, 0, 0], negatives, axis=0), op.const(-1))
        known = op.Or(
            op.Or(op.Equal(positive, candidate), op.Equal(anchor, candidate)), op.Equal(anchor, owner)
        )
        count = op.Squeeze(op.Shape(candidate, start=1), [0])
        columns = op.Unsqueeze(op.Range(op.const(0), count, op.const(1)), [0])
        result: ir.Value = op.And(known, op.Not(op.Equal(op.Unsqueeze(own, [1]), columns)))
        return result


def _cross_entropy(op: Emitter, logits: ir.Value, labels: ir.Value, classes: str) -> ir.Value:
    """Returns the cross-entropy of each row of logits [pairs, classes], with the symbolic size `classes`."""
    logits.shape = ir.Shape([PAIRS, classes])
    labels.shape = ir.Shape([PAIRS])
    return CrossEntropyLoss(reduction="none").build(op, logits, labels)


@dataclass(frozen=True, kw_only=True)
class TripletLoss(EmbeddingLoss):
    """max(distance(anchor, positive) - distance(anchor, negative) + margin, 0) of embeddings.

    Samples are an anchor, a positive and a negative. It is TripletLoss of sentence-transformers (Schroff et al., 2015,
    equation 3), and `torch.nn.TripletMarginLoss` for the Euclidean distance.

    Attributes:
        margin: how much farther a negative should be than the positive; non-negative, e.g. 5.0.
        distance: "euclidean", "cosine" for 1 - cosine similarity, or "manhattan".
    """

    texts: ClassVar[int | str] = 3
    margin: float = 5.0
    distance: Literal["euclidean", "cosine", "manhattan"] = "euclidean"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "margin", lambda margin: 0 <= margin < float("inf"), "a non-negative number")
        names = ("euclidean", "cosine", "manhattan")
        require(self, "distance", lambda value: value in names, f"one of {', '.join(names)}")

    def _terms(self, op: Emitter, rows: ir.Value, target: ir.Value) -> ir.Value:
        columns = self._columns(op, unit_rows(op, rows) if self.distance == "cosine" else rows, target)
        anchor, positive, negative = (op.Gather(columns, op.const(i), axis=0) for i in range(3))
        gap = op.Sub(self._distance(op, anchor, positive), self._distance(op, anchor, negative))
        return op.Relu(op.Add(gap, self.margin))

    def _distance(self, op: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
        if self.distance == "cosine":
            return op.Sub(1.0, dot(op, a, b))
        # As in `torch.nn.functional.pairwise_distance`, whose slope for equal embeddings would otherwise be infinite.
        difference = op.Add(op.Sub(a, b), 1e-6)
        if self.distance == "manhattan":
            return op.ReduceSum(op.Abs(difference), [-1], keepdims=0)
        return op.Sqrt(dot(op, difference, difference))


@dataclass(frozen=True, kw_only=True)
class CosineSimilarityLoss(EmbeddingLoss):
    """(cosine similarity of two texts - score)², for scores such as 0 to 1.

    It is CosineSimilarityLoss of sentence-transformers (Reimers and Gurevych, 2019, section 3).
    """

    texts: ClassVar[int | str] = 2

    def _target(self, scores: ir.Value) -> TargetSpec:
        assert scores.dtype is not None  # `targets` checked it
        return TargetSpec("score", scores.dtype, (PAIRS,), groups=self.texts)

    def _terms(self, op: Emitter, rows: ir.Value, target: ir.Value) -> ir.Value:
        columns = self._columns(op, unit_rows(op, rows, 1e-8), target)
        first, second = (op.Gather(columns, op.const(i), axis=0) for i in range(2))
        error = op.Sub(dot(op, first, second), target)
        return op.Mul(error, error)
