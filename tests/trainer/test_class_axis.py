"""Scores of more than two axes: the classes lie along the axis that the user says, or an error names it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from onnxtrain import Trainer
from onnxtrain.errors import GraphBuildError, InputError
from onnxtrain.losses import CrossEntropyLoss
from training_run import Run

WORDS = 9
RNG = np.random.default_rng(3)
IDS = RNG.integers(0, WORDS, (12, 5))
WEIGHTS = {"embedding": RNG.normal(size=(WORDS, 6)), "head": RNG.normal(size=(6, WORDS))}
LAST = r"classes from axis 1 of the scores \[batch, {}, 9\].*CrossEntropyLoss\(axis=-1\)"


def language_model(length: int | str) -> onnx.ModelProto:
    """Logits `[batch, length, 9]` of each word, from the word alone."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21]>
        g (int64[batch, {length}] ids) => (float[batch, {length}, {WORDS}] logits) {{
            h = Gather(embedding, ids)
            t = Tanh(h)
            logits = MatMul(t, head)
        }}""")
    for name, array in WEIGHTS.items():
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    return model


@pytest.mark.parametrize("length", ["seq", 5, WORDS])
def test_the_last_axis_holds_the_classes_where_the_loss_says_so(length: int | str) -> None:
    ids = RNG.integers(0, WORDS, (12, WORDS)) if length == WORDS else IDS
    trainer = Trainer(language_model(length), CrossEntropyLoss(axis=-1), "adamw", 0.05)
    before = trainer.evaluate(ids, ids)
    embedding, head = (
        torch.from_numpy(array.astype(np.float32).astype(np.float64)) for array in WEIGHTS.values()
    )
    logits = torch.tanh(embedding[torch.from_numpy(ids)]) @ head
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(ids).flatten())
    assert before["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert before["accuracy"] == pytest.approx(float((logits.argmax(-1).numpy() == ids).mean()))
    trainer.fit(ids, ids, epochs=25, batch_size=4)
    assert trainer.evaluate(ids, ids)["accuracy"] == 1.0


@pytest.mark.parametrize("length", ["seq", WORDS])
def test_what_no_batch_could_show_is_an_error_when_the_graph_is_built(length: int | str) -> None:
    """Labels would be `[batch, 9]`: those of a sequence of nine words would be taken for them."""
    with pytest.raises(
        GraphBuildError, match=r"Classes are taken from axis 1.*axis=-1.*labels of shape \[batch,"
    ):
        Trainer(language_model(length), "cross_entropy")


def test_the_first_batch_names_the_axis(tmp_path: Path) -> None:
    trainer = Trainer(language_model(5), CrossEntropyLoss(axis=1))
    with pytest.raises(InputError, match=LAST.format(5)):
        trainer.fit(IDS, IDS)
    run = Run.generate(tmp_path, language_model("seq"), loss=CrossEntropyLoss(axis=1))
    with pytest.raises(InputError, match=LAST.format("seq")):
        run.module(IDS, IDS)
    run = Run.generate(tmp_path / "last", language_model("seq"), loss=CrossEntropyLoss(axis=-1))
    with pytest.raises(InputError, match=r"classes from axis 2 of the scores.*along axis 1, .*axis=1\)"):
        run.module(IDS, IDS[:, :4])
