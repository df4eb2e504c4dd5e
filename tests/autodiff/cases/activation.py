"""Activation functions."""

import numpy as np
import torch
import torch.nn.functional as fn

from autodiff.case import Case, F

# Attributes are float32: the default values, and numbers that float32 holds exactly.
HUNDREDTH, FIFTH = float(np.float32(0.01)), float(np.float32(0.2))
SELU_ALPHA, SELU_GAMMA = 1.67326319217681884765625, 1.05070102214813232421875

CASES = [
    Case("Relu", (F(3, 4),), torch.relu),
    Case("Sigmoid", (F(3, 4),), torch.sigmoid),
    Case("Tanh", (F(3, 4),), torch.tanh),
    Case("LeakyRelu", (F(3, 4),), lambda x: fn.leaky_relu(x, HUNDREDTH)),
    Case("LeakyRelu", (F(3, 4),), lambda x: fn.leaky_relu(x, -0.25), {"alpha": -0.25}),
    Case("Elu", (F(3, 4),), fn.elu),
    Case("Elu", (F(3, 4),), lambda x: fn.elu(x, 0.75), {"alpha": 0.75}),
    Case("Selu", (F(3, 4),), lambda x: SELU_GAMMA * fn.elu(x, SELU_ALPHA)),
    Case("Selu", (F(3, 4),), lambda x: 1.25 * fn.elu(x, 0.75), {"alpha": 0.75, "gamma": 1.25}),
    Case("Celu", (F(3, 4),), fn.celu),
    Case("Celu", (F(3, 4),), lambda x: fn.celu(x, 2.5), {"alpha": 2.5}),
    Case("Gelu", (F(3, 4, low=-4.0, high=4.0),), fn.gelu),
    Case(
        "Gelu",
        (F(3, 4, low=-4.0, high=4.0),),
        lambda x: fn.gelu(x, approximate="tanh"),
        {"approximate": "tanh"},
    ),
    Case("Softplus", (F(3, 4, low=-8.0, high=8.0),), fn.softplus),
    Case("Softplus", (F(3, 4, low=-60.0, high=60.0),), lambda x: fn.softplus(x, threshold=1e9), name="far"),
    Case("Softsign", (F(3, 4),), fn.softsign),
    Case(
        "HardSigmoid",
        (F(3, 4, low=-5.0, high=5.0),),
        lambda x: (x / 8 + 0.75).clamp(0, 1),
        {"alpha": 0.125, "beta": 0.75},
    ),
    Case("HardSigmoid", (F(3, 4, low=-5.0, high=5.0),), lambda x: (FIFTH * x + 0.5).clamp(0, 1)),
    Case("HardSwish", (F(3, 4, low=-5.0, high=5.0),), fn.hardswish),
    Case("PRelu", (F(2, 3, 4), F(2, 3, 4)), lambda x, s: torch.where(x > 0, x, s * x)),
    Case("PRelu", (F(2, 3, 4), F(3, 1)), lambda x, s: fn.prelu(x, s[:, 0])),
    Case("PRelu", (F(2, 3, 4), F(1)), fn.prelu),
    Case("ThresholdedRelu", (F(3, 4),), lambda x: fn.threshold(x, 1.0, 0.0)),
    Case("ThresholdedRelu", (F(3, 4),), lambda x: fn.threshold(x, 0.25, 0.0), {"alpha": 0.25}),
    Case("Shrink", (F(3, 4),), fn.hardshrink),
    Case("Shrink", (F(3, 4),), lambda x: fn.softshrink(x, 0.75), {"lambd": 0.75, "bias": 0.75}),
    Case("Mish", (F(3, 4, low=-6.0, high=6.0),), fn.mish),
    Case("Swish", (F(3, 4),), fn.silu, opset=24),
    Case("Swish", (F(3, 4),), lambda x: x * torch.sigmoid(1.75 * x), {"alpha": 1.75}, opset=24),
    Case("Swish", (F(3, 4),), lambda x: x * torch.sigmoid(0.5 * x), {"alpha": 0.5}, opset=26),
]
CASES += [
    Case(op, (F(3, 4),), lambda x, a=axis, twin=twin: twin(x, a), {"axis": axis})
    for op, twin in (("Softmax", torch.softmax), ("LogSoftmax", torch.log_softmax))
    for axis in (0, 1, -1)
]
