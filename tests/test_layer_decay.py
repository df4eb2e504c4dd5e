"""Learning rates of single layers: `layer_decay` and `learning_rate_scale` beside PyTorch's groups of parameters."""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import models
from onnxtrain import Recipe, Trainer, generate_artifacts
from onnxtrain.errors import GraphBuildError, InputError
from onnxtrain.optimizers import AdamW, ParameterGroup

SHAPES = {
    "stem.weight": (4, 6),
    "blocks.0.norm.weight": (6,),
    "blocks.0.norm.bias": (6,),
    "blocks.0.fc.weight": (6, 6),
    "blocks.0.fc.bias": (6,),
    "blocks.1.norm.weight": (6,),
    "blocks.1.norm.bias": (6,),
    "blocks.1.fc1.weight": (6, 8),
    "blocks.1.fc2.weight": (8, 6),
    "norm.weight": (6,),
    "norm.bias": (6,),
    "head.weight": (6, 3),
    "head.bias": (3,),
}
# The stem, two blocks with the norm behind them, the head.
BEHIND = dict.fromkeys(SHAPES, 1) | {
    "stem.weight": 3,
    **{name: 2 for name in SHAPES if name.startswith("blocks.0.")},
    "head.weight": 0,
    "head.bias": 0,
}


def values(dtype: Any = np.float64) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(0, 0.4, shape).astype(dtype) for name, shape in SHAPES.items()}


def nodes_of(text: str) -> list[onnx.NodeProto]:
    """Make nodes of a text such as "h = MatMul(x, l.0.w)"; ONNX's own text format has no names with dots."""
    return [
        onnx.helper.make_node(op, inputs.split(", "), [output])
        for output, op, inputs in re.findall(r"(\S+) = (\w+)\((.*?)\)", text)
    ]


def residual(dtype: int = TensorProto.DOUBLE) -> onnx.ModelProto:
    """A network with a stem, two residual blocks with norms in front, a norm and a head."""
    arrays = values(np.float64 if dtype == TensorProto.DOUBLE else np.float32)
    nodes = nodes_of("""
        s = MatMul(x, stem.weight)
        n0 = LayerNormalization(s, blocks.0.norm.weight, blocks.0.norm.bias)
        m0 = MatMul(n0, blocks.0.fc.weight)
        a0 = Add(m0, blocks.0.fc.bias)
        t0 = Tanh(a0)
        r0 = Add(s, t0)
        n1 = LayerNormalization(r0, blocks.1.norm.weight, blocks.1.norm.bias)
        m1 = MatMul(n1, blocks.1.fc1.weight)
        t1 = Tanh(m1)
        m2 = MatMul(t1, blocks.1.fc2.weight)
        r1 = Add(r0, m2)
        n2 = LayerNormalization(r1, norm.weight, norm.bias)
        logits = Gemm(n2, head.weight, head.bias)
    """)
    return models.make_model(nodes, {"x": ["n", 4]}, {"logits": ["n", 3]}, arrays, dtype=dtype)


def loss_in_torch(p: dict[str, Any], x: np.ndarray, y: np.ndarray) -> Any:
    """Compute the cross-entropy of the same network from PyTorch's tensors."""
    import torch

    def norm(h: Any, name: str) -> Any:
        return torch.nn.functional.layer_norm(h, (6,), p[f"{name}.weight"], p[f"{name}.bias"])

    h = torch.tensor(x) @ p["stem.weight"]
    h = h + torch.tanh(norm(h, "blocks.0.norm") @ p["blocks.0.fc.weight"] + p["blocks.0.fc.bias"])
    h = h + torch.tanh(norm(h, "blocks.1.norm") @ p["blocks.1.fc1.weight"]) @ p["blocks.1.fc2.weight"]
    scores = norm(h, "norm") @ p["head.weight"] + p["head.bias"]
    return torch.nn.functional.cross_entropy(scores, torch.tensor(y))


def scales_of(model: Any, **fields: Any) -> dict[str, float]:
    return Trainer(model, recipe=Recipe(loss="cross_entropy", **fields)).learning_rate_scales


def test_layers_are_counted_to_the_loss() -> None:
    assert scales_of(residual(), layer_decay=0.5) == {name: 0.5**k for name, k in BEHIND.items()}
    assert set(scales_of(residual()).values()) == {1.0}


def test_training_is_that_of_pytorch_with_a_group_for_each_parameter() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((16, 4)), rng.integers(0, 3, 16)
    # Powers of two: float32, in which the model takes the learning rate, has them exactly.
    rate, decay, factor = 2.0**-6, 0.75, 4.0
    trainer = Trainer(
        residual(),
        "cross_entropy",
        AdamW(weight_decay=0.1),
        rate,
        layer_decay=decay,
        learning_rate_scale={"head.*": factor},
        clip_grad_norm=0.5,
    )
    trainer.fit(x, y, epochs=12, batch_size=16, shuffle=False, verbose=False)
    tensors = {name: torch.tensor(value, requires_grad=True) for name, value in values().items()}

    groups = [
        {
            "params": [tensor],
            "lr": rate * decay ** BEHIND[name] * (factor if name.startswith("head.") else 1),
        }
        for name, tensor in tensors.items()
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
    for _ in range(12):
        optimizer.zero_grad()
        loss_in_torch(tensors, x, y).backward()
        torch.nn.utils.clip_grad_norm_(tensors.values(), 0.5)
        optimizer.step()
    start = values()
    for name, parameter in trainer.parameters:
        expected = tensors[name].detach().numpy()
        assert np.abs(expected - start[name]).max() > 1e-3
        np.testing.assert_allclose(parameter.data, expected, rtol=1e-6, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    ("text", "shapes", "expected"),
    [
        # Without names of blocks, each product is a layer; its bias belongs to it.
        ("h = Gemm(x, a, b)  t = Tanh(h)  y = Gemm(t, c, d)", "a 4,4 b 4 c 4,3 d 3", "a 1 b 1 c 0 d 0"),
        # Parallel layers count once.
        (
            "q = MatMul(x, a)  k = MatMul(x, b)  s = Mul(q, k)  y = MatMul(s, c)",
            "a 4,4 b 4,4 c 4,3",
            "a 1 b 1 c 0",
        ),
        # The longest path decides.
        (
            "p = MatMul(x, a)  q = MatMul(p, b)  s = Add(p, q)  y = MatMul(s, c)",
            "a 4,4 b 4,4 c 4,3",
            "a 2 b 1 c 0",
        ),
        # A weight that is transposed, and a scale in front of all layers.
        (
            "s = Mul(x, a)  w = Transpose(b)  h = MatMul(s, w)  y = MatMul(h, c)",
            "a 4 b 4,4 c 4,3",
            "a 1 b 1 c 0",
        ),
        # A shared weight belongs to its first layer.
        ("h = MatMul(x, a)  t = Tanh(h)  u = MatMul(t, a)  y = MatMul(u, c)", "a 4,4 c 4,3", "a 2 c 0"),
        # A block that is applied twice.
        (
            "h = MatMul(x, l.0.a)  i = MatMul(h, l.1.a)  j = MatMul(i, l.0.a)  y = MatMul(j, c)",
            "l.0.a 4,4 l.1.a 4,4 c 4,3",
            "l.0.a 2 l.1.a 1 c 0",
        ),
        # The number that all names share is that of no block.
        (
            "h = MatMul(x, 0.l.0.a)  i = MatMul(h, 0.l.0.b)  y = MatMul(i, 0.l.1.a)",
            "0.l.0.a 4,4 0.l.0.b 4,4 0.l.1.a 4,3",
            "0.l.0.a 1 0.l.0.b 1 0.l.1.a 0",
        ),
    ],
)
def test_layers_of_small_graphs(text: str, shapes: str, expected: str) -> None:
    words = shapes.split()
    sizes = {
        name: tuple(map(int, size.split(","))) for name, size in zip(words[::2], words[1::2], strict=True)
    }
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    model = models.make_model(nodes_of(text), {"x": ["n", 4]}, {"y": ["n", 3]}, arrays)
    pairs = expected.split()
    behind = {name: 0.5 ** int(k) for name, k in zip(pairs[::2], pairs[1::2], strict=True)}
    assert scales_of(model, layer_decay=0.5) == behind


@pytest.mark.parametrize("dynamo", [False, True])
def test_blocks_of_exported_modules(dynamo: bool, tmp_path: Path) -> None:
    """Exporters name some weights by themselves; the names of the nodes then tell their blocks."""
    torch = pytest.importorskip("torch")

    nn = torch.nn

    class Block(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

        def forward(self, h: Any) -> Any:
            return h + self.mlp(self.norm(h))

    class Net(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.layers = nn.ModuleList(Block() for _ in range(3))
            self.head = nn.Linear(8, 3)

        def forward(self, ids: Any) -> Any:
            h = self.embed(ids)
            for layer in self.layers:
                h = layer(h)
            return self.head(h.mean(1))

    torch.manual_seed(0)
    ids = torch.randint(0, 11, (2, 5))
    with warnings.catch_warnings():
        # The exporter that writes names such as onnx::MatMul_7 is deprecated, and files of it are still common.
        warnings.simplefilter("ignore")
        torch.onnx.export(Net().eval(), (ids,), tmp_path / "net.onnx", dynamo=dynamo, verbose=False)
    model = onnx.load(tmp_path / "net.onnx")
    found = scales_of(model, layer_decay=0.5)
    for name, scale in found.items():
        if "layers." in name:
            assert scale == 0.5 ** (3 - int(name.split("layers.")[1][0])), name
    assert {found["embed.weight"], found["head.weight"], found["head.bias"]} == {0.0625, 1.0}
    # Of each block two weights, two biases and a norm.
    assert Counter(found.values()) == {1.0: 2, 0.5: 6, 0.25: 6, 0.125: 6, 0.0625: 1}


def test_factors_multiply_those_of_groups() -> None:
    optimizer = AdamW(groups=(ParameterGroup("head.*", learning_rate_scale=3.0, weight_decay=0.0),))
    found = scales_of(
        residual(),
        optimizer=optimizer,
        layer_decay=0.5,
        learning_rate_scale={"head.weight": 2.0, "*.weight": 0.1},
    )
    assert found["head.weight"] == 6.0
    assert found["head.bias"] == 3.0
    assert found["stem.weight"] == pytest.approx(0.0125)


def test_groups_alone_keep_their_factors() -> None:
    optimizer = AdamW(groups=(ParameterGroup("head.*", learning_rate_scale=3.0),))
    found = scales_of(residual(), optimizer=optimizer)
    assert found == {name: 3.0 if name.startswith("head.") else 1.0 for name in SHAPES}


def test_a_factor_of_zero_keeps_a_parameter() -> None:
    rng = np.random.default_rng(1)
    model = residual(TensorProto.FLOAT)
    trainer = Trainer(model, "cross_entropy", learning_rate=0.1, learning_rate_scale={"stem.*": 0.0})
    trainer.fit(rng.standard_normal((8, 4)), rng.integers(0, 3, 8), verbose=False)
    moved = {name: not np.array_equal(p.data, values(np.float32)[name]) for name, p in trainer.parameters}
    assert moved == {name: name != "stem.weight" for name in SHAPES}


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"layer_decay": 0.0}, InputError, "layer_decay must be a number above 0 and at most 1"),
        ({"layer_decay": True}, InputError, "layer_decay"),
        ({"layer_decay": float("nan")}, InputError, "layer_decay"),
        ({"learning_rate_scale": 2.0}, InputError, "must map names or patterns to factors"),
        ({"learning_rate_scale": {3: 1.0}}, InputError, "must map names or patterns to factors"),
        (
            {"learning_rate_scale": {"head.*": -1.0}},
            InputError,
            "factor of 'head.\\*' .* must be a number from 0",
        ),
        ({"learning_rate_scale": {"head.*": float("inf")}}, InputError, "must be a number from 0"),
        (
            {"learning_rate_scale": {"tail.*": 1.0}},
            GraphBuildError,
            "no trained parameter matches 'tail.\\*'",
        ),
    ],
)
def test_what_is_refused(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        scales_of(residual(), **fields)


def test_an_optimizer_block_has_one_rate(tmp_path: Path) -> None:
    from onnxtrain.onnxblock.optim import AdamW as Block

    with pytest.raises(GraphBuildError, match="layer_decay needs an optimizer of onnxtrain"):
        generate_artifacts(
            residual(),
            artifact_directory=tmp_path,
            recipe=Recipe(loss="cross_entropy", optimizer=Block(), layer_decay=0.5),
        )
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_keeps_its_rates(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((16, 4)), rng.integers(0, 3, 16)
    fields: dict[str, Any] = {"layer_decay": 0.5, "learning_rate_scale": {"head.*": 3.0}}
    straight = Trainer(residual(), "cross_entropy", **fields)
    straight.fit(x, y, epochs=4, batch_size=4, verbose=False)
    trainer = Trainer(residual(), "cross_entropy", directory=tmp_path, **fields)
    trainer.fit(x, y, epochs=2, batch_size=4, verbose=False)
    del trainer
    resumed = Trainer.resume(tmp_path)
    assert resumed.learning_rate_scales == straight.learning_rate_scales
    resumed.fit(x, y, epochs=2, batch_size=4, verbose=False)
    for name, parameter in resumed.parameters:
        assert parameter.data.tobytes() == straight.parameters[name].data.tobytes(), name
    groups = json.loads((tmp_path / "manifest.json").read_text())["optimizer"]["settings"]["groups"]
    assert sorted(group["learning_rate_scale"] for group in groups) == [0.125, 0.25, 0.5, 3.0]
