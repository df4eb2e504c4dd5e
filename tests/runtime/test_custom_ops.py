"""Libraries of custom ops: every session runs their kernels."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

import onnxtrain
from onnxtrain.errors import InputError, ModelLoadError
from onnxtrain.runtime import custom_ops

kernels = pytest.importorskip("onnxtrain_kernels")

X = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
MODEL = """<ir_version: 10, opset_import: ["": 21, "onnxtrain": 1]>
g (float[N, 3] x) => (float[N, 3] y) <float[3] w = {1, 2, 3}> { a = Mul(x, w)  y = onnxtrain.Silu_float(a) }"""


@pytest.fixture(autouse=True)
def stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions without native kernels, and a registry of the test's own."""
    monkeypatch.setenv("ONNXTRAIN_KERNELS", "off")
    monkeypatch.setattr(custom_ops, "_paths", [])
    monkeypatch.setattr(custom_ops, "_registered", weakref.WeakKeyDictionary())


def silu_gradient(op: Any, n: Any, ct: Any) -> Any:
    s = op.Sigmoid(n.X)
    return op.Mul(ct, op.Add(s, op.Mul(n.out.Y, op.Sub(1.0, s))))


def test_a_model_with_a_custom_op_trains_and_is_exported_with_it(tmp_path: Path) -> None:
    """The library of native kernels has the op; no model has a body of it."""
    with onnxtrain.local_rules():
        onnxtrain.register_gradient(
            "onnxtrain", "Silu_float", silu_gradient, inputs="X", outputs="Y", override=True
        )
        settings: dict[str, Any] = {"loss": "mse", "optimizer": "sgd", "learning_rate": 0.1}
        model = onnx.parser.parse_model(MODEL)
        model.graph.value_info.append(onnx.helper.make_tensor_value_info("a", 1, ["N", 3]))
        with pytest.raises(
            ModelLoadError, match=r"no op 'Silu_float' of the domain 'onnxtrain'. Register the library"
        ):
            onnxtrain.Trainer(model, **settings)
        onnxtrain.register_custom_ops_library(kernels.library())
        # Twice is as good as once.
        onnxtrain.register_custom_ops_library(kernels.library())
        (check,) = onnxtrain.check_op("onnxtrain", "Silu_float", [X])
        assert (check.verdict, check.precision) == ("agrees", "float32")
        trainer = onnxtrain.Trainer(model, **settings)
        target = np.zeros_like(X)
        first = trainer.evaluate(X, target)["loss"]
        trainer.fit(X, target, epochs=5, verbose=False)
    a = X * np.array([1, 2, 3], np.float32)
    assert first == pytest.approx(np.mean((a / (1 + np.exp(-a))) ** 2), rel=1e-4)
    w = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    for _ in range(5):
        (step,) = torch.autograd.grad(torch.nn.functional.silu(torch.tensor(X) * w).square().mean(), w)
        w = (w - 0.1 * step).detach().requires_grad_()
    np.testing.assert_allclose(trainer.parameters["w"].data, w.detach(), rtol=1e-4)
    trainer.export(tmp_path / "trained.onnx")
    exported = onnx.load(tmp_path / "trained.onnx")
    assert "Silu_float" in {node.op_type for node in exported.graph.node}
    assert not exported.functions


def test_options_of_a_user_are_used_for_several_sessions(tmp_path: Path) -> None:
    onnxtrain.register_custom_ops_library(kernels.library())
    options = ort.SessionOptions()
    for _ in range(2):
        custom_ops.add_custom_ops(options)
    ort.InferenceSession(onnx.parser.parse_model(MODEL).SerializeToString(), options)


def test_files_that_are_no_libraries_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no file"):
        onnxtrain.register_custom_ops_library(tmp_path / "none.so")
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(InputError, match=r"cannot load .*text.so"):
        onnxtrain.register_custom_ops_library(tmp_path / "text.so")
    assert custom_ops._paths == []
