"""Training of language models: the loss of the next token, its mean over batches, and metrics."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from typer.testing import CliRunner

from onnxtrain import Trainer, onnxblock
from onnxtrain.cli._app import app
from onnxtrain.errors import InputError
from onnxtrain.losses import CausalLMLoss
from trainer.test_class_axis import WEIGHTS, WORDS, language_model
from training_run import Run

RNG = np.random.default_rng(5)
IDS = RNG.integers(0, WORDS, (11, 6))
LABELS = IDS.copy()
# Sequences of which much, little and nothing counts; the first label of a sequence counts never.
LABELS[0, 2:] = LABELS[3, 4:] = LABELS[7, 1:] = -100


def logits(ids: np.ndarray) -> torch.Tensor:
    embedding, head = (torch.from_numpy(array.astype(np.float32)).double() for array in WEIGHTS.values())
    return torch.tanh(embedding[torch.from_numpy(ids)]) @ head


def torch_loss(ids: np.ndarray, labels: np.ndarray) -> float:
    scores, following = logits(ids)[:, :-1], torch.from_numpy(labels)[:, 1:]
    return float(torch.nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten()))


@pytest.mark.parametrize("batch_size", [1, 4, 11])
def test_loss_and_perplexity_are_means_over_all_tokens_of_the_set(batch_size: int) -> None:
    """Whatever the batches: with 1, sample 7 has no label that counts, and sample 0 has one."""
    trainer = Trainer(language_model("seq"), "causal_lm", metrics=["perplexity", "accuracy"])
    values = trainer.evaluate(IDS, LABELS, batch_size=batch_size)
    expected = torch_loss(IDS, LABELS)
    assert values["loss"] == pytest.approx(expected, rel=1e-6)
    assert values["perplexity"] == pytest.approx(np.exp(expected), rel=1e-6)
    guess, following = logits(IDS).argmax(-1).numpy()[:, :-1], LABELS[:, 1:]
    hits = (guess == following)[following != -100]
    assert values["accuracy"] == pytest.approx(hits.mean())


def test_perplexity_is_the_default_metric_unless_losses_are_summed() -> None:
    history = Trainer(language_model("seq"), "causal_lm").fit(IDS, IDS, epochs=1)
    assert {"loss", "perplexity"} <= set(history.keys())
    summed = Trainer(language_model("seq"), CausalLMLoss(reduction="sum"))
    assert set(summed.evaluate(IDS, IDS)) == {"loss"}
    with pytest.raises(InputError, match="this loss is a sum"):
        Trainer(language_model("seq"), CausalLMLoss(reduction="sum"), metrics=["perplexity"])


def test_whole_metrics_compare_with_the_next_token() -> None:
    pytest.importorskip("sklearn")
    trainer = Trainer(language_model("seq"), "causal_lm", metrics=["f1_micro", "top3_accuracy"])
    values = trainer.evaluate(IDS, LABELS)
    scores, following = logits(IDS).numpy()[:, :-1], LABELS[:, 1:]
    counted = following != -100
    guess = scores.argmax(-1)
    assert values["f1_micro"] == pytest.approx((guess == following)[counted].mean())
    best = np.argsort(-scores, axis=-1)[..., :3]
    assert values["top3_accuracy"] == pytest.approx((best == following[..., None]).any(-1)[counted].mean())


def test_batches_of_unequal_numbers_of_tokens_accumulate_to_the_gradient_of_all() -> None:
    """Batches of 1, 5 and 4 tokens that count, and one without."""
    parts = [IDS[[0, 7, 3, 4]], LABELS[[0, 7, 3, 4]]]
    weights = []
    for options in ({"batch_size": 4}, {"batch_size": 1, "accumulate": 4}):
        trainer = Trainer(language_model("seq"), "causal_lm", "sgd", 0.5, seed=3)
        trainer.fit(*parts, epochs=1, shuffle=False, **options)  # type: ignore[arg-type]
        weights.append(np.asarray(dict(trainer.parameters)["head"].data))
    np.testing.assert_allclose(weights[1], weights[0], rtol=1e-5, atol=1e-6)
    assert not np.allclose(weights[0], WEIGHTS["head"].astype(np.float32))


def test_sample_weights_are_weights_of_the_tokens_of_a_sequence() -> None:
    weight = np.array([0.0, 2.0, 1.0])
    values = Trainer(language_model("seq"), "causal_lm").evaluate(IDS[:3], LABELS[:3], sample_weight=weight)
    repeated = [1, 1, 2]
    assert values["loss"] == pytest.approx(torch_loss(IDS[repeated], LABELS[repeated]), rel=1e-6)


def test_a_sequence_of_one_token_has_nothing_to_predict() -> None:
    trainer = Trainer(language_model("seq"), "causal_lm", "sgd")
    with pytest.raises(
        InputError, match="No parameter was updated, because no label contributes to the loss"
    ):
        trainer.fit(IDS[:, :1], IDS[:, :1], epochs=1)
    np.testing.assert_array_equal(dict(trainer.parameters)["head"].data, WEIGHTS["head"].astype(np.float32))


def test_artifacts_block_and_shell_take_the_same_loss(tmp_path: Path) -> None:
    run = Run.generate(tmp_path / "name", language_model("seq"), loss="causal_lm")
    block = Run.generate(tmp_path / "block", language_model("seq"), loss=onnxblock.loss.CausalLMLoss())
    onnx.save(language_model("seq"), tmp_path / "lm.onnx")
    shell = CliRunner().invoke(
        app, ["artifacts", str(tmp_path / "lm.onnx"), "--loss", "causal_lm", "-o", str(tmp_path / "shell")]
    )
    assert shell.exit_code == 0, shell.output
    expected = torch_loss(IDS, LABELS)
    shell_run = Run.open(tmp_path / "shell")
    losses = [run.module(IDS, LABELS), block.module(IDS, LABELS), shell_run.module(IDS, LABELS)[0]]
    assert list(map(float, losses)) == pytest.approx([expected] * 3, rel=1e-6)
    manifest = json.loads((tmp_path / "name" / "manifest.json").read_text())
    assert manifest["loss_mean"] == {"labels": "labels", "ignore_index": -100, "weight": None, "shift": 1}
    assert manifest["targets"][0]["class_labels"] == {
        "count": WORDS, "ignore_index": -100, "axis": 2, "scores": ["batch", "seq", WORDS], "shift": 1,
    }  # fmt: skip
