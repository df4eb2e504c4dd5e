"""Control flow of PyTorch, by both exporters, and ops that no layer of PyTorch is exported to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import torch
from torch import nn

from sources.torch_layers import Tensors, p
from sources.torch_nets import export

__all__ = ["make"]


class ScriptedLoop(nn.Module):
    """As many steps of a cell as the input has."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(x.shape[0], 5)
        for t in range(x.shape[1]):
            state = torch.tanh(self.a(x[:, t]) + self.b(state))
        return state


class ScriptedWhile(nn.Module):
    """Steps until a norm is small."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = 0
        while bool(x.abs().max() > 0.5) and count < 5:
            x = 0.7 * torch.tanh(self.a(x))
            count += 1
        return x


class ScriptedIf(nn.Module):
    """One of two layers, by what the input is."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() > 0):
            y = torch.relu(self.a(x))
        else:
            y = torch.tanh(self.b(x)) + self.a(x)
        return y * 2


class Cond(nn.Module):
    """The same by torch.cond."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            torch.cond(x.sum() > 0, lambda x: torch.relu(self.a(x)), lambda x: torch.tanh(self.b(x)), (x,))
            * 2
        )


class Scan(nn.Module):
    """A recurrence by PyTorch's scan."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.w = nn.Linear(8, 4), p(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch._higher_order_ops.scan import scan

        def step(state: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            after = torch.tanh(state @ self.w + value)
            return after, after.clone()

        return scan(step, torch.zeros(x.shape[0], 4), self.a(x).transpose(0, 1))[1]


SCRIPTED = {"loop": ScriptedLoop, "while": ScriptedWhile, "if": ScriptedIf}
CAPTURED = {"cond": Cond, "scan": Scan}

GRAPHS = {
    "deform-conv": """<ir_version: 9, opset_import: ["": 19]>
        g (float[2, 3, 8, 8] x) => (float[2, 4, 6, 6] y) {
            offset = Conv(x, v)
            y = DeformConv<kernel_shape = [3, 3]>(x, w, offset, b)
        }""",
    "roi-align": """<ir_version: 8, opset_import: ["": 16]>
        g (float[1, 3, 8, 8] x) => (float[2, 4, 3, 3] y)
        <int64[2] batch = {0, 0}> {
            rois = Constant<value = float[2, 4] {0.0, 0.0, 5.0, 5.0, 1.0, 2.0, 6.0, 7.0}>()
            h = Conv<kernel_shape = [1, 1]>(x, w1)
            y = RoiAlign<output_height = 3, output_width = 3, sampling_ratio = 2>(h, rois, batch)
        }""",
    "spectrogram": """<ir_version: 8, opset_import: ["": 17]>
        g (float[2, 64, 1] x) => (float[2, 7, 9, 2] y) <int64 step = {8}, int64 length = {16}> {
            y = STFT<onesided = 1>(x, step, window, length)
        }""",
    "grid": """<ir_version: 8, opset_import: ["": 16]>
        g (float[2, 3, 8, 8] x) => (float[2, 3, 4, 4] y) { y = GridSample(x, grid) }""",
    "windows": """<ir_version: 8, opset_import: ["": 15]>
        g (float[2, 3] x) => (float[5, 2, 3] y) <int64 five = {5}, bool yes = {1}> {
            last, y = Loop(five, yes, x) <body = step (int64 i, bool go, float[2, 3] s) =>
                (bool still, float[2, 3] after, float[2, 3] out) {
                still = Identity(go)
                m = MatMul(s, w3)
                after = Tanh(m)
                out = Identity(after)
            }>
        }""",
    "sequence": """<ir_version: 8, opset_import: ["": 15]>
        g (float[2, 6] x) => (float[2, 3] y) <int64 one = {1}, int64 two = {2}> {
            h = Mul(x, w6)
            parts = SplitToSequence<axis = 1>(h, two)
            a = SequenceAt(parts, one)
            e = SequenceErase(parts, one)
            rest = ConcatFromSequence<axis = 1>(e)
            both = Concat<axis = 1>(rest, a)
            y = MatMul(both, w63)
        }""",
    "trilinear": """<ir_version: 10, opset_import: ["": 21]>
        g (float[1, 2, 4, 4, 4] x) => (float[1, 2, N, H, W] y) <float[5] scales = {1, 1, 1.5, 2, 2}> {
            h = Conv(x, w5)
            y = Resize<mode = "linear", coordinate_transformation_mode = "align_corners">(h, , scales)
        }""",
    "scatter": """<ir_version: 10, opset_import: ["": 18]>
        g (float[4, 3] x, int64[5, 1] i) => (float[4, 3] y) {
            h = Mul(x, w13)
            y = ScatterND<reduction = "add">(h, i, w53)
        }""",
}
SHAPES = {
    "v": (18, 3, 3, 3),
    "w": (4, 3, 3, 3),
    "b": (4,),
    "w1": (4, 3, 1, 1),
    "window": (16,),
    "grid": (2, 4, 4, 2),
    "w3": (3, 3),
    "w6": (6,),
    "w63": (6, 3),
    "w5": (2, 2, 1, 1, 1),
    "w13": (1, 3),
    "w53": (5, 3),
}


def _write(folder: Path, name: str, text: str) -> None:
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    read = {value for node in model.graph.node for value in _read(node)}
    for weight, shape in SHAPES.items():
        if weight in read:
            array = 0.4 * rng.standard_normal(shape).astype(np.float32)
            model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), weight))
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / f"{name}.onnx")


def _read(node: onnx.NodeProto) -> set[str]:
    inner = {value for a in node.attribute for n in a.g.node for value in _read(n)}
    return {*node.input} | inner


def make(folder: Path) -> None:
    """Writes the files."""
    for names, dynamo in ((SCRIPTED, False), (CAPTURED, True)):
        for number, (name, new) in enumerate(names.items()):
            torch.manual_seed(number)
            inputs: Tensors = (torch.randn(2, 6, 8),) if name in ("loop", "scan") else (torch.randn(3, 8),)
            net = new().eval()
            path = folder / "torch-control-flow" / f"{name}.onnx"
            try:
                export(net if dynamo else torch.jit.script(net), inputs, path, dynamo, 18)
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    for name, text in GRAPHS.items():
        _write(folder / "graphs", name, text)
