"""Metrics of models with several outputs, and of losses with several targets, beside scikit-learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import accuracy_score, f1_score, mean_absolute_error, r2_score

from onnxtrain import Trainer
from onnxtrain.errors import InputError
from onnxtrain.trainer import Metric, torch_metric


def joint(value: Any, kind: Any, reg: Any, cls: Any) -> Any:
    return F.smooth_l1_loss(value, reg) + F.cross_entropy(kind, cls)


def both(value: Any, kind: Any, reg: Any, cls: Any) -> float:
    """A metric of all outputs and targets: kinds that are right where the value is close."""
    return float(np.mean((kind.argmax(1) == cls) & (np.abs(value - reg)[:, 0] < 2)))


def right(kind: Any, cls: Any) -> float:
    """A metric of the second output and the second target, by their names."""
    return float(np.mean(kind.argmax(1) == cls))


def model() -> onnx.ModelProto:
    net = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> net (float[n, 4] x) => (float[n, 1] value, float[n, 3] kind) {
            value = MatMul(x, a)  kind = MatMul(x, b)
        }"""
    )
    rng = np.random.default_rng(0)
    for name, width in (("a", 1), ("b", 3)):
        weight = rng.normal(size=(4, width)).astype(np.float32)
        net.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    return net


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(70, 4)).astype(np.float32)
    return x, {"reg": rng.normal(size=(70, 1)).astype(np.float32), "cls": rng.integers(0, 3, 70)}


def test_metrics_by_output_match_sklearn_and_survive_a_save(data: Any, tmp_path: Path) -> None:
    x, y = data
    metrics = {"kind": ["accuracy", "f1_macro"], "value": ["mae", "r2"]}
    trainer = Trainer(model(), joint, metrics=metrics, directory=tmp_path / "run")
    predicted = trainer.predict(x)
    value, kind = predicted["value"], predicted["kind"]
    guess = kind.argmax(1)
    expected = {
        "kind_accuracy": accuracy_score(y["cls"], guess),
        "kind_f1_macro": f1_score(y["cls"], guess, average="macro"),
        "value_mae": mean_absolute_error(y["reg"], value),
        "value_r2": r2_score(y["reg"], value),
    }
    found = trainer.evaluate(x, y, batch_size=32)
    assert list(found) == ["loss", *expected]
    for name, number in expected.items():
        assert found[name] == pytest.approx(number, rel=1e-5), name
    history = trainer.fit(x, y, epochs=2, validation=(x, y), verbose=False)
    again = Trainer.resume(tmp_path / "run")
    assert [metric.name for metric in again.metrics] == list(expected)
    evaluated = again.evaluate(x, y)
    for name in expected:
        assert evaluated[name] == pytest.approx(history[f"val_{name}"][-1], rel=1e-6)


def test_functions_of_outputs_and_targets(data: Any) -> None:
    x, y = data
    kinds = torch_metric(lambda scores, labels: F.cross_entropy(scores, labels), name="entropy")
    metrics = [
        both,
        Metric("close", function=lambda v, r: float(np.mean(np.abs(v - r) < 1)), arguments=("value", "reg")),
    ]
    trainer = Trainer(model(), joint, metrics=metrics)
    predicted = trainer.predict(x)
    found = trainer.evaluate(x, y, batch_size=32)
    named = Trainer(model(), joint, metrics=[right]).evaluate(x, y)["right"]
    assert named == pytest.approx(accuracy_score(y["cls"], predicted["kind"].argmax(1)))
    assert found["both"] == pytest.approx(both(predicted["value"], predicted["kind"], y["reg"], y["cls"]))
    assert found["close"] == pytest.approx(np.mean(np.abs(predicted["value"] - y["reg"]) < 1))
    by_output = Trainer(model(), joint, metrics={"kind": kinds}).evaluate(x, y)
    expected = F.cross_entropy(torch.tensor(predicted["kind"]), torch.tensor(y["cls"])).item()
    assert by_output["kind_entropy"] == pytest.approx(expected, rel=1e-5)


def test_an_epoch_resumes_in_its_middle_with_the_arrays_of_all_metrics(data: Any, tmp_path: Path) -> None:
    from onnxtrain import Callback

    class Leave(Callback):
        def on_step_end(self, trainer: Trainer, loss: float) -> None:
            if trainer.global_step == 2:
                trainer.save(tmp_path / "half")

    x, y = data
    options: dict[str, Any] = {"epochs": 1, "batch_size": 16, "verbose": False, "seed": 3} | {}
    options.pop("seed")
    whole = Trainer(model(), joint, metrics=[both], seed=3)
    history = whole.fit(x, y, callbacks=[Leave()], **options)
    half = Trainer.resume(tmp_path / "half", metrics=[both])
    assert half.fit(x, y, **options)["both"] == history["both"]


def test_a_metric_of_sequences_receives_the_lengths() -> None:
    net = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> net (float[n, t, 4] x) => (float[n, t, 4] log_p) {
            log_p = Mul(x, w)
        }"""
    )
    net.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(1, np.float32), "w"))

    def exact(scores: Any, labels: Any, input_lengths: Any, target_lengths: Any) -> float:
        right = 0
        for s, label, positions, count in zip(scores, labels, input_lengths, target_lengths, strict=True):
            best = s[:positions].argmax(1)
            kept = best[np.insert(best[1:] != best[:-1], 0, True)]
            right += list(kept[kept != 0]) == list(label[:count])
        return right / len(scores)

    x = np.eye(4, dtype=np.float32)[[[1, 1, 0, 2, 3], [1, 0, 1, 2, 2], [3, 0, 0, 0, 1]]] * 9
    y = {
        "labels": np.array([[1, 2], [1, 1], [3, 1]]),
        "input_lengths": np.array([4, 3, 4]),
        "target_lengths": np.array([2, 2, 2]),
    }
    assert Trainer(net, "ctc", metrics=[exact]).evaluate(x, y, batch_size=2)["exact"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (["accuracy"], r"does not fit a prediction of shape .*metrics=\{'OUTPUT': 'accuracy'\}"),
        ({"kinds": "accuracy"}, "'kinds_accuracy' reads kinds, but the outputs are value, kind, the targets reg, cls"),
        ([lambda a, b, c: 0.0], r"takes a, b, c, but the outputs are value, kind"),
        ({"kind": "kappa"}, "'kind:kappa' is unknown"),
        ([torch.nn.MSELoss()], r"pass onnxtrain.trainer.torch_metric\(MSELoss\(...\)\)"),
        ([lambda v, r: v.softmax(1)], r"raised AttributeError: .*takes NumPy arrays; .*torch_metric"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said(data: Any, metrics: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Trainer(model(), joint, metrics=metrics).evaluate(*data)


def test_objects_of_torchmetrics_are_refused_with_the_remedy() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    with pytest.raises(InputError, match=r"torch_metric\(MulticlassAccuracy\(...\)\)"):
        Trainer(model(), joint, metrics=[torchmetrics.classification.MulticlassAccuracy(3)])
