"""Losses over texts against the formulas of sentence-transformers in PyTorch, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F

from onnxtrain.autodiff import differentiate
from onnxtrain.emitter import Emitter
from onnxtrain.errors import GraphBuildError
from onnxtrain.losses import (
    CosineSimilarityLoss,
    EmbeddingLoss,
    InfoNCELoss,
    TripletLoss,
    attach_loss,
    embedding_output,
)
from onnxtrain.passes import canonicalize, load_model
from onnxtrain.texts._pooling import pool_rows
from runtimes import needs_opset

DIM = 6


def info_nce(
    rows: torch.Tensor, *, scale: float = 20.0, symmetric: bool = False, dot: bool = False
) -> torch.Tensor:
    """`MultipleNegativesRankingLoss.forward`, or its symmetric variant, for rows [pairs, texts, dim]."""
    columns = list(rows.unbind(1))
    candidates = torch.cat(columns[1:])
    if dot:
        scores = columns[0] @ candidates.T * scale
    else:
        scores = F.normalize(columns[0]) @ F.normalize(candidates).T * scale
    labels = torch.arange(len(scores))
    forward = F.cross_entropy(scores, labels, reduction="none")
    if not symmetric:
        return forward
    return (forward + F.cross_entropy(scores[:, : len(scores)].T, labels, reduction="none")) / 2


def own_negatives(rows: torch.Tensor, *, scale: float = 20.0) -> torch.Tensor:
    """InfoNCE among the positive and the negatives of each anchor, for rows [pairs, texts, dim]."""
    unit = F.normalize(rows, dim=2)
    scores = torch.einsum("pd,ptd->pt", unit[:, 0], unit[:, 1:]) * scale
    return F.cross_entropy(scores, torch.zeros(len(rows), dtype=torch.int64), reduction="none")


def triplet(rows: torch.Tensor, *, distance: str = "euclidean", margin: float = 5.0) -> torch.Tensor:
    """`TripletLoss.forward` of sentence-transformers."""
    measure = {
        "euclidean": lambda a, b: F.pairwise_distance(a, b, p=2),
        "manhattan": lambda a, b: F.pairwise_distance(a, b, p=1),
        "cosine": lambda a, b: 1 - F.cosine_similarity(a, b),
    }[distance]
    anchor, positive, negative = rows.unbind(1)
    return F.relu(measure(anchor, positive) - measure(anchor, negative) + margin)


def cosine(rows: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """`CosineSimilarityLoss.forward` without its mean."""
    return (torch.cosine_similarity(rows[:, 0], rows[:, 1]) - score) ** 2


CASES: dict[str, tuple[EmbeddingLoss, int, Callable[..., torch.Tensor]]] = {
    "pairs": (InfoNCELoss(), 2, info_nce),
    "negatives": (InfoNCELoss(), 4, info_nce),
    "temperature": (InfoNCELoss(scale=7.5), 3, lambda rows: info_nce(rows, scale=7.5)),
    "symmetric": (InfoNCELoss(symmetric=True), 3, lambda rows: info_nce(rows, symmetric=True)),
    "own negatives": (InfoNCELoss(in_batch_negatives=False), 4, own_negatives),
    "own negative": (
        InfoNCELoss(in_batch_negatives=False, scale=3.0, mask_duplicates=False),
        3,
        lambda rows: own_negatives(rows, scale=3.0),
    ),
    "dot": (InfoNCELoss(similarity="dot", scale=1.0), 2, lambda rows: info_nce(rows, scale=1.0, dot=True)),
    "unit dot": (
        InfoNCELoss(similarity="dot", scale=2.0, normalize=True),
        2,
        lambda rows: info_nce(rows, scale=2.0),
    ),
    "triplet": (TripletLoss(), 3, triplet),
    "triplet cosine": (
        TripletLoss(distance="cosine", margin=0.3),
        3,
        lambda rows: triplet(rows, distance="cosine", margin=0.3),
    ),
    "triplet manhattan": (
        TripletLoss(distance="manhattan"),
        3,
        lambda rows: triplet(rows, distance="manhattan"),
    ),
    "cosine": (CosineSimilarityLoss(), 2, cosine),
}


def built(
    loss: EmbeddingLoss,
    dtype: int = onnx.TensorProto.DOUBLE,
    *,
    tokens: bool = False,
    weighted: bool = False,
    opset: int = 21,
) -> onnx.ModelProto:
    """Returns the loss of the input "scores" and its gradient, with dynamic shapes."""
    shape = ["batch", "sequence", DIM] if tokens else ["batch", DIM]
    inputs = [onnx.helper.make_tensor_value_info("input", dtype, shape)]
    if tokens:
        inputs.append(
            onnx.helper.make_tensor_value_info(
                "attention_mask", onnx.TensorProto.INT64, ["batch", "sequence"]
            )
        )
    node = onnx.helper.make_node("Identity", ["input"], ["scores"])
    graph = onnx.helper.make_graph(
        [node], "scores", inputs, [onnx.helper.make_tensor_value_info("scores", dtype, shape)]
    )
    model = canonicalize(
        load_model(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)]))
    )
    op = Emitter(model.graph, functions=model.functions)
    value = attach_loss(op, loss, "scores", sample_weight=weighted)
    model.graph.outputs[:] = [value]
    return differentiate(ir.to_proto(model), str(value.name), ["input"])


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> tuple[Any, Any]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    loss, gradient = session.run(None, {name: value for name, value in feeds.items() if name in names})
    return loss, gradient


def numbers(pairs: int, texts: int) -> np.ndarray:
    return np.arange(pairs * texts).reshape(pairs, texts)


def expected(
    twin: Callable[..., torch.Tensor],
    rows: np.ndarray,
    score: np.ndarray | None,
    weight: np.ndarray | None = None,
) -> tuple[float, np.ndarray]:
    tensor = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
    terms = twin(tensor) if score is None else twin(tensor, torch.tensor(score, dtype=torch.float64))
    weights = torch.ones(len(terms)) if weight is None else torch.tensor(weight)
    loss = (terms * weights).sum() / weights.sum()
    loss.backward()
    assert tensor.grad is not None
    return float(loss.detach()), tensor.grad.numpy().reshape(-1, rows.shape[-1])


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("pairs", [1, 5])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_those_of_sentence_transformers(name: str, weighted: bool, pairs: int) -> None:
    loss, texts, twin = CASES[name]
    rng = np.random.default_rng(len(name))
    rows = rng.standard_normal((pairs, texts, DIM))
    score = rng.random(pairs) if name == "cosine" else None
    weight = rng.random(pairs) + 0.1 if weighted else None
    model = built(loss, weighted=weighted)
    target = {"texts": numbers(pairs, texts), "score": score, "sample_weight": weight}
    feeds = {
        "input": rows.reshape(-1, DIM),
        **{key: value for key, value in target.items() if value is not None},
    }
    value, gradient = run(model, feeds)
    wanted, slope = expected(twin, rows, score, weight)
    assert value == pytest.approx(wanted, rel=1e-10, abs=1e-12)
    assert np.abs(gradient - slope).max() <= 1e-9 * max(1, np.abs(slope).max())


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("opset", [pytest.param(n, marks=needs_opset(n)) for n in range(22, 27)])
def test_every_supported_opset(opset: int) -> None:
    for name in ("symmetric", "triplet", "cosine"):
        loss, texts, twin = CASES[name]
        rng = np.random.default_rng(opset)
        rows, score = rng.standard_normal((3, texts, DIM)), rng.random(3)
        feeds = {"input": rows.reshape(-1, DIM), "texts": numbers(3, texts), "score": score}
        value, _ = run(built(loss, opset=opset), feeds)
        assert value == pytest.approx(expected(twin, rows, score if name == "cosine" else None)[0])


@pytest.mark.parametrize("name", ["pairs", "triplet", "cosine"])
def test_float16_embeddings_are_compared_in_float32(name: str) -> None:
    loss, texts, twin = CASES[name]
    rng = np.random.default_rng(3)
    # Squares of these overflow in float16.
    rows = (rng.standard_normal((4, texts, DIM)) * 300).astype(np.float16)
    score = rng.random(4).astype(np.float16) if name == "cosine" else None
    feeds = {"input": rows.reshape(-1, DIM), "texts": numbers(4, texts)} | (
        {} if score is None else {"score": score}
    )
    value, gradient = run(built(loss, onnx.TensorProto.FLOAT16), feeds)
    wanted, _ = expected(twin, rows.astype(np.float64), score)
    assert value.dtype == gradient.dtype == np.float16
    assert float(value) == pytest.approx(wanted, rel=2e-3)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("symmetric", [False, True])
def test_duplicates_are_no_negatives(symmetric: bool) -> None:
    """Without them, the loss is that of PyTorch with those candidates taken out, one anchor at a time."""
    rng = np.random.default_rng(1)
    # Texts by number: 0 and 2 share the positive, 1 and 3 the anchor, and the anchor of 4 is the positive of 1.
    ids = np.array([[10, 20, 30], [11, 21, 31], [12, 20, 32], [11, 23, 33], [21, 24, 34]])
    vectors = {number: rng.standard_normal(DIM) for number in np.unique(ids)}
    rows = np.array([[vectors[number] for number in row] for row in ids])
    unit = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
    candidates = [(i, column) for column in (1, 2) for i in range(5)]

    def row_loss(i: int, others: list[tuple[int, int]], query: np.ndarray, own: np.ndarray) -> float:
        scores = [20 * query @ unit[j, column] for j, column in others] + [20 * query @ own]
        return float(np.logaddexp.reduce(scores) - scores[-1])

    terms = []
    for i in range(5):
        kept = [
            (j, column)
            for j, column in candidates
            if (j, column) != (i, 1)
            and ids[j, column] not in (ids[i, 0], ids[i, 1])
            and not (column == 1 and ids[j, 0] == ids[i, 0])
        ]
        term = row_loss(i, kept, unit[i, 0], unit[i, 1])
        if symmetric:
            anchors = [(j, 0) for j, column in kept if column == 1]
            # Seen from the positive, the same pairs of samples are excluded.
            anchors = [
                (j, 0)
                for j in range(5)
                if j != i and ids[i, 1] not in (ids[j, 0], ids[j, 1]) and ids[i, 0] != ids[j, 0]
            ]
            term = (term + row_loss(i, anchors, unit[i, 1], unit[i, 0])) / 2
        terms.append(term)
    value, gradient = run(
        built(InfoNCELoss(symmetric=symmetric)), {"input": rows.reshape(-1, DIM), "texts": ids}
    )
    assert float(value) == pytest.approx(np.mean(terms), rel=1e-10)
    assert np.isfinite(gradient).all()
    counted = InfoNCELoss(symmetric=symmetric, mask_duplicates=False)
    value, _ = run(built(counted), {"input": rows.reshape(-1, DIM), "texts": ids})
    wanted, _ = expected(lambda rows: info_nce(rows, symmetric=symmetric), rows, None)
    assert float(value) == pytest.approx(wanted, rel=1e-10)
    assert abs(wanted - np.mean(terms)) > 1e-3


def test_own_negatives_that_are_the_anchor_or_the_positive_are_left_out() -> None:
    rows = np.random.default_rng(11).standard_normal((3, 4, DIM))
    # The second negative of the first pair is its positive, the first of the second pair is its anchor.
    ids = np.array([[0, 1, 2, 1], [3, 4, 3, 5], [6, 7, 1, 3]])
    loss = InfoNCELoss(in_batch_negatives=False)
    value, _ = run(built(loss), {"input": rows.reshape(-1, DIM), "texts": ids})
    kept = [[0, 1, 2], [0, 1, 3], [0, 1, 2, 3]]
    terms = [own_negatives(torch.tensor(rows[i : i + 1, columns])) for i, columns in enumerate(kept)]
    assert float(value) == pytest.approx(float(torch.cat(terms).mean()), rel=1e-10)


def test_positives_are_compared_with_anchors_of_the_batch_only() -> None:
    with pytest.raises(
        GraphBuildError, match="symmetric is True; it must be False without in_batch_negatives"
    ):
        InfoNCELoss(symmetric=True, in_batch_negatives=False)


def pooled(tokens: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """`Pooling.forward` of sentence-transformers."""
    wide = mask.unsqueeze(-1).double()
    if pooling == "cls":
        return tokens[:, 0]
    if pooling == "max":
        return tokens.masked_fill(wide == 0, -1e9).amax(1)
    if pooling == "last":
        return tokens[torch.arange(len(tokens)), mask.sum(1) - 1]
    return (tokens * wide).sum(1) / wide.sum(1).clamp(min=1e-9)


@pytest.mark.parametrize("pooling", ["auto", "mean", "cls", "max", "last"])
def test_tokens_are_pooled_as_by_sentence_transformers(pooling: Any) -> None:
    rng = np.random.default_rng(2)
    tokens = rng.standard_normal((8, 5, DIM))
    mask = (np.arange(5) < np.array([5, 1, 3, 4, 2, 5, 1, 2])[:, None]).astype(np.int64)
    leaf = torch.tensor(tokens, requires_grad=True)
    rows = pooled(leaf, torch.tensor(mask), pooling)
    info_nce(rows.reshape(4, 2, DIM)).mean().backward()
    loss = InfoNCELoss(pooling=pooling)
    feeds = {"input": tokens, "attention_mask": mask, "texts": numbers(4, 2)}
    value, gradient = run(built(loss, tokens=True), feeds)
    assert leaf.grad is not None
    assert float(value) == pytest.approx(float(info_nce(rows.reshape(4, 2, DIM)).mean().detach()), rel=1e-10)
    assert np.abs(gradient - leaf.grad.numpy()).max() < 1e-10
    # What predicts embeddings pools in numpy.
    assert np.abs(pool_rows(tokens, mask, pooling, normalize=False) - rows.detach().numpy()).max() < 1e-5


def test_equal_embeddings_and_zeros_have_finite_gradients() -> None:
    for loss, texts in ((InfoNCELoss(), 2), (TripletLoss(), 3), (CosineSimilarityLoss(), 2)):
        for rows in (np.zeros((3 * texts, DIM)), np.ones((3 * texts, DIM))):
            value, gradient = run(
                built(loss), {"input": rows, "texts": numbers(3, texts), "score": np.zeros(3)}
            )
            assert np.isfinite(value)
            assert np.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: InfoNCELoss(scale=0), "scale is 0.0; it must be a positive number"),
        (lambda: InfoNCELoss(similarity="l2"), "similarity is 'l2'; it must be 'cosine' or 'dot'"),  # type: ignore[arg-type]
        (lambda: InfoNCELoss(symmetric=1), "symmetric is 1; it must be True or False"),  # type: ignore[arg-type]
        (lambda: TripletLoss(margin=-1), "margin is -1.0; it must be a non-negative number"),
        (lambda: TripletLoss(distance="dot"), "distance is 'dot'; it must be one of euclidean"),  # type: ignore[arg-type]
        (lambda: CosineSimilarityLoss(pooling="sum"), "pooling is 'sum'; it must be one of auto, mean"),  # type: ignore[arg-type]
        (lambda: built(InfoNCELoss(pooling="mean")), "have no token axis, because the model pools itself"),
    ],
)
def test_settings_that_mean_nothing_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(GraphBuildError) as error:
        make()
    for part in message.split("; "):
        assert part in str(error.value)


@pytest.mark.parametrize("kind", [InfoNCELoss, TripletLoss, CosineSimilarityLoss])
def test_every_setting_has_a_case(kind: type[EmbeddingLoss]) -> None:
    cases = [loss for loss, _, _ in CASES.values() if type(loss) is kind]
    default = kind()
    # Pooling and normalisation are of the base class, and reductions of every loss; duplicates have their own test.
    shared = {"reduction", "pooling", "normalize", "mask_duplicates"}
    for field in {field.name for field in fields(kind)} - shared:
        assert any(getattr(loss, field) != getattr(default, field) for loss in cases), field
    # Integers are converted, as the emitter would write an integer tensor.
    assert InfoNCELoss(scale=7) == InfoNCELoss(scale=7.0)
    assert type(TripletLoss(margin=1).margin) is float


def test_reductions() -> None:
    rows = np.random.default_rng(7).standard_normal((8, DIM))
    feeds = {"input": rows, "texts": numbers(4, 2)}
    mean, _ = run(built(InfoNCELoss()), feeds)
    total, _ = run(built(InfoNCELoss(reduction="sum")), feeds)
    assert float(total) == pytest.approx(4 * float(mean))


def test_scores_of_another_rank_are_refused() -> None:
    scores = ir.Value(name="s", shape=ir.Shape(["batch"]), type=ir.TensorType(ir.DataType.FLOAT))
    with pytest.raises(GraphBuildError, match=r"choose embeddings \[texts, dim\] or token embeddings"):
        InfoNCELoss().targets(scores)


def test_the_output_with_embeddings_is_found_by_its_name() -> None:
    assert embedding_output(["last_hidden_state", "pooler_output"]) == "last_hidden_state"
    assert embedding_output(["token_embeddings", "sentence_embedding"]) == "sentence_embedding"
    assert embedding_output(["a"]) == "a"
    assert embedding_output(["a", "b"]) is None
