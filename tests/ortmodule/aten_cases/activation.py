"""Activation functions, also at their kinks."""

from typing import Any

import torch
import torch.nn.functional as F

from ortmodule.aten_case import Case, T


def _activation(name: str, fn: Any, kinks: list[float] | None = None) -> list[Case]:
    cases = [Case(name, fn, (T(4, 6, low=-5, high=5),))]
    if kinks is not None:
        cases.append(Case(f"{name}_kink", fn, (torch.tensor(kinks, requires_grad=True),)))
    return cases


CASES = [
    *_activation("relu", F.relu, [-1.0, 0.0, 1.0]),
    *_activation("relu6", F.relu6, [0.0, 6.0, 3.0]),
    *_activation("hardtanh", lambda x: F.hardtanh(x, -2.0, 1.5), [-2.0, 1.5, 0.0]),
    *_activation("leaky_relu", lambda x: F.leaky_relu(x, 0.2), [0.0, 1.0]),
    *_activation("rrelu_eval", lambda x: F.rrelu(x, 0.1, 0.3, training=False), [0.0, 1.0]),
    *_activation("elu", lambda x: F.elu(x, 0.7), [0.0, 1.0]),
    *_activation("selu", F.selu, [0.0, 1.0]),
    *_activation("celu", lambda x: F.celu(x, 1.3), [0.0, 1.0]),
    *_activation("gelu", F.gelu),
    *_activation("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
    *_activation("silu", F.silu),
    *_activation("mish", F.mish),
    *_activation("log_sigmoid", F.logsigmoid),
    *_activation("softplus", F.softplus),
    *_activation("softplus_beta", lambda x: F.softplus(x, 2.0, 4.0)),
    *_activation("hardswish", F.hardswish, [-3.0, 3.0, 0.0]),
    *_activation("hardsigmoid", F.hardsigmoid, [-3.0, 3.0, 0.0]),
    *_activation("softsign", F.softsign),
    *_activation("tanhshrink", F.tanhshrink),
    *_activation("hardshrink", F.hardshrink, [-0.5, 0.5, 1.0]),
    *_activation("softshrink", F.softshrink, [-0.5, 0.5, 1.0]),
    *_activation("threshold", lambda x: F.threshold(x, 0.5, 2.0), [0.5, 1.0]),
    *_activation("glu", F.glu),
    *_activation("glu_dim", lambda x: F.glu(x, 0)),
    Case("prelu", F.prelu, (T(2, 3, 4), T(3))),
    Case("prelu_single", F.prelu, (T(2, 3, 4), T(1))),
    Case(
        "shrink_nan",
        lambda x: (F.hardshrink(x), F.softshrink(x)),
        (torch.tensor([float("nan"), -float("inf"), 0.5, 3.0]),),
    ),
]
