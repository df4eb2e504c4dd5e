"""Optimizer models against numpy in float64, against torch.optim, and bound in place."""

from __future__ import annotations

import inspect
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from onnxtrain import onnxblock, optimizers
from onnxtrain.artifacts import OptimType, optimizer_for
from onnxtrain.emitter import Emitter
from onnxtrain.errors import GraphBuildError, NothingToTrain
from onnxtrain.fusion.grouped_steps import SplitStepsPass
from onnxtrain.optimizers import (
    OPTIMIZERS,
    SGD,
    Adafactor,
    Adagrad,
    Adam,
    AdamW,
    ClipGradNorm,
    ClipGradValue,
    GradientClipping,
    Lion,
    Muon,
    NAdam,
    Optimizer,
    ParameterGroup,
    ParameterSpec,
    RMSprop,
    build_optimizer_model,
    make_optimizer,
    manifest_entry,
    moment_dtype,
)
from onnxtrain.optimizers._base import bias_correction
from onnxtrain.passes import infer_shapes
from onnxtrain.passes.portable import find_obstacles, make_portable
from onnxtrain.runtime.device import parse_device
from onnxtrain.runtime.session import open_session
from runtimes import needs_opset

SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (3, 4),
    "vector": (5,),
    "scalar": (),
    "empty": (0,),
    "one.weight": (1, 1, 1),
    "blocks/0": (2, 3, 2),
    "pointwise": (4, 3, 1, 1),
}
NOT_EMPTY = {name: shape for name, shape in SHAPES.items() if 0 not in shape}
"""PyTorch's Adafactor divides by the number of elements."""
MATRICES = {"wide": (3, 4), "tall": (5, 2), "row": (1, 3), "square": (2, 2)}

STEPS = 20
LEARNING_RATES = [
    0.03125 * (1 - t / STEPS) for t in range(STEPS)
]  # exact in float32 up to rounding of the last bits

Arrays = dict[str, np.ndarray]


# ---- the independent implementation: one parameter, one step, float64 -------------------------------------


def _adamw(
    w, g, s, lr, t, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, bias_correction=True, adam_mode=0
):
    b1, b2 = betas
    s[0][...] = b1 * s[0] + (1 - b1) * g
    s[1][...] = b2 * s[1] + (1 - b2) * g * g  # in this order as in PyTorch, where g * g overflows
    c1, c2 = (1 - b1**t, 1 - b2**t) if bias_correction else (1.0, 1.0)
    if adam_mode == 0:
        return w * (1 - lr * weight_decay) - lr * (s[0] / c1) / (np.sqrt(s[1] / c2) + eps)
    u = w - lr * math.sqrt(c2) / c1 * s[0] / (np.sqrt(s[1]) + eps)
    return u - lr * weight_decay * u


def _adam(w, g, s, lr, t, eps=1e-8, weight_decay=0.0, **options):
    return _adamw(w, g + weight_decay * w, s, lr, t, eps=eps, weight_decay=0.0, **options)


def _nadam(
    w,
    g,
    s,
    lr,
    t,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.0,
    momentum_decay=4e-3,
    decoupled_weight_decay=False,
):
    if decoupled_weight_decay:
        w = w * (1 - lr * weight_decay)
    else:
        g = g + weight_decay * w
    mu, following = (betas[0] * (1 - 0.5 * 0.96 ** (n * momentum_decay)) for n in (t, t + 1))
    s[0][...] = betas[0] * s[0] + (1 - betas[0]) * g
    s[1][...] = betas[1] * s[1] + (1 - betas[1]) * g * g
    s[2][...] = s[2] * mu
    root = np.sqrt(s[1] / (1 - betas[1] ** t)) + eps
    w = w - lr * (1 - mu) / (1 - s[2]) * g / root
    return w - lr * following / (1 - s[2] * following) * s[0] / root


def _sgd(w, g, s, lr, t, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False):
    g = g + weight_decay * w
    if not momentum:
        return w - lr * g
    s[0][...] = g if t == 1 else momentum * s[0] + (1 - dampening) * g
    return w - lr * (g + momentum * s[0] if nesterov else s[0])


def _adagrad(w, g, s, lr, t, lr_decay=0.0, weight_decay=0.0, initial_accumulator_value=0.0, eps=1e-10):
    g = g + weight_decay * w
    s[0][...] = s[0] + g**2
    return w - lr / (1 + (t - 1) * lr_decay) * g / (np.sqrt(s[0]) + eps)


def _rmsprop(w, g, s, lr, t, alpha=0.99, eps=1e-8, momentum=0.0, centered=False, weight_decay=0.0):
    g = g + weight_decay * w
    s[0][...] = alpha * s[0] + (1 - alpha) * g**2
    variance = s[0]
    if centered:
        s[1][...] = alpha * s[1] + (1 - alpha) * g
        variance = s[0] - s[1] ** 2
    change = g / (np.sqrt(variance) + eps)
    if momentum:
        s[-1][...] = momentum * s[-1] + change
        change = s[-1]
    return w - lr * change


def _lion(w, g, s, lr, t, betas=(0.9, 0.99), weight_decay=0.0):
    difference = s[0] - g  # so that an infinite gradient gives NaN
    direction = np.sign(g + betas[0] * difference)
    s[0][...] = g + betas[1] * difference
    return w - lr * weight_decay * w - lr * direction


def _adafactor(w, g, s, lr, t, dtype, beta2_decay=-0.8, eps=(None, 1e-3), d=1.0, weight_decay=0.0):
    eps1 = np.finfo(dtype).eps if eps[0] is None else eps[0]
    renew = t**beta2_decay
    if w.ndim < 2:
        s[0][...] = (1 - renew) * s[0] + renew * g**2
        estimate = s[0]
    else:
        s[0][...] = (1 - renew) * s[0] + renew * (g**2).mean(-1, keepdims=True)
        s[1][...] = (1 - renew) * s[1] + renew * (g**2).mean(-2, keepdims=True)
        estimate = s[0] @ s[1] / np.maximum(s[0].mean(-2, keepdims=True), eps1)
    u = g / np.sqrt(np.maximum(estimate, eps1**2))
    step = min(lr, t**-0.5) * max(eps[1], np.linalg.norm(w) / max(1, w.size) ** 0.5)
    u = u / max(1.0, np.linalg.norm(u) / max(1, u.size) ** 0.5 / d)
    return w * (1 - lr * weight_decay) - step * u


def _muon(
    w, g, s, lr, t, momentum=0.95, nesterov=True, weight_decay=0.1, ns_steps=5, adjust_lr_fn="original",
    ns_coefficients=(3.4445, -4.775, 2.0315), eps=1e-7,
):  # fmt: skip
    """Newton-Schulz steps act on the singular values alone, by the polynomial a s + b s³ + c s⁵."""
    s[0][...] = momentum * s[0] + (1 - momentum) * g
    u = momentum * s[0] + (1 - momentum) * g if nesterov else s[0]
    if not np.isfinite(u).all():  # the norm is not finite either; LAPACK may not return
        return np.full_like(w, np.nan)
    left, values, right = np.linalg.svd(u, full_matrices=False)
    values = values / max(np.linalg.norm(u), eps)
    for _ in range(ns_steps):
        values = np.polyval([ns_coefficients[2], 0, ns_coefficients[1], 0, ns_coefficients[0], 0], values)
    rows, columns = w.shape
    ratio = max(1, rows / columns) ** 0.5 if adjust_lr_fn == "original" else 0.2 * max(rows, columns) ** 0.5
    return w * (1 - lr * weight_decay) - lr * ratio * (left * values) @ right


def _clip(clipping: ClipGradNorm | ClipGradValue | None, gradients: Arrays) -> Arrays:
    if isinstance(clipping, ClipGradValue):
        return {name: np.clip(g, -clipping.value, clipping.value) for name, g in gradients.items()}
    if isinstance(clipping, ClipGradNorm):
        norm = np.linalg.norm(np.concatenate([g.ravel() for g in gradients.values()]))
        return {name: g * min(1.0, clipping.max_norm / norm) for name, g in gradients.items()}
    return gradients


# ---- the table --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptimizerCase:
    """An optimizer with its numpy step and, where torch has the same formula, its torch twin."""

    name: str
    optimizer: type[Optimizer]
    step: Callable[..., np.ndarray]
    twin: type[torch.optim.Optimizer] | None
    options: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=lambda: SHAPES)
    factored: bool = False
    """True if moments have other shapes than the parameter, e.g. a row and a column."""
    calls: int = 1
    """Number of composite functions that the step of one parameter calls; 0 if its step is written in standard ops."""
    tolerance: float = 1e-11
    """Relative error in float64."""
    twin_tolerance: float = 1e-11
    """Relative difference from PyTorch in float64, if PyTorch itself is less exact."""

    def make(self, **more: Any) -> Optimizer:
        return self.optimizer(**self.options, **more)

    def make_twin(self, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        assert self.twin is not None
        return self.twin(parameters, lr=1.0, foreach=False, **self.options)

    def stepped(self, *arguments: Any, dtype: type) -> np.ndarray:
        """The parameter after a step of the independent implementation."""
        more = {"dtype": dtype} if self.optimizer is Adafactor else {}  # one of its settings depends on it
        return np.asarray(self.step(*arguments, **more, **self.options))


OLD_ADAMW = {"adam_mode": 1, "eps": 1e-6, "weight_decay": 0.0}
"""onnxruntime-training's AdamW."""

FOLDED = 1e-6
"""ONNX Runtime folds a factor of a product of matrices into an attribute, which is float32."""
NADAM = {"calls": 0, "factored": True, "twin_tolerance": 1e-6}
"""PyTorch (2.13) keeps the product of the momenta in float32."""

CASES = [
    OptimizerCase("adamw", AdamW, _adamw, torch.optim.AdamW),
    OptimizerCase(
        "adamw-all",
        AdamW,
        _adamw,
        torch.optim.AdamW,
        {"weight_decay": 0.2, "eps": 1e-3, "betas": (0.8, 0.99)},
    ),
    OptimizerCase("adamw-uncorrected", AdamW, _adamw, None, {"bias_correction": False}),
    OptimizerCase("adamw-old", AdamW, _adamw, None, OLD_ADAMW),
    OptimizerCase(
        "adamw-old-decay", AdamW, _adamw, None, OLD_ADAMW | {"weight_decay": 0.1, "betas": (0.8, 0.99)}
    ),
    OptimizerCase(
        "adamw-old-uncorrected",
        AdamW,
        _adamw,
        None,
        OLD_ADAMW | {"bias_correction": False, "weight_decay": 0.1},
    ),
    OptimizerCase("adamw-old-beta1=0", AdamW, _adamw, None, OLD_ADAMW | {"betas": (0.0, 0.9)}),
    OptimizerCase("adam", Adam, _adam, torch.optim.Adam),
    OptimizerCase(
        "adam-l2", Adam, _adam, torch.optim.Adam, {"weight_decay": 0.3, "betas": (0.5, 0.9999), "eps": 1e-3}
    ),
    OptimizerCase("nadam", NAdam, _nadam, torch.optim.NAdam, **NADAM),
    OptimizerCase(
        "nadam-l2",
        NAdam,
        _nadam,
        torch.optim.NAdam,
        {"betas": (0.8, 0.99), "eps": 1e-3, "weight_decay": 0.3, "momentum_decay": 0.1},
        **NADAM,
    ),
    OptimizerCase(
        "nadam-decay",
        NAdam,
        _nadam,
        torch.optim.NAdam,
        {"weight_decay": 0.3, "decoupled_weight_decay": True},
        **NADAM,
    ),
    OptimizerCase("sgd", SGD, _sgd, torch.optim.SGD),
    OptimizerCase("sgd-l2", SGD, _sgd, torch.optim.SGD, {"weight_decay": 0.3}),
    OptimizerCase("sgd-momentum", SGD, _sgd, torch.optim.SGD, {"momentum": 0.9}),
    OptimizerCase(
        "sgd-dampening", SGD, _sgd, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.4, "weight_decay": 0.1}
    ),
    OptimizerCase(
        "sgd-nesterov", SGD, _sgd, torch.optim.SGD, {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1}
    ),
    OptimizerCase("adagrad", Adagrad, _adagrad, torch.optim.Adagrad),
    OptimizerCase(
        "adagrad-all",
        Adagrad,
        _adagrad,
        torch.optim.Adagrad,
        {"lr_decay": 0.1, "weight_decay": 0.2, "initial_accumulator_value": 0.5, "eps": 1e-3},
    ),
    OptimizerCase("rmsprop", RMSprop, _rmsprop, torch.optim.RMSprop),
    OptimizerCase(
        "rmsprop-momentum", RMSprop, _rmsprop, torch.optim.RMSprop, {"momentum": 0.7, "alpha": 0.9}
    ),
    OptimizerCase("rmsprop-centered", RMSprop, _rmsprop, torch.optim.RMSprop, {"centered": True}),
    OptimizerCase(
        "rmsprop-all",
        RMSprop,
        _rmsprop,
        torch.optim.RMSprop,
        {"centered": True, "momentum": 0.6, "weight_decay": 0.1, "eps": 1e-4},
    ),
    OptimizerCase("lion", Lion, _lion, None),
    OptimizerCase("lion-decay", Lion, _lion, None, {"betas": (0.5, 0.8), "weight_decay": 0.3}),
    OptimizerCase("adafactor", Adafactor, _adafactor, torch.optim.Adafactor, shapes=NOT_EMPTY, factored=True),
    OptimizerCase(
        "adafactor-all",
        Adafactor,
        _adafactor,
        torch.optim.Adafactor,
        {"beta2_decay": -0.5, "eps": (1e-4, 0.1), "d": 1.5, "weight_decay": 0.3},
        shapes=NOT_EMPTY,
        factored=True,
    ),
    OptimizerCase("muon", Muon, _muon, None, shapes=MATRICES, calls=0, tolerance=FOLDED),
    OptimizerCase(
        "muon-coefficients",
        Muon,
        _muon,
        None,
        {"ns_coefficients": (2.0, -1.5, 0.5), "eps": 3.0},  # larger than the norms of some matrices
        shapes=MATRICES,
        calls=0,
        tolerance=FOLDED,
    ),
    OptimizerCase(
        "muon-plain",
        Muon,
        _muon,
        None,
        {
            "nesterov": False,
            "momentum": 0.8,
            "weight_decay": 0.0,
            "ns_steps": 3,
            "adjust_lr_fn": "match_rms_adamw",
        },
        shapes=MATRICES,
        calls=0,
        tolerance=FOLDED,
    ),
]
CLIPPING = {
    "unclipped": None,
    "norm": ClipGradNorm(2.0),
    "norm-large": ClipGradNorm(1e4),
    "value": ClipGradValue(0.7),
}

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_clipping = pytest.mark.parametrize("clipping", CLIPPING.values(), ids=CLIPPING)


# ---- running a model --------------------------------------------------------------------------------------


def _specs(
    dtype: ir.DataType = ir.DataType.FLOAT, shapes: dict[str, tuple[int, ...]] = SHAPES
) -> list[ParameterSpec]:
    return [ParameterSpec(name, dtype, shape) for name, shape in shapes.items()]


def _session(model: ir.Model) -> ort.InferenceSession:
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return open_session(proto.SerializeToString(), "model", parse_device("cpu"), options)


def _state(optimizer: Optimizer, dtype: type, shapes: dict[str, tuple[int, ...]] = SHAPES) -> Arrays:
    """Parameters and moments before the first step, by input name."""
    rng = np.random.default_rng(7)
    parameters = {name: np.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}
    wide = moment_dtype(ir.DataType.from_numpy(np.dtype(dtype))).numpy()
    moments = {
        f"{name}_{moment.name}": np.full(moment.shape, moment.initial_value, wide)
        for name, shape in shapes.items()
        for moment in optimizer.state_spec(shape)
    }
    return parameters | moments


def _gradients(t: int, dtype: type, shapes: dict[str, tuple[int, ...]] = SHAPES) -> Arrays:
    rng = np.random.default_rng(1000 + t)
    return {name: np.asarray(rng.normal(size=shape) + 0.2, dtype) for name, shape in shapes.items()}


def _feeds(t: int, gradients: Arrays) -> Arrays:
    return {
        "learning_rate": np.array(LEARNING_RATES[t - 1], np.float32),
        "step": np.array(t, np.int64),
        **{f"{name}_grad": g for name, g in gradients.items()},
    }


def _train(run: Callable[[Arrays], Arrays], state: Arrays, dtype: type, steps: int = STEPS) -> Arrays:
    shapes = {name: array.shape for name, array in state.items() if "_momentum" not in name}
    for t in range(1, steps + 1):
        updated = run(state | _feeds(t, _gradients(t, dtype, shapes)))
        state = {name: updated[f"{name}_updated"] for name in state}
    return state


def _runner(session: ort.InferenceSession) -> Callable[[Arrays], Arrays]:
    names = [output.name for output in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(names, feeds), strict=True))


def _train_numpy(case: OptimizerCase, clipping: Any, dtype: type, steps: int = STEPS) -> Arrays:
    """All steps in float64, from the same parameters and gradients in `dtype`."""
    optimizer = case.make()
    state = {name: a.astype(np.float64) for name, a in _state(optimizer, dtype, case.shapes).items()}
    wide = moment_dtype(ir.DataType.from_numpy(np.dtype(dtype))).numpy()
    for t in range(1, steps + 1):
        gradients = {name: g.astype(np.float64) for name, g in _gradients(t, dtype, case.shapes).items()}
        gradients = _clip(clipping, gradients)
        for name, shape in case.shapes.items():
            slots = [state[f"{name}_{moment.name}"] for moment in optimizer.state_spec(shape)]
            rate = float(np.float32(LEARNING_RATES[t - 1]))
            state[name] = case.stepped(state[name], gradients[name], slots, rate, t, dtype=wide)
    return state


# ---- values -----------------------------------------------------------------------------------------------


@pytest.mark.sample(every=2)
@each_clipping
@each_case
def test_20_steps_match_numpy(case: OptimizerCase, clipping: Any) -> None:
    optimizer = case.make(clip_grad=clipping)
    expected = _train_numpy(case, clipping, np.float32)
    session = _session(build_optimizer_model(optimizer, _specs(shapes=case.shapes)))
    got = _train(_runner(session), _state(optimizer, np.float32, case.shapes), np.float32)
    for name, want in expected.items():
        assert got[name].dtype == np.float32
        assert got[name].shape == want.shape
        scale = max(1.0, float(np.abs(want).max(initial=0)))
        assert np.abs(got[name] - want).max(initial=0) <= 1e-6 * scale, name


@pytest.mark.sample(every=2)
@each_clipping
@each_case
def test_20_steps_in_float64_match_torch(case: OptimizerCase, clipping: Any) -> None:
    optimizer = case.make(clip_grad=clipping)
    state = _state(optimizer, np.float64, case.shapes)
    session = _session(build_optimizer_model(optimizer, _specs(ir.DataType.DOUBLE, case.shapes)))
    got = _train(_runner(session), state, np.float64)
    compares_to_twin = case.twin is not None and clipping is None
    if not compares_to_twin:
        # torch has no such form, and adds 1e-6 to the norm that it clips by: numpy in float64 it is
        exact = _train_numpy(case, clipping, np.float64)
        expected = {name: exact[name] for name in case.shapes}
    else:
        tensors = {name: torch.from_numpy(state[name].copy()).requires_grad_() for name in case.shapes}
        twin = case.make_twin(list(tensors.values()))
        for t in range(1, STEPS + 1):
            for name, g in _gradients(t, np.float64, case.shapes).items():
                tensors[name].grad = torch.from_numpy(g)
            twin.param_groups[0]["lr"] = float(np.float32(LEARNING_RATES[t - 1]))
            twin.step()
        expected = {name: tensor.detach().numpy() for name, tensor in tensors.items()}
    tolerance = case.twin_tolerance if compares_to_twin else case.tolerance
    for name, want in expected.items():
        np.testing.assert_allclose(got[name], want, rtol=tolerance, atol=tolerance / 10)


@each_case
def test_the_onnx_reference_computes_the_same(case: OptimizerCase) -> None:
    optimizer = case.make(clip_grad=ClipGradNorm(2.0))
    evaluator = ReferenceEvaluator(ir.to_proto(build_optimizer_model(optimizer, _specs(shapes=case.shapes))))
    names = evaluator.output_names
    got = _train(
        lambda feeds: dict(zip(names, evaluator.run(None, feeds), strict=True)),
        _state(optimizer, np.float32, case.shapes),
        np.float32,
        steps=3,
    )
    for name, want in _train_numpy(case, ClipGradNorm(2.0), np.float32, steps=3).items():
        np.testing.assert_allclose(got[name], want, rtol=1e-5, atol=1e-6)


@pytest.mark.sample(every=4)
@each_clipping
@each_case
def test_float16_parameters_lose_only_their_own_rounding(case: OptimizerCase, clipping: Any) -> None:
    optimizer = case.make(clip_grad=clipping)
    model = build_optimizer_model(optimizer, _specs(ir.DataType.FLOAT16, case.shapes))
    state = _state(optimizer, np.float16, case.shapes)
    got = _train(_runner(_session(model)), state, np.float16)
    for name, want in _train_numpy(case, clipping, np.float16).items():
        assert got[name].dtype == state[name].dtype
        # One rounding of at most 2**-11 relative per step; float32 moments only feel it through L2 decay.
        np.testing.assert_allclose(
            got[name], want, rtol=0, atol=STEPS * 2**-11 * max(1.0, np.abs(want).max(initial=0))
        )


def test_bfloat16_parameters_have_float32_moments() -> None:
    model = build_optimizer_model(AdamW(), [ParameterSpec("w", "bfloat16", (3,))])
    dtypes = {value.name: value.dtype for value in (*model.graph.inputs, *model.graph.outputs)}
    assert dtypes["w"] == dtypes["w_grad"] == dtypes["w_updated"] == ir.DataType.BFLOAT16
    assert dtypes["w_momentum0"] == dtypes["w_momentum1_updated"] == ir.DataType.FLOAT
    _session(model)


def test_parameters_of_several_dtypes_are_clipped_by_their_common_norm() -> None:
    specs = [
        ParameterSpec("h", "float16", (2,)),
        ParameterSpec("f", "float32", (1,)),
        ParameterSpec("d", "float64", ()),
    ]
    session = _session(build_optimizer_model(SGD(clip_grad=ClipGradNorm(6.0)), specs))
    feeds = {
        "learning_rate": np.float32(1), "step": np.int64(1),
        "h": np.zeros(2, np.float16), "h_grad": np.array([2, 4], np.float16),
        "f": np.zeros(1, np.float32), "f_grad": np.array([4], np.float32),
        "d": np.array(0.0), "d_grad": np.array(-8.0),
    }  # fmt: skip
    got = session.run(None, {name: np.asarray(value) for name, value in feeds.items()})  # the norm is 10
    np.testing.assert_allclose(np.concatenate([np.ravel(a) for a in got]), [-1.2, -2.4, -2.4, 4.8], rtol=1e-3)


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.DOUBLE])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.999999])
def test_bias_correction_keeps_its_digits(beta: float, dtype: ir.DataType) -> None:
    step = ir.Value(name="step", shape=ir.Shape([None]), type=ir.TensorType(ir.DataType.INT64))
    like = ir.Value(name="like", shape=ir.Shape([]), type=ir.TensorType(dtype))
    graph = ir.Graph([step, like], [], nodes=[], opset_imports={"": 21}, name="correction")
    op = Emitter(graph)
    value = op.Identity(bias_correction(op, beta, step, like))
    value.name, value.shape = "c", ir.Shape([None] if beta else [])
    graph.outputs.append(value)
    session = _session(ir.Model(graph, ir_version=10))
    steps = np.unique(np.geomspace(1, 1e7, 500).astype(np.int64))
    got = session.run(None, {"step": steps, "like": np.zeros((), dtype.numpy())})[0]
    expected = -np.expm1(steps * math.log(beta)) if beta else np.ones(len(steps))
    assert np.max(np.abs(got - expected) / expected) <= (5e-7 if dtype == ir.DataType.FLOAT else 1e-14)


def test_clipping_by_norm_matches_torch_to_its_epsilon() -> None:
    gradients = _gradients(1, np.float64)
    tensors = [torch.zeros(g.shape, dtype=torch.float64, requires_grad=True) for g in gradients.values()]
    for tensor, g in zip(tensors, gradients.values(), strict=True):
        tensor.grad = torch.from_numpy(g)
    norm = float(torch.nn.utils.clip_grad_norm_(tensors, 1.5))
    session = _session(build_optimizer_model(SGD(clip_grad=ClipGradNorm(1.5)), _specs(ir.DataType.DOUBLE)))
    feeds = _feeds(1, gradients) | {"learning_rate": np.array(1, np.float32)}
    feeds |= {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for got, tensor in zip(session.run(None, feeds), tensors, strict=True):
        np.testing.assert_allclose(-got, tensor.grad.numpy(), rtol=1.1e-6 / norm)


@pytest.mark.parametrize("profile", ["default", "portable"])
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [("float32", (1e-3, 1e10, 1e18, 1e19, 1e25, 1e34)), ("float64", (1e-3, 1e153, 1e200, 1e300))],
)
def test_clipping_where_squares_overflow(dtype: str, sizes: tuple[float, ...], profile: str) -> None:
    """The norm can be represented; PyTorch's own clip_grad_norm_ gives steps of 0 from 1e19 on."""
    shapes = {"a": (300, 400), "b": (7,), "c": ()}
    model = build_optimizer_model(
        SGD(clip_grad=ClipGradNorm(2.0)),
        [ParameterSpec(name, dtype, shape) for name, shape in shapes.items()],
    )
    if profile == "portable":
        if dtype == "float64":
            pytest.skip("browsers have no float64")
        model = make_portable(model)
        assert find_obstacles(infer_shapes(model)) == []
    session = _session(model)
    state = {name: np.zeros(shape, dtype) for name, shape in shapes.items()}
    for size, equal in itertools.product(sizes, (True, False)):
        rng = np.random.default_rng(0)
        draw = np.ones if equal else rng.standard_normal
        gradients = {name: np.asarray(draw(shape) * size, dtype) for name, shape in shapes.items()}
        exact = [gradient.astype(np.float64) / size for gradient in gradients.values()]
        norm = math.sqrt(sum((gradient**2).sum() for gradient in exact)) * size
        got = session.run(None, state | _feeds(1, gradients) | {"learning_rate": np.array(1, np.float32)})
        for value, gradient in zip(got, exact, strict=True):
            want = -gradient * size * min(1.0, 2.0 / norm)
            rtol = 1e-12 if dtype == "float64" else 5e-7 if profile == "default" else 1e-5
            np.testing.assert_allclose(value, want, rtol=rtol)


@pytest.mark.parametrize(("bad", "others"), [(np.inf, 0.0), (np.nan, np.nan)])
def test_clipping_of_infinity_and_nan(bad: float, others: float) -> None:
    specs = [ParameterSpec("a", "float32", (2,)), ParameterSpec("b", "float32", (1000,))]
    session = _session(build_optimizer_model(SGD(clip_grad=ClipGradNorm(1.0)), specs))
    gradients = {"a": np.ones(2, np.float32), "b": np.full(1000, bad, np.float32)}
    state = {"a": np.zeros(2, np.float32), "b": np.zeros(1000, np.float32)}
    a, b = session.run(None, state | _feeds(1, gradients) | {"learning_rate": np.array(1, np.float32)})
    np.testing.assert_array_equal(a, [others, others])
    assert np.isnan(b).all()


def test_norm_of_many_parameters() -> None:
    """Sums of 1000 norms, which ONNX Runtime would add one by one."""
    specs = [ParameterSpec(f"p{i}", "float32", (100,)) for i in range(1000)]
    session = _session(build_optimizer_model(SGD(clip_grad=ClipGradNorm(1.0)), specs))
    gradients = {spec.name: np.full(100, 0.1, np.float32) for spec in specs}
    state = {spec.name: np.zeros(100, np.float32) for spec in specs}
    first, *_ = session.run(None, state | _feeds(1, gradients) | {"learning_rate": np.array(1, np.float32)})
    np.testing.assert_allclose(first, -1 / math.sqrt(100_000), rtol=5e-7)


@pytest.mark.parametrize(
    ("optimizer", "readers"),
    [
        (
            AdamW(weight_decay=0.1, clip_grad=ClipGradNorm()),
            {"SumOfSquares0_float", "ClippedAdamWSteps0_float"},
        ),
        (Adam(clip_grad=ClipGradNorm()), {"SumOfSquares0_float", "ClippedAdamSteps0_float"}),
        (SGD(clip_grad=ClipGradNorm()), {"SumOfSquares0_float", "SGDSteps0_float"}),
        (Adam(weight_decay=0.1, clip_grad=ClipGradNorm()), {"SumOfSquares0_float", "Mul"}),
        (SGD(momentum=0.9, clip_grad=ClipGradNorm()), {"SumOfSquares0_float", "Mul"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_clipping_by_norm_writes_gradients_where_the_step_cannot_scale_them(
    optimizer: Optimizer, readers: set[str]
) -> None:
    graph = build_optimizer_model(optimizer, _specs(shapes={"matrix": (3, 4), "vector": (5,)})).graph
    gradients = {"matrix_grad", "vector_grad"}
    assert {node.op_type for node in graph if any(v and v.name in gradients for v in node.inputs)} == readers


class ByFactor(GradientClipping):
    """Multiplies all gradients by a number."""

    def __init__(self, number: float) -> None:
        self.number = number

    def factor(self, op: Emitter, gradients: Sequence[ir.Value]) -> ir.Value:
        return op.const(self.number, like=gradients[0])

    def apply(self, op: Emitter, gradients: Sequence[ir.Value]) -> list[ir.Value]:
        return [op.Mul(gradient, self.number) for gradient in gradients]


@pytest.mark.parametrize("name", ["adamw", "adam", "adam-l2", "sgd", "sgd-momentum", "rmsprop", "lion"])
def test_a_factor_of_clipping_is_exact_where_its_square_is_zero(name: str) -> None:
    """2**-80 times gradients of 2**80, whose squares are 0 and infinite in float32, are gradients of 1."""
    case = next(case for case in CASES if case.name == name)
    states = []
    for clipping, scale in ((None, 1.0), (ByFactor(2.0**-80), 2.0**80)):
        session = _session(build_optimizer_model(case.make(clip_grad=clipping), _specs()))
        state = _state(case.make(), np.float32)
        for t in (1, 2, 3):
            gradients = {
                key: np.asarray(g * scale, np.float32) for key, g in _gradients(t, np.float32).items()
            }
            updated = _runner(session)(state | _feeds(t, gradients))
            state = {key: updated[f"{key}_updated"] for key in state}
        states.append(state)
    for key, want in states[0].items():
        np.testing.assert_allclose(states[1][key], want, rtol=1e-5, atol=1e-6, err_msg=key)


def test_zero_gradients_are_not_divided_by_their_norm() -> None:
    session = _session(build_optimizer_model(AdamW(weight_decay=0, clip_grad=ClipGradNorm(1.0)), _specs()))
    state = _state(AdamW(), np.float32)
    zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    updated = _runner(session)(state | _feeds(1, zeros))
    assert all(np.array_equal(updated[f"{name}_updated"], state[name]) for name in SHAPES)


@each_case
def test_learning_rate_zero_leaves_parameters_bit_equal(case: OptimizerCase) -> None:
    state = _state(case.make(), np.float32, case.shapes)
    feeds = (
        state | _feeds(1, _gradients(1, np.float32, case.shapes)) | {"learning_rate": np.array(0, np.float32)}
    )
    updated = _runner(_session(build_optimizer_model(case.make(), _specs(shapes=case.shapes))))(feeds)
    assert all(np.array_equal(updated[f"{name}_updated"], state[name]) for name in case.shapes)


def test_centered_rmsprop_survives_a_constant_gradient() -> None:
    """The variance is then zero up to rounding, which may be negative: torch gives NaN there."""
    session = _session(build_optimizer_model(RMSprop(centered=True, alpha=0.5), _specs()))
    state = _state(RMSprop(centered=True), np.float32)
    gradients = {name: np.full(shape, 0.1, np.float32) for name, shape in SHAPES.items()}
    for t in range(1, STEPS + 1):
        for _ in range(5):
            updated = _runner(session)(state | _feeds(t, gradients))
            state = {name: updated[f"{name}_updated"] for name in state}
    assert all(np.isfinite(array).all() for array in state.values())


# ---- any hyperparameters ----------------------------------------------------------------------------------


def _one_parameter_against_torch(
    optimizer: Optimizer,
    make_twin: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    lr: float,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    w = rng.normal(size=4)
    session = _session(build_optimizer_model(optimizer, [ParameterSpec("w", "float64", (4,))]))
    tensor = torch.from_numpy(w.copy()).requires_grad_()
    twin = make_twin([tensor])
    state = {"w": w} | {f"w_{m.name}": np.full(4, m.initial_value) for m in optimizer.state_spec()}
    for t in range(1, 6):
        g = rng.normal(size=4)
        tensor.grad = torch.from_numpy(g)
        twin.step()
        feeds = {"learning_rate": np.array(lr, np.float32), "step": np.array(t), "w_grad": g}
        updated = _runner(session)(state | feeds)
        state = {name: updated[f"{name}_updated"] for name in state}
    np.testing.assert_allclose(state["w"], tensor.detach().numpy(), rtol=1e-9, atol=1e-9)


_rates = st.floats(2**-20, 1.0, width=32)
# Nothing between zero and 1e-5: ONNX Runtime drops a product with a float64 constant that is one in float32.
_betas = st.tuples(*(st.just(0.0) | st.floats(1e-5, most) for most in (0.999, 0.99999)))
_decays = st.just(0.0) | st.floats(0, 0.5)
_seeds = st.integers(0, 2**16)


@settings(max_examples=20, deadline=None)
@given(
    lr=_rates, betas=_betas, eps=st.floats(1e-12, 1e-2), decay=_decays, seed=_seeds, decoupled=st.booleans()
)
def test_adam_matches_torch_for_any_hyperparameters(
    lr: float, betas: tuple[float, float], eps: float, decay: float, seed: int, decoupled: bool
) -> None:
    options: dict[str, Any] = {"betas": betas, "eps": eps, "weight_decay": decay}
    optimizer = AdamW(adam_mode=0, **options) if decoupled else Adam(**options)
    twin = torch.optim.AdamW if decoupled else torch.optim.Adam
    _one_parameter_against_torch(optimizer, lambda p: twin(p, lr=lr, **options), lr, seed)


@settings(max_examples=20, deadline=None)
@given(
    lr=_rates,
    momentum=st.just(0.0) | st.floats(0.01, 0.999),
    dampening=st.just(0.0) | st.floats(0, 1),
    decay=_decays,
    nesterov=st.booleans(),
    seed=_seeds,
)
def test_sgd_matches_torch_for_any_hyperparameters(
    lr: float, momentum: float, dampening: float, decay: float, nesterov: bool, seed: int
) -> None:
    nesterov = nesterov and momentum > 0
    options: dict[str, Any] = {
        "momentum": momentum,
        "dampening": 0.0 if nesterov else dampening,
        "weight_decay": decay,
        "nesterov": nesterov,
    }
    _one_parameter_against_torch(SGD(**options), lambda p: torch.optim.SGD(p, lr=lr, **options), lr, seed)


# ---- updating in place ------------------------------------------------------------------------------------


@pytest.mark.sample(every=4)
@each_clipping
@each_case
def test_outputs_bound_onto_their_inputs_are_bit_equal(case: OptimizerCase, clipping: Any) -> None:
    optimizer = case.make(clip_grad=clipping)
    session = _session(build_optimizer_model(optimizer, _specs(shapes=case.shapes)))
    apart = _train(_runner(session), _state(optimizer, np.float32, case.shapes), np.float32)
    together = {
        n: ort.OrtValue.ortvalue_from_numpy(a.copy())
        for n, a in _state(optimizer, np.float32, case.shapes).items()
    }
    for t in range(1, STEPS + 1):
        binding = session.io_binding()
        for name, value in together.items():
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(f"{name}_updated", value)
        held = {
            n: ort.OrtValue.ortvalue_from_numpy(a)
            for n, a in _feeds(t, _gradients(t, np.float32, case.shapes)).items()
        }
        for name, value in held.items():
            binding.bind_ortvalue_input(name, value)
        session.run_with_iobinding(binding)
    for name, value in together.items():
        np.testing.assert_array_equal(value.numpy(), apart[name], err_msg=name)


@pytest.mark.sample(every=4)
@each_clipping
@each_case
def test_no_old_value_is_read_after_its_new_value_is_there(case: OptimizerCase, clipping: Any) -> None:
    check_reads_come_first(build_optimizer_model(case.make(clip_grad=clipping), _specs(shapes=case.shapes)))


def check_reads_come_first(model: ir.Model) -> None:
    """Every reader of an updated input is an ancestor of the update: no order of execution reads too late."""
    ir.passes.common.InlinePass()(model)
    graph = model.graph
    outputs = {value.name: value for value in graph.outputs}
    for value in graph.inputs:
        update = outputs.get(f"{value.name}_updated")
        if update is None:
            continue
        ancestors, pending = set(), [update.producer()]
        while pending:
            node = pending.pop()
            if node is not None and node not in ancestors:
                ancestors.add(node)
                pending += [v.producer() for v in node.inputs if v is not None]
        late = [node.name for node in value.consumers() if node not in ancestors]
        assert late == [], (
            f"{', '.join(late)} may read {value.name} after {value.name}_updated was written over it: make the new "
            "value depend on them; CONTRIBUTING.md, Adding an optimizer, shows how by op.Where(always, new, x)"
        )


# ---- the contract -----------------------------------------------------------------------------------------


@each_case
def test_interface_of_the_model(case: OptimizerCase) -> None:
    optimizer = case.make()
    model = build_optimizer_model(optimizer, _specs(shapes=case.shapes))
    inputs, outputs = ["learning_rate", "step"], []
    expected: dict[str, tuple[int, ...]] = {}
    for name, shape in case.shapes.items():
        moments = optimizer.state_spec(shape)
        assert [m.name for m in moments] == [f"momentum{i}" for i in range(len(moments))]
        state = {name: shape} | {f"{name}_{m.name}": m.shape for m in moments}
        inputs += [name, f"{name}_grad", *list(state)[1:]]
        outputs += [f"{key}_updated" for key in state]
        expected |= state | {f"{name}_grad": shape} | {f"{key}_updated": s for key, s in state.items()}
    assert [v.name for v in model.graph.inputs] == inputs
    assert [v.name for v in model.graph.outputs] == outputs
    shapes = {v.name: tuple(v.shape) for v in (*model.graph.inputs, *model.graph.outputs)}
    assert shapes == expected | {"learning_rate": (), "step": ()}
    if not case.factored:
        others = {
            m.name for shape in case.shapes.values() for m in optimizer.state_spec(shape) if m.shape != shape
        }
        assert others == set(), "moments have other shapes than the parameter: pass factored=True to the case"


@each_case
def test_each_parameter_is_one_call_of_a_composite(case: OptimizerCase) -> None:
    model = build_optimizer_model(case.make(), _specs(shapes=case.shapes))
    SplitStepsPass()(model)
    calls = [node for node in model.graph if node.domain == "onnxtrain" and "Elementwise" not in node.op_type]
    assert len(calls) == case.calls * len(case.shapes)
    assert {node.op_identifier() for node in model.graph if node.domain == "onnxtrain"} == set(
        model.functions
    )
    assert all(node.op_type.endswith("Step_float") for node in calls)


@pytest.mark.sample(every=4)
@each_clipping
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.optimizer.elementwise], ids=lambda case: case.name
)
def test_scalars_have_the_rank_of_tensors_with_a_last_axis_of_one(case: OptimizerCase, clipping: Any) -> None:
    shapes = {"pointwise": (4, 3, 1, 1), "column": (5, 1)}
    model = build_optimizer_model(case.make(clip_grad=clipping), _specs(shapes=shapes))
    ir.passes.common.InlinePass()(model)
    ir.passes.common.ShapeInferencePass()(model)
    combining = {"Add", "Sub", "Mul", "Div", "Max"}
    ranks = [
        {v.shape.rank() for v in node.inputs}
        for node in model.graph
        if node.op_type in combining and node.outputs[0].shape.numpy() in shapes.values()
    ]
    # Scalars of shape [] would take ONNX Runtime 60 times as long, and a Reshape of a tensor copies it.
    assert ranks
    assert all(len(different) == 1 for different in ranks), (
        "if an element's step depends on other elements, set elementwise: ClassVar[bool] = False in the class"
    )
    reshaped = [node.inputs[0] for node in model.graph if node.op_type == "Reshape"]
    assert all(value.shape == () for value in reshaped)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("opset", [pytest.param(n, marks=needs_opset(n)) for n in range(21, 27)])
@pytest.mark.parametrize(
    "name", [name for name, kind in OPTIMIZERS.items() if kind().gradient_refusal(sparse=False) is None]
)
def test_every_supported_opset(name: str, opset: int) -> None:
    optimizer = OPTIMIZERS[name](clip_grad=ClipGradNorm(1.0))
    shapes = {key: shape for key, shape in (NOT_EMPTY | MATRICES).items() if optimizer.refusal(shape) is None}
    session = _session(build_optimizer_model(optimizer, _specs(shapes=shapes), opset=opset))
    state = _state(optimizer, np.float32, shapes)
    updated = _runner(session)(state | _feeds(1, _gradients(1, np.float32, shapes)))
    first = next(key for key in shapes if np.count_nonzero(state[key]))
    assert not np.array_equal(updated[f"{first}_updated"], state[first])


# ---- groups of parameters ---------------------------------------------------------------------------------


GROUPED = AdamW(
    weight_decay=0.1,
    clip_grad=ClipGradNorm(2.0),
    groups=[
        ParameterGroup("blocks/*", learning_rate_scale=0.5),
        ParameterGroup(["vector", "scalar", "*.weight"], weight_decay=0.0),
        ParameterGroup("matrix", optimizer=Muon(weight_decay=0.2), learning_rate_scale=2),
        ParameterGroup("pointwise", optimizer=SGD()),
        ParameterGroup("one.*", optimizer=Adagrad(initial_accumulator_value=0.5)),
    ],
)
OWN: dict[str, tuple[Callable[..., np.ndarray], float, dict[str, Any]]] = {
    "matrix": (_muon, 2.0, {"weight_decay": 0.2}),
    "vector": (_adamw, 1.0, {"weight_decay": 0.0}),
    "scalar": (_adamw, 1.0, {"weight_decay": 0.0}),
    "empty": (_adamw, 1.0, {"weight_decay": 0.1}),
    "one.weight": (_adagrad, 1.0, {}),
    "blocks/0": (_adamw, 0.5, {"weight_decay": 0.1}),
    "pointwise": (_sgd, 1.0, {}),
}
"""By parameter, the step, factor of the learning rate and settings that GROUPED gives it."""
GROUPED_STATE = {"matrix": ["momentum0"], "one.weight": ["momentum2"], "pointwise": []}
"""Adagrad's state starts from another value than what has the first two names."""


def test_groups_have_their_own_rate_decay_and_optimizer() -> None:
    model = build_optimizer_model(GROUPED, _specs(ir.DataType.DOUBLE))
    moments = {name: GROUPED_STATE.get(name, ["momentum0", "momentum1"]) for name in SHAPES}
    manifest = manifest_entry(GROUPED, _specs(ir.DataType.DOUBLE))
    assert manifest["moments"] == ["momentum0", "momentum1", "momentum2"]
    assert manifest["initial_values"] == [0.0, 0.0, 0.5]
    state = _state(SGD(), np.float64)
    for name, keys in moments.items():
        state |= {f"{name}_{m}": np.full(SHAPES[name], 0.5 if m == "momentum2" else 0.0) for m in keys}
    got = _train(_runner(_session(model)), state, np.float64)
    for t in range(1, STEPS + 1):
        gradients = _clip(GROUPED.clip_grad, _gradients(t, np.float64))
        for name, (step, scale, options) in OWN.items():
            slots = [state[f"{name}_{m}"] for m in moments[name]]
            rate = scale * float(np.float32(LEARNING_RATES[t - 1]))
            state[name] = step(state[name], gradients[name], slots, rate, t, **options)
    for name in SHAPES:
        tolerance = 1e-6 if name == "matrix" else 1e-11  # Muon's, as above
        np.testing.assert_allclose(got[name], state[name], rtol=tolerance, atol=tolerance / 10, err_msg=name)


def test_the_last_group_that_gives_a_setting_decides() -> None:
    groups = [
        ParameterGroup("*", weight_decay=0.5, learning_rate_scale=0.1),
        ParameterGroup("w", learning_rate_scale=1.0),
    ]
    session = _session(build_optimizer_model(SGD(groups=groups), [ParameterSpec("w", "float64", (1,))]))
    feeds = {
        "learning_rate": np.array(0.25, np.float32),
        "step": np.array(1),
        "w": np.ones(1),
        "w_grad": np.ones(1),
    }
    assert session.run(None, feeds)[0] == 1 - 0.25 * (1 + 0.5)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (
            ParameterGroup("nope.*", weight_decay=0.0),
            r"no trained parameter matches 'nope\.\*' of a group; .*matrix",
        ),
        (ParameterGroup("vector", optimizer=Muon()), r"'vector' has shape \[5\]; Muon updates matrices only"),
    ],
)
def test_groups_that_do_not_fit_are_refused(group: ParameterGroup, message: str) -> None:
    with pytest.raises(GraphBuildError, match=message):
        build_optimizer_model(AdamW(groups=[group]), _specs())


def test_adagrad_starts_from_its_initial_accumulator() -> None:
    (moment,) = Adagrad(initial_accumulator_value=0.25).state_spec()
    assert (moment.name, moment.initial_value) == ("momentum0", 0.25)
    assert [m.initial_value for m in AdamW().state_spec()] == [0.0, 0.0]
    assert SGD().state_spec() == ()


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_integers_are_floats_where_settings_are(name: str) -> None:
    default = OPTIMIZERS[name]()
    spec = ParameterSpec("w", "float32", (2, 3), sparse=default.gradient_refusal(sparse=False) is not None)
    for setting in [f.name for f in fields(default) if type(getattr(default, f.name)) is float]:
        whole = 0 if (name, setting) in (("muon", "momentum"), ("adafactor", "beta2_decay")) else 1
        optimizer = replace(default, **{setting: whole})
        assert type(getattr(optimizer, setting)) is float
        onnx.checker.check_model(ir.to_proto(build_optimizer_model(optimizer, [spec])), full_check=True)
    assert type(ClipGradNorm(1).max_norm) is type(ClipGradValue(1).value) is float
    assert type(AdamW(betas=(0, 0.9)).betas[0]) is float


TESTED_APART = {"prodigy": "test_prodigy.py", "sparse_adam": "test_sparse_gradients.py"}
"""Optimizers without a case, and the file that compares them with PyTorch or the paper."""


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - TESTED_APART.keys()))
def test_every_optimizer_has_cases_of_its_settings(name: str) -> None:
    cases = [case for case in CASES if case.optimizer is OPTIMIZERS[name]]
    assert cases, (
        "add OptimizerCase(...) to CASES; what depends on all parameters together needs a file of its own"
    )
    settings = {field.name for field in fields(OPTIMIZERS[name])} - {
        field.name for field in fields(Optimizer)
    }
    untested = settings - {setting for case in cases for setting in case.options}
    assert untested == set(), "add an OptimizerCase to CASES that sets these fields"


def test_every_class_of_optimizer_has_a_name() -> None:
    exported = {name for name in optimizers.__all__ if isinstance(getattr(optimizers, name), type)}
    concrete = {
        name
        for name in exported
        if issubclass(kind := getattr(optimizers, name), Optimizer) and not inspect.isabstract(kind)
    }
    nameless = concrete - {kind.__name__ for kind in OPTIMIZERS.values()}
    assert nameless == set(), f"add a row for {nameless} to OPTIMIZERS in src/onnxtrain/_names.py"


def test_names_make_default_optimizers() -> None:
    for name, kind in OPTIMIZERS.items():
        assert make_optimizer(name) == kind()
    optimizer = SGD(momentum=0.5)
    assert make_optimizer(optimizer) is optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdamW(betas=(0.9, 1.0)), r"betas is \(0.9, 1.0\); it must be two numbers in \[0, 1\)"),
        (lambda: AdamW(adam_mode=2), "adam_mode is 2; it must be 0"),
        (lambda: Adam(eps=-1e-8), "making Adam: eps is -1e-08"),
        (lambda: AdamW(weight_decay=float("nan")), "weight_decay is nan"),
        (lambda: AdamW(betas=0.9), "betas is 0.9; it must be two numbers"),
        (lambda: SGD(momentum=-0.9), "momentum is -0.9; it must be a non-negative number"),
        (lambda: SGD(momentum="a"), "momentum is 'a'; it must be a non-negative number"),
        (lambda: ClipGradNorm("a"), "max_norm is 'a'; it must be a positive number"),
        (
            lambda: SGD(nesterov=True),
            "nesterov=True needs a positive momentum",
        ),
        (lambda: SGD(clip_grad=1.0), r"clip_grad is 1.0; it must be ClipGradNorm\(...\)"),
        (lambda: Adagrad(lr_decay=-1), "lr_decay is -1"),
        (lambda: RMSprop(alpha=1.5), "alpha is 1.5; it must be between 0 and 1"),
        (lambda: ClipGradNorm(0.0), "max_norm is 0.0; it must be a positive number"),
        (lambda: ClipGradValue(-1.0), "value is -1.0; it must be a positive number"),
        (lambda: make_optimizer("nope"), f"received 'nope'; give one of {', '.join(sorted(OPTIMIZERS))}"),
    ],
)
def test_settings_that_mean_nothing_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(GraphBuildError, match=message):
        make()


@pytest.mark.parametrize(
    ("parameters", "opset", "message"),
    [
        ([ParameterSpec("w", ir.DataType.INT64, (2,))], 21, "parameter 'w' is INT64; freeze it, or convert"),
        ([ParameterSpec("w", "int8", (2,))], 21, "parameter 'w' is int8"),
        ([ParameterSpec("w", "float32", (2,))] * 2, 21, "two inputs or outputs would be named 'w'"),
        ([ParameterSpec("step", "float32", (2,))], 21, "two inputs or outputs would be named 'step'"),
        (
            [ParameterSpec("w", "float32", ()), ParameterSpec("w_grad", "float32", ())],
            21,
            "two inputs or outputs would be named 'w_grad'",
        ),
        ([ParameterSpec("w", "float32", (2,))], 20, "opset 20; choose one from 21 to 26"),
    ],
)
def test_parameters_that_cannot_be_updated_are_refused(
    parameters: list[ParameterSpec], opset: int, message: str
) -> None:
    with pytest.raises(GraphBuildError, match=message):
        build_optimizer_model(SGD(), parameters, opset)


def test_no_parameters_is_nothing_to_train() -> None:
    with pytest.raises(NothingToTrain, match="no parameters were given"):
        build_optimizer_model(SGD(), [])


def test_names_of_parameters_that_look_like_nodes_do_not_collide() -> None:
    names = ["Mul", "Sub_out", "const", "learning_rate_1"]
    session = _session(
        build_optimizer_model(SGD(weight_decay=0.5), [ParameterSpec(n, "float32", (1,)) for n in names])
    )
    feeds = {n: np.ones(1, np.float32) for n in names} | {f"{n}_grad": np.zeros(1, np.float32) for n in names}
    got = session.run(None, feeds | {"learning_rate": np.array(1, np.float32), "step": np.array(1)})
    assert [float(a[0]) for a in got] == [0.5] * 4


def _torch_class(name: str) -> type | None:
    """The class of an optimizer in PyTorch, None where PyTorch lacks it, as it lacks Lion and Prodigy."""
    return next((cls for key, cls in vars(torch.optim).items() if key.lower() == name.replace("_", "")), None)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if _torch_class(name) is not None])
def test_defaults_are_torchs(name: str) -> None:
    """Each setting that PyTorch's class has too has its default."""
    optimizer, twin = OPTIMIZERS[name], _torch_class(name)
    theirs = {key: parameter.default for key, parameter in inspect.signature(twin).parameters.items()}
    ours = {field.name: getattr(optimizer(), field.name) for field in fields(optimizer)}
    shared = ours.keys() & theirs.keys()
    assert shared == ours.keys() - {"clip_grad", "groups", "bias_correction", "adam_mode"}
    # None of adjust_lr_fn is "original" in torch.optim.Muon.
    assert {key: ours[key] for key in shared} == {
        key: "original" if key == "adjust_lr_fn" and theirs[key] is None else theirs[key] for key in shared
    }


def test_a_name_means_the_same_everywhere_and_blocks_of_the_old_package_keep_its_defaults() -> None:
    for name, kind in OPTIMIZERS.items():
        assert optimizer_for(name) == make_optimizer(name) == kind()
    assert AdamW() == AdamW(eps=1e-8, weight_decay=0.01, adam_mode=0)
    old = AdamW(eps=1e-6, weight_decay=0.0, adam_mode=1)
    assert optimizer_for(OptimType.AdamW) == onnxblock.optim.AdamW().optimizer == old
    assert optimizer_for(OptimType.SGD) == onnxblock.optim.SGD().optimizer == SGD()


def test_the_manifest_lists_the_settings() -> None:
    optimizer = AdamW(
        eps=1e-6,
        clip_grad=ClipGradNorm(2.0),
        groups=[ParameterGroup("w", weight_decay=0.0), ParameterGroup("v", optimizer=Adafactor())],
    )
    specs = [ParameterSpec("w", "float32", (2,)), ParameterSpec("v", "float32", (2,))]
    listed = manifest_entry(optimizer, specs)["settings"]
    adafactor = {"type": "Adafactor", "beta2_decay": -0.8, "eps": [None, 1e-3], "d": 1.0, "weight_decay": 0.0}
    assert (
        listed
        == json.loads(json.dumps(listed, allow_nan=False))
        == {
            "clip_grad": {"type": "ClipGradNorm", "max_norm": 2.0},
            "groups": [
                {"type": "ParameterGroup", "parameters": ["w"], "weight_decay": 0.0},
                {"type": "ParameterGroup", "parameters": ["v"], "optimizer": adafactor},
            ],
            "betas": [0.9, 0.999],
            "eps": 1e-6,
            "weight_decay": 0.01,
            "bias_correction": True,
            "adam_mode": 0,
        }
    )
