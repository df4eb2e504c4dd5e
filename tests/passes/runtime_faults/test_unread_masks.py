"""Dropout in training mode whose mask nothing reads, which a graph optimizer of ONNX Runtime 1.32 removes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import models
from onnxtrain import CheckpointState, Module, generate_artifacts
from onnxtrain.passes import apply_workarounds, canonicalize
from onnxtrain.passes.runtime_faults.unread_masks import UnreadMasksPass

HEAD = '<ir_version: 10, opset_import: ["": 21]>'
P = "float ratio = {0.25}, bool training = {1}, bool off = {0}"


def parsed(nodes: str, outputs: str = "float[b, 1000] y", dtype: str = "float") -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"{HEAD} net ({dtype}[b, 1000] x, bool mode) => ({outputs.replace('float', dtype)}) <{P}> {{ {nodes} }}"
    )


def run(model: onnx.ModelProto, dtype: Any = np.float32) -> list[np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"x": np.ones((20, 1000), dtype), "mode": np.array(True)}
    taken = {value.name for value in session.get_inputs()}
    results: list[np.ndarray] = session.run(None, {k: v for k, v in feeds.items() if k in taken})
    return results


def kept_share(y: np.ndarray) -> float:
    """Returns the share of elements that are 1 / (1 - 0.25); all others are 0."""
    kept = y != 0
    np.testing.assert_allclose(y[kept].astype(np.float32), 4 / 3, rtol=1e-3)
    return float(kept.mean())


CHAIN = "a = Abs(x)  d = Dropout(a, ratio, training)  y = Relu(d)"


def test_onnxruntime_removes_dropout_with_an_unread_mask() -> None:
    """If this fails, a new ONNX Runtime keeps it: UnreadMasksPass may go."""
    np.testing.assert_array_equal(run(parsed(CHAIN))[0], np.ones((20, 1000), np.float32))


@pytest.mark.parametrize("dtype", ["float", "double", "float16"])
@pytest.mark.parametrize(
    "nodes",
    [
        CHAIN,
        "a = Abs(x)  d, mask = Dropout(a, ratio, training)  y = Relu(d)",
        "a = Abs(x)  d, mask = Dropout(a, ratio, training)  unread = Not(mask)  y = Relu(d)",
        "a = Abs(x)  d = Dropout(a, ratio, mode)  y = Relu(d)",
        "d = Dropout(x, ratio, training)  y = Relu(d)",
        "a = Abs(x)  y = Dropout(a, ratio, training)",
        """y = If (training) <
            then_branch = one () => (then_y) { a = Abs(x)  d = Dropout(a, ratio, training)  then_y = Relu(d) },
            else_branch = two () => (else_y) { else_y = Abs(x) }>""",
    ],
)
def test_dropout_drops(nodes: str, dtype: str) -> None:
    model = parsed(nodes, dtype=dtype)
    model = ir.to_proto(apply_workarounds(canonicalize(ir.from_proto(model))))
    onnx.checker.check_model(model, full_check=True)
    kinds = {"float": np.float32, "double": np.float64, "float16": np.float16}
    first, second = (run(model, kinds[dtype])[0] for _ in range(2))
    for y in (first, second):
        # Five standard deviations of 20,000 draws.
        assert abs(kept_share(y) - 0.75) < 5 * (0.25 * 0.75 / 20_000) ** 0.5
    assert (first != second).any()


@pytest.mark.parametrize(
    "nodes",
    [
        "a = Abs(x)  d = Dropout(a, ratio, off)  y = Relu(d)",
        "a = Abs(x)  d = Dropout(a, ratio)  y = Relu(d)",
        "a = Abs(x)  d, mask = Dropout(a, ratio, training)  m = Cast<to = 1>(mask)  y = Mul(m, d)",
    ],
)
def test_other_dropouts_stay_as_they_are(nodes: str) -> None:
    assert not UnreadMasksPass()(ir.from_proto(parsed(nodes))).modified


def test_dropout_between_frozen_layers_and_a_head(tmp_path: Path) -> None:
    """The share of what is kept, and the gradient of the head for the mask that was drawn."""
    rng = np.random.default_rng(0)
    nodes = models.parse_nodes("h = MatMul(x, w)  d = Dropout(h, ratio)  y = MatMul(d, v)")
    values = {"w": np.ones((4, 2000)), "ratio": np.array(0.5), "v": rng.standard_normal((2000, 2))}
    values = {name: value.astype(np.float32) for name, value in values.items()}
    model = models.make_model(nodes, {"x": ["b", 4]}, {"y": ["b", 2]}, values)
    generate_artifacts(
        model, loss="mse", requires_grad=["v"], dropout=0.25, artifact_directory=tmp_path,
    )  # fmt: skip
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    x, target = np.full((1, 4), 0.25, np.float32), np.zeros((1, 2), np.float32)
    loss = float(np.asarray(module(x, target)))
    # The gradient is d^T · 2 (y - target) / 2, for d = h · mask / 0.75 with h = 1.
    gradient = np.asarray(state._store.gradients["v"].read())
    mask = gradient[:, 0] != 0
    assert abs(mask.mean() - 0.75) < 5 * (0.25 * 0.75 / 2000) ** 0.5
    y = (mask / 0.75) @ values["v"]
    np.testing.assert_allclose(loss, np.mean(y**2), rtol=1e-4)
    np.testing.assert_allclose(gradient, np.outer(mask / 0.75, y), rtol=1e-3, atol=1e-4)
    module.eval()
    np.testing.assert_allclose(module(x, target), np.mean(values["v"].sum(0) ** 2), rtol=1e-4)
