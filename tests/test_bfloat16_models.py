"""Models that are bfloat16 throughout, as `net.bfloat16()` exports: data, results, metrics, device and tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch

from onnxtrain import (
    CheckpointState,
    Module,
    Optimizer,
    Trainer,
    check_gradients,
    generate_artifacts,
    make_batch_dynamic,
)
from onnxtrain.errors import InputError

X = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
Y = np.random.default_rng(1).standard_normal((8, 2)).astype(np.float32)
LABELS = np.arange(8) % 2


def as_torch() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).bfloat16()


def perceptron(batch: str = "n") -> onnx.ModelProto:
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (bfloat16[{batch}, 4] x) => (bfloat16[{batch}, 2] y) {{
            h = Gemm<transB = 1>(x, w0, b0)  a = Tanh(h)  y = Gemm<transB = 1>(a, w2, b2) }}""")
    for name, value in as_torch().state_dict().items():
        layer, _, kind = name.partition(".")
        array = value.float().numpy().astype(ml_dtypes.bfloat16)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, f"{kind[0]}{layer}"))
    return model


def values(parameters: Any) -> dict[str, np.ndarray]:
    """Parameters are bits: numpy has no bfloat16."""
    return {name: np.array(p.data).view(ml_dtypes.bfloat16).astype(np.float32) for name, p in parameters}


def close(actual: np.ndarray, expected: torch.Tensor, steps: int = 2) -> None:
    """Assert that numbers differ by some steps of bfloat16, which has 8 digits, of the largest one at most."""
    expected_array = expected.detach().float().numpy()
    np.testing.assert_allclose(actual, expected_array, atol=steps * 2.0**-8 * np.abs(expected_array).max())


KINDS = {
    "float32": lambda a: a,
    "float64": lambda a: a.astype(np.float64),
    "ml_dtypes": lambda a: a.astype(ml_dtypes.bfloat16),
    "bits": lambda a: a.astype(ml_dtypes.bfloat16).view(np.uint16),
    "torch": lambda a: torch.tensor(a).bfloat16(),
    "list": lambda a: a.tolist(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_that_of_torch_from_data_of_any_dtype(kind: str) -> None:
    trainer = Trainer(perceptron(), "mse", "sgd", learning_rate=0.5)
    trainer.fit(KINDS[kind](X), KINDS[kind](Y), batch_size=8, verbose=False)

    net = as_torch()
    x, y = torch.tensor(X).bfloat16(), torch.tensor(Y).bfloat16()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    torch.nn.functional.mse_loss(net(x), y).backward()
    optimizer.step()
    trained = values(trainer.parameters)
    for name, value in net.state_dict().items():
        layer, _, part = name.partition(".")
        close(trained[f"{part[0]}{layer}"], value)


def test_predictions_and_metrics_are_those_of_torch_and_numpy() -> None:
    trainer = Trainer(perceptron(), "mse")
    prediction = trainer.predict(X)
    assert prediction.dtype == np.float32
    close(prediction, as_torch()(torch.tensor(X).bfloat16()))
    results = trainer.evaluate(X, Y)
    rounded = Y.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_allclose(results["mae"], np.abs(prediction - rounded).mean(), rtol=1e-5)
    np.testing.assert_allclose(results["loss"], np.square(prediction - rounded).mean(), rtol=1e-2)

    classifier = Trainer(perceptron(), "cross_entropy")
    accuracy = np.mean(prediction.argmax(1) == LABELS)
    np.testing.assert_allclose(classifier.evaluate(X, LABELS)["accuracy"], accuracy)
    np.testing.assert_allclose(classifier.predict_proba(X).sum(1), 1, rtol=1e-5)


def test_values_beyond_bfloat16_are_refused() -> None:
    with pytest.raises(InputError, match="too large for bfloat16"):
        Trainer(perceptron(), "mse").predict(np.full((1, 4), np.finfo(np.float32).max))
    with pytest.raises(InputError, match=r"should be bfloat16, received dtype int64.*astype.'float32'"):
        Trainer(perceptron(), "mse").predict(np.ones((1, 4), np.int64))


def test_the_device_takes_float32_and_bfloat16(tmp_path: Path) -> None:
    generate_artifacts(
        perceptron(), loss="mse", optimizer="sgd", artifact_directory=tmp_path, additional_output_names=["y"]
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    first = module(X, Y)
    second = module(X.astype(ml_dtypes.bfloat16), Y.astype(ml_dtypes.bfloat16))
    for one, other in zip(first, second, strict=True):
        assert one.dtype == np.float32
        np.testing.assert_array_equal(one, other)
    close(first[1], as_torch()(torch.tensor(X).bfloat16()))
    optimizer.step()
    module.export_model_for_inferencing(tmp_path / "out.onnx", ["y"])
    np.testing.assert_array_equal(Trainer(tmp_path / "out.onnx", "mse").predict(X), module.eval()(X, Y)[1])
    with pytest.raises(InputError, match=r"expected .* received dtype float64.*astype\('float32'\)"):
        module(X.astype(np.float64), Y)


def test_gradients_agree_with_differences() -> None:
    results = check_gradients(perceptron())
    assert len(results) == 4
    assert all(result.passed for result in results), results


def test_a_fixed_batch_is_made_dynamic_and_padded() -> None:
    fixed = perceptron("4")
    expected = as_torch()(torch.tensor(X).bfloat16())
    close(Trainer(make_batch_dynamic(fixed), "mse").predict(X), expected)
    trainer = Trainer(fixed, "mse")
    close(trainer.predict(X[:6]), expected[:6])
    rounded = Y[:6].astype(ml_dtypes.bfloat16).astype(np.float32)
    loss = np.square(trainer.predict(X[:6]) - rounded).mean()
    np.testing.assert_allclose(trainer.evaluate(X[:6], Y[:6])["loss"], loss, rtol=1e-2)


def test_a_saved_run_and_an_export_compute_the_same(tmp_path: Path) -> None:
    trainer = Trainer(perceptron(), "mse")
    trainer.fit(X, Y, epochs=2, verbose=False)
    trainer.save(tmp_path / "run")
    trainer.export(tmp_path / "out.onnx")
    expected = trainer.predict(X)
    np.testing.assert_array_equal(Trainer.resume(tmp_path / "run").predict(X), expected)
    np.testing.assert_array_equal(Trainer(tmp_path / "out.onnx", "mse").predict(X), expected)


def test_estimators_fit_and_predict() -> None:
    estimators = pytest.importorskip("onnxtrain.estimators")
    regressor = estimators.OnnxRegressor(perceptron(), epochs=1).fit(X, Y)
    assert regressor.predict(X).dtype == np.float32
    classifier = estimators.OnnxClassifier(perceptron(), epochs=1).fit(X, LABELS)
    assert set(classifier.predict(X)) <= {0, 1}
