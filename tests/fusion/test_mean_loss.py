"""The mean loss of labels becomes one function, and the other forms of it stay ONNX's."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch.nn import functional as fn

from fusion.rewriting import ops, rewritten, with_gradients
from onnxtrain.fusion.mean_loss import MeanLossPass
from onnxtrain.passes import canonicalize, load_model, to_proto
from passes._models import run

RNG = np.random.default_rng(5)


def model(
    shape: list[int | str],
    op: str = "SoftmaxCrossEntropyLoss",
    *,
    dtype: int = onnx.TensorProto.FLOAT,
    labels: int = onnx.TensorProto.INT64,
    weights: bool = False,
    **attributes: object,
) -> onnx.ModelProto:
    inputs = [
        helper.make_tensor_value_info("scores", dtype, shape),
        helper.make_tensor_value_info("labels", labels, [shape[0], *shape[2:]]),
    ]
    if weights:
        inputs.append(helper.make_tensor_value_info("weights", dtype, [shape[1]]))
    node = helper.make_node(op, [i.name for i in inputs], ["y"], **attributes)
    graph = helper.make_graph([node], "net", inputs, [helper.make_tensor_value_info("y", dtype, None)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("labels", [[0, 4, 2, 2, 1, 0, 3], [2] * 7, [2, 2, 2, 4, 2, 2, 2]], ids=str)
def test_the_loss_is_that_of_pytorch(labels: list[int]) -> None:
    scores = RNG.standard_normal((7, 5)).astype(np.float32)
    fused = rewritten(model(["batch", 5], ignore_index=2), MeanLossPass())
    assert ops(fused) == {"LogSoftmax": 1, "MeanNegativeLogLikelihood_float": 1}
    (loss,) = run(to_proto(fused), {"scores": scores, "labels": np.array(labels)})
    want = fn.cross_entropy(torch.from_numpy(scores).double(), torch.tensor(labels), ignore_index=2)
    assert loss.shape == ()
    np.testing.assert_allclose(loss, want, rtol=1e-6)


@pytest.mark.parametrize("shape", [[4, 5], [2, 5, 3], [2, 5, 2, 4]], ids=str)
def test_the_gradient_is_that_of_pytorch(shape: list[int]) -> None:
    joint = with_gradients(
        canonicalize(load_model(model(shape, reduction="mean", ignore_index=2))), ["scores"]
    )
    assert [node.op_type for node in joint.graph.node].count("MeanCrossEntropyGradient_float") == 1
    scores = RNG.standard_normal(shape).astype(np.float32)
    labels = RNG.integers(0, 5, [shape[0], *shape[2:]])
    labels.flat[:2] = 2, 1
    _, gradient = run(joint, {"scores": scores, "labels": labels, "ct": np.array(-1.7, np.float32)})
    leaf = torch.from_numpy(scores).double().requires_grad_()
    (-1.7 * fn.cross_entropy(leaf, torch.from_numpy(labels), ignore_index=2)).backward()
    assert leaf.grad is not None
    np.testing.assert_allclose(gradient, leaf.grad, rtol=1e-5, atol=1e-7)


def test_of_images_only_the_likelihood_is_rewritten() -> None:
    images = model([2, 3, 4], "NegativeLogLikelihoodLoss", ignore_index=-100)
    assert ops(rewritten(images, MeanLossPass())) == {"MeanNegativeLogLikelihood_float": 1}
    whole = model([2, 3, 4], ignore_index=-100)
    assert ops(rewritten(whole, MeanLossPass())) == {"SoftmaxCrossEntropyLoss": 1}


@pytest.mark.parametrize(
    "others",
    [
        {"reduction": "sum", "ignore_index": 2},
        {"reduction": "none", "ignore_index": 2},
        {"weights": True, "ignore_index": 2},
        {"labels": onnx.TensorProto.INT32, "ignore_index": 2},
        {"dtype": onnx.TensorProto.DOUBLE, "ignore_index": 2},
        {},
    ],
    ids=str,
)
def test_what_the_function_does_not_compute_stays(others: dict[str, object]) -> None:
    proto = model(["batch", 5], "NegativeLogLikelihoodLoss", **others)
    assert ops(rewritten(proto, MeanLossPass())) == {"NegativeLogLikelihoodLoss": 1}


def test_a_loss_that_is_kept_stays() -> None:
    proto = model(["batch", 5], "NegativeLogLikelihoodLoss", ignore_index=2)
    assert ops(rewritten(proto, MeanLossPass({"y"}))) == {"NegativeLogLikelihoodLoss": 1}
