"""The names of optimizers in `Trainer` are PyTorch's optimizers, with PyTorch's defaults."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import numpy_helper

from onnxtrain import OptimType, Trainer
from onnxtrain.optimizers import OPTIMIZERS

STEPS = 12
TWINS = {
    key.lower(): twin
    for key, twin in vars(torch.optim).items()
    if key.lower() in OPTIMIZERS and key != "Muon"  # PyTorch's iterates in bfloat16
}
"""By name of an optimizer, PyTorch's of the same name."""


def line() -> onnx.ModelProto:
    return onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> net (float[n, 3] x) => (float[n, 2] y)
        <float[3, 2] w = {0.5, -1, 1, 0.25, 0.75, 1}> { y = MatMul(x, w) }"""
    )


def in_torch(
    make: type[torch.optim.Optimizer], x: np.ndarray, y: np.ndarray, rate: float, clip: bool
) -> np.ndarray:
    w = torch.tensor(
        numpy_helper.to_array(line().graph.initializer[0]).astype(np.float64), requires_grad=True
    )
    optimizer = make([w], lr=rate)  # type: ignore[call-arg]
    for _ in range(STEPS):
        optimizer.zero_grad()
        ((torch.tensor(x).double() @ w - torch.tensor(y).double()) ** 2).mean().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_([w], 0.5)
        optimizer.step()
    return w.detach().numpy()


@pytest.mark.parametrize("name", sorted(TWINS))
@pytest.mark.parametrize("clip", [False, True])
def test_a_name_is_torchs_optimizer(name: str, clip: bool) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((6, 3)).astype(np.float32), rng.standard_normal((6, 2)).astype(np.float32)
    # A decay of 0.01 at this rate moves the weights by 2 % in these steps, far more than the tolerance.
    trainer = Trainer(line(), "mse", name, 0.2, clip_grad_norm=0.5 if clip else None)
    trainer.fit(x, y, epochs=STEPS, verbose=False)
    # PyTorch clips to max_norm / (norm + 1e-6), which is 1e-6 of the gradient less and adds up over the steps.
    expected = in_torch(TWINS[name], x, y, 0.2, clip)
    np.testing.assert_allclose(trainer.parameters["w"].data, expected, rtol=2e-5, atol=5e-5 if clip else 1e-6)


def two_heads() -> onnx.ModelProto:
    return onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> net (float[n, 3] x) => (float[n, 2] y, float[n, 2] z)
        <float[3, 2] w = {0.5, -1, 1, 0.25, 0.75, 1}, float[3, 2] v = {0.5, -1, 1, 0.25, 0.75, 1}>
        { y = MatMul(x, w)  z = MatMul(x, v) }"""
    )


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "sparse_adam"])
def test_a_head_that_the_loss_does_not_read_stays(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in PyTorch, where its grad is None: no decay, also if it is resumed, averaged and exported."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((6, 3)).astype(np.float32), rng.standard_normal((6, 2)).astype(np.float32)
    optimizer = OPTIMIZERS[name](weight_decay=0.1)
    settings = {"loss_input_names": "y", "ema_decay": 0.5, "directory": tmp_path / "run"}
    trainer = Trainer(two_heads(), "mse", optimizer, 0.2, **settings)
    warned = [r for r in caplog.records if "depend on 1 of the 2 parameters to train: v." in r.getMessage()]
    assert len(warned) == 1
    before = trainer.parameters["v"].data.copy()
    trainer.fit(x, y, epochs=2, verbose=False)
    trainer = Trainer.resume(tmp_path / "run")
    trainer.fit(x, y, epochs=2, verbose=False)
    assert np.array_equal(trainer.parameters["v"].data, before)
    assert trainer.parameters["w"].requires_grad
    assert not trainer.parameters["v"].requires_grad
    trainer.export(tmp_path / "trained.onnx", outputs=["z"])
    trained, given = (
        ort.InferenceSession(model).run(["z"], {"x": x})[0]
        for model in (tmp_path / "trained.onnx", two_heads().SerializeToString())
    )
    assert np.array_equal(trained, given)


def test_optim_type_keeps_the_old_defaults() -> None:
    """No weight decay: without a gradient nothing moves, clipped or not."""
    x, y = np.zeros((4, 3), np.float32), np.zeros((4, 2), np.float32)
    for clip in (None, 1.0):
        for optimizer, moves in ((OptimType.AdamW, False), ("adamw", True)):
            trainer = Trainer(line(), "mse", optimizer, 0.1, clip_grad_norm=clip)
            before = trainer.parameters["w"].data.copy()
            trainer.fit(x, y, verbose=False)
            assert np.array_equal(trainer.parameters["w"].data, before) != moves
