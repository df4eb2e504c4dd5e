"""onnxsim 0.8.1: its training step, compiled from the PyTorch module.

Needs an environment of its own: `onnxsim==0.8.1 onnxruntime==1.31.1 onnxscript torch==2.13.0`. Cross-entropy is written
with the ops that it can differentiate; its Adam has no decay.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

import numpy as np
import onnx
import onnxsim
import torch
from onnxsim.torch_training import export_torch_module_to_onnx
from torch import nn

from steps.engines._engine import Engine, Job
from steps.nets import CASES, make_batch, make_net

__all__ = ["make"]


class _WithLoss(nn.Module):
    """A net and its loss in ops that onnxsim has gradients of; class labels come one-hot over their number."""

    def __init__(self, net: nn.Module, loss: str) -> None:
        super().__init__()
        self.net, self.kind = net, loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.net(x)
        if self.kind == "mse":
            difference = out - y
            return (difference * difference).mean()
        return -(torch.log(torch.softmax(out, 1)) * y).sum()


def _constants_to_initializers(model: onnx.ModelProto) -> None:
    """Turns Constant nodes, which onnxsim has no gradient rule for, into initializers."""
    for node in [node for node in model.graph.node if node.op_type == "Constant"]:
        tensor = node.attribute[0].t
        tensor.name = node.output[0]
        model.graph.initializer.append(tensor)
        model.graph.node.remove(node)


def make(job: Job) -> Callable[[], Engine]:
    """Returns what starts the engine."""
    case = CASES[job.case]
    net = make_net(case)
    inputs, target = make_batch(case)
    if case.net.loss == "cross_entropy":
        with torch.no_grad():
            classes = net.eval()(torch.from_numpy(inputs)).shape[1]
        net.train()
        target = np.eye(classes, dtype=np.float32)[target] / np.float32(len(target))
    x, y = torch.from_numpy(inputs), torch.from_numpy(target)

    def start() -> Engine:
        model = export_torch_module_to_onnx(_WithLoss(net, case.net.loss), (x, y), output_names=("loss",))
        _constants_to_initializers(model)
        parameters = [f"net.{name}" for name, _ in net.named_parameters()]
        loop = onnxsim.compile_training_loop(model, "loss", parameters)
        latest = [0.0]

        def update(rate: float) -> None:
            latest[0] = float(loop({"x": x, "y": y}, lr=rate))

        versions = {name: metadata.version(name) for name in ("onnxsim", "onnxruntime")}
        return Engine(lambda: latest[0], update, versions, whole=True)

    return start
