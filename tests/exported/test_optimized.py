"""Files as onnxruntime's own optimizer leaves them: the gradient of every parameter beside PyTorch's."""

from __future__ import annotations

import collections
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

from onnxtrain import differentiate

NETS = {
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, 0.0, activation="gelu", batch_first=True), 1,
            enable_nested_tensor=False,
        ),
        (5, 16),
        {"BiasGelu"},
    ),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3), nn.LeakyReLU(0.2),
            nn.Flatten(), nn.Linear(16, 4),
        ),
        (3, 8, 8),
        {"FusedConv"},
    ),
    "mlp": (
        lambda: nn.Sequential(
            nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4),
        ),
        (8,),
        {"Gelu", "FusedGemm"},
    ),
}  # fmt: skip


def _optimized(path: Path) -> onnx.ModelProto:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(path.with_suffix(".optimized.onnx"))
    options.log_severity_level = 4
    ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return onnx.load(options.optimized_model_filepath)


# PyTorch exports its attention from opset 14 on; 13 has no LayerNormalization.
@pytest.mark.parametrize(
    ("name", "opset"), [("encoder", 17), ("cnn", 13), ("cnn", 17), ("mlp", 13), ("mlp", 17)]
)
@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_gradients_behind_the_optimizer_match_torch(name: str, opset: int, tmp_path: Path) -> None:
    make, shape, expected = NETS[name]
    torch.manual_seed(0)
    net = make().eval()
    for parameter in net.parameters():  # equal ones would be merged
        torch.nn.init.normal_(parameter, 0.2, 0.5)
    path = tmp_path / "net.onnx"
    example = torch.randn(2, *shape)
    torch.onnx.export(
        net, (example,), str(path), dynamo=False, opset_version=opset, input_names=["x"], output_names=["y"],
        dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}},
    )  # fmt: skip
    proto = _optimized(path)
    fused = {node.op_type for node in proto.graph.node if node.domain == "com.microsoft"}
    assert expected <= fused
    named = dict(net.named_parameters())
    # The optimizer gives names of its own to what it has transposed or merged.
    names = [
        t.name
        for t in proto.graph.initializer
        if t.name in named and list(t.dims) == list(named[t.name].shape)
    ]
    assert len(names) >= len(named) / 2
    step = differentiate(proto, "y", ["x", *names], cotangent="ct")
    assert not collections.Counter(node.op_type for node in step.graph.node if node.domain == "com.microsoft")
    session = ort.InferenceSession(step.SerializeToString(), providers=["CPUExecutionProvider"])
    x = torch.randn(3, *shape, requires_grad=True)
    y = net(x)
    ct = torch.randn_like(y)
    gradients = torch.autograd.grad(y, [x, *(named[name] for name in names)], ct)
    got = session.run(None, {"x": x.detach().numpy(), "ct": ct.numpy()})
    for value, reference in zip(got, (y, *gradients), strict=True):
        np.testing.assert_allclose(value, reference.detach(), rtol=1e-4, atol=1e-5)
