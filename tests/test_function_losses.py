"""Losses that are functions: of PyTorch tensors, onnxscript functions and ONNX models."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxscript
import pytest
import torch
import torch.nn.functional as F
from onnxscript import FLOAT, INT64
from onnxscript import opset18 as op18
from torch import nn

from onnxtrain import Recipe, Trainer, generate_artifacts, onnxblock
from onnxtrain.errors import DivergenceError, GraphBuildError, InputError
from onnxtrain.losses import CrossEntropyLoss, ModelLoss, MSELoss, TorchLoss, make_loss

RATE = 0.2
CLASSES = 4


def _model(outputs: int = 1, rank: int = 2) -> onnx.ModelProto:
    """Linear layers from x to the outputs scores, or start and end."""
    names = ["scores"] if outputs == 1 else ["start", "end", "other"][:outputs]
    axes = ", ".join(["n", *(f"t{k}" for k in range(rank - 2))])
    signature = ", ".join(f"float[{axes}, {CLASSES}] {name}" for name in names)
    body = "\n".join(f"{name} = MatMul(x, w_{name})" for name in names)
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> net (float[{axes}, 3] x) => ({signature}) {{ {body} }}"""
    )
    rng = np.random.default_rng(0)
    for name in names:
        weight = rng.normal(size=(3, CLASSES)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, f"w_{name}"))
    return model


def _data(count: int = 10) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.normal(size=(count, 3)).astype(np.float32), rng.integers(0, CLASSES, count)


def _recorded(
    loss: Callable[..., torch.Tensor],
    model: onnx.ModelProto,
    x: np.ndarray,
    targets: list[np.ndarray],
    epochs: int = 2,
    batch: int = 4,
) -> list[float]:
    """Losses of the epochs in PyTorch; batches are in order."""
    weights = [
        torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy()).requires_grad_()
        for tensor in model.graph.initializer
    ]
    recorded = []
    for _ in range(epochs):
        total = 0.0
        for k in range(0, len(x), batch):
            part = slice(k, k + batch)
            scores = [torch.from_numpy(x[part]) @ weight for weight in weights]
            value = loss(*scores, *(torch.from_numpy(np.asarray(target[part])) for target in targets))
            value = value.mean()
            gradients = torch.autograd.grad(value, weights, allow_unused=True)
            with torch.no_grad():
                for weight, gradient in zip(weights, gradients, strict=True):
                    weight -= RATE * (0 if gradient is None else gradient)
            total += value.item() * len(scores[0])
        recorded.append(total / len(x))
    return recorded


def _trained(model: onnx.ModelProto, loss: Any, x: Any, y: Any, **options: Any) -> list[float]:
    trainer = Trainer(model, loss, optimizer="sgd", learning_rate=RATE, metrics=[], **options)
    return trainer.fit(x, y, epochs=2, batch_size=4, shuffle=False, verbose=False)["loss"]


_TEMPERATURE = torch.tensor([0.5, 1.0, 2.0, 1.5])


def _focal(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One value per sample, with a factor through which no gradient flows."""
    nll = F.cross_entropy(scores, y, reduction="none")
    with torch.no_grad():
        factor = (1 - torch.exp(-nll)) ** 2
    return factor * nll


class _Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (self.scale * (prediction - target).abs() + (prediction - target) ** 2).mean()


def _entropy(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    p = scores.softmax(1)
    return F.nll_loss((p + 1e-6).log(), y) - 0.1 * (p * (p + 1e-6).log()).sum(1).mean()


def _in_batch(scores: torch.Tensor) -> torch.Tensor:
    """Without targets: each half of an embedding finds the other half among those of the batch."""
    a, b = F.normalize(scores[:, :2], dim=1), F.normalize(scores[:, 2:], dim=1)
    return F.cross_entropy(a @ b.T * 5, torch.arange(len(scores)))


LABELS = {
    "cross_entropy": lambda scores, y: F.cross_entropy(scores, y),
    "temperature": lambda scores, y: F.cross_entropy(scores * _TEMPERATURE, y, label_smoothing=0.1),
    "focal": _focal,
    "entropy": _entropy,
    "one-hot": lambda scores, y: ((scores.sigmoid() - F.one_hot(y, CLASSES)) ** 2).mean(),
}


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("name", LABELS)
def test_a_function_of_labels_trains_as_in_torch(name: str) -> None:
    (x, y), model, loss = _data(), _model(), LABELS[name]
    np.testing.assert_allclose(_trained(model, loss, x, y), _recorded(loss, model, x, [y]), rtol=2e-5)


@pytest.mark.sample(every=5)
@pytest.mark.parametrize(
    "loss",
    [
        lambda scores, y: F.mse_loss(scores, y),
        lambda scores, y: ((scores - y) ** 2).sum(1),
        lambda scores, y: F.binary_cross_entropy(scores.sigmoid(), y.sigmoid()),
        lambda scores, y: torch.logsumexp((scores - y).abs(), 1).mean(),
        _Criterion(),
    ],
)
def test_a_function_of_quantities_trains_as_in_torch(loss: Any) -> None:
    (x, _), model = _data(), _model()
    y = np.random.default_rng(2).normal(size=(len(x), CLASSES)).astype(np.float32)
    np.testing.assert_allclose(_trained(model, loss, x, y), _recorded(loss, model, x, [y]), rtol=2e-5)


@pytest.mark.thorough
def test_a_function_without_targets_trains_as_in_torch() -> None:
    (x, _), model = _data(12), _model()
    np.testing.assert_allclose(
        _trained(model, _in_batch, x, None), _recorded(_in_batch, model, x, []), rtol=2e-5
    )


def test_scores_of_shape_n_1_are_compared_with_targets_of_that_shape() -> None:
    """Targets [N] would be broadcast to [N, N]: the function takes them without a word."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        net (float[n, 3] x) => (float[n, 1] scores) <float[3, 1] w = {1, 2, 3}> { scores = MatMul(x, w) }"""
    )
    trainer = Trainer(model, lambda scores, y: ((scores - y) ** 2).mean())
    spec = trainer.manifest.targets[0]
    assert (spec.name, spec.dtype.name, spec.shape) == ("y", "float32", ("n", 1))
    x = _data()[0]
    with pytest.raises(InputError):
        trainer.fit(x, x[:, 0], verbose=False)


def _span(start: Any, end: Any, start_y: Any, end_y: Any) -> torch.Tensor:
    return (F.cross_entropy(start, start_y) + F.cross_entropy(end, end_y)) / 2


def test_several_outputs_and_targets_are_matched_by_name() -> None:
    x, first = _data()
    second = np.random.default_rng(3).integers(0, CLASSES, len(x))
    model = _model(outputs=2)
    expected = _recorded(_span, model, x, [first, second])
    y = {"start_y": first, "end_y": second}
    np.testing.assert_allclose(_trained(model, _span, x, y), expected, rtol=2e-5)
    # By name, whatever the order; by position, whatever the names.
    swapped = lambda end_y, end, start_y, start: _span(start, end, start_y, end_y)
    np.testing.assert_allclose(_trained(model, swapped, x, y), expected, rtol=2e-5)
    placed = lambda a, b, start_y, end_y: _span(a, b, start_y, end_y)
    np.testing.assert_allclose(_trained(model, placed, x, y), expected, rtol=2e-5)


@pytest.mark.thorough
def test_outputs_may_be_named_or_left_out() -> None:
    (x, y), model = _data(), _model(outputs=3)
    expected = _recorded(lambda a, b, c, y: F.cross_entropy(b, y), model, x, [y])
    by_name = lambda end, y: F.cross_entropy(end, y)
    np.testing.assert_allclose(_trained(model, by_name, x, y), expected, rtol=2e-5)
    other = lambda scores, y: F.cross_entropy(scores, y)
    np.testing.assert_allclose(_trained(model, other, x, y, loss_input_names=["end"]), expected, rtol=2e-5)
    with pytest.raises(GraphBuildError, match=r"takes scores, y, and the model has .* ambiguous"):
        Trainer(model, other)


@pytest.mark.thorough
def test_declared_targets_decide() -> None:
    (x, y), model = _data(), _model()
    loss = TorchLoss(
        lambda scores, y: F.cross_entropy(scores, y.long().squeeze(1)), targets={"y": ("int32", ["n", 1])}
    )
    trainer = Trainer(model, loss)
    spec = trainer.manifest.targets[0]
    assert (spec.dtype.name, spec.shape) == ("int32", ("n", 1))
    expected = _recorded(lambda scores, y: F.cross_entropy(scores, y), model, x, [y])
    np.testing.assert_allclose(_trained(model, loss, x, y.astype(np.int32)[:, None]), expected, rtol=2e-5)


def test_any_sizes_run_after_one_trace() -> None:
    model = _model(rank=3)
    loss = lambda scores, y: F.cross_entropy(scores.flatten(0, 1), y.flatten())
    trainer = Trainer(model, loss)
    weight = torch.from_numpy(onnx.numpy_helper.to_array(model.graph.initializer[0]).copy())
    rng = np.random.default_rng(4)
    for n, t in ((1, 1), (1, 7), (6, 1), (5, 3)):
        x, y = rng.normal(size=(n, t, 3)).astype(np.float32), rng.integers(0, CLASSES, (n, t))
        expected = loss(torch.from_numpy(x) @ weight, torch.from_numpy(y)).item()
        assert trainer.evaluate(x, y)["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("weighted", ["torch", "onnx"])
def test_sample_weights_multiply_values_per_sample(weighted: str, tmp_path: Path) -> None:
    (x, y), model = _data(8), _model()
    loss: Any = _focal if weighted == "torch" else _per_sample_model(tmp_path / "loss.onnx")
    twin = _focal if weighted == "torch" else lambda s, y: F.cross_entropy(s, y, reduction="none")
    weights = np.array([1, 2, 0, 1, 1, 3, 1, 1], np.float32)
    trainer = Trainer(model, loss, optimizer="sgd", learning_rate=RATE)
    got = trainer.fit(x, y, batch_size=8, shuffle=False, verbose=False, sample_weight=weights)["loss"]
    w = torch.from_numpy(weights)
    expected = _recorded(
        lambda scores, y: (twin(scores, y) * w).sum() / w.sum(), model, x, [y], epochs=1, batch=8
    )
    np.testing.assert_allclose(got, expected, rtol=2e-5)


@pytest.mark.thorough
def test_sample_weights_of_one_number_are_refused() -> None:
    (x, y), trainer = _data(), Trainer(_model(), lambda scores, y: F.cross_entropy(scores, y))
    with pytest.raises(InputError, match=r"one value per sample, shape \[N\]"):
        trainer.fit(x, y, sample_weight=np.ones(len(x), np.float32), verbose=False)
    # Nothing has changed.
    trainer.fit(x, y, verbose=False)


@pytest.mark.thorough
def test_a_run_resumes_without_the_function(tmp_path: Path) -> None:
    (x, y), model = _data(), _model()
    trainer = Trainer(model, _focal, directory=tmp_path / "run", seed=3)
    trainer.fit(x, y, epochs=2, verbose=False)
    trainer.save(tmp_path / "copy")
    trainer.fit(x, y, epochs=1, verbose=False)
    resumed = Trainer.resume(tmp_path / "copy")
    resumed.fit(x, y, epochs=1, verbose=False)
    assert resumed.history["loss"] == trainer.history["loss"]


@pytest.mark.thorough
def test_half_precision_scores_are_passed_as_float32() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        net (float16[n, 3] x) => (float16[n, 4] scores) { scores = MatMul(x, w) }"""
    )
    weight = np.random.default_rng(0).normal(size=(3, CLASSES)).astype(np.float16)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    x, y = _data()
    got = Trainer(model, LABELS["temperature"]).evaluate(x.astype(np.float16), y)["loss"]
    scores = torch.from_numpy(x.astype(np.float16) @ weight).float()
    assert got == pytest.approx(LABELS["temperature"](scores, torch.from_numpy(y)).item(), rel=2e-3)


def _in_place(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores, y.clamp_(min=0))


def _branches(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores, y) if scores.sum() > 0 else scores.mean()


class _Own(torch.autograd.Function):
    """A gradient that is not that of the value."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:
        return ct * 7


_TRAINED = nn.Linear(CLASSES, CLASSES)

REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "if": (_branches, "Python reads the values of a tensor"),
    "item": (lambda s, y: F.cross_entropy(s, y) * math.exp(s.max().item()), "Python reads the values of a tensor"),
    "list": (lambda s, y: F.cross_entropy(s, y) * max(s.flatten().tolist()), "Python reads the values of a tensor"),
    "in place": (_in_place, "writes to one of its arguments"),
    "random": (lambda s, y: F.cross_entropy(F.dropout(s, 0.5), y), "draws random numbers"),
    "trained": (lambda s, y: F.cross_entropy(_TRAINED(s), y), "2 tensors that require a gradient"),
    "shape": (lambda s, y: F.cross_entropy(s, y, reduction="none")[:, None], "one number .* or one per sample"),
    "nothing": (lambda s, y: None, "returned a NoneType, not a tensor"),
    "number": (lambda s, y: 1.0, "returned a float, not a tensor"),
    "detached": (lambda s, y: F.cross_entropy(s.detach(), y), "does not depend on an output of the model"),
    "error": (lambda s, y: F.cross_entropy(s, y, weight=torch.ones(7)), "weight tensor should be defined"),
    "own gradient": (lambda s, y: F.cross_entropy(_Own.apply(s), y), "tracing the lambda"),
    "fixed size": (lambda s, y: (F.cross_entropy(s, y, reduction="none") * torch.ones(3)).mean(), "tracing"),
}  # fmt: skip


@pytest.mark.sample(every=6)
@pytest.mark.parametrize("case", REFUSED)
def test_functions_that_cannot_be_traced_are_refused(case: str) -> None:
    function, message = REFUSED[case]
    with pytest.raises(GraphBuildError, match=message):
        Trainer(_model(), function)


def test_the_shape_of_the_result_is_the_reason_and_not_the_targets() -> None:
    """Among all dtypes and shapes of targets that are tried, those with which the function runs are shown."""

    def per_sample(start: Any, end: Any, amount: Any, label: Any) -> Any:
        near = F.smooth_l1_loss(start, amount, reduction="none").mean(1, keepdim=True)
        return near + F.cross_entropy(end, label, reduction="none")[:, None]

    with pytest.raises(GraphBuildError) as caught:
        Trainer(_model(2), per_sample)
    said = str(caught.value)
    assert "amount float32 [n, 4], label int64 [n]: it returned float32 of shape [3, 1] for 3 samples" in said
    assert "UserWarning" not in said
    Trainer(_model(2), lambda start, end, amount, label: per_sample(start, end, amount, label)[:, 0])


@pytest.mark.parametrize("declared", [True, False])
def test_ctc_as_a_function_names_the_loss_to_pass(declared: bool) -> None:
    def ctc(scores: Any, labels: Any, positions: Any, counts: Any) -> Any:
        return F.ctc_loss(scores.log_softmax(2).transpose(0, 1), labels, positions, counts)

    types = {"labels": ("int64", ["N", 5]), "positions": ("int64", ["N"]), "counts": ("int64", ["N"])}
    with pytest.raises(GraphBuildError, match=r"F\.ctc_loss.*CTCLoss\(blank=\.\.\.\)"):
        Trainer(_model(rank=3), TorchLoss(ctc, targets=types) if declared else ctc)


def test_a_difference_to_torch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxtrain.ortmodule.lowering._table import LOWERINGS

    right = LOWERINGS["aten.softplus.default"]
    loss = lambda scores, y: F.softplus(scores - y).mean()
    Trainer(_model(), loss)
    monkeypatch.setitem(
        LOWERINGS, "aten.softplus.default", lambda low, x, *rest: low.op.Mul(right(low, x, *rest), 1.001)
    )
    with pytest.raises(GraphBuildError, match=r"its value differs from PyTorch's on random numbers"):
        Trainer(_model(), loss)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TorchLoss(3), "pass a function of PyTorch tensors"),
        (lambda: TorchLoss(lambda *args: args), "number of its arguments is unknown"),
        (lambda: TorchLoss(lambda: None), "e.g. def loss"),
        (lambda: TorchLoss(lambda s, *, y: s), "by position"),
        (lambda: TorchLoss(lambda s, y: s, targets={"z": ("int64", ["N"])}), "targets has 'z'"),
        (lambda: TorchLoss(lambda s, y: s, targets={"y": "int64"}), "give a dtype and a shape"),
        (lambda: TorchLoss(lambda s, y: s, targets={"y": ("int64", "N")}), "give a dtype and a shape"),
        (lambda: TorchLoss(lambda s, y: s, targets={"y": ("int65", ["N"])}), "give a dtype and a shape"),
        (lambda: TorchLoss(lambda s, y: s, reduction="avg"), "reduction is 'avg'"),
        (lambda: make_loss(nn.CrossEntropyLoss), r"the class CrossEntropyLoss; pass loss='cross_entropy'"),
        (lambda: make_loss(3), "received 3; give one of"),
    ],
)
def test_what_is_not_a_loss_function_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(GraphBuildError, match=message):
        make()


@pytest.mark.thorough
def test_a_failed_check_of_the_function_stops_training() -> None:
    x, _ = _data()
    loss = TorchLoss(
        lambda scores, y: F.binary_cross_entropy(scores.sigmoid(), y),
        targets={"y": ("float32", ["N", CLASSES])},
    )
    with pytest.raises(DivergenceError):
        Trainer(_model(), loss).fit(x, np.full((len(x), CLASSES), 2, np.float32), verbose=False)


def _per_sample_model(path: Path) -> Path:
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        loss (float[batch, {CLASSES}] scores, int64[batch] labels) => (float[batch] each) {{
            log_p = LogSoftmax<axis=1>(scores)
            each = NegativeLogLikelihoodLoss<reduction="none">(log_p, labels)
        }}"""
    )
    onnx.save(model, path)
    return path


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("form", ["path", "text", "proto", "loss"])
def test_an_onnx_model_is_a_loss(form: str, tmp_path: Path) -> None:
    (x, y), model, path = _data(), _model(), _per_sample_model(tmp_path / "loss.onnx")
    loss: Any = {
        "path": lambda: path,
        "text": lambda: str(path),
        "proto": lambda: onnx.load(path),
        "loss": lambda: ModelLoss(path),
    }[form]()
    expected = _recorded(lambda scores, y: F.cross_entropy(scores, y), model, x, [y])
    np.testing.assert_allclose(_trained(model, loss, x, y), expected, rtol=2e-5)


@pytest.mark.thorough
def test_weights_of_a_loss_model_are_constants(tmp_path: Path) -> None:
    """A frozen teacher, with an input that is an output of the model under another name."""
    loss = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        distance (float[b, 4] anything, float[b, 2] target) => (float loss) <float[4, 2] w = {1,0, 0,1, 1,1, 2,0}> {
            p = MatMul(anything, w)
            d = Sub(p, target)
            s = Mul(d, d)
            loss = ReduceMean<keepdims=0>(s)
        }"""
    )
    x, _ = _data()
    y = np.random.default_rng(5).normal(size=(len(x), 2)).astype(np.float32)
    model = _model()
    w = torch.from_numpy(onnx.numpy_helper.to_array(loss.graph.initializer[0]).copy())
    expected = _recorded(lambda s, y: F.mse_loss(s @ w, y), model, x, [y])
    np.testing.assert_allclose(_trained(model, loss, x, y), expected, rtol=2e-5)
    assert [p.name for p in Trainer(model, loss).manifest.parameters] == ["w_scores"]


@onnxscript.script()
def smooth(scores: FLOAT["N", 4], y: INT64["N"]) -> FLOAT["N"]:  # noqa: F821, UP037
    log_p = op18.LogSoftmax(scores, axis=1)
    return op18.NegativeLogLikelihoodLoss(log_p, y, reduction="none")


@onnxscript.script()
def bare(scores, y):
    difference = op18.Sub(scores, y)
    return op18.ReduceMean(op18.Mul(difference, difference), keepdims=0)


def test_an_onnxscript_function_is_a_loss() -> None:
    (x, y), model = _data(), _model()
    expected = _recorded(lambda scores, y: F.cross_entropy(scores, y), model, x, [y])
    np.testing.assert_allclose(_trained(model, smooth, x, y), expected, rtol=2e-5)
    with pytest.raises(GraphBuildError, match=r"target 'y' of the onnxscript function 'bare' are unknown"):
        Trainer(model, bare)
    target = np.random.default_rng(6).normal(size=(len(x), CLASSES)).astype(np.float32)
    loss = ModelLoss(bare, targets={"y": ("float32", ["N", CLASSES])})
    expected = _recorded(lambda scores, y: F.mse_loss(scores, y), model, x, [target])
    np.testing.assert_allclose(_trained(model, loss, x, target), expected, rtol=2e-5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(float[b, 5] scores, int64[b] y) => (float loss) { loss = ReduceMean<keepdims=0>(scores) }", "receives"),
        ("(float[b, 4] s) => (float[b, 4] loss) { loss = Neg(s) }", r"one number of shape \[\] or one per sample"),
        ("(float[b, 4] s) => (float[b, 4] a, float[b, 4] c) { a = Neg(s) c = Abs(s) }", "1 inputs and 2 outputs"),
        ("(float[b, 4] s) => (int64 loss) { a = ReduceMean<keepdims=0>(s) loss = Cast<to=7>(a) }", "floating point"),
    ],
)  # fmt: skip
def test_loss_models_that_do_not_fit_are_refused(text: str, message: str) -> None:
    loss = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> loss {text}')
    with pytest.raises(GraphBuildError, match=message):
        Trainer(_model(), loss)


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"none\.onnx"):
        Trainer(_model(), tmp_path / "none.onnx")


def test_a_criterion_of_torch_becomes_the_loss_of_its_name() -> None:
    x, y = _data()
    trainer = Trainer(_model(), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 1.0])))
    assert trainer.loss_name == "CrossEntropyLoss"
    scores = torch.from_numpy(trainer.predict(x))
    expected = F.cross_entropy(scores, torch.from_numpy(y), weight=torch.tensor([1.0, 2.0, 0.5, 1.0]))
    result = trainer.evaluate(x, y)
    assert result["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert "accuracy" in result
    assert isinstance(make_loss(nn.MSELoss()), MSELoss)
    assert isinstance(make_loss(CrossEntropyLoss()), CrossEntropyLoss)


def test_compiled_functions_and_criteria_are_traced_as_the_originals(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def smooth(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(scores, y, label_smoothing=0.1)

    model, (x, y) = _model(), _data()
    criterion = torch.compile(nn.CrossEntropyLoss(label_smoothing=0.2), backend="eager")
    assert make_loss(criterion) == CrossEntropyLoss(label_smoothing=0.2)
    compiled = torch.compile(smooth, backend="eager")

    trainer = Trainer(model, compiled, metrics=[])
    scores = torch.from_numpy(trainer.predict(x))
    wanted = smooth(scores, torch.from_numpy(y)).item()
    assert trainer.evaluate(x, y)["loss"] == pytest.approx(wanted, rel=1e-5)
    # No errors of targets that do not fit: the shape of y is found by trying.
    assert "Traceback" not in capfd.readouterr().err
    assert not [record for record in caplog.records if record.name.startswith("torch")]

    # Has all attributes of the compiled function. Dynamo takes it for that one.
    @functools.wraps(compiled)
    def doubled(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 2 * smooth(scores, y)

    assert TorchLoss(doubled).function is doubled
    with pytest.raises(GraphBuildError, match="its value differs from PyTorch's"):
        Trainer(model, doubled)


@pytest.mark.thorough
def test_a_function_that_belongs_to_no_module_is_traced() -> None:
    """Dynamo reads a function's globals from the module of their `__name__`, which lacks these."""
    names: dict[str, Any] = {"__name__": "__main__", "some_f": F}
    exec("def loss(scores, y):\n    return some_f.cross_entropy(scores, y)", names)
    (x, y), model = _data(), _model()
    expected = _recorded(LABELS["cross_entropy"], model, x, [y])
    np.testing.assert_allclose(_trained(model, names["loss"], x, y), expected, rtol=2e-5)


@pytest.mark.thorough
def test_recipe_takes_functions() -> None:
    recipe = Recipe(loss=LABELS["focal"], optimizer="sgd")
    assert Trainer(_model(), recipe=recipe).loss_name == "TorchLoss"


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("opset", [21, 23])
def test_a_function_is_a_block(opset: int, tmp_path: Path) -> None:
    model = _model(outputs=2)
    model.opset_import[0].version = opset

    class Span(onnxblock.Block):
        def __init__(self) -> None:
            super().__init__()
            self.span = onnxblock.loss.FunctionLoss(_span)
            self.margin = onnxblock.loss.FunctionLoss("margin_ranking")
            self.add = onnxblock.blocks.Add()

        def build(self, start: str, end: str) -> str:
            return self.add(self.span(start, end), self.margin(start, end))

    generate_artifacts(model, loss=Span(), optimizer="sgd", artifact_directory=tmp_path)
    run = Trainer.resume(tmp_path)
    x, first = _data()
    sign = np.random.default_rng(7).choice([1, -1], (len(x), CLASSES)).astype(np.float32)
    loss = run.evaluate(x, {"start_y": first, "end_y": first, "target": sign})["loss"]
    weights = [torch.from_numpy(onnx.numpy_helper.to_array(t).copy()) for t in model.graph.initializer]
    start, end = (torch.from_numpy(x) @ weight for weight in weights)
    y = torch.from_numpy(first)
    expected = _span(start, end, y, y) + F.margin_ranking_loss(start, end, torch.from_numpy(sign))
    assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_a_block_of_an_older_opset_says_how_to_convert() -> None:
    model = _model()
    model.opset_import[0].version = 17
    with (
        onnxblock.base(model),
        pytest.raises(GraphBuildError, match=r"opset 17, .* opset 21; convert the model"),
    ):
        onnxblock.loss.FunctionLoss(lambda scores, y: F.cross_entropy(scores, y))("scores")
