"""Scores of many classes, their log-probabilities and cotangents take turns in one memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import helper
from torch.nn import functional as fn

from fusion.rewriting import ops
from models import make_model
from onnxtrain.api import CheckpointState, Module
from onnxtrain.artifacts import generate_artifacts

WIDTH, TOKENS = 4, (2, 5)
RNG = np.random.default_rng(3)
X = RNG.standard_normal((*TOKENS, WIDTH)).astype(np.float32)


def head(classes: int, folder: Path) -> tuple[ir.Model, np.ndarray, np.ndarray]:
    """Writes the artifacts of a head with so many classes; returns the training model, the weight and labels."""
    weight = RNG.standard_normal((WIDTH, classes)).astype(np.float32)
    model = make_model(
        [helper.make_node("MatMul", ["x", "weight"], ["logits"])],
        {"x": ["batch", "length", WIDTH]},
        {"logits": ["batch", "length", classes]},
        {"weight": weight},
    )
    generate_artifacts(model, loss="causal_lm", artifact_directory=folder)
    labels = RNG.integers(0, classes, TOKENS)
    labels[0, 3] = -100
    return ir.load(folder / "training_model.onnx"), weight, labels


def test_the_gradient_waits_for_the_loss(tmp_path: Path) -> None:
    """Between the gradient and the loss there is a path, so that no runtime computes the gradient first."""
    model, _, _ = head(5000, tmp_path)
    assert ops(model)["LogSoftmaxOfRows_float"] == 1
    nodes = list(model.graph)
    gradient = next(node for node in nodes if node.op_type == "MeanCrossEntropyGradient_float")
    before, waiting = set[ir.Node](), [gradient]
    while waiting:
        node = waiting.pop()
        sources = {source for value in node.inputs if value is not None and (source := value.producer())}
        waiting += sources - before
        before |= sources
    assert model.graph.outputs[0].producer() in before


def test_all_of_them_have_one_shape(tmp_path: Path) -> None:
    """ONNX Runtime writes a result over an input only where the model gives both the same sizes."""
    model, _, _ = head(5000, tmp_path)
    of = {"LogSoftmaxOfRows_float": [], "MeanCrossEntropyGradient_float": []}
    for node in model.graph:
        if node.op_type in of:
            of[node.op_type] = [node.inputs[0].shape, node.outputs[0].shape]
    shapes = [shape for pair in of.values() for shape in pair]
    assert len(shapes) == 4
    assert all(shape == shapes[0] for shape in shapes)
    assert isinstance(shapes[0][0], ir.SymbolicDim)
    assert shapes[0][0].value is not None


@pytest.mark.parametrize("classes", [5000, 40])
def test_loss_and_gradient_are_those_of_pytorch(classes: int, tmp_path: Path) -> None:
    model, weight, labels = head(classes, tmp_path)
    assert ("LogSoftmaxOfRows_float" in ops(model)) == (classes == 5000)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    loss = Module(tmp_path / "training_model.onnx", state)(X, labels)
    w = torch.from_numpy(weight).double().requires_grad_()
    scores = torch.from_numpy(X).double() @ w
    want = fn.cross_entropy(scores[:, :-1].reshape(-1, classes), torch.from_numpy(labels)[:, 1:].reshape(-1))
    want.backward()
    np.testing.assert_allclose(loss, want.item(), rtol=1e-6)
    np.testing.assert_allclose(state.parameters["weight"].grad, w.grad.numpy(), rtol=1e-4, atol=1e-7)
