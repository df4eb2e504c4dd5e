"""Loss blocks say what they are the mean over: accumulated steps and evaluation are torch's over all samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import models
from onnxtrain import Trainer, generate_artifacts, losses, onnxblock
from tolerances import NORM_RELATIVE, norm_relative_error

functional = torch.nn.functional
BLOCKS = onnxblock.loss
WEIGHT = [1.0, 5.0, 0.2]
F32 = np.dtype(np.float32)
X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
LABELS = np.where(np.arange(32) % 3 == 0, 2, np.random.default_rng(1).integers(0, 2, 32))
FLOATS = np.random.default_rng(2).random((32, 3)).astype(np.float32)

PAIRS: dict[str, tuple[losses.Loss, onnxblock.Block]] = {
    f"{name}, {reduction}": (
        getattr(losses, name)(reduction=reduction, **options),
        getattr(BLOCKS, name)(reduction=reduction, **options),
    )
    for name, options in (
        ("MSELoss", {}),
        ("L1Loss", {}),
        ("HuberLoss", {}),
        ("SmoothL1Loss", {}),
        ("BCEWithLogitsLoss", {"weight": WEIGHT}),
        ("CrossEntropyLoss", {"ignore_index": 2, "weight": WEIGHT}),
        ("CrossEntropyLoss", {"label_smoothing": 0.1}),
        ("NLLLoss", {"ignore_index": 1}),
    )
    for reduction in ("mean", "sum")
}


@pytest.mark.parametrize("opset", [17, 21])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_manifest_says_the_same_as_of_the_loss_itself(tmp_path: Path, pair: Any, opset: int) -> None:
    said = []
    for number, loss in enumerate(pair):
        generate_artifacts(models.mlp(opset=opset), loss=loss, artifact_directory=tmp_path / str(number))
        manifest = json.loads((tmp_path / str(number) / "manifest.json").read_text())
        said.append((manifest["loss_mean"], manifest["targets"]))
    assert said[0] == said[1]


class Scaled(onnxblock.Block):
    """-3 (c + c) / 4 - c of a summed loss c."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = BLOCKS.MSELoss(reduction="sum")

    def build(self, scores: str) -> str:
        loss = self.loss(scores)
        quarter = onnxblock.blocks.Div()(loss, onnxblock.blocks.Constant(-4.0)())
        twice = onnxblock.blocks.Add()(quarter, quarter)
        three = onnxblock.blocks.Mul()(onnxblock.blocks.Constant(3.0)(), twice)
        return onnxblock.blocks.Neg()(onnxblock.blocks.Add()(three, loss))


class Penalised(onnxblock.Block):
    """A mean over the labels that count, and the squares of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = BLOCKS.CrossEntropyLoss(ignore_index=2, weight=WEIGHT)

    def build(self, scores: str) -> str:
        blocks = onnxblock.blocks
        penalty = blocks.ReduceSum(keepdims=False)(blocks.Mul()("w1", "w1"))
        return blocks.Add()(self.loss(scores), blocks.Mul()(penalty, blocks.Constant(0.01)()))


Reference = Callable[[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]


def cross_entropy(scores: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
    return functional.cross_entropy(scores, target, weight=torch.tensor(WEIGHT).double(), **options)


CASES: dict[str, tuple[Callable[[], onnxblock.Block], Reference, np.ndarray]] = {
    "summed": (
        lambda: BLOCKS.MSELoss("sum"), lambda s, t, p: functional.mse_loss(s, t, reduction="sum"), FLOATS,
    ),
    "ignored and weighted": (
        lambda: BLOCKS.CrossEntropyLoss(weight=WEIGHT, ignore_index=2), lambda s, t,
        p: cross_entropy(s, t, ignore_index=2), LABELS,
    ),
    "summed, ignored and weighted": (
        lambda: BLOCKS.CrossEntropyLoss(weight=WEIGHT, ignore_index=2, reduction="sum"), lambda s, t,
        p: cross_entropy(s, t, ignore_index=2, reduction="sum"), LABELS,
    ),
    "multiples of a sum": (
        Scaled, lambda s, t, p: (3 * 2 / 4 - 1) * functional.mse_loss(s, t, reduction="sum"), FLOATS,
    ),
    "mean and penalty": (
        Penalised, lambda s, t, p: cross_entropy(s, t, ignore_index=2) + 0.01 * (p["w1"] ** 2).sum(), LABELS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_accumulated_step_matches_torch_over_all_samples(name: str) -> None:
    make, reference, target = CASES[name]
    model = models.mlp()
    trainer = Trainer(model, make(), "sgd", learning_rate=0.01, metrics=[])
    p = {k: torch.tensor(v.data.astype(np.float64), requires_grad=True) for k, v in trainer.parameters}
    scores = torch.tanh(torch.tensor(X).double() @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]
    wanted = torch.tensor(target).double() if target is FLOATS else torch.tensor(target)
    loss = reference(scores, wanted, p)
    loss.backward()
    for size in (32, 10, 1):
        assert trainer.evaluate(X, target, batch_size=size)["loss"] == pytest.approx(loss.item(), rel=2e-6)
    trainer.fit(X, target, batch_size=4, accumulate=8, shuffle=False, verbose=False)
    for key, parameter in trainer.parameters:
        step = p[key].grad
        assert step is not None
        expected = (p[key] - 0.01 * step).detach().numpy()
        assert norm_relative_error(parameter.data, expected) < NORM_RELATIVE[F32]
