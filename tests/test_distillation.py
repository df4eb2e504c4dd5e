"""Knowledge distillation: losses and steps as in a loop in PyTorch, and what teachers may be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper
from torch.nn import functional as F

import models
from onnxtrain import Callback, Recipe, Trainer, generate_artifacts
from onnxtrain.errors import GraphBuildError, InputError, ModelLoadError
from onnxtrain.losses import (
    BCEWithLogitsLoss,
    CausalLMLoss,
    CrossEntropyLoss,
    FocalLoss,
    Loss,
    NLLLoss,
    TverskyLoss,
)
from tolerances import NORM_RELATIVE, norm_relative_error

FLOAT64, FLOAT32 = (NORM_RELATIVE[np.dtype(kind)] for kind in (np.float64, np.float32))
STEPS, BATCH = 20, 8
# The learning rate of a run is float32, which has this number exactly.
RATE = 1 / 16
RNG = np.random.default_rng(0)
X = RNG.standard_normal((STEPS * BATCH, 4))
LABELS = RNG.integers(0, 3, STEPS * BATCH)
TARGETS = RNG.standard_normal((STEPS * BATCH, 3))
YES = (TARGETS > 0).astype(np.float64)


def double(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Converts a model of float32 to float64."""
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(
            onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(np.float64), tensor.name)
        )
    for info in (*proto.graph.input, *proto.graph.output):
        if info.type.tensor_type.elem_type == TensorProto.FLOAT:
            info.type.tensor_type.elem_type = TensorProto.DOUBLE
    return proto


def arrays(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


def network(x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.tanh(x @ w["w1"] + w["b1"]) @ w["w2"] + w["b2"]


def kl(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    """T²·KL of the last axis, one per position."""
    logs = [F.log_softmax(scores / temperature, -1) for scores in (student, teacher)]
    return temperature**2 * F.kl_div(*logs, reduction="none", log_target=True).sum(-1)


def bernoulli(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    """T²·KL of independent labels: the cross-entropy with the teacher's probabilities, less the teacher's entropy."""
    s, t = student / temperature, teacher / temperature
    p = torch.sigmoid(t)
    cross, entropy = (F.binary_cross_entropy_with_logits(logits, p, reduction="none") for logits in (s, t))
    return temperature**2 * (cross - entropy)


Twin = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def masked(ignore: int, weight: list[float] | None = None) -> Twin:
    """Cross-entropy and the distance over labels that count, both weighted by the classes."""

    def twin(s: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w = (
            torch.ones(3, dtype=torch.float64)
            if weight is None
            else torch.tensor(weight, dtype=torch.float64)
        )
        counts = torch.where(y == ignore, 0.0, w[y.clamp(0, 2)])
        hard = F.cross_entropy(s, y, w, ignore_index=ignore)
        return hard, (kl(s, t, 2.0) * counts).sum() / counts.sum()

    return twin


def focal(s: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Focal loss with the defaults of torchvision: alpha 0.25, gamma 2."""
    p = torch.sigmoid(s)
    right = p * y + (1 - p) * (1 - y)
    weight = 0.25 * y + 0.75 * (1 - y)
    return weight * (1 - right) ** 2 * F.binary_cross_entropy_with_logits(s, y, reduction="none")


CASES: dict[str, tuple[Loss | str, np.ndarray, Twin]] = {
    "cross_entropy": (
        "cross_entropy", LABELS, lambda s, t, y: (F.cross_entropy(s, y), kl(s, t, 2.0).mean())
    ),
    "label_smoothing": (
        CrossEntropyLoss(label_smoothing=0.1, ignore_index=None),
        LABELS,
        lambda s, t, y: (F.cross_entropy(s, y, label_smoothing=0.1), kl(s, t, 2.0).mean()),
    ),
    "ignored": (CrossEntropyLoss(ignore_index=2), LABELS, masked(2)),
    "class weights": (CrossEntropyLoss(weight=[1, 5, 0.5]), LABELS, masked(-100, [1, 5, 0.5])),
    "sum": (
        CrossEntropyLoss(reduction="sum"),
        LABELS,
        lambda s, t, y: (F.cross_entropy(s, y, reduction="sum"), kl(s, t, 2.0).sum()),
    ),
    "probabilities": (
        CrossEntropyLoss(probabilities=True),
        YES,
        lambda s, t, y: (F.cross_entropy(s, y), kl(s, t, 2.0).mean()),
    ),
    "bce": (
        BCEWithLogitsLoss(pos_weight=[2.0, 1.0, 3.0]),
        YES,
        lambda s, t, y: (
            F.binary_cross_entropy_with_logits(s, y, pos_weight=torch.tensor([2.0, 1.0, 3.0])),
            bernoulli(s, t, 2.0).mean(),
        ),
    ),
    "focal": (FocalLoss(alpha=0.25, gamma=2.0), YES, lambda s, t, y: (focal(s, y).mean(), bernoulli(s, t, 2.0).mean())),
    "tversky": (
        TverskyLoss(alpha=0.5, beta=0.5, smooth=1.0),
        YES,
        lambda s, t, y: (dice(s, y).mean(), bernoulli(s, t, 2.0).mean()),
    ),
    "mse": ("mse", TARGETS, lambda s, t, y: (F.mse_loss(s, y), F.mse_loss(s, t))),
    "huber": ("huber", TARGETS, lambda s, t, y: (F.huber_loss(s, y), F.mse_loss(s, t))),
}  # fmt: skip


def dice(s: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    p = torch.sigmoid(s)
    both, alone, missed = (p * y).sum(1), (p * (1 - y)).sum(1), ((1 - p) * y).sum(1)
    return 1 - (both + 1) / (both + 0.5 * alone + 0.5 * missed + 1)


class Losses(Callback):
    """Records the loss of each step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_step_end(self, trainer: Trainer, loss: float) -> None:
        self.values.append(loss)


def distilled(
    loss: Any, y: np.ndarray, twin: Twin, share: float, weights: np.ndarray | None = None, **settings: Any
) -> None:
    """Compares 20 steps of SGD with a loop in PyTorch, in float64."""
    student, teacher = double(models.mlp(seed=1)), double(models.mlp(hidden=16, seed=2))
    trainer = Trainer(student, loss, "sgd", RATE, teacher=teacher, distill_weight=share, **settings)
    losses = Losses()
    data = (X,) if share == 1 else (X, y)
    trainer.fit(
        *data, batch_size=BATCH, shuffle=False, callbacks=[losses], sample_weight=weights, verbose=False
    )
    frozen = {name: torch.tensor(array) for name, array in arrays(teacher).items()}
    w = {name: torch.tensor(array, requires_grad=True) for name, array in arrays(student).items()}
    for step in range(STEPS):
        part = slice(step * BATCH, (step + 1) * BATCH)
        x, target = torch.tensor(X[part]), torch.tensor(y[part])
        hard, soft = twin(network(x, w), network(x, frozen), target)
        value = (1 - share) * hard + share * soft
        assert losses.values[step] == pytest.approx(value.item(), rel=1e-9)
        for name, gradient in zip(w, torch.autograd.grad(value, list(w.values())), strict=True):
            w[name] = (w[name] - RATE * gradient).detach().requires_grad_()
    for name, parameter in trainer.parameters:
        assert norm_relative_error(parameter.data, w[name].detach().numpy()) < FLOAT64, name


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_are_those_of_pytorch(name: str) -> None:
    distilled(*CASES[name], share=0.3)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", ["cross_entropy", "bce", "mse"])
def test_without_targets_the_teacher_alone_is_imitated(name: str) -> None:
    distilled(*CASES[name], share=1.0)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("temperature", [1.0, 5.0])
def test_temperature_divides_the_scores(temperature: float) -> None:
    loss, y, _ = CASES["cross_entropy"]

    def twin(s: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.cross_entropy(s, y), kl(s, t, temperature).mean()

    distilled(loss, y, twin, share=0.9, temperature=temperature)


def test_sample_weights_weigh_both_parts() -> None:
    """Every batch has the same weights, so that the twin can use them."""
    weights = np.tile(np.linspace(0, 2, BATCH), STEPS)
    w = torch.tensor(weights[:BATCH])

    def weighted(terms: torch.Tensor) -> torch.Tensor:
        return (terms * w).sum() / w.sum()

    distilled(
        "cross_entropy",
        LABELS,
        lambda s, t, y: (weighted(F.cross_entropy(s, y, reduction="none")), weighted(kl(s, t, 2.0))),
        share=0.5,
        weights=weights,
    )
    distilled(*CASES["tversky"][:2], lambda s, t, y: (weighted(dice(s, y)), weighted(bernoulli(s, t, 2.0).mean(1))),
              share=0.5, weights=weights)  # fmt: skip


def language_model(seed: int, hidden: int = 6) -> onnx.ModelProto:
    """tokens [batch, sequence] -> embedding, linear layer over 5 words."""
    rng = np.random.default_rng(seed)
    values = {"e": rng.standard_normal((5, hidden)), "w": rng.standard_normal((hidden, 5))}
    nodes = [
        helper.make_node("Gather", ["e", "tokens"], ["h"]),
        helper.make_node("MatMul", ["h", "w"], ["logits"]),
    ]
    proto = models.make_model(
        nodes,
        {"tokens": ["b", "s"]},
        {"logits": ["b", "s", 5]},
        {k: v.astype(np.float32) for k, v in values.items()},
    )
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    return proto


def test_language_models_imitate_the_next_token_of_the_teacher_where_labels_count() -> None:
    student, teacher = double(language_model(1)), double(language_model(2, hidden=9))
    tokens = np.random.default_rng(3).integers(0, 5, (6, 7))
    labels = np.where(np.arange(7) > 4, -100, tokens)
    trainer = Trainer(student, CausalLMLoss(), "sgd", teacher=teacher, distill_weight=0.4)
    value = trainer.evaluate(tokens, labels)["loss"]
    scores = [
        torch.tensor(arrays(model)["e"][tokens] @ arrays(model)["w"])[:, :-1] for model in (student, teacher)
    ]
    shifted = torch.tensor(labels)[:, 1:]
    hard = F.cross_entropy(scores[0].reshape(-1, 5), shifted.reshape(-1))
    soft = kl(*scores, 2.0)[shifted != -100].mean()
    assert value == pytest.approx((0.6 * hard + 0.4 * soft).item(), rel=1e-9)


def imitation(
    student: onnx.ModelProto, teacher: Any, x: np.ndarray, loss: Any = "mse", **settings: Any
) -> tuple[float, np.ndarray]:
    """Returns the distance to a teacher of the untrained student, in evaluation, and the student's scores."""
    trainer = Trainer(student, loss, teacher=teacher, distill_weight=1, temperature=1, **settings)
    return trainer.evaluate(x)["loss"], np.asarray(trainer.predict(x))


X32 = X[:32].astype(np.float32)


def scores_of(proto: onnx.ModelProto, **feeds: np.ndarray) -> np.ndarray:
    result: np.ndarray = ort.InferenceSession(proto.SerializeToString()).run(["logits"], feeds)[0]
    return result


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("opset", [13, 17, 22, 24])
@pytest.mark.parametrize("own", [17, 23])
def test_the_teacher_may_have_another_opset(opset: int, own: int) -> None:
    teacher = models.mlp(hidden=16, seed=2, opset=opset)
    teacher.ir_version = 8
    wanted = scores_of(teacher, x=X32)
    value, scores = imitation(models.mlp(opset=own), teacher, X32)
    assert value == pytest.approx(np.mean((scores - wanted) ** 2), rel=1e-5)


def test_newer_ops_of_the_teacher_are_written_in_those_of_the_student() -> None:
    """RMSNormalization and Swish are ops of opsets 23 and 24."""
    proto = onnx.parser.parse_model("""<ir_version: 11, opset_import: ["": 24]>
        g (float[N, 4] x) => (float[N, 4] logits) <float[4] s = {1, 2, 3, 4}>
        { a = RMSNormalization(x, s)  logits = Swish <alpha = 1.5> (a) }""")
    rms = X32 / np.sqrt((X32**2).mean(1, keepdims=True) + 1e-5) * np.arange(1, 5)
    wanted = rms / (1 + np.exp(-1.5 * rms))
    value, scores = imitation(models.mlp(classes=4), proto, X32)
    assert value == pytest.approx(np.mean((scores - wanted) ** 2), rel=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_the_teacher_is_in_inference_mode(training: bool) -> None:
    """Its BatchNormalization uses the running statistics in training, too, in whatever mode it was exported."""
    images = np.random.default_rng(4).standard_normal((16, 2, 6, 6)).astype(np.float32)
    teacher, inference = (
        models.conv_bn(training=training, channels=6),
        models.conv_bn(training=False, channels=6),
    )
    losses = Losses()
    trainer = Trainer(models.conv_bn(training=False), "mse", "sgd", 1e-9, teacher=teacher, distill_weight=1)
    scores = np.asarray(trainer.predict(images))
    trainer.fit(images, batch_size=16, callbacks=[losses], verbose=False)
    assert losses.values[0] == pytest.approx(
        np.mean((scores - scores_of(inference, x=images)) ** 2), rel=1e-4
    )


def test_modes_and_patterns_of_the_student_leave_the_teacher_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Both have the same layer names. The teacher's Dropout drops nothing, and no warning is about the teacher."""
    student = models.conv_bn(training=False)
    teacher = models.conv_bn(training=False)
    dropout = helper.make_node("Dropout", ["f", "ratio", "yes"], ["dropped"])
    teacher.graph.node.insert(5, dropout)
    teacher.graph.node[-1].input[0] = "dropped"
    for name, value in (("ratio", np.float32(0.9)), ("yes", np.array(True))):
        teacher.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    images = np.random.default_rng(4).standard_normal((16, 2, 6, 6)).astype(np.float32)
    trainer = Trainer(
        student, "mse", "sgd", 0.01, teacher=teacher, distill_weight=1, batch_norm={"bn": "training"}
    )
    losses = Losses()
    trainer.fit(images, batch_size=16, epochs=2, shuffle=False, callbacks=[losses], verbose=False)
    # The first loss is that of the batch's statistics beside the running ones: not zero, and without random numbers.
    again = Trainer(
        student, "mse", "sgd", 0.01, teacher=teacher, distill_weight=1, batch_norm={"bn": "training"}
    )
    other = Losses()
    again.fit(images, batch_size=16, epochs=2, shuffle=False, callbacks=[other], verbose=False)
    assert losses.values == other.values
    assert losses.values[0] > 1e-4
    # In evaluation, before any step, both compute the same.
    fresh = Trainer(student, "mse", teacher=teacher, distill_weight=1, batch_norm={"bn": "training"})
    assert fresh.evaluate(images)["loss"] == pytest.approx(0, abs=1e-12)
    assert not [record for record in caplog.records if "teacher" in record.getMessage()]


def test_probabilities_of_the_teacher_are_taken_back_to_logits() -> None:
    logits = models.mlp(hidden=16, seed=2)
    teacher = models.mlp(hidden=16, seed=2)
    teacher.graph.node[-1].output[0] = "raw"
    teacher.graph.node.append(helper.make_node("Softmax", ["raw"], ["logits"], axis=1))
    values = [imitation(models.mlp(), model, X32, "cross_entropy")[0] for model in (logits, teacher)]
    assert values[0] == pytest.approx(values[1], rel=1e-6)
    # The mean squared error compares the probabilities themselves.
    value, scores = imitation(models.mlp(), teacher, X32, "mse")
    assert value == pytest.approx(np.mean((scores - scores_of(teacher, x=X32)) ** 2), rel=1e-5)


def quantized(proto: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    onnx.save(proto, path / "float.onnx")
    quantize_dynamic(path / "float.onnx", path / "int8.onnx", weight_type=QuantType.QInt8)
    return onnx.load(path / "int8.onnx")


def test_an_int8_teacher_teaches_what_it_computes(tmp_path: Path) -> None:
    teacher = quantized(models.mlp(hidden=16, seed=2), tmp_path)
    assert any(node.op_type == "MatMulInteger" for node in teacher.graph.node)
    value, scores = imitation(models.mlp(), teacher, X32)
    assert value == pytest.approx(np.mean((scores - scores_of(teacher, x=X32)) ** 2), rel=1e-4)
    trainer = Trainer(models.mlp(), "cross_entropy", teacher=teacher)
    assert [name for name, _ in trainer.parameters] == ["w1", "b1", "w2", "b2"]
    trainer.fit(X32, LABELS[:32], verbose=False)


def test_a_float16_teacher_is_fed_float16() -> None:
    teacher = models.mlp(hidden=16, seed=2)
    for tensor in teacher.graph.initializer:
        tensor.CopyFrom(
            onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(np.float16), tensor.name)
        )
    for info in (*teacher.graph.input, *teacher.graph.output):
        info.type.tensor_type.elem_type = TensorProto.FLOAT16
    wanted = scores_of(teacher, x=X32.astype(np.float16)).astype(np.float32)
    value, scores = imitation(models.mlp(), teacher, X32)
    assert value == pytest.approx(np.mean((scores - wanted) ** 2), rel=1e-3)


def test_inputs_are_shared_by_name_or_if_there_is_one_by_position() -> None:
    renamed = models.mlp(hidden=16, seed=2)
    renamed.graph.input[0].name = renamed.graph.node[0].input[0] = "image"
    value, scores = imitation(models.mlp(), renamed, X32)
    assert value == pytest.approx(np.mean((scores - scores_of(renamed, image=X32)) ** 2), rel=1e-5)
    header = '<ir_version: 10, opset_import: ["": 21]>'
    two = onnx.parser.parse_model(
        f"{header} g (float[N, 3] a, float[N, 3] b) => (float[N, 3] logits) <float[3] w = {{1, 2, 3}}>"
        "{ c = Mul(a, w)  logits = Sub(c, b) }"
    )
    swapped = onnx.parser.parse_model(
        f"{header} g (float[M, 3] b, float[M, 3] a) => (float[M, 3] logits) {{ logits = Sub(b, a) }}"
    )
    a, b = TARGETS[:9].astype(np.float32), TARGETS[9:18].astype(np.float32)
    trainer = Trainer(two, "mse", teacher=swapped, distill_weight=1)
    scores = a * np.arange(1, 4) - b
    value = trainer.evaluate({"a": a, "b": b})["loss"]
    assert value == pytest.approx(np.mean((scores - (b - a)) ** 2), rel=1e-5)


def test_the_teacher_is_in_no_checkpoint_and_no_exported_file(tmp_path: Path) -> None:
    """Its weights, in a file of external data, are read from there; training continues without the file."""
    teacher = models.mlp(hidden=4096, seed=2)
    (tmp_path / "files").mkdir()
    onnx.save(teacher, tmp_path / "files" / "teacher.onnx", save_as_external_data=True, size_threshold=0)
    onnx.save(models.mlp(), tmp_path / "student.onnx")
    run = tmp_path / "run"
    trainer = Trainer(
        tmp_path / "student.onnx", "cross_entropy", teacher=tmp_path / "files" / "teacher.onnx", directory=run
    )
    trainer.fit(X32, LABELS[:32], verbose=False)
    trainer.export(tmp_path / "trained.onnx")
    plain = Trainer(tmp_path / "student.onnx", "cross_entropy", directory=tmp_path / "plain")
    plain.fit(X32, LABELS[:32], verbose=False)
    plain.export(tmp_path / "plain.onnx")
    sizes = [(tmp_path / name).stat().st_size for name in ("trained.onnx", "plain.onnx")]
    assert abs(sizes[0] - sizes[1]) < 200
    assert (run / "checkpoint").stat().st_size < (tmp_path / "plain" / "checkpoint").stat().st_size + 1000
    assert (run / "inference_model.onnx").stat().st_size < 20_000
    assert trainer.manifest.trainable == plain.manifest.trainable
    for path in (tmp_path / "files").iterdir():
        path.unlink()
    Trainer.resume(run).fit(X32, LABELS[:32], verbose=False)


def test_values_are_not_mixed_up_with_the_students_of_the_same_name() -> None:
    """A copy of the student teaches nothing new: the distance is zero, and so are its gradients."""
    trainer = Trainer(models.mlp(), "cross_entropy", "sgd", 1.0, teacher=models.mlp(), distill_weight=1)
    before = {name: parameter.data.copy() for name, parameter in trainer.parameters}
    trainer.fit(X32, verbose=False)
    for name, parameter in trainer.parameters:
        np.testing.assert_allclose(parameter.data, before[name], atol=1e-6)


def test_scores_of_minus_infinity_rule_classes_out() -> None:
    teacher = models.mlp(hidden=16, seed=2)
    bias = next(tensor for tensor in teacher.graph.initializer if tensor.name == "b2")
    masked = onnx.numpy_helper.to_array(bias) - np.array([0, 0, np.inf], np.float32)
    bias.CopyFrom(onnx.numpy_helper.from_array(masked, "b2"))
    value, scores = imitation(models.mlp(), teacher, X32, "cross_entropy")
    p = torch.softmax(torch.tensor(scores_of(teacher, x=X32)).double(), 1)
    assert (p[:, 2] == 0).all()
    wanted = F.kl_div(F.log_softmax(torch.tensor(scores).double(), 1), p, reduction="batchmean").item()
    assert value == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher": models.mlp(classes=5)}, r"of the teacher have shape \[batch,5\]: the classes differ"),
        (
            {"teacher": models.mlp(features=7)},
            r"its input 'x' has shape \[batch,7\], but the student's input 'x'",
        ),
        ({"teacher": models.conv_bn()}, r"its input 'x' has shape \[batch,2,6,6\]"),
        ({"teacher": language_model(0)}, "its input 'tokens' is INT64, but the student's input 'x' is FLOAT"),
        (
            {"teacher_output": "probabilities"},
            "teacher_output='probabilities' is not a value of the teacher; its outputs",
        ),
        ({"loss": None, "loss_input_names": "logits"}, "teacher needs a loss of onnxtrain.losses"),
    ],
)
def test_teachers_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    settings = {"loss": "cross_entropy", "teacher": models.mlp(hidden=16)} | change
    with pytest.raises(GraphBuildError, match=message):
        Trainer(models.mlp(), **settings)


def test_a_teacher_with_a_fixed_batch_is_refused_with_advice() -> None:
    teacher = models.mlp(hidden=16)
    teacher.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    with pytest.raises(
        GraphBuildError, match=r"fixed batch size 1, .* teacher=onnxtrain.make_batch_dynamic\(teacher\)"
    ):
        Trainer(models.mlp(), "cross_entropy", teacher=teacher)


def test_outputs_of_the_teacher_are_chosen_by_name() -> None:
    teacher = models.mlp(hidden=16)
    teacher.graph.output[0].name = teacher.graph.node[-1].output[0] = "scores"
    teacher.graph.output.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, ["batch", 16]))
    with pytest.raises(
        GraphBuildError, match="its outputs are scores, a, and none has the name of the student's"
    ):
        Trainer(models.mlp(), "cross_entropy", teacher=teacher)
    Trainer(models.mlp(), "cross_entropy", teacher=teacher, teacher_output="scores")


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"distill_weight": 0.2}, GraphBuildError, "distill_weight=0.2 has no effect without a teacher"),
        ({"temperature": 3.0}, GraphBuildError, "temperature=3.0 has no effect without a teacher"),
        (
            {"teacher": "t.onnx", "distill_weight": 0},
            InputError,
            "distill_weight must be a number above 0 and at most 1",
        ),
        ({"teacher": "t.onnx", "distill_weight": 1.5}, InputError, "received 1.5"),
        ({"teacher": "t.onnx", "distill_weight": True}, InputError, "received True"),
        (
            {"teacher": "t.onnx", "temperature": -1.0},
            InputError,
            "temperature must be a number above 0, received -1.0",
        ),
        ({"teacher": "t.onnx", "temperature": float("inf")}, InputError, "received inf"),
        ({"teacher": "t.onnx", "temperature": float("nan")}, InputError, "received nan"),
    ],
)
def test_wrong_settings_of_teacher_distill_weight_and_temperature(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Recipe(**fields)


def test_a_missing_teacher_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such file"):
        Trainer(models.mlp(), "cross_entropy", teacher=tmp_path / "none.onnx", directory=tmp_path / "run")


def test_the_on_device_files_contain_the_teacher(tmp_path: Path) -> None:
    recipe = Recipe(loss="cross_entropy", teacher=models.mlp(hidden=16, seed=2), profile="portable")
    generate_artifacts(models.mlp(), artifact_directory=tmp_path, recipe=recipe)
    names = {tensor.name for tensor in onnx.load(tmp_path / "training_model.onnx").graph.initializer}
    assert any(name.startswith("teacher/") for name in names)
    assert dataclasses.replace(recipe, temperature=3.0).teacher is recipe.teacher


def test_nll_distils_log_probabilities() -> None:
    student = models.mlp()
    student.graph.node[-1].output[0] = "raw"
    student.graph.node.append(helper.make_node("LogSoftmax", ["raw"], ["logits"], axis=1))
    teacher = models.mlp(hidden=16, seed=2)
    value, scores = imitation(student, teacher, X32, NLLLoss())
    wanted = kl(*(torch.tensor(v).double() for v in (scores, scores_of(teacher, x=X32))), 1.0).mean().item()
    assert value == pytest.approx(wanted, rel=1e-4)
