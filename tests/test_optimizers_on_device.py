"""All optimizers on the device beside torch.optim: gradients that are zero, too large, too small, or missing.

The loss is the sum of w·c over all parameters w, so that an input c of the model is the gradient of w.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from onnxtrain.optimizers import Muon
from test_optimizers import CASES, OptimizerCase
from training_run import Run

STEPS = 30
RATE = 0.0625
NARROW = {"half": (TensorProto.FLOAT16, torch.float16), "brain": (TensorProto.BFLOAT16, torch.bfloat16)}

Gradients = Callable[[np.random.Generator, int, tuple[int, ...]], np.ndarray]


def random(rng: np.random.Generator, t: int, shape: tuple[int, ...]) -> np.ndarray:
    return rng.normal(size=shape) + 0.2


def zero(rng: np.random.Generator, t: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape)


def zero_at_first(rng: np.random.Generator, t: int, shape: tuple[int, ...]) -> np.ndarray:
    return random(rng, t, shape) * (t > 3)


def huge(rng: np.random.Generator, t: int, shape: tuple[int, ...]) -> np.ndarray:
    """Squares that overflow float32 in one element at the fourth step, and in all at the tenth."""
    gradient = random(rng, t, shape)
    if t == 4 and gradient.size:
        gradient.flat[0] *= 1e30
    return gradient * (1e25 if t == 10 else 1.0)


def large(rng: np.random.Generator, t: int, shape: tuple[int, ...]) -> np.ndarray:
    """Squares that overflow float32, but not when they are scaled by 1 - beta2 first, as PyTorch does."""
    return np.sign(random(rng, t, shape)) * (1e20 if t == 4 else 1.0)


def infinite(rng: np.random.Generator, t: int, shape: tuple[int, ...]) -> np.ndarray:
    return random(rng, t, shape) * (np.inf if t == 4 else 1.0)


def tiny(rng: np.random.Generator, t: int, shape: tuple[int, ...]) -> np.ndarray:
    """Squares that underflow float32."""
    return random(rng, t, shape) * 1e-25


SEQUENCES: tuple[Gradients, ...] = (random, zero, zero_at_first, huge, large, infinite, tiny)


@dataclass(frozen=True)
class Weight:
    """A parameter with a gradient of its own: the loss is the sum of w·c, with c from a sequence."""

    shape: tuple[int, ...]
    gradients: Gradients = random
    kind: str = "float"
    reading: str = "Identity"

    @property
    def proto_dtype(self) -> int:
        return NARROW[self.kind][0] if self.kind in NARROW else TensorProto.FLOAT

    @property
    def torch_dtype(self) -> torch.dtype:
        return NARROW[self.kind][1] if self.kind in NARROW else torch.float32


WEIGHTS = {
    "vector": Weight((5,)),
    "scalar": Weight(()),
    "empty": Weight((0, 3)),
    "behind": Weight((3, 4), reading="Round"),
    **{
        f"{sequence.__name__}_{kind}": Weight((3, 4), sequence, kind)
        for sequence in SEQUENCES
        for kind in ("float", *NARROW)
    },
}


def model_of(weights: dict[str, Weight]) -> onnx.ModelProto:
    """loss = the sum of w·c over all weights; only the output `other` reads the weight `unreached`."""
    rng = np.random.default_rng(7)
    nodes, inputs, values = [], [], []
    for name, weight in weights.items():
        values.append(
            helper.make_tensor(name, weight.proto_dtype, weight.shape, rng.normal(size=weight.shape).ravel())
        )
        inputs.append(helper.make_tensor_value_info(f"c_{name}", TensorProto.FLOAT, weight.shape))
        nodes += [
            helper.make_node(weight.reading, [name], [f"r_{name}"]),
            helper.make_node("Cast", [f"r_{name}"], [f"f_{name}"], to=TensorProto.FLOAT),
            helper.make_node("Mul", [f"f_{name}", f"c_{name}"], [f"p_{name}"]),
            helper.make_node("ReduceSum", [f"p_{name}"], [f"s_{name}"], keepdims=0),
        ]
    values.append(helper.make_tensor("unreached", TensorProto.FLOAT, (3, 4), rng.normal(size=12)))
    nodes.append(helper.make_node("Sum", [f"s_{name}" for name in weights], ["loss"]))
    nodes.append(helper.make_node("Neg", ["unreached"], ["other"]))
    outputs = [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])]
    outputs.append(helper.make_tensor_value_info("other", TensorProto.FLOAT, (3, 4)))
    graph = helper.make_graph(nodes, "sums", inputs, outputs, values)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def wide(array: np.ndarray) -> np.ndarray:
    """A parameter as float32; those of bfloat16 are raw bits."""
    return (
        array.view(ml_dtypes.bfloat16).astype(np.float32)
        if array.dtype == np.uint16
        else array.astype(np.float32)
    )


class Twin:
    """torch.optim, or the step in numpy where PyTorch has none, on float32 that is rounded to the parameter's dtype."""

    def __init__(self, case: OptimizerCase, start: np.ndarray, weight: Weight) -> None:
        self.case, self.dtype = case, weight.torch_dtype
        self.tensor = torch.from_numpy(start.copy()).requires_grad_()
        self.torch = None if case.twin is None else case.make_twin([self.tensor])
        self.slots = [
            np.full(m.shape, m.initial_value, np.float32) for m in case.make().state_spec(start.shape)
        ]

    def step(self, gradient: np.ndarray, t: int) -> None:
        if not gradient.size:
            return  # torch.optim.Adafactor divides by the number of elements
        with torch.no_grad(), np.errstate(all="ignore"):
            if self.torch is not None:
                self.tensor.grad = torch.from_numpy(gradient)
                self.torch.param_groups[0]["lr"] = RATE
                self.torch.step()
            else:
                arguments = (self.tensor.numpy().copy(), gradient, self.slots, np.float32(RATE), t)
                result = self.case.stepped(*arguments, dtype=np.float32)
                self.tensor.copy_(torch.from_numpy(np.asarray(result, np.float32)))
            self.tensor.copy_(self.tensor.to(self.dtype).float())


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_30_steps_on_the_device_match_torch(tmp_path: Path, case: OptimizerCase) -> None:
    made = case.make()
    weights = {name: weight for name, weight in WEIGHTS.items() if made.refusal(weight.shape) is None}
    run = Run.generate(
        tmp_path,
        model_of(weights),
        loss_input_names=["loss"],
        additional_output_names=["other"],
        optimizer=made,
        # The mean over the parameter without elements is NaN.
        error_if_nonfinite=False,
    )
    assert run.optimizer is not None
    run.optimizer.set_learning_rate(RATE)
    parameters = run.state.parameters
    twins = {name: Twin(case, wide(parameters[name].data), weight) for name, weight in weights.items()}
    unreached = parameters["unreached"].data.copy()
    rng = np.random.default_rng(3)
    for t in range(1, STEPS + 1):
        given = [np.asarray(w.gradients(rng, t, w.shape), np.float32) for w in weights.values()]
        run.module.train()
        run.module(*given)
        # Rounded to the parameter's dtype: of float16, 1e20 is infinite.
        gradients = {name: wide(parameters[name].grad) for name in weights}
        run.optimizer.step()
        run.module.lazy_reset_grad()
        for name, gradient in gradients.items():
            twins[name].step(gradient, t)
    assert not gradients["behind"].any()
    assert (parameters["unreached"].requires_grad, parameters["unreached"].grad) == (False, None)
    np.testing.assert_array_equal(parameters["unreached"].data, unreached)
    for name, twin in twins.items():
        # One unit in the last place of the dtype, where the float32 before the rounding differs in its last place.
        relative = {"half": 2**-10, "brain": 2**-7}.get(
            weights[name].kind, 1e-4 if case.optimizer is Muon else 2e-6
        )
        np.testing.assert_allclose(
            wide(parameters[name].data),
            twin.tensor.detach().numpy(),
            rtol=relative,
            atol=relative,
            err_msg=name,
        )
