"""Losses against torch.nn.functional: values in float64, float32 and float16, and gradients."""

from __future__ import annotations

import functools
import json
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from inspect import isabstract
from typing import Any, get_args

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from onnxtrain import Trainer, losses
from onnxtrain.autodiff import differentiate
from onnxtrain.emitter import Emitter
from onnxtrain.errors import GraphBuildError
from onnxtrain.losses import (
    LOSSES,
    TARGET_KEY,
    ArcFaceLoss,
    BCELoss,
    BCEWithLogitsLoss,
    CausalLMLoss,
    ClassLabels,
    CrossEntropyLoss,
    EmbeddingLoss,
    FocalLoss,
    HingeEmbeddingLoss,
    HuberLoss,
    JointLoss,
    KLDivLoss,
    L1Loss,
    Loss,
    MSELoss,
    MultiLabelMarginLoss,
    MultiLabelSoftMarginLoss,
    MultiMarginLoss,
    NLLLoss,
    PoissonNLLLoss,
    QuantileLoss,
    SmoothL1Loss,
    SoftMarginLoss,
    TargetSpec,
    TverskyLoss,
    attach_loss,
    make_loss,
)
from onnxtrain.losses._base import Activation
from onnxtrain.recipe import Recipe
from onnxtrain.trainer import METRICS
from onnxtrain.training.training_graph import build_training_graphs
from runtimes import needs_opset
from tolerances import NORM_RELATIVE, norm_relative_error
from trainer import problems

REFERENCE_WEIGHTS = 1e-6
"""The reference evaluator rounds class weights to float32 whatever the dtype of the scores."""

CLASSES = 5
WEIGHT = np.array([0.2, 1.5, 0.7, 3.0, 1.1])


@dataclass(frozen=True)
class LossCase:
    """A loss, its torch twin and the shape of the scores; `target` draws the target for a batch."""

    name: str
    loss: type[Loss]
    options: dict[str, Any]
    twin: Callable[..., torch.Tensor]
    target: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
    shape: tuple[int, ...] = (6, CLASSES)
    positive: bool = False
    """True for scores that must be positive."""
    domain: Callable[[np.ndarray], np.ndarray] | None = None
    """Maps normal numbers to scores that the loss takes."""

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        scores = rng.normal(size=self.shape) * 3
        if self.domain is not None:
            scores = self.domain(scores)
        return np.abs(scores) if self.positive else scores, self.target(rng, self.shape)


def _real(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.normal(size=shape) * 3


def _unit(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.uniform(size=shape)


def _probabilities(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.exp(F.log_softmax(torch.from_numpy(rng.normal(size=shape)), 1).numpy())


def _labels(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(0, shape[1], (shape[0], *shape[2:]))


def _some_ignored(rng: np.random.Generator, shape: tuple[int, ...], ignore_index: int = -100) -> np.ndarray:
    labels = _labels(rng, shape)
    # Otherwise a random case may ignore all labels.
    labels[labels == ignore_index] = 0
    labels.flat[:: max(2, labels.size // 3)] = ignore_index
    return labels


_ignoring_2 = functools.partial(_some_ignored, ignore_index=2)


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array))


def _focal(
    scores: torch.Tensor,
    target: torch.Tensor,
    reduction: str = "mean",
    alpha: float | None = 0.25,
    gamma: float = 2.0,
) -> torch.Tensor:
    """Lin et al., 2017, equation 5, for each label, weighted by how probable the target says it is."""
    p = torch.sigmoid(scores)
    one, other = (1 - p) ** gamma * -torch.log(p), p**gamma * -torch.log(1 - p)
    if alpha is not None:
        one, other = alpha * one, (1 - alpha) * other
    terms = target * one + (1 - target) * other
    return {"mean": terms.mean, "sum": terms.sum, "none": lambda: terms}[reduction]()


def _tversky(
    scores: torch.Tensor,
    target: torch.Tensor,
    reduction: str = "mean",
    alpha: float = 0.5,
    beta: float = 0.5,
    smooth: float = 1.0,
) -> torch.Tensor:
    """Salehi et al., 2017, equation 3, for each sample; 0.5 and 0.5 count as Dice's 2·TP / (2·TP + FP + FN)."""
    p, t = torch.sigmoid(scores).flatten(1), target.flatten(1)
    found, alarms, missed = (p * t).sum(1), (p * (1 - t)).sum(1), ((1 - p) * t).sum(1)
    terms = 1 - (found + smooth) / (found + alpha * alarms + beta * missed + smooth)
    return {"mean": terms.mean, "sum": terms.sum, "none": lambda: terms}[reduction]()


def _quantile(
    scores: torch.Tensor, target: torch.Tensor, reduction: str = "mean", quantile: float = 0.5
) -> torch.Tensor:
    d = target - scores
    terms = torch.where(d > 0, quantile * d, (quantile - 1) * d)
    return {"mean": terms.mean, "sum": terms.sum, "none": lambda: terms}[reduction]()


def _arcface(
    scores: torch.Tensor,
    target: torch.Tensor,
    reduction: str = "mean",
    margin: float = 0.5,
    scale: float = 64.0,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Deng et al., 2019, equation 3, by angles, with the authors' score where the angle would exceed pi."""
    angle = torch.acos(scores)
    turned = torch.where(
        angle + margin < math.pi, torch.cos(angle + margin), scores - margin * math.sin(margin)
    )
    own = F.one_hot(target.clamp_min(0), scores.shape[1]).bool()
    logits = scale * torch.where(own, turned, scores)
    return F.cross_entropy(logits, target, weight=weight, reduction=reduction, ignore_index=ignore_index)


def _kl_div(
    scores: torch.Tensor, target: torch.Tensor, reduction: str = "mean", log_target: bool = False
) -> torch.Tensor:
    """Without PyTorch's warning that "mean" divides by the number of elements."""
    terms = F.kl_div(scores, target, reduction="none", log_target=log_target)
    return {"mean": terms.mean, "sum": terms.sum, "none": lambda: terms}[reduction]()


def _signs(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.choice([-1.0, 1.0], shape)


def _signs_and_zeros(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.choice([-1.0, 0.0, 1.0], shape)


def _label_lists(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Lists of labels, some with a label twice, that end with -1, behind which there is anything; one is empty."""
    lists = np.stack([rng.permutation(shape[1]) for _ in range(shape[0])])
    lists[0, 0], lists[1, 2], lists[2, 3] = -1, -1, -1
    lists[2, 1] = lists[2, 0]
    return lists


def _log_probabilities(scores: np.ndarray) -> np.ndarray:
    return F.log_softmax(torch.from_numpy(scores), 1).numpy()


def _of_target(
    make: Callable[..., np.ndarray], function: Callable[..., np.ndarray]
) -> Callable[..., np.ndarray]:
    return lambda rng, shape: function(make(rng, shape))


def _some_zero(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    shares = _probabilities(rng, shape)
    shares[:, 1] = 0
    return shares


def _shares(scores: np.ndarray) -> np.ndarray:
    # Slopes are steep at 0 and 1, where float32 has rounded the scores.
    return 1 / (1 + np.exp(-scores / 3))


def _cosines(scores: np.ndarray) -> np.ndarray:
    return 0.95 * np.tanh(scores / 2)


def _bits(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(0, 2, shape).astype(np.float64)


def _counts(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.poisson(2.0, shape).astype(np.float64)


SINGLE = sorted(name for name, kind in LOSSES.items() if not issubclass(kind, JointLoss | EmbeddingLoss))
"""Names of the losses with one output and one target; `test_joint_losses.py` and `texts/` test the others."""

_weight = _tensor(WEIGHT)
_pos_weight = np.array([0.5, 2.0, 1.0, 3.0, 0.1])
_image = (2, CLASSES, 3, 2)

_FORMS: list[LossCase] = [
    LossCase("mse", MSELoss, {}, F.mse_loss, _real),
    LossCase("mse-rank4", MSELoss, {}, F.mse_loss, _real, _image),
    LossCase("mse-vector", MSELoss, {}, F.mse_loss, _real, (7,)),
    LossCase("l1", L1Loss, {}, F.l1_loss, _real),
    LossCase("huber", HuberLoss, {}, F.huber_loss, _real),
    LossCase("huber-0.3", HuberLoss, {"delta": 0.3}, functools.partial(F.huber_loss, delta=0.3), _real),
    LossCase("smooth_l1", SmoothL1Loss, {}, F.smooth_l1_loss, _real),
    LossCase(
        "smooth_l1-2", SmoothL1Loss, {"beta": 2.0}, functools.partial(F.smooth_l1_loss, beta=2.0), _real
    ),
    LossCase("smooth_l1-0", SmoothL1Loss, {"beta": 0}, functools.partial(F.smooth_l1_loss, beta=0.0), _real),
    LossCase("bce", BCEWithLogitsLoss, {}, F.binary_cross_entropy_with_logits, _unit),
    LossCase(
        "bce-pos_weight",
        BCEWithLogitsLoss,
        {"pos_weight": _pos_weight},
        functools.partial(F.binary_cross_entropy_with_logits, pos_weight=_tensor(_pos_weight)),
        _unit,
    ),
    LossCase(
        "bce-weights",
        BCEWithLogitsLoss,
        {"weight": WEIGHT, "pos_weight": 2.5},
        functools.partial(
            F.binary_cross_entropy_with_logits,
            weight=_weight,
            pos_weight=torch.tensor(2.5, dtype=torch.float64),
        ),
        _unit,
    ),
    LossCase("focal", FocalLoss, {}, _focal, _bits),
    LossCase("focal-soft", FocalLoss, {}, _focal, _unit),
    LossCase(
        "focal-0.5",
        FocalLoss,
        {"alpha": None, "gamma": 0.5},
        functools.partial(_focal, alpha=None, gamma=0.5),
        _bits,
    ),
    LossCase(
        "focal-0",
        FocalLoss,
        {"alpha": None, "gamma": 0},
        F.binary_cross_entropy_with_logits,
        _unit,
    ),
    LossCase("poisson_nll", PoissonNLLLoss, {}, F.poisson_nll_loss, _counts),
    LossCase(
        "poisson_nll-full",
        PoissonNLLLoss,
        {"full": True},
        functools.partial(F.poisson_nll_loss, full=True),
        _counts,
    ),
    LossCase(
        "poisson_nll-rate",
        PoissonNLLLoss,
        {"log_input": False, "eps": 0.5},
        functools.partial(F.poisson_nll_loss, log_input=False, eps=0.5),
        _counts,
        positive=True,
    ),
    LossCase("bce-probabilities", BCELoss, {}, F.binary_cross_entropy, _unit, domain=_shares),
    LossCase(
        "bce-probabilities-weight",
        BCELoss,
        {"weight": WEIGHT},
        functools.partial(F.binary_cross_entropy, weight=_weight),
        _bits,
        domain=_shares,
    ),
    LossCase("soft_margin", SoftMarginLoss, {}, F.soft_margin_loss, _signs),
    LossCase("hinge_embedding", HingeEmbeddingLoss, {}, F.hinge_embedding_loss, _signs),
    LossCase(
        "hinge_embedding-margin",
        HingeEmbeddingLoss,
        {"margin": 2.5},
        functools.partial(F.hinge_embedding_loss, margin=2.5),
        _signs_and_zeros,
        _image,
    ),
    LossCase("multilabel_soft_margin", MultiLabelSoftMarginLoss, {}, F.multilabel_soft_margin_loss, _bits),
    LossCase(
        "multilabel_soft_margin-weight",
        MultiLabelSoftMarginLoss,
        {"weight": WEIGHT},
        functools.partial(F.multilabel_soft_margin_loss, weight=_weight),
        _unit,
        (2, 3, CLASSES),
    ),
    LossCase("multilabel_margin", MultiLabelMarginLoss, {}, F.multilabel_margin_loss, _label_lists),
    LossCase("multi_margin", MultiMarginLoss, {}, F.multi_margin_loss, _labels),
    LossCase(
        "multi_margin-all",
        MultiMarginLoss,
        {"p": 2, "margin": 0.4, "weight": WEIGHT},
        functools.partial(F.multi_margin_loss, p=2, margin=0.4, weight=_weight),
        _labels,
    ),
    LossCase("kl_div", KLDivLoss, {}, _kl_div, _some_zero, domain=_log_probabilities),
    LossCase(
        "kl_div-log_target",
        KLDivLoss,
        {"log_target": True},
        functools.partial(_kl_div, log_target=True),
        _of_target(_probabilities, np.log),
        _image,
        domain=_log_probabilities,
    ),
    LossCase("arcface", ArcFaceLoss, {}, _arcface, _labels, domain=_cosines),
    LossCase(
        "arcface-all",
        ArcFaceLoss,
        {"margin": 1.2, "scale": 5.0, "weight": WEIGHT, "ignore_index": 2, "axis": 1},
        functools.partial(_arcface, margin=1.2, scale=5.0, weight=_weight, ignore_index=2),
        _ignoring_2,
        domain=_cosines,
    ),
    LossCase("quantile", QuantileLoss, {}, _quantile, _real),
    LossCase(
        "quantile-0.9", QuantileLoss, {"quantile": 0.9}, functools.partial(_quantile, quantile=0.9), _real
    ),
    LossCase("tversky", TverskyLoss, {}, _tversky, _bits),
    LossCase(
        "tversky-image",
        TverskyLoss,
        {"alpha": 0.3, "beta": 0.7},
        functools.partial(_tversky, alpha=0.3, beta=0.7),
        _bits,
        _image,
    ),
    LossCase(
        "tversky-smooth",
        TverskyLoss,
        {"alpha": 0, "smooth": 0.01},
        functools.partial(_tversky, alpha=0.0, smooth=0.01),
        _unit,
    ),
    LossCase("nll", NLLLoss, {}, F.nll_loss, _labels),
    LossCase(
        "nll-ignore=2",
        NLLLoss,
        {"ignore_index": 2},
        functools.partial(F.nll_loss, ignore_index=2),
        _ignoring_2,
    ),
    LossCase(
        "nll-image",
        NLLLoss,
        {"weight": WEIGHT},
        functools.partial(F.nll_loss, weight=_weight),
        _some_ignored,
        _image,
    ),
]
for _shape, _at in (((6, CLASSES), ""), ((3, CLASSES, 4), "-sequence"), (_image, "-image")):
    for _smoothing in (0.0, 0.1, 1.0):
        for _w in (False, True):
            _name = f"ce{_at}-smoothing={_smoothing}-weight={_w}"
            _options: dict[str, Any] = {"label_smoothing": _smoothing} | ({"weight": WEIGHT} if _w else {})
            _options |= {"axis": 1} if len(_shape) == 3 else {}  # without sizes nothing says which axis it is
            _twin = functools.partial(
                F.cross_entropy, label_smoothing=_smoothing, weight=_weight if _w else None
            )
            _FORMS += [
                LossCase(_name, CrossEntropyLoss, _options, _twin, _labels, _shape),
                LossCase(f"{_name}-some", CrossEntropyLoss, _options, _twin, _some_ignored, _shape),
                LossCase(
                    f"{_name}-ignore=2",
                    CrossEntropyLoss,
                    _options | {"ignore_index": 2},
                    functools.partial(_twin, ignore_index=2),
                    _ignoring_2,
                    _shape,
                ),
                LossCase(
                    f"{_name}-ignore=None",
                    CrossEntropyLoss,
                    _options | {"ignore_index": None},
                    _twin,
                    _labels,
                    _shape,
                ),
                LossCase(
                    f"{_name}-probabilities",
                    CrossEntropyLoss,
                    _options | {"probabilities": True},
                    _twin,
                    _probabilities,
                    _shape,
                ),
            ]


def _last(twin: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The loss of scores, and of probabilities, whose classes lie along the last axis."""

    def moved(scores: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
        floating = target.is_floating_point()
        return twin(
            scores.movedim(-1, 1).contiguous(), target.movedim(-1, 1) if floating else target, **options
        )

    return moved


def _last_labels(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return _some_ignored(rng, (shape[0], shape[-1], *shape[1:-1]))


def _last_probabilities(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.moveaxis(_probabilities(rng, (shape[0], shape[-1], *shape[1:-1])), 1, -1)


for _shape in ((3, 4, CLASSES), (3, CLASSES, CLASSES), (2, 3, 2, CLASSES)):
    _at = f"last-{'x'.join(map(str, _shape))}"
    _weighted_twin = functools.partial(F.cross_entropy, weight=_weight, label_smoothing=0.1)
    _FORMS += [
        LossCase(f"ce-{_at}", CrossEntropyLoss, {"axis": -1}, _last(F.cross_entropy), _last_labels, _shape),
        LossCase(
            f"ce-{_at}-weight",
            CrossEntropyLoss,
            {"axis": len(_shape) - 1, "weight": WEIGHT, "label_smoothing": 0.1},
            _last(_weighted_twin),
            _last_labels,
            _shape,
        ),
        LossCase(
            f"ce-{_at}-probabilities",
            CrossEntropyLoss,
            {"axis": -1, "probabilities": True},
            _last(F.cross_entropy),
            _last_probabilities,
            _shape,
        ),
        LossCase(f"nll-{_at}", NLLLoss, {"axis": -1}, _last(F.nll_loss), _last_labels, _shape),
    ]


def _next_token(
    scores: torch.Tensor, labels: torch.Tensor, reduction: str = "mean", ignore_index: int = -100
) -> torch.Tensor:
    """transformers' ForCausalLMLoss, which computes in float32 whatever the dtype: the labels are shifted."""
    shifted = F.pad(labels, (0, 1), value=ignore_index)[:, 1:]
    terms = F.cross_entropy(
        scores.flatten(0, 1), shifted.flatten(), reduction=reduction, ignore_index=ignore_index
    )
    return terms.view(labels.shape) if reduction == "none" else terms


_ignoring_first = functools.partial(_some_ignored, ignore_index=0)

for _shape in ((3, 4, CLASSES), (2, CLASSES, CLASSES), (4, 2, CLASSES)):
    _at = f"causal_lm-{'x'.join(map(str, _shape))}"
    _FORMS += [
        LossCase(_at, CausalLMLoss, {}, _next_token, _last_labels, _shape),
        LossCase(
            f"{_at}-ignore=0",
            CausalLMLoss,
            {"ignore_index": 0},
            functools.partial(_next_token, ignore_index=0),
            lambda rng, shape: _ignoring_first(rng, (shape[0], shape[-1], *shape[1:-1])),
            _shape,
        ),
    ]

CASES = [
    pytest.param(form, reduction, id=f"{form.name}-{reduction}")
    for form in _FORMS
    for reduction in ("mean", "sum", "none")
]
each_case = pytest.mark.parametrize(("case", "reduction"), CASES)


def _loss_model(
    loss: Loss,
    shape: tuple[int | str, ...],
    dtype: type = np.float32,
    labels: ir.DataType | None = None,
    opset: int = 21,
    weighted: bool = False,
) -> onnx.ModelProto:
    """A model of inputs `scores`, `target` and possibly `weight`, and output `loss`."""
    scores = ir.Value(
        name="scores", shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype)))
    )
    target = loss.targets(scores)[0].as_input()
    target.name = "target"
    if labels is not None:
        target.type = ir.TensorType(labels)
    graph = ir.Graph([scores, target], [], nodes=[], opset_imports={"": opset}, name="loss")
    if weighted:
        kind = ir.DataType.DOUBLE if dtype is np.float64 else ir.DataType.FLOAT
        weight = ir.Value(name="weight", shape=ir.Shape(shape[:1]), type=ir.TensorType(kind))
        graph.inputs.append(weight)
        value = loss.build_weighted(Emitter(graph), scores, target, weight)
    else:
        value = loss.build(Emitter(graph), scores, target)
    value.name = "loss"
    assert value.dtype == scores.dtype
    assert value.shape is not None
    graph.outputs.append(value)
    model = ir.to_proto(ir.Model(graph, ir_version=10))
    onnx.checker.check_model(model, full_check=True)
    return model


def _run(model: onnx.ModelProto, feeds: dict[str, np.ndarray], output: str = "loss") -> np.ndarray:
    return _fetch(model, feeds, output)[0]


def _fetch(model: onnx.ModelProto, feeds: dict[str, np.ndarray], *outputs: str) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(outputs, feeds)


def _symbolic(shape: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(f"d{axis}" for axis in range(len(shape)))


def _cast(array: np.ndarray, dtype: type) -> np.ndarray:
    return array.astype(dtype) if array.dtype.kind == "f" else array


@pytest.mark.sample(every=3)
@each_case
@pytest.mark.parametrize(
    ("dtype", "symbolic"),
    [(np.float32, False), (np.float64, True)],
    ids=["static-float32", "symbolic-float64"],
)
def test_value_and_gradient_match_torch(case: LossCase, reduction: str, dtype: type, symbolic: bool) -> None:
    scores, target = case.arrays()
    loss = case.loss(reduction=reduction, **case.options)
    leaf = _tensor(scores).requires_grad_()
    value = case.twin(leaf, _tensor(target), reduction=reduction)
    cotangent = np.random.default_rng(0).normal(size=tuple(value.shape))
    gradient = torch.autograd.grad(value, leaf, _tensor(cotangent))[0]
    model = _loss_model(loss, _symbolic(case.shape) if symbolic else case.shape, dtype)
    feeds = {
        "scores": scores.astype(dtype),
        "target": _cast(target, dtype),
        "ct": np.asarray(cotangent, dtype),
    }
    step = differentiate(model, of="loss", wrt=["scores"], cotangent="ct")
    results = _fetch(step, feeds, "loss", "scores_grad")
    for got, expected in zip(results, (value.detach().numpy(), gradient.numpy()), strict=True):
        assert got.dtype == dtype
        assert got.shape == expected.shape
        assert norm_relative_error(got, expected) <= NORM_RELATIVE[np.dtype(dtype)]


SAMPLE_WEIGHTS = np.array([2, 0, 1, 3, 1, 2, 1])


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("form", _FORMS, ids=lambda form: form.name)
def test_weight_of_a_sample_is_how_often_torch_sees_it(form: LossCase, reduction: str) -> None:
    scores, target = form.arrays()
    weights = SAMPLE_WEIGHTS[: len(scores)]
    leaf = _tensor(scores).requires_grad_()
    times = _tensor(weights)
    repeated = leaf.repeat_interleave(times, 0), _tensor(target).repeat_interleave(times, 0)
    value = form.twin(*repeated, reduction=reduction)
    value.backward()
    loss = form.loss(reduction=reduction, **form.options)
    model = _loss_model(loss, _symbolic(form.shape), np.float64, weighted=True)
    feeds = {"scores": scores, "target": target, "weight": weights.astype(np.float64)}
    step = differentiate(model, of="loss", wrt=["scores"])
    results = _fetch(step, feeds, "loss", "scores_grad")
    for got, expected in zip(results, (value.detach().numpy(), leaf.grad.numpy()), strict=True):
        assert got.shape == expected.shape
        assert norm_relative_error(got, expected) <= NORM_RELATIVE[np.dtype(np.float64)]


def test_weighted_loss_of_float16_scores_is_computed_in_float32() -> None:
    scores = np.zeros((40_000, 2), np.float16)
    scores[:, 1] = 8
    feeds = {
        "scores": scores,
        "target": np.zeros(40_000, np.int64),
        "weight": np.full(40_000, 3.0, np.float32),
    }
    got = _run(_loss_model(CrossEntropyLoss(), ("n", 2), np.float16, weighted=True), feeds)
    assert got.dtype == np.float16
    assert got == pytest.approx(8.0, rel=2**-11)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("form", _FORMS, ids=lambda form: form.name)
def test_value_matches_torch_by_the_onnx_reference(form: LossCase) -> None:
    scores, target = form.arrays()
    loss = form.loss(**form.options)
    expected = form.twin(_tensor(scores), _tensor(target)).numpy()
    model = _loss_model(loss, form.shape, np.float64)
    got = ReferenceEvaluator(model).run(None, {"scores": scores, "target": target})[0]
    assert np.shape(got) == expected.shape
    weighted = form.options.get("weight") is not None
    assert norm_relative_error(got, expected) <= (REFERENCE_WEIGHTS if weighted else 1e-9)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("form", _FORMS, ids=lambda form: form.name)
def test_float16_scores_lose_only_the_rounding_of_inputs_and_result(form: LossCase) -> None:
    scores, target = form.arrays()
    scores, target = scores.astype(np.float16), _cast(target, np.float16)
    expected = form.twin(
        _tensor(scores).double(),
        _tensor(np.asarray(target, np.float64 if target.dtype.kind == "f" else np.int64)),
    )
    got = _run(
        _loss_model(form.loss(**form.options), form.shape, np.float16), {"scores": scores, "target": target}
    )
    assert got.dtype == np.float16
    assert norm_relative_error(got, expected.numpy()) <= 2**-11


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("form", _FORMS, ids=lambda form: form.name)
def test_gradient_of_float16_scores_matches_torch(form: LossCase) -> None:
    scores, target = form.arrays()
    scores, target = scores.astype(np.float16), _cast(target, np.float16)
    leaf = _tensor(scores).double().requires_grad_()
    form.twin(leaf, _tensor(_cast(target, np.float64))).backward()
    step = differentiate(
        _loss_model(form.loss(**form.options), form.shape, np.float16), of="loss", wrt=["scores"]
    )
    got = _run(step, {"scores": scores, "target": target}, "scores_grad")
    assert got.dtype == np.float16
    assert norm_relative_error(got, leaf.grad.numpy()) <= NORM_RELATIVE[np.dtype(np.float16)]


def test_weighted_mean_of_many_float16_terms_does_not_overflow() -> None:
    scores = np.zeros((40_000, 2), np.float16)
    scores[:, 1] = 8
    labels = np.zeros(40_000, np.int64)  # the sum of the terms is 3.2e5, beyond float16
    got = _run(
        _loss_model(CrossEntropyLoss(weight=[1, 1]), ("n", 2), np.float16),
        {"scores": scores, "target": labels},
    )
    assert got == pytest.approx(8.0, rel=2**-11)


@pytest.mark.parametrize(
    "loss", [CrossEntropyLoss(), CrossEntropyLoss(label_smoothing=0.2, weight=WEIGHT), NLLLoss()], ids=repr
)
def test_int32_labels(loss: Loss) -> None:
    rng = np.random.default_rng(3)
    scores, labels = rng.normal(size=(6, CLASSES)).astype(np.float32), _some_ignored(rng, (6, CLASSES))
    wide = _run(_loss_model(loss, ("n", CLASSES)), {"scores": scores, "target": labels})
    model = _loss_model(loss, ("n", CLASSES), labels=ir.DataType.INT32)
    assert _run(model, {"scores": scores, "target": labels.astype(np.int32)}) == wide


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("opset", [pytest.param(n, marks=needs_opset(n)) for n in range(21, 27)])
@pytest.mark.parametrize("name", SINGLE)
def test_every_supported_opset(name: str, opset: int) -> None:
    form = next((form for form in _FORMS if form.loss is LOSSES[name]), None)
    assert form is not None, f"{name}: give it a LossCase in _FORMS"
    scores, target = form.arrays()
    model = _loss_model(make_loss(name), form.shape, opset=opset)
    got = _run(model, {"scores": scores.astype(np.float32), "target": _cast(target, np.float32)})
    expected = form.twin(_tensor(scores), _tensor(target)).numpy()
    assert norm_relative_error(got, expected) <= NORM_RELATIVE[np.dtype(np.float32)]


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_gradient_of_focal_loss_is_zero_where_a_label_is_certain(gamma: float) -> None:
    scores, targets = np.float32([-300, 300, -300, 300]), np.float32([0, 1, 1, 0])
    step = differentiate(
        _loss_model(FocalLoss(gamma=gamma, reduction="sum"), (4,)), of="loss", wrt=["scores"]
    )
    loss, gradient = _fetch(step, {"scores": scores, "target": targets}, "loss", "scores_grad")
    # A wrong label is |score| away: -alpha·log(p) = 0.25·300 and 0.75·300, whose slopes are these weights.
    assert loss == pytest.approx(300.0)
    np.testing.assert_allclose(gradient, [0, 0, -0.25, 0.75], atol=1e-6)


@pytest.mark.parametrize("target", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_bce_and_its_gradient_are_exact_for_huge_logits_and_at_zero(target: float, dtype: type) -> None:
    scores, targets = np.array([-1e4, -200.0, 0.0, 200.0, 1e4], dtype), np.full(5, target, dtype)
    model = _loss_model(BCEWithLogitsLoss(reduction="none"), (5,), dtype)
    leaf = _tensor(scores).requires_grad_()
    expected = F.binary_cross_entropy_with_logits(leaf, _tensor(targets), reduction="none")
    expected.sum().backward()
    step = differentiate(model, of="loss", wrt=["scores"], cotangent="ct")
    feeds = {"scores": scores, "target": targets, "ct": np.ones(5, dtype)}
    for got, want in zip(
        _fetch(step, feeds, "loss", "scores_grad"), (expected.detach(), leaf.grad), strict=True
    ):
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["unweighted", "weighted"])
def test_mean_over_nothing_but_ignored_labels_is_nan_with_zero_gradient_as_in_torch(
    smoothing: float, weight: np.ndarray | None
) -> None:
    scores, labels = np.ones((3, CLASSES), np.float32), np.full(3, -100)
    model = _loss_model(CrossEntropyLoss(label_smoothing=smoothing, weight=weight), ("n", CLASSES))
    assert np.isnan(_run(model, {"scores": scores, "target": labels}))
    leaf = _tensor(scores).double().requires_grad_()
    value = F.cross_entropy(
        leaf, _tensor(labels), label_smoothing=smoothing, weight=None if weight is None else _weight
    )
    assert torch.isnan(value)
    value.backward()
    step = differentiate(model, of="loss", wrt=["scores"])
    gradient = _run(step, {"scores": scores, "target": labels}, "scores_grad")
    np.testing.assert_array_equal(gradient, leaf.grad.numpy())
    assert not gradient.any()
    total = CrossEntropyLoss(label_smoothing=smoothing, weight=weight, reduction="sum")
    assert _run(_loss_model(total, ("n", CLASSES)), {"scores": scores, "target": labels}) == 0


@settings(max_examples=25, deadline=None)
@given(
    labels=st.lists(st.sampled_from([-100, 0, 1, 2]), min_size=1, max_size=6).filter(
        lambda y: set(y) != {-100}
    ),
    # ONNX Runtime (1.32) takes a factor of 1 - 1e-8 for one, in float64 too.
    smoothing=st.just(0.0) | st.floats(1e-6, 1),
    weight=st.none() | st.lists(st.floats(0.01, 10), min_size=3, max_size=3),
    seed=st.integers(0, 2**16),
)
def test_cross_entropy_matches_torch_for_any_labels_and_smoothing(
    labels: list[int], smoothing: float, weight: list[float] | None, seed: int
) -> None:
    scores = np.random.default_rng(seed).normal(size=(len(labels), 3)) * 5
    loss = CrossEntropyLoss(label_smoothing=smoothing, weight=weight)
    got = _run(_loss_model(loss, ("n", 3), np.float64), {"scores": scores, "target": np.array(labels)})
    expected = F.cross_entropy(
        _tensor(scores),
        torch.tensor(labels),
        label_smoothing=smoothing,
        weight=None if weight is None else torch.tensor(weight, dtype=torch.float64),
    )
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-9, atol=1e-12)


def _value(
    shape: tuple[int | str, ...] | None, dtype: ir.DataType = ir.DataType.FLOAT, name: str = "logits"
) -> ir.Value:
    return ir.Value(name=name, shape=None if shape is None else ir.Shape(shape), type=ir.TensorType(dtype))


def test_the_axis_of_the_classes_is_no_guess() -> None:
    """Of scores as a language model has them, axis 1 is never the classes without a word."""
    for shape in (
        ("batch", "seq", 512),
        ("batch", None, 512),
        ("batch", "seq", "vocab"),
        (2, 7, 7),
        ("b", "h", "w", 21),
    ):
        for loss in (CrossEntropyLoss(), NLLLoss(), CrossEntropyLoss(probabilities=True)):
            with pytest.raises(
                GraphBuildError, match=rf"(?s)from axis 1.*{type(loss).__name__}\(axis=-1\), with labels"
            ):
                loss.targets(_value(shape))
        assert CrossEntropyLoss(axis=-1).targets(_value(shape))[0].shape == shape[:-1]
        assert CrossEntropyLoss(axis=1).targets(_value(shape))[0].shape == (shape[0], *shape[2:])
    for shape in (
        ("batch", 7, 512),
        ("batch", 7, "seq"),
        ("n", 21, "h", "w"),
        ("n", 21, 21, 21),
        ("n", None, "h", "w"),
    ):
        assert CrossEntropyLoss().targets(_value(shape))[0].shape == (shape[0], *shape[2:])


@pytest.mark.parametrize("axis", [0, -3, 3, -4])
def test_an_axis_that_is_none_of_classes_is_an_error(axis: int) -> None:
    with pytest.raises(GraphBuildError, match="axis"):
        CrossEntropyLoss(axis=axis).targets(_value((2, 3, 4)))


def test_labels_of_the_model_that_fit_another_axis_name_it() -> None:
    values = [_value((2, 7, 512)), _value((2, 7), ir.DataType.INT64, "labels")]
    graph = ir.Graph(values, [], nodes=[], opset_imports={"": 21})
    with pytest.raises(GraphBuildError, match=r"from axis 1 of the scores.*CrossEntropyLoss\(axis=-1\)"):
        attach_loss(Emitter(graph), CrossEntropyLoss(), "logits", "labels")


def test_targets_share_the_symbolic_dimensions_of_the_scores() -> None:
    scores = _value(("batch", 10, "time"))
    assert CrossEntropyLoss().targets(scores) == [
        TargetSpec(
            "labels", ir.DataType.INT64, ("batch", "time"), ClassLabels(10, -100, 1, ("batch", 10, "time"))
        )
    ]
    assert CrossEntropyLoss(probabilities=True).targets(scores) == [
        TargetSpec("target", ir.DataType.FLOAT, ("batch", 10, "time"))
    ]
    assert NLLLoss(ignore_index=None).targets(_value(("n", "classes")))[0].class_labels == ClassLabels(
        None, None
    )
    assert MSELoss().targets(_value(("n", 3), ir.DataType.DOUBLE)) == [
        TargetSpec("target", ir.DataType.DOUBLE, ("n", 3))
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MSELoss(reduction="avg"), "reduction is 'avg'; it must be 'mean', 'sum' or 'none'"),
        (lambda: HuberLoss(delta=-1.0), "delta is -1.0; it must be a positive number"),
        (lambda: HuberLoss(delta=float("nan")), "delta is nan"),
        (lambda: HuberLoss(delta="a"), "delta is 'a'; it must be a positive number"),
        (lambda: SmoothL1Loss(beta=-0.5), "beta is -0.5"),
        (lambda: CrossEntropyLoss(label_smoothing=1.5), "label_smoothing is 1.5; it must be between 0 and 1"),
        (lambda: CrossEntropyLoss(probabilities=True, ignore_index=3), "ignore_index is 3"),
        (
            lambda: CrossEntropyLoss(weight=[[1.0, 2.0]]),
            r"weight has shape \[1, 2\]; give one weight per class",
        ),
        (lambda: NLLLoss(weight="heavy"), "weight is 'heavy'; give an array of numbers"),
        (lambda: NLLLoss(weight=[1.0, float("inf")]), "weight holds NaN or infinity"),
        (lambda: make_loss("hinge"), f"received 'hinge'; give one of {', '.join(sorted(LOSSES))}"),
        (lambda: FocalLoss(alpha=1.5), "alpha is 1.5; it must be from 0 to 1, or None"),
        (lambda: FocalLoss(gamma=-1.0), "gamma is -1.0; it must be a non-negative number"),
        (lambda: PoissonNLLLoss(eps=0.0), "eps is 0.0; it must be a positive number"),
        (lambda: TverskyLoss(alpha=-1.0), "alpha is -1.0; it must be a non-negative number"),
        (lambda: TverskyLoss(beta=float("inf")), "beta is inf; it must be a non-negative number"),
        (lambda: TverskyLoss(smooth=0.0), "smooth is 0.0; it must be a positive number"),
        (lambda: QuantileLoss(quantile=1), "quantile is 1.0; it must be between 0 and 1"),
        (lambda: QuantileLoss(quantile=float("nan")), "quantile is nan"),
        (lambda: make_loss(3), "received 3"),
    ],
)
def test_settings_that_mean_nothing_are_refused(make: Callable[[], Loss], message: str) -> None:
    with pytest.raises(GraphBuildError, match=message):
        make()


@pytest.mark.parametrize(
    ("loss", "scores", "target", "message"),
    [
        (MSELoss(), _value(None), _value(("n",)), "rank of scores 'logits' is unknown; run shape inference"),
        (MSELoss(), _value((3,), ir.DataType.INT64), _value((3,)), "'logits' are INT64; choose a floating"),
        (MSELoss(), _value(("n", 3)), _value(("n",)), r"shape \[n\], but .* need \[n,3\]; reshape"),
        (MSELoss(), _value((3,)), _value((3,), ir.DataType.DOUBLE), "is DOUBLE, not FLOAT; convert"),
        (CrossEntropyLoss(), _value((4,)), _value((), ir.DataType.INT64), r"need \[N, C, d1, ...\]"),
        (CrossEntropyLoss(), _value((4, 3)), _value((4,)), "is FLOAT, not INT64 or INT32"),
        (CrossEntropyLoss(), _value((4, 3)), _value((4, 1), ir.DataType.INT64), r"need \[4\]; reshape"),
        (CrossEntropyLoss(weight=[1, 2]), _value((4, 3)), _value((4,), ir.DataType.INT64), "has 2 entries"),
        (TverskyLoss(), _value(("n",)), _value(("n",)), r"have shape \[n\]; this loss needs \[N, d1, ...\]"),
        (NLLLoss(weight=[1, 2]), _value((4, 3)), _value((4,), ir.DataType.INT64), "have 3 classes"),
        (BCEWithLogitsLoss(pos_weight=[1, 2]), _value((4, 3)), _value((4, 3)), r"pos_weight has shape \[2\]"),
        (BCEWithLogitsLoss(weight=np.ones((2, 3))), _value((3,)), _value((3,)), r"weight has shape \[2, 3\]"),
    ],
)  # fmt: skip
def test_scores_and_targets_that_do_not_fit_are_refused(
    loss: Loss, scores: ir.Value, target: ir.Value, message: str
) -> None:
    graph = ir.Graph([scores, target], [], nodes=[], opset_imports={"": 21})
    with pytest.raises(GraphBuildError, match=message):
        loss.build(Emitter(graph), scores, target)


def _head_model(head: str) -> ir.Model:
    """Scores of 4 positions, computed by the nodes `head` from `x` and weights."""
    model = onnx.parser.parse_model(
        f"""
        <ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        net (float[batch, 4, 8] x) => (float[batch, 4, 512] y) {{ {head} }}
        """
    )
    shapes = {"w": (8, 512), "wt": (512, 8), "b": (512,), "each": (1, 8, 512), "s": (512,), "q": (512, 1, 8)}
    for name, shape in shapes.items():
        array = np.zeros(shape, np.uint8 if name == "q" else np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return ir.from_proto(model)


LINEAR_HEADS = {
    "MatMul": "y = MatMul(x, w)",
    "tied": "wt2 = Transpose<perm=[1, 0]>(wt) y = MatMul(x, wt2)",
    "bias and soft cap": "a = MatMul(x, w) c = Add(b, a) t = Tanh(c) y = Mul(t, s)",
    "int4": """a = com.microsoft.MatMulNBits<K=8, N=512, bits=4, block_size=16>(x, q, s)
        y = Add(a, b)""",
}


@pytest.mark.parametrize("head", LINEAR_HEADS)
@pytest.mark.parametrize("loss", [CrossEntropyLoss, NLLLoss])
def test_scores_of_a_linear_layer_have_their_classes_last(head: str, loss: type[Loss]) -> None:
    """Labels `[batch, 512]` would be taken for classes 0 .. 3 at 512 places."""
    model = _head_model(LINEAR_HEADS[head])
    with pytest.raises(
        GraphBuildError, match=r"linear layer along the last axis.*'causal_lm'.*axis=-1.*axis=1"
    ):
        attach_loss(Emitter(model.graph), loss(), "y")
    for axis, shape in ((1, ["batch", 512]), (-1, ["batch", 4])):
        attach_loss(Emitter(model.graph), loss(axis=axis), "y")
        assert list(map(str, model.graph.inputs[-1].shape or ())) == list(map(str, shape))


@pytest.mark.parametrize(
    "head",
    [
        "y = MatMul(x, each)",
        "a = MatMul(x, w) y = Softmax(a)",
        "a = MatMul(x, w) t = Transpose<perm=[0, 2, 1]>(a) y = Transpose<perm=[0, 2, 1]>(t)",
        "a = MatMul(x, w) y = Add(a, a)",
    ],
)
def test_other_scores_of_three_axes_have_their_classes_on_axis_1(head: str) -> None:
    model = _head_model(head)
    attach_loss(Emitter(model.graph), CrossEntropyLoss(), "y")
    assert json.loads(model.graph.inputs[-1].metadata_props[TARGET_KEY])["class_labels"]["count"] == 4


def test_causal_lm_equals_the_loss_of_transformers() -> None:
    loss_utils = pytest.importorskip("transformers.loss.loss_utils")
    rng = np.random.default_rng(0)
    scores, labels = rng.normal(size=(3, 6, CLASSES)) * 3, rng.integers(0, CLASSES, (3, 6))
    labels[0, 3:] = labels[2, 0] = -100
    leaf = _tensor(scores.astype(np.float32)).requires_grad_()
    expected = loss_utils.ForCausalLMLoss(leaf, _tensor(labels), vocab_size=CLASSES)
    model = _loss_model(CausalLMLoss(), ("batch", "sequence", CLASSES))
    feeds = {"scores": scores.astype(np.float32), "target": labels}
    assert float(_run(model, feeds)) == pytest.approx(float(expected.detach()), rel=1e-6)
    gradient = _run(differentiate(model, of="loss", wrt=["scores"]), feeds, "scores_grad")
    assert norm_relative_error(gradient, torch.autograd.grad(expected, leaf)[0].numpy()) < 1e-6


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.9])
def test_quantile_equals_the_loss_of_scikit_learn(quantile: float) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    scores, target = np.random.default_rng(0).normal(size=(2, 40, 3))
    scores[0] = target[0]
    model = _loss_model(QuantileLoss(quantile=quantile), scores.shape, np.float64)
    expected = metrics.mean_pinball_loss(target, scores, alpha=quantile)
    assert float(_run(model, {"scores": scores, "target": target})) == pytest.approx(expected, rel=1e-12)


def test_quantile_is_what_a_constant_learns() -> None:
    """The gradient is zero at the quantile: below it, as many targets as `quantile` says."""
    target = np.random.default_rng(0).permutation(np.arange(100.0))[:, None]
    model = differentiate(
        _loss_model(QuantileLoss(quantile=0.9), target.shape, np.float64), of="loss", wrt=["scores"]
    )
    slopes = [
        _run(model, {"scores": np.full_like(target, score), "target": target}, "scores_grad").sum()
        for score in (88.5, 89.5, 90.5)
    ]
    np.testing.assert_allclose(slopes, [-0.01, 0.0, 0.01], atol=1e-12)


def test_quantile_gradient_of_a_hit_is_the_mean_of_both_sides() -> None:
    target = np.zeros((4, 1))
    model = differentiate(
        _loss_model(QuantileLoss(quantile=0.9), target.shape, np.float64), of="loss", wrt=["scores"]
    )
    gradient = _run(model, {"scores": target, "target": target}, "scores_grad")
    np.testing.assert_allclose(gradient, (0.5 - 0.9) / 4, rtol=1e-12)


@pytest.mark.parametrize("shape", [("batch", 5), ("batch", 2, 3, 5)])
def test_causal_lm_needs_scores_of_each_token(shape: tuple[int | str, ...]) -> None:
    with pytest.raises(GraphBuildError, match=r"causal_lm needs \[batch, sequence, vocabulary\]"):
        _loss_model(CausalLMLoss(), shape)


def test_causal_lm_computes_no_copy_of_the_scores() -> None:
    """Only the matrix of scores, a view of them, and the logarithms of the softmax are as large as the scores."""
    model = _loss_model(CausalLMLoss(), (2, 6, CLASSES))
    assert [node.op_type for node in model.graph.node if "scores" in node.input] == ["Reshape"]
    assert not {"Transpose", "Slice", "Gather"} & {
        node.op_type for node in model.graph.node if "target" not in node.input
    }


@pytest.mark.parametrize("name", SINGLE)
def test_every_loss_has_cases_of_its_settings(name: str) -> None:
    default = make_loss(name)
    forms = [form for form in _FORMS if form.loss is type(default)]
    assert forms, "add LossCase(...) to _FORMS"
    tested = {setting for form in forms for setting in form.options}
    untested = {field.name for field in fields(default)} - tested - {"reduction"}
    assert untested == set(), "add a LossCase to _FORMS that sets these fields"


def test_every_class_of_loss_has_a_name() -> None:
    exported = {name for name in losses.__all__ if isinstance(getattr(losses, name), type)}
    concrete = {
        name for name in exported if issubclass(kind := getattr(losses, name), Loss) and not isabstract(kind)
    }
    # They need a function or a file.
    concrete = {name for name in concrete if not issubclass(getattr(losses, name), losses.FunctionLoss)}
    nameless = concrete - {kind.__name__ for kind in LOSSES.values()}
    assert nameless == set(), f"add a row for {nameless} to LOSSES in src/onnxtrain/_names.py"


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_metrics_and_activation_of_losses_exist(name: str) -> None:
    """A misspelt metric would end a run at its first epoch, a misspelt activation in scores taken for quantities."""
    kind = LOSSES[name]
    assert {*kind.default_metrics, *kind.label_metrics} <= METRICS.keys()
    assert kind.activation in (None, *get_args(Activation))


def test_names_make_default_losses() -> None:
    for name, kind in LOSSES.items():
        assert type(make_loss(name)) is kind
    loss = HuberLoss(delta=2.0)
    assert make_loss(loss) is loss


@pytest.mark.parametrize("name", SINGLE)
def test_integers_are_floats_where_settings_are(name: str) -> None:
    default = make_loss(name)
    floats = [field.name for field in fields(default) if type(getattr(default, field.name)) is float]
    for field in floats:
        try:
            whole, real = (replace(default, **{field: one}) for one in (1, 1.0))
        except GraphBuildError as error:
            # No integer is between 0 and 1. The message has the converted number, too.
            assert f"{field} is 1.0; it must be" in str(error)  # noqa: PT017
            continue
        assert repr(whole) == repr(real)
        form = next(form for form in _FORMS if form.loss is LOSSES[name])
        scores, target = form.arrays()
        feeds = {"scores": scores.astype(np.float32), "target": _cast(target, np.float32)}
        assert np.isfinite(_run(_loss_model(whole, form.shape), feeds))


def _linear_model() -> ir.Model:
    return ir.from_onnx_text(
        """
        <ir_version: 10, opset_import: ["": 21]>
        linear (float[batch, 2] x, float[batch] labels) => (float[batch, 3] logits)
        <float[2, 3] w = {1, 2, 3, 4, 5, 6}> { logits = MatMul(x, w) }
        """
    )


def test_attached_loss_adds_marked_targets_under_free_names() -> None:
    model = _linear_model()
    loss = attach_loss(Emitter(model.graph), CrossEntropyLoss(), "logits")
    target = model.graph.inputs[-1]
    assert loss.name == "loss"
    assert target.name == "labels_1"  # the model has an input of the suggested name
    assert json.loads(target.metadata_props[TARGET_KEY]) == {
        "class_labels": {"count": 3, "ignore_index": -100}
    }
    second = attach_loss(Emitter(model.graph), MSELoss(), "logits")
    assert (second.name, model.graph.inputs[-1].name) == ("loss_1", "target")
    assert model.graph.inputs[-1].metadata_props[TARGET_KEY] == "{}"


def test_attached_loss_can_compare_two_values_of_the_model() -> None:
    model = _linear_model()
    attach_loss(Emitter(model.graph), MSELoss(), "logits", "logits")
    assert [value.name for value in model.graph.inputs] == ["x", "labels"]
    with pytest.raises(GraphBuildError, match="'nope' is not a value of the graph; its outputs are logits"):
        attach_loss(Emitter(model.graph), MSELoss(), "nope")


def test_weights_of_a_loss_are_not_trained() -> None:
    model = _linear_model()
    loss = attach_loss(Emitter(model.graph), BCEWithLogitsLoss(pos_weight=[1, 2, 3], weight=0.5), "logits")
    assert build_training_graphs(model, str(loss.name), Recipe()).trainable == ["w"]


def test_a_loss_of_ones_own_need_not_say_its_shape() -> None:
    """Nodes without annotations: the gradient is PyTorch's."""

    @dataclass(frozen=True, kw_only=True)
    class LogCosh(MSELoss):
        def build(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
            return op.ReduceMean(op.Log(op.Cosh(op.Sub(scores, target))), keepdims=0)

    problem = problems.line()
    trainer = Trainer(problem.model, LogCosh(), "sgd", learning_rate=0.5)
    values = {
        name: torch.tensor(p.data, dtype=torch.float64, requires_grad=True) for name, p in trainer.parameters
    }
    x, y = torch.from_numpy(problem.x).double(), torch.from_numpy(problem.y).double()
    loss = torch.log(torch.cosh(x @ values["w"] + values["b"] - y)).mean()
    loss.backward()
    assert trainer.evaluate(problem.x, problem.y)["loss"] == pytest.approx(loss.item(), rel=1e-5)
    trainer.fit(problem.x, problem.y, batch_size=len(x), verbose=False)
    for name, parameter in trainer.parameters:
        expected = values[name].detach() - 0.5 * values[name].grad
        np.testing.assert_allclose(parameter.data, expected.numpy(), rtol=1e-5, atol=1e-6)
