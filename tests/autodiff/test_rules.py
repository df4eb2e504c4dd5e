"""Every rule against finite differences, torch autograd in float64, and stock ONNX Runtime in float32."""

from __future__ import annotations

import importlib
import math
import pkgutil
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from autodiff import cases
from autodiff.case import Case, F, runtime_inputs
from autodiff.reference import ReferenceEvaluator
from on_device import DEVICE
from onnxtrain.autodiff import differentiate
from onnxtrain.runtime.device import parse_device
from onnxtrain.runtime.session import open_session
from runtimes import broadcasts_scales, has_deform_conv, keeps_nothing, makes_reals_of_spectra, needs_opset
from slopes import assert_gradient
from tolerances import NORM_RELATIVE, norm_relative_error


def _all_cases() -> list[Case]:
    modules = [
        importlib.import_module(f"autodiff.cases.{m.name}") for m in pkgutil.iter_modules(cases.__path__)
    ]
    return [case for module in modules for case in module.CASES]


def _on_onnxruntime(case: Case) -> Any:
    return pytest.param(case, marks=needs_opset(case.opset), id=case.id)


def _in_float64(case: Case) -> Any:
    return pytest.param(case, id=case.id) if case.evaluator == "reference" else _on_onnxruntime(case)


CASES = _all_cases()
IN_FLOAT64 = [case for case in CASES if case.evaluator != "none"]
each_case = pytest.mark.parametrize("case", [_on_onnxruntime(case) for case in CASES])
each_float64_case = pytest.mark.parametrize("case", [_in_float64(case) for case in IN_FLOAT64])
first_case_of_each_op = pytest.mark.parametrize(
    "case", [_in_float64(case) for case in {case.op: case for case in reversed(IN_FLOAT64)}.values()]
)


def _gradient_model(case: Case, dtype: type, *, symbolic: bool = False) -> onnx.ModelProto:
    model = case.model(np.dtype(dtype), symbolic=symbolic)
    return differentiate(model, of="loss", wrt=[f"x{i}" for i in case.wrt])


def _torch_outputs_and_gradients(case: Case) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Output values, weights and gradients of the weighted sum, all float64."""
    tensors = [
        None if a is None else torch.from_numpy(np.array(a)) for a in case.arrays(np.dtype(np.float64))
    ]
    for index in case.wrt:
        tensors[index].requires_grad_()
    result = case.twin(*tensors)
    outputs = result if isinstance(result, tuple) else (result,)
    assert len(outputs) == case.outputs
    rng = np.random.default_rng(0)
    weights = [
        rng.uniform(0.5, 1.5, tuple(out.shape)) * rng.choice([-1, 1], tuple(out.shape)) for out in outputs
    ]
    loss = sum((out * torch.from_numpy(np.asarray(w))).sum() for out, w in zip(outputs, weights, strict=True))
    gradients = torch.autograd.grad(loss, [tensors[i] for i in case.wrt])
    return [o.detach().numpy() for o in outputs], weights, [g.numpy() for g in gradients]


def _feeds(case: Case, dtype: type, weights: list[np.ndarray]) -> dict[str, np.ndarray]:
    feeds = runtime_inputs(case, case.arrays(np.dtype(dtype)))
    return feeds | {f"w{i}": np.asarray(w, dtype) for i, w in enumerate(weights)}


def _session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return open_session(model.SerializeToString(), "model", parse_device(DEVICE), options)


def _evaluator(case: Case, model: onnx.ModelProto) -> ReferenceEvaluator | ort.InferenceSession:
    """Return an evaluator of a float64 model of this case: a session or a reference evaluator, with the same `run`."""
    return ReferenceEvaluator(model) if case.evaluator == "reference" else _session(model)


@each_float64_case
def test_vjp_matches_torch_in_float64(case: Case) -> None:
    outputs, weights, expected = _torch_outputs_and_gradients(case)
    feeds = _feeds(case, np.float64, weights)
    names = [f"y{i}" for i in range(case.outputs)]
    primal = case.model(np.dtype(np.float64))
    primal.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    errors = [
        norm_relative_error(got, want)
        for got, want in zip(_evaluator(case, primal).run(names, feeds), outputs, strict=True)
    ]
    assert max(errors) <= 1e-6, (
        "the op's value differs between the torch twin and the float64 evaluator. If ONNX's reference evaluator is "
        "wrong about this op, or lacks it, write the op in tests/autodiff/reference.py"
    )
    # Hardly more precise than the op itself: AffineGrid of onnxruntime 1.20 rounds float64 to float32.
    tolerance = max(NORM_RELATIVE[np.dtype(np.float64)], *(2 * error for error in errors))
    model = _gradient_model(case, np.float64)
    got = _evaluator(case, model).run([f"x{i}_grad" for i in case.wrt], feeds)
    for value, want in zip(got, expected, strict=True):
        assert value.shape == want.shape
        assert value.dtype == np.float64
        assert norm_relative_error(value, want) <= tolerance


@first_case_of_each_op
def test_vjp_matches_finite_differences(case: Case) -> None:
    """Once for each op: the other cases follow from the values and gradients of their twins."""
    _, weights, _ = _torch_outputs_and_gradients(case)
    feeds = _feeds(case, np.float64, weights)
    primal = _evaluator(case, case.model(np.dtype(np.float64)))
    gradients = _evaluator(case, _gradient_model(case, np.float64)).run(
        [f"x{i}_grad" for i in case.wrt], feeds
    )
    rng = np.random.default_rng(1)
    for index, gradient in zip(case.wrt, gradients, strict=True):
        name = f"x{index}"
        direction = rng.choice([-1.0, 1.0], feeds[name].shape)

        def loss(value: np.ndarray, name: str = name) -> float:
            return primal.run(["loss"], feeds | {name: value})[0]

        assert_gradient(loss, feeds[name], gradient, direction)


def _cannot_run(case: Case, symbolic: bool) -> str | None:
    """Return the reason why this onnxruntime cannot run the case, found by trying a single node; None if it can."""
    if case.op == "LayerNormalization" and not broadcasts_scales():
        x, *scales = (a for a in case.arrays(np.dtype(np.float32)) if a is not None)
        if {scale.size for scale in scales} != {math.prod(x.shape[case.attrs.get("axis", -1) :])}:
            return "does not broadcast scale and bias"
    if case.op == "DeformConv" and not has_deform_conv():
        return "has no DeformConv"
    if (case.op, *case.attrs) == ("DFT", "inverse", "onesided") and not makes_reals_of_spectra():
        return "makes no real numbers of half a spectrum"
    if symbolic and ("nothing" in case.id or "empty" in case.id) and not keeps_nothing():
        return "does not keep the shape of a sum over no axes of no elements"
    return None


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@each_case
def test_vjp_on_onnxruntime(case: Case, symbolic: bool) -> None:
    if (why := _cannot_run(case, symbolic)) is not None:
        pytest.skip(f"onnxruntime {ort.__version__} {why}")
    _, weights, expected = _torch_outputs_and_gradients(case)
    model = _gradient_model(case, np.float32, symbolic=symbolic)
    onnx.checker.check_model(model, full_check=True)
    got = _session(model).run([f"x{i}_grad" for i in case.wrt], _feeds(case, np.float32, weights))
    for value, want in zip(got, expected, strict=True):
        assert value.shape == want.shape
        assert norm_relative_error(value, want) <= NORM_RELATIVE[np.dtype(np.float32)]


def test_case_names_are_unique() -> None:
    ids = [case.id for case in CASES]
    assert len(set(ids)) == len(ids), sorted({i for i in ids if ids.count(i) > 1})


def test_every_case_has_something_to_differentiate() -> None:
    assert all(any(isinstance(item, F) for item in case.inputs) for case in CASES)
