"""Defines the base class of losses over embeddings of texts, and how token embeddings are pooled in a graph."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import onnx_ir as ir

from onnxtrain._settings import require
from onnxtrain.emitter import Emitter, find_value, static_dims

from ._base import Loss, TargetSpec, narrow, reduce, widen

Pooling = Literal["auto", "mean", "cls", "max", "last"]
"""Pooling of token embeddings to one embedding per text; "auto" is the mean, or none if the model pools itself."""

MASK = "attention_mask"
"""Name of the model input that is 1 for tokens and 0 for padding."""

PAIRS, TEXTS = "pairs", "texts"
"""Symbolic sizes of grouped inputs, [pairs, texts, ...]: the batch size, and the number of texts in each sample."""

WITH_NEGATIVES = "texts_with_negatives"
"""Symbolic number of texts in each sample of a loss that needs negatives: three or more."""

# Names that sentence-transformers, optimum and transformers give to outputs, the best first.
_OUTPUTS = ("sentence_embedding", "token_embeddings", "last_hidden_state")


def embedding_output(names: Sequence[str]) -> str | None:
    """Returns the model output that contains the embeddings.

    Args:
        names: names of the model's outputs, e.g. ["last_hidden_state", "pooler_output"].

    Returns:
        The only name, or a name that exporters of sentence models use; None if neither exists.
    """
    return names[0] if len(names) == 1 else next((name for name in _OUTPUTS if name in names), None)


@dataclass(frozen=True, kw_only=True)
class EmbeddingLoss(Loss):
    """Base class for losses over the embeddings of several texts per sample, e.g. a question and its answer.

    The scores are embeddings [texts, dim], or token embeddings [texts, tokens, dim], which are pooled. The texts of a
    sample are adjacent rows: a0, p0, a1, p1, ... In the training model, the inputs of the encoder have one more axis,
    [pairs, texts, tokens], so that samples remain along axis 0.

    Attributes:
        default_metrics: none; `Trainer.evaluate` computes retrieval metrics of texts.
        pooling: pooling of token embeddings: "mean" over the attention mask, "cls" for the first token, "max", or
            "last" for the last token; "auto" for "mean", if the model returns token embeddings.
        normalize: True to divide each pooled embedding by its length.
    """

    default_metrics: ClassVar[tuple[str, ...]] = ()
    label_metrics: ClassVar[tuple[str, ...]] = ()
    # Number of texts per sample; a name if samples may have any number.
    texts: ClassVar[int | str] = TEXTS
    pooling: Pooling = "auto"
    normalize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        names = get_args(Pooling)
        require(self, "pooling", lambda value: value in names, f"one of {', '.join(names)}")
        require(self, "normalize", lambda value: isinstance(value, bool), "True or False")

    def targets(self, scores: ir.Value) -> list[TargetSpec]:
        dims = self._scores_dims(scores)
        if len(dims) not in (2, 3):
            raise self._error(
                f"scores {scores.name!r} have shape {scores.shape}; choose embeddings [texts, dim] or token "
                "embeddings [texts, tokens, dim]"
            )
        if len(dims) == 2 and self.pooling != "auto":
            raise self._error(
                f"pooling is {self.pooling!r}, but scores {scores.name!r} of shape {scores.shape} have no token axis, "
                "because the model pools itself; leave pooling out"
            )
        return [self._target(scores)]

    def _target(self, scores: ir.Value) -> TargetSpec:
        """Returns the target; by default, a number for each text: equal texts have equal numbers."""
        return TargetSpec("texts", ir.DataType.INT64, (PAIRS, self.texts), groups=self.texts)

    def build(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        self._check_target(self.targets(scores)[0], target)
        rows = widen(op, scores)
        if len(static_dims(scores) or ()) == 3:
            mask = find_value(op.graph, MASK)
            rows = pool_tokens(op, rows, mask, "mean" if self.pooling == "auto" else self.pooling)
        if self.normalize:
            rows = unit_rows(op, rows)
        terms = self._terms(op, rows, widen(op, target))
        # Sample weights need the rank of the terms.
        terms.shape = ir.Shape([PAIRS])
        return narrow(op, reduce(op, terms, self.reduction), scores)

    @abstractmethod
    def _terms(self, op: Emitter, rows: ir.Value, target: ir.Value) -> ir.Value:
        """Emits the loss of each sample, [pairs], from embeddings [pairs · texts, dim] in float32 or float64."""

    def _columns(self, op: Emitter, rows: ir.Value, target: ir.Value) -> ir.Value:
        """Returns the embeddings as [texts, pairs, dim]: first all anchors, then all positives, ..."""
        sizes = op.Shape(target) if self.texts == TEXTS else op.const([-1, self.texts])
        grouped = op.Reshape(rows, op.Concat(sizes, op.Shape(rows, start=1), axis=0))
        columns: ir.Value = op.Transpose(grouped, perm=[1, 0, 2])
        return columns


def pool_tokens(op: Emitter, tokens: ir.Value, mask: ir.Value | None, pooling: str) -> ir.Value:
    """Emits the pooling of token embeddings.

    Args:
        op: emitter of the graph.
        tokens: embeddings of tokens, float [texts, tokens, dim].
        mask: 1 for tokens and 0 for padding, integer [texts, tokens]; None if there is no padding.
        pooling: "mean", "cls", "max" or "last".

    Returns:
        One embedding per text, [texts, dim].
    """
    if pooling == "cls":
        result: ir.Value = op.Gather(tokens, op.const(0), axis=1)
    elif pooling == "max":
        kept = tokens
        if mask is not None:
            # As in sentence-transformers; padding must not be the maximum.
            kept = op.Where(op.Unsqueeze(op.Cast(mask, to=ir.DataType.BOOL), [-1]), tokens, -1e9)
        result = op.ReduceMax(kept, [1], keepdims=0)
    elif mask is None:
        result = (
            op.ReduceMean(tokens, [1], keepdims=0)
            if pooling == "mean"
            else op.Gather(tokens, op.const(-1), axis=1)
        )
    else:
        weights = op.Cast(mask, to=tokens.dtype)
        if pooling == "mean":
            weights = op.Div(weights, op.Max(op.ReduceSum(weights, [1], keepdims=1), 1e-9))
        else:
            # The last token has a 1 and, after it, no further 1.
            following = op.CumSum(weights, op.const(1), reverse=1)
            weights = op.Mul(weights, op.Cast(op.Less(following, 1.5), to=tokens.dtype))
        # A matrix product needs no temporary value of the size of the tokens.
        result = op.Squeeze(op.MatMul(op.Unsqueeze(weights, [1]), tokens), [1])
    if tokens.shape is not None:
        result.shape = ir.Shape([tokens.shape[0], tokens.shape[2]])
    return result


def unit_rows(op: Emitter, rows: ir.Value, eps: float = 1e-12) -> ir.Value:
    """Divides each row by max(its Euclidean length, eps), as `torch.nn.functional.normalize`."""
    squares = op.ReduceSum(op.Mul(rows, rows), [-1], keepdims=1)
    # The maximum is inside of the root, whose slope at 0 is infinite.
    result: ir.Value = op.Div(rows, op.Sqrt(op.Max(squares, eps * eps)))
    result.shape = rows.shape
    return result


def dot(op: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
    """Returns the inner product of each row of `a` with the same row of `b`, [pairs]."""
    result: ir.Value = op.ReduceSum(op.Mul(a, b), [-1], keepdims=0)
    return result
