"""Recurrent layers as composite ops: values and gradients as PyTorch has them in float64, by bodies and by kernels."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from autodiff.case import Case, F, runtime_inputs
from autodiff.cases.recurrent import CASES
from fusion.rewriting import ops, rewritten
from onnxtrain.autodiff._differentiate import add_gradients, append_outputs
from onnxtrain.fusion import RecurrentPass
from onnxtrain.passes import CleanupPass, to_proto
from onnxtrain.runtime.kernels import register_kernels
from tolerances import NORM_RELATIVE, norm_relative_error

PLAIN = [
    case
    for case in CASES
    if (case.op == "LSTM" or case.attrs.get("linear_before_reset"))
    and "lens" not in case.id
    and "peepholes" not in case.id
]
FLOAT = np.dtype(np.float32)


def results_in_float64(case: Case) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """The outputs, gradients of their sum by weights, and the weights by name."""
    values = [None if a is None else torch.from_numpy(a) for a in case.arrays(np.dtype(np.float64))]
    leaves = [values[index].requires_grad_() for index in case.wrt]
    outputs = case.twin(*values)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    rng = np.random.default_rng(0)
    weights = {f"w{k}": rng.normal(size=tuple(output.shape)) for k, output in enumerate(outputs)}
    loss = sum((y * torch.from_numpy(w)).sum() for y, w in zip(outputs, weights.values(), strict=True))
    gradients = torch.autograd.grad(loss, leaves)
    return [v.detach().numpy() for v in (*outputs, *gradients)], weights


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("kernels", ["off", "auto"])
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.id)
def test_values_and_gradients_are_those_of_autograd(
    case: Case, symbolic: bool, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONNXTRAIN_KERNELS", kernels)
    wrt, outputs = [f"x{index}" for index in case.wrt], [f"y{index}" for index in range(case.outputs)]
    proto = case.model(FLOAT, symbolic=symbolic)
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    model = rewritten(proto, RecurrentPass())
    assert not ops(model)[case.op]
    joint, gradients = add_gradients(model, "loss", wrt)
    append_outputs(joint, wrt, gradients)
    CleanupPass()(joint)  # as training models are: it goes through the bodies of functions, too
    options = ort.SessionOptions()
    options.log_severity_level = 3
    register_kernels(options)
    session = ort.InferenceSession(
        to_proto(joint).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    expected, weights = results_in_float64(case)
    feeds = runtime_inputs(case, case.arrays(FLOAT)) | {k: v.astype(np.float32) for k, v in weights.items()}
    got = session.run([*outputs, *(f"{name}_grad" for name in wrt)], feeds)
    for value, want in zip(got, expected, strict=True):
        assert value.shape == want.shape
        assert norm_relative_error(value, want) <= NORM_RELATIVE[FLOAT]


def test_the_names_of_outputs_stay() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        net (float[4,3,2] x, float[2,20,2] w, float[2,20,5] r) => (float[4,2,3,5] y, float[2,3,5] c)
            { y, h, c = LSTM<hidden_size=5, direction="bidirectional">(x, w, r) }"""
    )
    rng = np.random.default_rng(0)
    feeds = {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in {"x": (4, 3, 2), "w": (2, 20, 2), "r": (2, 20, 5)}.items()
    }
    layer = rewritten(model, RecurrentPass())
    assert [value.name for value in layer.graph.outputs] == ["y", "c"]
    before, after = (
        ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]).run(
            ["y", "c"], feeds
        )
        for proto in (model, to_proto(layer))
    )
    for old, new in zip(before, after, strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-6)


LEFT_ALONE = [
    "clip=1.0, hidden_size=5",
    'activations=["Tanh", "Tanh", "Tanh"], hidden_size=5',
    "input_forget=1, hidden_size=5",
]


@pytest.mark.parametrize("attributes", LEFT_ALONE)
def test_other_layers_are_left_alone(attributes: str) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        net (float[4,3,2] x, float[1,20,2] w, float[1,20,5] r) => (y) {{ y = LSTM<{attributes}>(x, w, r) }}"""
    )
    assert ops(rewritten(model, RecurrentPass())) == {"LSTM": 1}


@pytest.mark.parametrize("case", [case for case in CASES if "peepholes" in case.id], ids=lambda case: case.id)
def test_peepholes_are_left_alone(case: Case) -> None:
    assert ops(rewritten(case.model(FLOAT), RecurrentPass()))["LSTM"] == 1


def test_gru_that_resets_first_is_left_alone() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        net (float[4,3,2] x, float[1,15,2] w, float[1,15,5] r) => (y) { y = GRU<hidden_size=5>(x, w, r) }"""
    )
    assert ops(rewritten(model, RecurrentPass())) == {"GRU": 1}


@pytest.mark.parametrize("types", ["double", "float16"])
def test_other_types_are_left_alone(types: str) -> None:
    x, w, r = (F(*shape) for shape in ((4, 3, 2), (1, 20, 2), (1, 20, 5)))
    case = Case("LSTM", (x, w, r), lambda *_: torch.zeros(4, 1, 3, 5), {"hidden_size": 5})
    dtype = np.dtype({"double": np.float64, "float16": np.float16}[types])
    model = rewritten(case.model(dtype), RecurrentPass())
    assert isinstance(model, ir.Model)
    assert ops(model)["LSTM"] == 1
