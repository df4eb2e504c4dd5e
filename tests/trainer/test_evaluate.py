"""Results of evaluate() are those that PyTorch in float64 and numpy compute from predict()."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxtrain import Trainer, onnxblock
from onnxtrain.errors import InputError
from onnxtrain.losses import BCEWithLogitsLoss, CrossEntropyLoss, L1Loss, Loss, MSELoss
from trainer import problems

EXAMPLES = int(os.environ.get("ONNXTRAIN_FUZZ_EVALUATE", "25"))
functional = torch.nn.functional


def scores_model(batch: int | str) -> onnx.ModelProto:
    """x [batch, 4] -> scores [batch, 3]."""
    rng = np.random.default_rng(1)
    weight = onnx.numpy_helper.from_array(rng.standard_normal((4, 3)).astype(np.float32), "w")
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        net (float[N, 4] x) => (float[N, 3] scores) { scores = MatMul(x, w) }"""
    )
    model.graph.initializer.append(weight)
    for value in (*model.graph.input, *model.graph.output):
        dim = value.type.tensor_type.shape.dim[0]
        if isinstance(batch, int):
            dim.dim_value = batch
        else:
            dim.dim_param = batch
    return model


@st.composite
def losses(draw: st.DrawFn) -> tuple[Loss, Any, bool, int | None]:
    """Our loss, torch's, whether its targets are labels, and its ignore_index."""
    name = draw(st.sampled_from(["cross_entropy", "mse", "l1", "bce"]))
    reduction = draw(st.sampled_from(["mean", "sum"]))
    options: dict[str, Any] = {"reduction": reduction}
    if name == "cross_entropy":
        ignored = draw(st.sampled_from([-100, 1]))
        options |= {"ignore_index": ignored, "label_smoothing": draw(st.sampled_from([0.0, 0.1]))}
        if draw(st.booleans()):
            options["weight"] = [0.5, 2.0, 1.0]
        twin = options | {k: torch.tensor(v).double() for k, v in options.items() if k == "weight"}
        return CrossEntropyLoss(**options), lambda s, y: functional.cross_entropy(s, y, **twin), True, ignored
    if name == "bce" and draw(st.booleans()):
        options["pos_weight"] = [1.0, 3.0, 0.5]
    twin = options | {k: torch.tensor(v).double() for k, v in options.items() if k == "pos_weight"}
    ours = {"mse": MSELoss, "l1": L1Loss, "bce": BCEWithLogitsLoss}[name]
    theirs = {
        "mse": functional.mse_loss,
        "l1": functional.l1_loss,
        "bce": functional.binary_cross_entropy_with_logits,
    }[name]
    return ours(**options), lambda s, y: theirs(s, y.double(), **twin), False, None


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(
    loss=losses(),
    batch=st.one_of(st.just("n"), st.integers(1, 9)),
    size=st.integers(1, 12),
    count=st.integers(1, 23),
    seed=st.integers(0, 1000),
)
def test_evaluate_is_the_metric_over_predict(
    loss: tuple[Loss, Any, bool, int | None], batch: int | str, size: int, count: int, seed: int
) -> None:
    ours, theirs, labels, ignored = loss
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, 4)).astype(np.float32)
    if labels:
        y = np.where(rng.random(count) < 0.3, ignored or 0, rng.integers(0, 3, count))
    else:
        y = rng.random((count, 3)).astype(np.float32)

    def spread(prediction: np.ndarray, target: np.ndarray) -> float:
        """No mean over batches, and it sees the targets."""
        return float(np.median(prediction) + target.max())

    trainer = Trainer(scores_model(batch), ours, metrics=["accuracy" if labels else "rmse", spread])
    asked = None if isinstance(batch, int) else size
    prediction = trainer.predict(x, batch_size=asked)
    assert prediction.shape == (count, 3)
    scores = trainer.evaluate(x, y, batch_size=asked)
    double = torch.tensor(prediction).double()
    expected = theirs(double, torch.tensor(y)).item()
    assert scores["loss"] == pytest.approx(expected, rel=2e-5, abs=1e-6, nan_ok=True)
    assert scores["spread"] == spread(prediction, y)
    if labels:
        counted = y != ignored
        hits = prediction.argmax(axis=1)[counted] == y[counted]
        assert scores["accuracy"] == pytest.approx(hits.mean() if len(hits) else np.nan, nan_ok=True)
    else:
        error = prediction.astype(np.float64) - y
        assert scores["rmse"] == pytest.approx(np.sqrt((error**2).mean()), rel=1e-6)


def test_incomplete_batch_that_is_badly_wrong_counts() -> None:
    """Seven of fifteen samples are 100 off; the model takes eight at a time."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        g (float[8, 1] x) => (float[8, 1] y) <float[1, 1] w = {0.0}> { y = MatMul(x, w) }"""
    )
    trainer = Trainer(model, "mse", directory=None)
    x, y = np.ones((15, 1), np.float32), np.zeros((15, 1), np.float32)
    y[8:] = 100
    assert trainer.evaluate(x, y)["loss"] == pytest.approx(7 * 100**2 / 15, rel=1e-6)
    train = (np.ones((16, 1), np.float32), np.zeros((16, 1), np.float32))
    history = trainer.fit(*train, validation=(x, y), verbose=False)
    assert history.last["val_loss"] == pytest.approx(7 * 100**2 / 15, rel=1e-6)
    few = trainer.evaluate(x[-3:], y[-3:])
    assert few["loss"] == pytest.approx(100**2, rel=1e-6)


def test_resumed_run_evaluates_incomplete_batches(tmp_path: Any) -> None:
    problem = problems.line(samples=11, batch=4)
    Trainer(problem.model, MSELoss(reduction="sum"), directory=tmp_path)
    trainer = Trainer.resume(tmp_path)
    error = trainer.predict(problem.x).astype(np.float64) - problem.y
    assert trainer.evaluate(problem.x, problem.y)["loss"] == pytest.approx((error**2).sum(), rel=1e-5)


def test_loss_that_cannot_be_told_apart_by_samples_is_refused_before_training() -> None:
    """The largest error of a batch; and a loss that the model computes itself."""

    class Largest(onnxblock.Block):
        def build(self, prediction: str) -> str:  # type: ignore[override]
            squares = onnxblock.blocks.Mul()(prediction, prediction)
            return _reduce_max(self, squares)

    def _reduce_max(block: onnxblock.Block, name: str) -> str:
        base = block.base
        node = onnx.helper.make_node("ReduceMax", [name], ["largest"], keepdims=0)
        base.graph.node.append(node)
        base.graph.output.append(onnx.helper.make_tensor_value_info("largest", onnx.TensorProto.FLOAT, []))
        return "largest"

    problem = problems.line(samples=10, batch=4)
    trainer = Trainer(problem.model, Largest(), metrics=[])
    before = trainer.parameters["w"].data.copy()
    with pytest.raises(InputError, match="it is not a mean or sum over the samples"):
        trainer.evaluate(problem.x)
    with pytest.raises(InputError, match=r"Validation data: .* it is not a mean or sum over the samples"):
        trainer.fit(problem.x, validation=(problem.x, None), verbose=False)
    np.testing.assert_array_equal(trainer.parameters["w"].data, before)

    own = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        g (float[4, 1] x) => (float[] loss) <float[1, 1] w = {1.0}>
        { y = MatMul(x, w) s = Mul(y, y) loss = ReduceMean<keepdims = 0>(s) }"""
    )
    with pytest.raises(InputError, match="is not computed from the model's outputs"):
        Trainer(own, None).evaluate(np.ones((6, 1), np.float32))
    assert Trainer(own, None).evaluate(np.ones((8, 1), np.float32)) == {"loss": 1.0}


def test_a_fraction_that_leaves_no_batch_to_train_on() -> None:
    problem = problems.line(samples=10, batch=8)
    with pytest.raises(InputError, match="takes exactly 8 samples at a time, received 7 to train on"):
        Trainer(problem.model, "mse").fit(problem.x, problem.y, validation=0.3, verbose=False)
