"""Optimizers written outside of the package, each a class of its own: through artifacts, against numpy in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxtrain import generate_artifacts
from onnxtrain.api import CheckpointState, Module
from onnxtrain.api import Optimizer as DeviceOptimizer
from onnxtrain.emitter import Emitter, Operand
from onnxtrain.optimizers import SGD, Moment, Optimizer, ParameterSpec, build_optimizer_model

RATE, STEPS = 0.05, 5


@dataclass(frozen=True, kw_only=True)
class Signum(Optimizer):
    """The sign of a running mean (Bernstein et al., 2018)."""

    momentum: float = 0.9

    def moments(self, shape: tuple[int, ...]) -> Sequence[Moment]:
        return [Moment("running mean of the gradient")]

    def scalars(self, op: Emitter, learning_rate: ir.Value, step: ir.Value) -> Sequence[Operand]:
        return [learning_rate]

    def update(
        self, op: Emitter, w: ir.Value, g: ir.Value, moments: Sequence[ir.Value], scalars: Sequence[Operand]
    ) -> tuple[ir.Value, ...]:
        mean = op.Add(op.Mul(moments[0], self.momentum), op.Mul(g, 1 - self.momentum))
        return op.Sub(w, op.Mul(op.Sign(mean), scalars[0])), mean


@dataclass(frozen=True, kw_only=True)
class Factored(Optimizer):
    """The second moment of a matrix as the product of sums over its rows and its columns, as in Adafactor."""

    elementwise = False
    decay: float = 0.9

    def moments(self, shape: tuple[int, ...]) -> Sequence[Moment]:
        if len(shape) != 2:
            return [Moment("running mean of the squared gradient")]
        return [Moment("of rows", shape=(shape[0], 1)), Moment("of columns", shape=(1, shape[1]))]

    def scalars(self, op: Emitter, learning_rate: ir.Value, step: ir.Value) -> Sequence[Operand]:
        return [learning_rate]

    def update(
        self, op: Emitter, w: ir.Value, g: ir.Value, moments: Sequence[ir.Value], scalars: Sequence[Operand]
    ) -> tuple[ir.Value, ...]:
        square = op.Add(op.Mul(g, g), 1e-12)
        seen = (
            [square] if len(moments) == 1 else [op.ReduceMean(square, [axis], keepdims=1) for axis in (1, 0)]
        )
        new = [
            op.Add(op.Mul(m, self.decay), op.Mul(s, 1 - self.decay))
            for m, s in zip(moments, seen, strict=True)
        ]
        second = new[0] if len(new) == 1 else op.Div(op.Mul(*new), op.ReduceMean(new[0], [0], keepdims=1))
        return op.Sub(w, op.Mul(op.Div(g, op.Sqrt(second)), scalars[0])), *new


def signum(w: np.ndarray, g: np.ndarray, state: dict[str, np.ndarray]) -> np.ndarray:
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    return w - RATE * np.sign(state["m"])


def factored(w: np.ndarray, g: np.ndarray, state: dict[str, np.ndarray]) -> np.ndarray:
    square = g * g + 1e-12
    if w.ndim != 2:
        second = state["s"] = 0.9 * state.get("s", 0) + 0.1 * square
    else:
        state["r"] = 0.9 * state.get("r", 0) + 0.1 * square.mean(1)
        state["c"] = 0.9 * state.get("c", 0) + 0.1 * square.mean(0)
        second = np.outer(state["r"], state["c"]) / state["r"].mean()
    return w - RATE * g / np.sqrt(second)


@pytest.mark.parametrize(
    ("optimizer", "reference"), [(Signum(), signum), (Factored(), factored)], ids=["sign", "factored"]
)
def test_optimizers_of_ones_own(
    optimizer: Optimizer, reference: Callable[..., np.ndarray], tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    values = {"w": rng.normal(size=(4, 3)).astype(np.float32), "b": rng.normal(size=3).astype(np.float32)}
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> net (float[n, 4] x) => (float[n, 3] y) {
        p = MatMul(x, w)  y = Add(p, b) }"""
    )
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(value, name) for name, value in values.items()
    )
    generate_artifacts(model, loss="mse", optimizer=optimizer, artifact_directory=tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    device = DeviceOptimizer(tmp_path / "optimizer_model.onnx", module)
    device.set_learning_rate(RATE)
    x, target = rng.normal(size=(6, 4)).astype(np.float32), rng.normal(size=(6, 3)).astype(np.float32)
    wanted = {name: value.astype(np.float64) for name, value in values.items()}
    states: dict[str, dict[str, np.ndarray]] = {name: {} for name in wanted}
    for _ in range(STEPS):
        module(x, target)
        device.step()
        module.lazy_reset_grad()
        error = 2 * (x @ wanted["w"] + wanted["b"] - target) / target.size
        gradients = {"w": x.T @ error, "b": error.sum(0)}
        wanted = {name: reference(w, gradients[name], states[name]) for name, w in wanted.items()}
    for name, want in wanted.items():
        np.testing.assert_allclose(state.parameters[name].data, want, rtol=2e-5, atol=2e-6, err_msg=name)


@dataclass(frozen=True, kw_only=True)
class ClippedStep(SGD):
    """SGD whose step limits the gradient by its learning rate, which Clip takes as a scalar of shape [] only."""

    def update(
        self, op: Emitter, w: ir.Value, g: ir.Value, moments: Sequence[ir.Value], scalars: Sequence[Operand]
    ) -> tuple[ir.Value, ...]:
        return (op.Sub(w, op.Clip(g, 0.0, scalars[0])),)


def test_scalar_settings_keep_their_shape() -> None:
    parameters = [ParameterSpec("w", "float32", (4, 3, 1, 1))]
    model = ir.to_proto(build_optimizer_model(ClippedStep(), parameters))
    op_types = [node.op_type for node in model.graph.node]
    assert op_types == ["Clip", "Sub"]
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    w, g = np.random.default_rng(0).normal(size=(2, 4, 3, 1, 1)).astype(np.float32)
    feeds = {"w": w, "w_grad": g, "learning_rate": np.float32(RATE), "step": np.int64(1)}
    feeds = {value.name: np.asarray(feeds[value.name]) for value in session.get_inputs()}
    (updated,) = session.run(None, feeds)
    np.testing.assert_array_equal(updated, w - g.clip(0, np.float32(RATE)))


@pytest.mark.parametrize("shape", [(4, 3, 1, 1), (12, 1), (12,), (1, 1)])
def test_scalars_meet_tensors_in_the_rank_of_the_tensor(shape: tuple[int, ...]) -> None:
    """ONNX Runtime combines a tensor whose last axis has size one slowly with a scalar of shape []."""
    model = build_optimizer_model(Signum(momentum=0.75), [ParameterSpec("w", "float32", shape)])
    shapes = {value: value.shape for value in model.graph.initializers.values()}
    rank = len(shape) if len(shape) > 1 and shape[-1] == 1 else 0
    combined = {
        node.op_type: value
        for node in model.graph
        for value in node.inputs
        if node.op_type == "Mul" and value in shapes
    }
    assert combined["Mul"].shape.rank() == rank
    assert {value.shape.rank() for value in shapes if value.uses()} <= {rank, 1}
    assert [node.op_type for node in model.graph].count("Reshape") == (rank > 0)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    w, g, m = np.random.default_rng(0).normal(size=(3, *shape)).astype(np.float32)
    feeds = {"w": w, "w_grad": g, "w_momentum0": m, "learning_rate": np.float32(0.25), "step": np.int64(1)}
    updated, mean = session.run(None, {v.name: np.asarray(feeds[v.name]) for v in session.get_inputs()})
    np.testing.assert_array_equal(mean, m * np.float32(0.75) + g * np.float32(0.25))
    np.testing.assert_array_equal(updated, w - np.sign(mean) * np.float32(0.25))
