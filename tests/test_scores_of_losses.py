"""Losses that take scores warn of models that end in a Softmax or Sigmoid."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from onnxtrain import Trainer, generate_artifacts

WEIGHT = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


def model(*ops: str) -> onnx.ModelProto:
    """A linear layer "h", and ops behind it, of which the last one gives "y"."""
    names = ["h", *(f"v{number}" for number in range(1, len(ops))), "y"][-len(ops) - 1 :]
    nodes = [onnx.helper.make_node("MatMul", ["x", "w"], [names[0]])]
    nodes += [onnx.helper.make_node(op, [a], [b]) for op, a, b in zip(ops, names, names[1:], strict=False)]
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 4])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 3])],
        [onnx.numpy_helper.from_array(WEIGHT, "w")],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize(
    ("ops", "loss", "message"),
    [
        (
            ("Softmax",),
            "cross_entropy",
            "CrossEntropyLoss expects scores (logits), but 'y' is computed by Softmax.",
        ),
        (("Softmax", "Identity"), "cross_entropy", "but 'y' is computed by Softmax."),
        (
            ("Sigmoid",),
            "bce_with_logits",
            "BCEWithLogitsLoss expects scores (logits), but 'y' is computed by Sigmoid.",
        ),
        (
            ("Softmax",),
            "nll",
            "NLLLoss expects log-probabilities, but 'y' is computed by Softmax. Choose cross_entropy",
        ),
        (("Relu",), "cross_entropy", None),
        (("Softmax", "Relu"), "cross_entropy", None),
        # The softmax of a log-softmax is the softmax: nothing is lost.
        (("LogSoftmax",), "cross_entropy", None),
        (("LogSoftmax",), "nll", None),
        (("Sigmoid",), "mse", None),
    ],
)
def test_probabilities_are_noticed(
    ops: tuple[str, ...], loss: str, message: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    generate_artifacts(model(*ops), loss=loss, artifact_directory=tmp_path)
    texts = [record.getMessage() for record in caplog.records if " is computed by " in record.getMessage()]
    assert len(texts) == (message is not None)
    for text in texts:
        assert message in text
        assert "loss_input_names=['h']" in text


def test_what_the_warning_advises_trains_the_scores(caplog: pytest.LogCaptureFixture) -> None:
    """The loss is PyTorch's cross-entropy of the scores, and the trained model still gives probabilities."""
    x = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
    labels = np.arange(8) % 3
    trainer = Trainer(model("Softmax"), "cross_entropy", loss_input_names=["h"])
    assert not [record for record in caplog.records if " is computed by " in record.getMessage()]
    scores = torch.tensor(x).double() @ torch.tensor(WEIGHT).double()
    expected = torch.nn.functional.cross_entropy(scores, torch.tensor(labels)).item()
    assert trainer.evaluate(x, labels)["loss"] == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(trainer.predict(x), torch.softmax(scores, 1).numpy(), rtol=1e-5)
