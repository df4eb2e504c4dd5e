"""Losses of several outputs or targets against torch.nn.functional: values and gradients, in float64 and float32."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onnxtrain import Trainer, losses
from onnxtrain.autodiff import differentiate
from onnxtrain.emitter import Emitter
from onnxtrain.errors import DivergenceError, GraphBuildError, InputError
from onnxtrain.losses import (
    LOSSES,
    CosineEmbeddingLoss,
    CTCLoss,
    GaussianNLLLoss,
    JointLoss,
    KLDivLoss,
    Loss,
    MarginRankingLoss,
    TripletMarginLoss,
    TripletMarginWithDistanceLoss,
    attach_joint_loss,
    make_loss,
)
from runtimes import needs_opset
from tolerances import NORM_RELATIVE, norm_relative_error

Arrays = list[np.ndarray]


@dataclass(frozen=True)
class JointCase:
    """A loss, its torch twin `(*outputs, *targets, reduction=...)`, and functions that draw outputs and targets."""

    name: str
    loss: type[JointLoss]
    twin: Callable[..., torch.Tensor]
    outputs: Sequence[tuple[int, ...]]
    target: Callable[[np.random.Generator, Sequence[tuple[int, ...]]], Arrays] = lambda rng, shapes: []
    options: dict[str, Any] = field(default_factory=dict)
    domain: Callable[[Arrays], Arrays] = lambda arrays: arrays

    def arrays(self) -> tuple[Arrays, Arrays]:
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        outputs = self.domain([rng.normal(size=shape) for shape in self.outputs])
        return outputs, self.target(rng, self.outputs)


def _signs(rng: np.random.Generator, shapes: Sequence[tuple[int, ...]]) -> Arrays:
    return [rng.choice([-1.0, 1.0], shapes[0])]


def _sign_of_pairs(rng: np.random.Generator, shapes: Sequence[tuple[int, ...]]) -> Arrays:
    # A target that is neither 1 nor -1 costs nothing.
    return [rng.choice([-1.0, 1.0, 0.0], shapes[0][:1], p=[0.45, 0.45, 0.1])]


def _real(rng: np.random.Generator, shapes: Sequence[tuple[int, ...]]) -> Arrays:
    return [rng.normal(size=shapes[0])]


def _with_variance(arrays: Arrays) -> Arrays:
    return [arrays[0], np.abs(arrays[1]) + 0.01]


def _with_tiny_variance(arrays: Arrays) -> Arrays:
    variance = np.abs(arrays[1])
    variance[::2] = 1e-9
    return [arrays[0], variance]


def _gaussian(mean: Any, var: Any, target: Any, **options: Any) -> torch.Tensor:
    return F.gaussian_nll_loss(mean, target, var, **options)


# Repeated labels, an empty target, targets that need every position, more labels than positions, and repeated ones that
# need one position more than there are.
_LABELS = [[1, 2, 3, 1], [2, 2, 1, 0], [0, 0, 0, 0], [3, 3, 3, 0], [1, 3, 2, 2], [2, 1, 0, 0], [2, 2, 0, 0]]
_LABEL_COUNTS = [4, 3, 0, 3, 4, 2, 2]
_POSITIONS = [8, 6, 5, 5, 3, 2, 2]


def _sequences(blank: int) -> Callable[..., Arrays]:
    def drawn(rng: np.random.Generator, shapes: Sequence[tuple[int, ...]]) -> Arrays:
        labels = np.array(_LABELS)
        # Labels other than the blank: the blank takes the place of class 0.
        labels = np.where(labels == blank, 0, labels)
        return [labels, np.array(_POSITIONS), np.array(_LABEL_COUNTS)]

    return drawn


def _fits(rng: np.random.Generator, shapes: Sequence[tuple[int, ...]]) -> Arrays:
    keep = [0, 1, 2, 3, 5]
    labels, positions, counts = _sequences(0)(rng, shapes)
    return [labels[keep], positions[keep], counts[keep]]


def _ctc(scores: Any, labels: Any, positions: Any, counts: Any, **options: Any) -> torch.Tensor:
    """PyTorch takes log-probabilities [T, N, C]."""
    return F.ctc_loss(scores.log_softmax(2).transpose(0, 1), labels, positions, counts, **options)


_PAIR, _THREE = [(6, 4), (6, 4)], [(5, 3), (5, 3), (5, 3)]

CASES: list[JointCase] = [
    JointCase("triplet_margin", TripletMarginLoss, F.triplet_margin_loss, _THREE),
    *(
        JointCase(
            f"triplet_margin-{p}-{swap}",
            TripletMarginLoss,
            functools.partial(F.triplet_margin_loss, margin=0.7, p=p, swap=swap, eps=1e-3),
            [(5, 2, 3)] * 3,
            options={"margin": 0.7, "p": p, "swap": swap, "eps": 1e-3},
        )
        for p, swap in itertools.product((1.0, 1.5, 2.0, 3.0, math.inf), (False, True))
    ),
    JointCase(
        "triplet_margin_with_distance",
        TripletMarginWithDistanceLoss,
        F.triplet_margin_with_distance_loss,
        _THREE,
    ),
    JointCase(
        "triplet_margin_with_distance-cosine",
        TripletMarginWithDistanceLoss,
        functools.partial(
            F.triplet_margin_with_distance_loss,
            distance_function=lambda a, b: 1 - F.cosine_similarity(a, b),
            margin=0.5,
            swap=True,
        ),
        _THREE,
        options={"distance_function": "cosine", "margin": 0.5, "swap": True},
    ),
    JointCase(
        "triplet_margin_with_distance-function",
        TripletMarginWithDistanceLoss,
        functools.partial(
            F.triplet_margin_with_distance_loss, distance_function=lambda a, b: (a - b).square().sum(1)
        ),
        _THREE,
        options={
            "distance_function": lambda op, a, b: op.ReduceSumSquare(op.Sub(a, b), [1], keepdims=0),
        },
    ),
    JointCase("cosine_embedding", CosineEmbeddingLoss, F.cosine_embedding_loss, _PAIR, _sign_of_pairs),
    JointCase(
        "cosine_embedding-margin",
        CosineEmbeddingLoss,
        functools.partial(F.cosine_embedding_loss, margin=-0.3),
        _PAIR,
        _sign_of_pairs,
        {"margin": -0.3},
    ),
    JointCase("margin_ranking", MarginRankingLoss, F.margin_ranking_loss, [(7,), (7,)], _signs),
    JointCase(
        "margin_ranking-margin",
        MarginRankingLoss,
        functools.partial(F.margin_ranking_loss, margin=0.4),
        _PAIR,
        _signs,
        {"margin": 0.4},
    ),
    JointCase("gaussian_nll", GaussianNLLLoss, _gaussian, _PAIR, _real, domain=_with_variance),
    JointCase(
        "gaussian_nll-one",
        GaussianNLLLoss,
        functools.partial(_gaussian, full=True, eps=0.3),
        [(6, 4), (6, 1)],
        _real,
        {"full": True, "eps": 0.3},
        _with_variance,
    ),
    JointCase("gaussian_nll-shared", GaussianNLLLoss, _gaussian, [(6, 4), (6,)], _real, domain=_with_variance),
    JointCase("gaussian_nll-tiny", GaussianNLLLoss, _gaussian, _PAIR, _real, domain=_with_tiny_variance),
    JointCase("ctc", CTCLoss, _ctc, [(5, 8, 4)], _fits),
    JointCase(
        "ctc-zero_infinity",
        CTCLoss,
        functools.partial(_ctc, zero_infinity=True),
        [(7, 8, 4)],
        _sequences(0),
        {"zero_infinity": True},
    ),
    JointCase(
        "ctc-blank",
        CTCLoss,
        functools.partial(_ctc, blank=2, zero_infinity=True),
        [(7, 8, 4)],
        _sequences(2),
        {"blank": 2, "zero_infinity": True},
    ),
]  # fmt: skip


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array))


def _floats(array: np.ndarray, dtype: type) -> np.ndarray:
    return array.astype(dtype) if array.dtype.kind == "f" else array


def _model(
    case: JointCase,
    loss: JointLoss,
    dtype: type,
    *,
    symbolic: bool = False,
    weighted: bool = False,
    opset: int = 21,
) -> tuple[onnx.ModelProto, list[str]]:
    """Returns a model with the inputs output0, output1, ..., and targets; and the names of its targets."""
    kind = ir.DataType.from_numpy(np.dtype(dtype))
    outputs = []
    for k, shape in enumerate(case.outputs):
        dims = [f"d{size}" if symbolic else size for size in shape]
        outputs.append(ir.Value(name=f"output{k}", shape=ir.Shape(dims), type=ir.TensorType(kind)))
    graph = ir.Graph(outputs, [], nodes=[], opset_imports={"": opset}, name="loss")
    model = ir.Model(graph, ir_version=10)
    op = Emitter(graph, functions=model.functions)
    value = attach_joint_loss(
        op, loss, [str(value.name) for value in outputs], named=True, sample_weight=weighted
    )
    assert value.dtype == kind
    assert value.shape is not None
    graph.outputs.append(value)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    names = [str(value.name) for value in graph.inputs[len(outputs) :]]
    return proto, names


def _fetch(model: onnx.ModelProto, feeds: dict[str, np.ndarray], names: Sequence[str]) -> Arrays:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(list(names), feeds)


def _compare(case: JointCase, reduction: str, dtype: type, symbolic: bool) -> None:
    outputs, targets = case.arrays()
    outputs = [output.astype(dtype) for output in outputs]
    leaves = [_tensor(output.astype(np.float64)).requires_grad_() for output in outputs]
    value = case.twin(*leaves, *map(_tensor, targets), reduction=reduction)
    cotangent = np.random.default_rng(0).normal(size=tuple(value.shape))
    gradients = torch.autograd.grad(value, leaves, _tensor(cotangent))
    loss = case.loss(reduction=reduction, **case.options)
    model, names = _model(case, loss, dtype, symbolic=symbolic)
    wrt = [f"output{k}" for k in range(len(outputs))]
    step = differentiate(model, of="loss", wrt=wrt, cotangent="ct")
    feeds = dict(zip(wrt, outputs, strict=True)) | {"ct": cotangent.astype(dtype)}
    feeds |= {name: _floats(target, dtype) for name, target in zip(names, targets, strict=True)}
    results = _fetch(step, feeds, ["loss", *(f"{name}_grad" for name in wrt)])
    for got, expected in zip(results, [value.detach(), *gradients], strict=True):
        assert got.dtype == dtype
        assert got.shape == tuple(expected.shape)
        assert norm_relative_error(got, expected.numpy()) <= NORM_RELATIVE[np.dtype(dtype)]


@pytest.mark.sample(every=7)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_value_and_gradients_match_torch_in_float64(case: JointCase, reduction: str) -> None:
    _compare(case, reduction, np.float64, symbolic=True)


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_value_and_gradients_match_torch_in_float32_with_fixed_sizes(case: JointCase) -> None:
    _compare(case, "mean", np.float32, symbolic=False)


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_weight_of_a_sample_is_how_often_torch_sees_it(case: JointCase, reduction: str) -> None:
    outputs, targets = case.arrays()
    weights = np.array([2, 0, 1, 3, 1, 2, 1])[: len(outputs[0])]
    repeated = [_tensor(a).repeat_interleave(_tensor(weights), 0) for a in (*outputs, *targets)]
    expected = case.twin(*repeated, reduction=reduction)
    loss = case.loss(reduction=reduction, **case.options)
    model, names = _model(case, loss, np.float64, symbolic=True, weighted=True)
    feeds = {f"output{k}": output for k, output in enumerate(outputs)}
    feeds |= dict(zip(names, [*targets, weights.astype(np.float64)], strict=True))
    got = _fetch(model, feeds, ["loss"])[0]
    assert norm_relative_error(got, expected.numpy()) <= NORM_RELATIVE[np.dtype(np.float64)]


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("opset", [pytest.param(n, marks=needs_opset(n)) for n in (21, 23, 26)])
@pytest.mark.parametrize("name", sorted(n for n, kind in LOSSES.items() if issubclass(kind, JointLoss)))
def test_every_joint_loss_has_a_case_and_runs_in_supported_opsets(name: str, opset: int) -> None:
    case = next((case for case in CASES if case.loss is LOSSES[name]), None)
    assert case is not None, f"{name}: give it a JointCase in CASES"
    outputs, targets = case.arrays()
    model, names = _model(case, case.loss(**case.options), np.float32, opset=opset)
    feeds = {f"output{k}": output.astype(np.float32) for k, output in enumerate(outputs)}
    feeds |= {name: _floats(target, np.float32) for name, target in zip(names, targets, strict=True)}
    expected = case.twin(*map(_tensor, outputs), *map(_tensor, targets)).numpy()
    got = _fetch(model, feeds, ["loss"])[0]
    assert norm_relative_error(got, expected) <= NORM_RELATIVE[np.dtype(np.float32)]


@pytest.mark.parametrize("name", sorted(n for n, kind in LOSSES.items() if issubclass(kind, JointLoss)))
def test_every_joint_loss_has_cases_of_its_settings(name: str) -> None:
    tested = {setting for case in CASES if case.loss is LOSSES[name] for setting in case.options}
    # Tested by the Trainer's runs below.
    untested = {entry.name for entry in fields(LOSSES[name])} - tested - {"reduction", "batch_first"}
    assert untested == set(), "add a JointCase to CASES that sets these fields"


@pytest.mark.parametrize("case", [case for case in CASES if "-" not in case.name], ids=lambda case: case.name)
def test_float16_outputs_are_computed_in_float32(case: JointCase) -> None:
    outputs, targets = case.arrays()
    outputs = [output.astype(np.float16) for output in outputs]
    targets = [_floats(target, np.float16) for target in targets]
    model, names = _model(case, case.loss(), np.float16)
    got = _fetch(
        model,
        dict(zip([*(f"output{k}" for k in range(len(outputs))), *names], [*outputs, *targets], strict=True)),
        ["loss"],
    )[0]
    wide = [_tensor(_floats(array, np.float64)) for array in (*outputs, *targets)]
    assert got.dtype == np.float16
    assert norm_relative_error(got, case.twin(*wide).numpy()) <= NORM_RELATIVE[np.dtype(np.float16)]


@pytest.mark.parametrize("swap", [False, True])
def test_triplets_at_the_kink_have_the_gradient_of_torch(swap: bool) -> None:
    """The margin is met exactly, and with `swap` both distances to the negative are equal."""
    arrays = [np.array([[0.0, 0.0]]), np.array([[1.0, 0.0]]), np.array([[0.5, math.sqrt(0.75)]])]
    case = JointCase("kink", TripletMarginWithDistanceLoss, F.triplet_margin_loss, [(1, 2)] * 3)
    square = {"distance_function": lambda op, a, b: op.ReduceSumSquare(op.Sub(a, b), [1], keepdims=0)}
    arrays[2] = np.array([[0.5, 1.0]])  # equally far from both, in numbers that are exact
    margin = 1.25 - 1.0
    model, _ = _model(case, TripletMarginWithDistanceLoss(margin=margin, swap=swap, **square), np.float64)
    wrt = ["output0", "output1", "output2"]
    step = differentiate(model, of="loss", wrt=wrt)
    got = _fetch(step, dict(zip(wrt, arrays, strict=True)), ["loss", *(f"{name}_grad" for name in wrt)])
    leaves = [_tensor(array).requires_grad_() for array in arrays]
    value = F.triplet_margin_with_distance_loss(
        *leaves, distance_function=lambda a, b: (a - b).square().sum(1), margin=margin, swap=swap
    )
    assert value == 0
    for result, expected in zip(got, [value.detach(), *torch.autograd.grad(value, leaves)], strict=True):
        np.testing.assert_allclose(result, expected.numpy(), rtol=1e-12)


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, math.inf])
def test_gradient_of_the_distance_of_equal_embeddings_is_finite(p: float) -> None:
    case = JointCase("equal", TripletMarginLoss, F.triplet_margin_loss, [(2, 3)] * 3)
    model, _ = _model(case, TripletMarginLoss(p=p, eps=0), np.float64)
    wrt = ["output0", "output1", "output2"]
    same = np.ones((2, 3))
    step = differentiate(model, of="loss", wrt=wrt)
    got = _fetch(step, dict.fromkeys(wrt, same), [f"{name}_grad" for name in wrt])
    leaves = [_tensor(same.copy()).requires_grad_() for _ in wrt]
    F.triplet_margin_loss(*leaves, p=p, eps=0).backward()
    for result, leaf in zip(got, leaves, strict=True):
        np.testing.assert_allclose(result, leaf.grad.numpy(), atol=1e-12)


def _ctc_run(
    loss: CTCLoss, labels: Any, positions: Any, counts: Any, shape: tuple[int, ...] = (1, 4, 3)
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    case = JointCase("ctc", CTCLoss, _ctc, [shape])
    model, names = _model(case, loss, np.float64, symbolic=True)
    scores = np.random.default_rng(0).normal(size=shape)
    step = differentiate(model, of="loss", wrt=["output0"])
    feeds = {"output0": scores} | dict(zip(names, map(np.array, (labels, positions, counts)), strict=True))
    value, gradient = _fetch(step, feeds, ["loss", "output0_grad"])
    return value, gradient, scores


def test_ctc_loss_is_the_sum_over_all_alignments() -> None:
    """The definition: the probability of every path of classes that collapses to the labels."""
    value, _, scores = _ctc_run(CTCLoss(reduction="sum"), [[1, 1]], [4], [2])
    probability = np.exp(F.log_softmax(_tensor(scores), 2).numpy())[0]
    total = 0.0
    for path in itertools.product(range(3), repeat=4):
        collapsed = [label for label, _ in itertools.groupby(path) if label != 0]
        if collapsed == [1, 1]:
            total += math.prod(probability[t, label] for t, label in enumerate(path))
    assert value == pytest.approx(-math.log(total), rel=1e-12)


def test_ctc_loss_of_too_few_positions_is_infinite_or_zero() -> None:
    for zero_infinity, expected in ((False, math.inf), (True, 0.0)):
        value, gradient, _ = _ctc_run(CTCLoss(zero_infinity=zero_infinity), [[1, 1]], [2], [2])
        assert value == expected
        if zero_infinity:
            assert not gradient.any()


@pytest.mark.parametrize(
    ("labels", "positions", "counts"),
    [
        ([[1, 7]], [4], [2]), ([[1, -1]], [4], [2]), ([[1, 2]], [5], [2]), ([[1, 2]], [4], [3]), ([[1, 2]], [4], [-1]),
        ([[1, 2]], [-1], [1]),
    ],
)  # fmt: skip
def test_ctc_lengths_and_labels_out_of_range_make_the_loss_nan(
    labels: Any, positions: Any, counts: Any
) -> None:
    assert math.isnan(_ctc_run(CTCLoss(), labels, positions, counts)[0])


def test_ctc_padding_is_never_read() -> None:
    first, gradient, _ = _ctc_run(CTCLoss(), [[1, 2, -5]], [3], [2])
    second, other, _ = _ctc_run(CTCLoss(), [[1, 2, 99]], [3], [2])
    assert first == second
    np.testing.assert_array_equal(gradient, other)
    assert not gradient[:, 3].any()


def test_ctc_loss_of_a_long_sequence_in_float32_matches_float64() -> None:
    shape = (2, 400, 30)
    rng = np.random.default_rng(1)
    scores, labels = rng.normal(size=shape) * 4, rng.integers(1, 30, (2, 60))
    lengths = [np.array([400, 333]), np.array([60, 41])]
    expected = _ctc(_tensor(scores).requires_grad_(), _tensor(labels), *map(_tensor, lengths))
    case = JointCase("ctc", CTCLoss, _ctc, [shape])
    model, names = _model(case, CTCLoss(), np.float32, symbolic=True)
    feeds = {"output0": scores.astype(np.float32)} | dict(zip(names, [labels, *lengths], strict=True))
    assert _fetch(model, feeds, ["loss"])[0] == pytest.approx(expected.item(), rel=1e-5)


def test_negative_variance_makes_the_loss_nan() -> None:
    case = JointCase("gaussian", GaussianNLLLoss, _gaussian, [(2, 1), (2, 1)])
    model, names = _model(case, GaussianNLLLoss(), np.float32)
    feeds = {"output0": np.zeros((2, 1), np.float32), "output1": np.float32([[1], [-1]])}
    assert np.isnan(_fetch(model, feeds | {names[0]: np.zeros((2, 1), np.float32)}, ["loss"])[0])


def _value(name: str, shape: tuple[Any, ...], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


@pytest.mark.parametrize(
    ("loss", "values", "message"),
    [
        (TripletMarginLoss(), [("a", (3, 2))], "takes 3 outputs .*anchor, positive, negative.*received 1: a"),
        (TripletMarginLoss(), [("a", ("n", 2)), ("b", ("n", 2)), ("c", ("n", 3))], "same dtype and shape"),
        (TripletMarginLoss(), [("a", (3,)), ("b", (3,)), ("c", (3,))], r"shape \[N, D, ...\]"),
        (CosineEmbeddingLoss(), [("a", (3, 2, 2)), ("b", (3, 2, 2))], r"needs outputs of shape \[N, D\]"),
        (GaussianNLLLoss(), [("m", (3, 4)), ("v", (3, 2))], "the variance 'v' FLOAT .* must have"),
        (CTCLoss(), [("y", (3, 4))], r"this loss needs \[N, T, C\]"),
        (CTCLoss(blank=9), [("y", (3, 5, 4))], "blank is 9, but .* the classes 0 to 3"),
    ],
)  # fmt: skip
def test_outputs_that_do_not_fit_are_refused(
    loss: JointLoss, values: list[tuple[str, tuple[Any, ...]]], message: str
) -> None:
    graph = ir.Graph([_value(*entry) for entry in values], [], nodes=[], opset_imports={"": 21})
    with pytest.raises(GraphBuildError, match=message):
        attach_joint_loss(Emitter(graph), loss, [name for name, _ in values], named=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TripletMarginLoss(margin=0), "margin is 0.0; it must be a positive number"),
        (lambda: TripletMarginLoss(p=0.5), "p is 0.5; it must be a number that is at least 1"),
        (lambda: TripletMarginWithDistanceLoss(distance_function="far"), "distance_function is 'far'"),
        (lambda: CosineEmbeddingLoss(margin=2.0), "margin is 2.0; it must be from -1 to 1"),
        (lambda: GaussianNLLLoss(eps=0.0), "eps is 0.0"),
        (lambda: CTCLoss(blank=-1), "blank is -1"),
        (lambda: KLDivLoss(reduction="batch"), "'mean', 'batchmean', 'sum' or 'none'"),
    ],
)
def test_settings_that_mean_nothing_are_refused(make: Callable[[], Loss], message: str) -> None:
    with pytest.raises(GraphBuildError, match=message):
        make()


def test_kl_div_batchmean_is_torchs_also_with_weights() -> None:
    rng = np.random.default_rng(0)
    scores = F.log_softmax(_tensor(rng.normal(size=(4, 3))), 1)
    target = F.softmax(_tensor(rng.normal(size=(4, 3))), 1)
    weights = np.array([1, 0, 2, 1])
    loss = KLDivLoss(reduction="batchmean")
    values = [_value("scores", ("n", 3), ir.DataType.DOUBLE), _value("target", ("n", 3), ir.DataType.DOUBLE)]
    weight = _value("weight", ("n",), ir.DataType.DOUBLE)
    graph = ir.Graph([*values, weight], [], nodes=[], opset_imports={"": 21}, name="g")
    op = Emitter(graph)
    graph.outputs.extend([loss.build(op, *values), loss.build_weighted(op, *values, weight)])
    model = ir.to_proto(ir.Model(graph, ir_version=10))
    feeds = {"scores": scores.numpy(), "target": target.numpy(), "weight": weights.astype(np.float64)}
    plain, weighted = _fetch(model, feeds, [str(value.name) for value in graph.outputs])
    assert plain == pytest.approx(F.kl_div(scores, target, reduction="batchmean").item(), rel=1e-12)
    times = _tensor(weights)
    repeated = F.kl_div(
        scores.repeat_interleave(times, 0), target.repeat_interleave(times, 0), reduction="batchmean"
    )
    assert weighted == pytest.approx(repeated.item(), rel=1e-12)


def _all_of_torch() -> list[str]:
    return sorted(
        name
        for name, kind in vars(nn).items()
        if isinstance(kind, type) and issubclass(kind, nn.modules.loss._Loss) and name.endswith("Loss")
    )


# It has a weight that is trained: a layer with its loss.
_NO_LOSS_ALONE = {"LinearCrossEntropyLoss"}


@pytest.mark.parametrize("name", [name for name in _all_of_torch() if name not in _NO_LOSS_ALONE])
def test_every_loss_of_torch_nn_has_a_class_with_its_arguments_and_defaults(name: str) -> None:
    kind = getattr(losses, name)
    criterion = getattr(nn, name)()
    made = make_loss(criterion)
    if name == "TripletMarginWithDistanceLoss":
        assert isinstance(made, losses.TorchLoss)
        made = kind()
    assert type(made) is kind
    assert kind in LOSSES.values()
    deprecated = {"size_average", "reduce"}

    for parameter in inspect.signature(getattr(nn, name)).parameters.values():
        if parameter.name in deprecated:
            continue
        default = getattr(made, parameter.name)
        assert default == getattr(criterion, parameter.name) or parameter.name == "distance_function"
        assert getattr(kind(), parameter.name) == default


def test_settings_of_a_criterion_are_kept() -> None:
    made = make_loss(
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]), label_smoothing=0.1, ignore_index=3)
    )
    assert isinstance(made, losses.CrossEntropyLoss)
    np.testing.assert_array_equal(made.weight, [1, 2])
    assert (made.label_smoothing, made.ignore_index) == (0.1, 3)
    assert make_loss(nn.CTCLoss(blank=2)) == CTCLoss(blank=2, batch_first=False)


def _three_outputs() -> onnx.ModelProto:
    return onnx.parser.parse_model(
        """
        <ir_version: 10, opset_import: ["": 21]>
        towers (float[n, 4] a, float[n, 4] p, float[n, 4] q)
            => (float[n, 3] ea, float[n, 3] ep, float[n, 3] eq)
        <float[4, 3] w = {1, 0, 0, 0, 1, 0, 0, 0, 1, 0.5, 0.5, 0.5}> {
            ea = MatMul(a, w)
            ep = MatMul(p, w)
            eq = MatMul(q, w)
        }
        """
    )


def test_trainer_learns_from_triplets_without_targets_as_torch_does() -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(12, 4)).astype(np.float32) for _ in range(3)]
    model = _three_outputs()
    trainer = Trainer(model, "triplet_margin", optimizer="sgd", learning_rate=0.1)
    history = trainer.fit(arrays, epochs=3, batch_size=4, shuffle=False, verbose=False)
    weight = _tensor(onnx.numpy_helper.to_array(model.graph.initializer[0]).copy()).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    recorded = []
    for _ in range(3):
        values = []
        for k in range(0, 12, 4):
            optimizer.zero_grad()
            embeddings = [_tensor(array[k : k + 4]) @ weight for array in arrays]
            loss = F.triplet_margin_loss(*embeddings)
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        recorded.append(np.mean(values))
    np.testing.assert_allclose(history["loss"], recorded, rtol=1e-5)


def _recogniser(last: str = "LogSoftmax<axis=2>") -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(
        f"""
        <ir_version: 10, opset_import: ["": 21]>
        net (float[n, t, 5] x) => (float[n, t, 4] scores) {{ s = MatMul(x, w)  scores = {last}(s) }}
        """
    )
    weight = (rng.normal(size=(5, 4)) * 0.1).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    return model


@pytest.mark.parametrize("last", ["LogSoftmax<axis=2>", "Identity"])
def test_trainer_learns_with_ctc_as_torch_does_also_with_sample_weights(last: str) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(8, 6, 5)).astype(np.float32)
    y = {
        "labels": rng.integers(1, 4, (8, 2)),
        "input_lengths": np.full(8, 6),
        "target_lengths": np.array([2, 1, 2, 0, 1, 2, 2, 1]),
    }
    share = np.array([1, 2, 0, 1, 1, 3, 1, 1], np.float32)
    model = _recogniser(last)
    trainer = Trainer(model, "ctc", optimizer="sgd", learning_rate=0.5)
    trainer.fit(x, y, epochs=2, batch_size=8, verbose=False, shuffle=False)
    trainer.fit(x, y, epochs=2, batch_size=8, verbose=False, shuffle=False, sample_weight=share)
    weight = _tensor(onnx.numpy_helper.to_array(model.graph.initializer[0]).copy()).requires_grad_()
    recorded = []
    for weighted in (False, False, True, True):
        terms = _ctc(_tensor(x) @ weight, *map(_tensor, y.values()), reduction="none")
        terms = terms / _tensor(y["target_lengths"]).clamp_min(1)
        loss = (terms * _tensor(share)).sum() / share.sum() if weighted else terms.mean()
        weight.grad = None
        loss.backward()
        with torch.no_grad():
            weight -= 0.5 * weight.grad
        recorded.append(loss.item())
    np.testing.assert_allclose(trainer.history["loss"], recorded, rtol=1e-5)
    expected = (_tensor(x) @ weight).softmax(2).detach().numpy()
    np.testing.assert_allclose(trainer.predict_proba(x), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("loss", "labels", "message"),
    [
        (CTCLoss(), [[1, 2], [0, 1]], r"label 0 of sample 1, .* is the blank \(1 such .*class 3, pass .*blank=3"),
        (CTCLoss(), [[3, 2], [0, 1]], "is the blank .*Renumber the labels"),
        (CTCLoss(), [[1, 4], [1, 1]], r"label 4 of sample 0, at position 1, is not a class .*classes 0 to 3"),
        (CTCLoss(blank=3), [[0, -1], [1, 1]], "label -1 of sample 0, at position 1, is not a class"),
        (CTCLoss(blank=3), [[0, 1], [1, 3]], "label 3 of sample 1, at position 1, is the blank"),
    ],
)  # fmt: skip
def test_ctc_labels_that_are_the_blank_are_refused_before_the_first_step(
    loss: CTCLoss, labels: Any, message: str
) -> None:
    y = {"labels": np.array(labels), "input_lengths": np.full(2, 6), "target_lengths": np.full(2, 2)}
    x = np.zeros((2, 6, 5), np.float32)
    trainer = Trainer(_recogniser("Identity"), loss)
    for use in (lambda: trainer.fit(x, y, batch_size=1, verbose=False), lambda: trainer.evaluate(x, y)):
        with pytest.raises(InputError, match=message):
            use()
    assert trainer._state.position.step == 0
    # The same numbers are allowed as padding.
    short = {**y, "target_lengths": np.zeros(2, np.int64)}
    assert np.isfinite(trainer.evaluate(x, short)["loss"])


def test_impossible_ctc_targets_stop_training() -> None:
    x, y = np.zeros((4, 2, 5), np.float32), {
        "labels": np.full((4, 2), 1), "input_lengths": np.full(4, 2), "target_lengths": np.full(4, 2),
    }  # fmt: skip
    with pytest.raises(DivergenceError):
        Trainer(_recogniser(), "ctc").fit(x, y, verbose=False)
    with pytest.raises(InputError, match="target_lengths"):
        Trainer(_recogniser(), "ctc").fit(x, y["labels"], verbose=False)
