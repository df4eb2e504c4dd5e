"""Modules in float64: computed in float64 throughout, or in PyTorch with a warning that says what has no kernel."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onnxtrain.emitter import Emitter
from onnxtrain.ortmodule import ORTModule
from onnxtrain.ortmodule._exceptions import ORTModuleFallbackException
from onnxtrain.ortmodule.lowering import _formulas
from ortmodule.aten_case import Case, T
from ortmodule.eager import strict
from ortmodule.side_by_side import assert_no_differences, batches, differences
from ortmodule.test_aten_lowerings import CASES as LOWERING_CASES

pytestmark = pytest.mark.torch

EXACT = 1e-13
"""Norm-relative: PyTorch and ONNX Runtime sum in other orders."""

NO_KERNEL = {
    "AveragePool": {
        *("avg_pool1d", "avg_pool2d", "avg_pool2d_without_pads", "avg_pool2d_ceil", "avg_pool2d_divisor"),
        *("avg_pool2d_divisor_ceil", "avg_pool3d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    },
    "Conv": {
        "conv1d",
        "conv2d",
        "conv2d_without_bias",
        "conv2d_grouped_dilated",
        "conv2d_depthwise",
        "conv2d_same",
        "conv3d",
    },
    "ConvTranspose": {"conv_transpose1d", "conv_transpose2d", "conv_transpose2d_grouped", "conv_transpose3d"},
    "Det": {
        *(
            "det",
            "slogdet",
            "slogdet_one",
            "slogdet_large",
            "slogdet_too_small_for_float32",
            "slogdet_singular",
        ),
        *("logdet", "empty_det_0_0", "empty_det_2_0_0", "empty_slogdet_0_0", "empty_slogdet_2_0_0"),
    },
    "GRU": {"gru", "gru_batch_first_bidirectional", "gru_two_layers_without_bias"},
    "GlobalMaxPool": {"adaptive_max_pool2d_one"},
    "LSTM": {
        *("lstm", "lstm_batch_first", "lstm_without_bias", "lstm_bidirectional", "lstm_two_layers"),
        "lstm_dropout",
    },
    "RNN": {"rnn_tanh", "rnn_relu_bidirectional"},
    "Resize": {
        *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest2d_uneven", "upsample_nearest3d"),
        *("upsample_nearest_exact1d", "upsample_nearest_exact3d"),
        *("upsample_nearest_exact", "upsample_linear1d", "upsample_bilinear", "upsample_bilinear_uneven"),
        *(
            "upsample_nearest2d_kept",
            "upsample_nearest2d_doubled",
            "upsample_linear1d_kept",
            "upsample_bilinear_kept",
        ),
        *("upsample_bilinear_corners", "upsample_bilinear_down", "upsample_bicubic", "upsample_trilinear"),
    },
}
"""The cases that ONNX Runtime has no kernel for, by the op; another way to compute any of these would be long."""

# Numbers that float32, in which ONNX keeps attributes, cannot hold.
ATTRIBUTES = [
    Case("leaky_relu_0.01", F.leaky_relu, (T(4, 5),)),
    Case("elu_1.1", lambda x: F.elu(x, 1.1), (T(4, 5),)),
    Case("hardshrink_0.3", lambda x: F.hardshrink(x * x, 0.3) + F.hardshrink(x, 0.1), (T(4, 5),)),
    Case("softshrink_0.3", lambda x: F.softshrink(x, 0.3), (T(4, 5),)),
    Case("addmm_0.3", lambda c, a, b: torch.addmm(c, a, b, beta=0.7, alpha=0.3), (T(3, 5), T(3, 4), T(4, 5))),
    Case("addmm_0.5", lambda c, a, b: torch.addmm(c, a, b, beta=0, alpha=0.5), (T(3, 5), T(3, 4), T(4, 5))),
    Case("prelu_0.3", lambda x: F.prelu(x, torch.full((1,), 0.3, dtype=x.dtype)), (T(4, 5),)),
    Case("layer_norm_small", lambda x: F.layer_norm(x * 0.01, (5,)), (T(4, 5),)),
    Case("group_norm_small", lambda x: F.group_norm(x * 0.01, 2, eps=1e-4), (T(3, 4, 5),)),
]

# All families of lowerings: a new one is in the test by itself.
FAMILIES = {"attributes": ATTRIBUTES, **LOWERING_CASES}
CASES = [case for cases in FAMILIES.values() for case in cases]

# PyTorch itself multiplies by float32 constants in these backward kernels (1 / alpha and 1 / 6), and a loss of the
# logarithm of 1 - p tells the last digit of a p near 1. Its derivative of digamma is good to 5e-10.
LOOSER = {
    "digamma_0.05_to_9": 1e-9,
    "digamma_-2.9_to_-2.1": 1e-9,
    "celu": 1e-7,
    "celu_kink": 1e-7,
    "hardsigmoid": 1e-7,
    "hardsigmoid_kink": 1e-7,
    "binary_cross_entropy_saturated": 1e-2,
}


def _computed() -> list[Any]:
    not_computed = set().union(*NO_KERNEL.values())
    return [
        pytest.param(batch, id=f"{family}-{index}")
        for family, cases in FAMILIES.items()
        for index, batch in enumerate(batches([c for c in cases if c.name not in not_computed], 32))
    ]


@pytest.mark.parametrize("cases", _computed())
def test_computes_in_float64(cases: list[Case]) -> None:
    assert_no_differences(cases, torch.float64, tolerance=lambda case: LOOSER.get(case.name, EXACT))


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op, names in NO_KERNEL.items() for name in sorted(names)]
)
def test_says_why_not(op: str, name: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    with pytest.raises(Exception) as error:  # noqa: PT011 - Dynamo wraps the reason
        differences([case], torch.float64)
    reason = getattr(error.value, "inner_exception", error.value)
    assert isinstance(reason, ORTModuleFallbackException)
    assert re.match(f"ONNX Runtime.* no kernel of {op} for float64", str(reason))


def _run(formula: Callable[[Emitter, ir.Value], ir.Value], x: np.ndarray) -> np.ndarray:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="formula")
    dtype = ir.DataType.from_numpy(x.dtype)
    graph.inputs.append(ir.Value(name="x", shape=ir.Shape(["n"]), type=ir.TensorType(dtype)))
    y = formula(Emitter(graph), graph.inputs[0])
    y.name = "y"
    graph.outputs.append(y)
    proto = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    return ort.InferenceSession(proto, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


NUMBERS = np.random.default_rng(0)
TINY = 10.0 ** NUMBERS.uniform(-300, 0, 500) * NUMBERS.choice([-1, 1], 500)
HUGE = 10.0 ** NUMBERS.uniform(0, 300, 500) * NUMBERS.choice([-1, 1], 500)
UNIT, MODERATE = NUMBERS.uniform(-1, 1, 1000), NUMBERS.uniform(-30, 30, 1000)
SPECIAL = np.array([0.0, 1.0, -1.0, math.inf, -math.inf, math.nan])

FORMULAS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[np.ndarray, ...]]] = {
    "acos": (torch.acos, (TINY, UNIT)),
    "acosh": (torch.acosh, (abs(TINY) + 1, abs(MODERATE) + 1, abs(HUGE))),
    "asin": (torch.asin, (TINY, UNIT)),
    "asinh": (torch.asinh, (TINY, MODERATE, HUGE)),
    "atan": (torch.atan, (TINY, UNIT, MODERATE, HUGE)),
    "atanh": (torch.atanh, (TINY, UNIT)),
    "cosh": (torch.cosh, (TINY, MODERATE, 23 * MODERATE)),
    "erf": (torch.erf, (TINY, UNIT, 3 * UNIT, MODERATE, HUGE)),
    "expm1": (torch.expm1, (TINY, MODERATE)),
    "log1p": (torch.log1p, (TINY, UNIT, abs(HUGE))),
    "sinh": (torch.sinh, (TINY, MODERATE, 23 * MODERATE)),
    "softplus": (_softplus, (TINY, MODERATE, 23 * MODERATE, HUGE)),
    "tan": (torch.tan, (TINY, 1.5 * UNIT)),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_keep_fourteen_digits(name: str) -> None:
    """Element by element, not in the norm: small results count as much as large ones."""
    reference, samples = FORMULAS[name]
    for sample in samples:
        want = reference(torch.tensor(sample)).numpy()
        np.testing.assert_allclose(_run(getattr(_formulas, name), sample), want, rtol=1e-14)
    want = reference(torch.tensor(SPECIAL)).numpy()
    np.testing.assert_allclose(_run(getattr(_formulas, name), SPECIAL), want, rtol=1e-14)


def test_erfcx_where_it_is_used() -> None:
    sample = np.concatenate((abs(UNIT) + 0.5, abs(MODERATE) + 0.5, abs(HUGE)))
    want = torch.special.erfcx(torch.tensor(sample)).numpy()
    np.testing.assert_allclose(_run(_formulas.erfcx, sample), want, rtol=1e-14)


def test_gradcheck_of_a_transformer_layer() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, activation="gelu", batch_first=True).double()
    ours = strict(copy.deepcopy(layer))
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ours, (x,))
    assert torch.autograd.gradgradcheck(ours, (x,))
    torch.testing.assert_close(ours(x), layer(x), rtol=1e-13, atol=1e-13)
    assert ours.report().runs_in_onnxruntime


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


@pytest.mark.parametrize(
    ("make", "shape", "op"),
    [
        (lambda: nn.Conv2d(2, 3, 3), (1, 2, 5, 5), "Conv"),
        (lambda: nn.AvgPool2d(2), (1, 2, 4, 4), "AveragePool"),
        (Recurrent, (5, 2, 3), "LSTM"),
    ],
    ids=["conv", "pool", "lstm"],
)
def test_what_has_no_kernel_runs_in_pytorch(make: Any, shape: tuple[int, ...], op: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    plain = make().double()
    ours = ORTModule(copy.deepcopy(plain))
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    with pytest.warns(UserWarning, match=f"runs in PyTorch: .*no kernel of {op} for float64"):
        got = ours(x)
    torch.testing.assert_close(got, plain(x), rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(ours, (x,))
    assert f"no kernel of {op} for float64" in str(ours.report().fallbacks[0].fallback_reason)
