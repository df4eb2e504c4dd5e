"""Axes, sizes and pads of another rank than the op's schema, as ONNX Runtime accepts them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from onnxtrain import Trainer, differentiate

# What is computed, the parameter `p` as a file declares it, and where ONNX Runtime (1.32) accepts it.
EVERYWHERE = ("initializer", "input", "computed", "input without shape")
CASES = {
    "Unsqueeze by a scalar": ("y = Unsqueeze(x, p)", "int64", [1], EVERYWHERE),
    "Unsqueeze by a negative scalar": ("y = Unsqueeze(x, p)", "int64", [-1], EVERYWHERE),
    "Expand to a scalar": ("y = Expand(x, p)", "int64", [3], EVERYWHERE[:1]),
    "Pad by a matrix": ("y = Pad(x, p)", "int64[1, 4]", [0, 1, 2, 0], EVERYWHERE[1:]),
    "Resize to a matrix of sizes": ("y = Resize(x, , , p)", "int64[1, 2]", [4, 6], EVERYWHERE[:1]),
    "Resize by a matrix of scales": ("y = Resize(x, , p)", "float[1, 2]", [2, 2], EVERYWHERE[:2]),
    "ConstantOfShape of a matrix": ("c = ConstantOfShape(p) y = Sub(x, c)", "int64[1, 1]", [3], EVERYWHERE[:1]),
    "STFT with a matrix as step": ("y = STFT(x, p, , two)", "int64[1, 1]", [1], EVERYWHERE),
}  # fmt: skip


@pytest.mark.parametrize(("case", "where"), [(case, where) for case in CASES for where in CASES[case][3]])
def test_gradient_is_that_of_the_file(case: str, where: str) -> None:
    body, kind, numbers, _ = CASES[case]
    declared = kind.partition("[")[0] if where == "input without shape" else kind
    name = "q" if where in ("computed", "input without shape") else "p"
    source = "p = Identity(q)" if name == "q" else ""
    given = "" if where == "initializer" else f", {declared} {name}"
    initializers = f"{kind} p = {{{', '.join(map(str, numbers))}}}, " if where == "initializer" else ""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        net (float[a, b] x{given}) => (float loss) <{initializers}int64 two = {{2}}>
        {{ {source} {body}  square = Mul(y, y)  loss = ReduceSum<keepdims = 0>(square) }}""")
    if where == "input without shape":
        model.graph.input[1].type.tensor_type.ClearField("shape")
    shape = [int(size) for size in kind.partition("[")[2].rstrip("]").split(",") if size]
    parameter = np.reshape(numbers, shape).astype(np.float32 if kind.startswith("float") else np.int64)
    feeds = {} if where == "initializer" else {name: parameter}
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    original = ort.InferenceSession(model.SerializeToString())
    loss = original.run(None, feeds | {"x": x})[0]

    session = ort.InferenceSession(
        differentiate(model, of="loss", wrt=["x"]).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    kept = {value.name for value in session.get_inputs()}
    result = session.run(["loss", "x_grad"], {k: v for k, v in (feeds | {"x": x}).items() if k in kept})

    np.testing.assert_allclose(result[0], loss, rtol=1e-6)
    # Of a quadratic function differences of any width are exact.
    for index in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[index] = 1
        ends = [float(original.run(None, feeds | {"x": x + sign * step})[0]) for sign in (1, -1)]
        np.testing.assert_allclose(result[1][index], (ends[0] - ends[1]) / 2, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")  # of the exporter
@pytest.mark.parametrize("optimize", [True, False])
def test_attention_with_enable_gqa_trains_as_in_torch(optimize: bool, tmp_path: Path) -> None:
    """`torch.onnx.export` (2.13) writes an Unsqueeze with scalar axes for it."""

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k = torch.nn.Linear(8, 8)

        def forward(self, q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            k = self.k(x).view(2, 5, 2, 4).transpose(1, 2)
            return torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)

    torch.manual_seed(0)
    net, q, x = Attention(), torch.randn(2, 4, 5, 4), torch.randn(2, 5, 8)
    path = tmp_path / "net.onnx"
    torch.onnx.export(
        net, (q, x), path, dynamo=True, optimize=optimize, verbose=False, input_names=["q", "x"]
    )
    trainer = Trainer(path, "mse", "sgd", learning_rate=0.1)
    target = torch.randn(2, 4, 5, 4)
    trainer.fit({"q": q.numpy(), "x": x.numpy()}, target.numpy(), batch_size=2, verbose=False)

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.nn.functional.mse_loss(net(q, x), target).backward()
    optimizer.step()
    for name, value in net.named_parameters():
        trained = np.array(trainer.parameters[name].data)
        np.testing.assert_allclose(trained, value.detach().numpy(), rtol=1e-5, atol=1e-6)
