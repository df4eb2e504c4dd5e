"""Sequences of tokens of unequal length: they are padded batch by batch, and masks, positions and labels are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxtrain import Trainer, pack_tokens
from onnxtrain.errors import InputError
from onnxtrain.losses import CrossEntropyLoss
from test_generation_models import generation_model
from trainer.test_class_axis import WORDS, language_model

RNG = np.random.default_rng(8)
SEQUENCES = [RNG.integers(1, WORDS, n) for n in (5, 2, 7, 1, 4, 3, 6)]
LABELS = [np.where(np.arange(len(ids)) < 2, -100, ids) for ids in SEQUENCES]
IDS, MASK, POSITIONS, PADDED_LABELS = (
    np.stack([np.pad(row, (0, 7 - len(row)), constant_values=fill) for row in rows])
    for rows, fill in (
        (SEQUENCES, 0),
        ([np.ones_like(ids) for ids in SEQUENCES], 0),
        ([np.arange(len(ids)) for ids in SEQUENCES], 0),
        (SEQUENCES, -100),
    )
)


class Samples:
    """A map-style data set, as Hugging Face's: dicts with lists, and columns that the model does not know."""

    def __init__(self, *, labels: bool) -> None:
        self._labels = labels

    def __len__(self) -> int:
        return len(SEQUENCES)

    def __getitem__(self, index: int) -> dict[str, Any]:
        labels = {"labels": LABELS[index].tolist()} if self._labels else {}
        return {"input_ids": SEQUENCES[index].tolist(), "text": "so and so"} | labels


def frame(*, labels: bool) -> Any:
    pandas = pytest.importorskip("pandas")
    columns = {"input_ids": [ids.tolist() for ids in SEQUENCES]}
    return pandas.DataFrame(columns | ({"labels": [row.tolist() for row in LABELS]} if labels else {}))


def series(*, labels: bool) -> tuple[Any, ...]:
    table = frame(labels=labels)
    return tuple(table[name] for name in table)


def objects(rows: list[np.ndarray]) -> np.ndarray:
    array = np.empty(len(rows), object)
    array[:] = rows
    return array


FORMS: dict[str, Callable[[bool], Any]] = {
    "arrays": lambda labels: (SEQUENCES, LABELS) if labels else (SEQUENCES,),
    "lists": lambda labels: tuple(
        [row.tolist() for row in rows] for rows in (SEQUENCES, LABELS)[: labels + 1]
    ),
    "objects": lambda labels: tuple(map(objects, (SEQUENCES, LABELS)[: labels + 1])),
    "dict": lambda labels: ({"input_ids": SEQUENCES} | ({"labels": LABELS} if labels else {}),),
    "samples": lambda labels: ([Samples(labels=labels)[k] for k in range(len(SEQUENCES))],),
    "data set": lambda labels: (Samples(labels=labels),),
    "frame": lambda labels: (frame(labels=labels),),
    "series": lambda labels: series(labels=labels),
}


def evaluate(data: tuple[Any, ...], **options: Any) -> dict[str, float]:
    return Trainer(generation_model(), "causal_lm", metrics=["perplexity", "accuracy"]).evaluate(
        *data, **options
    )


@pytest.mark.sample(every=8)
@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_all_forms_are_the_padded_batches(form: str, labels: bool) -> None:
    """Without labels those of the next token are the tokens; padding never counts."""
    target = np.stack([np.pad(row, (0, 7 - len(row)), constant_values=-100) for row in LABELS])
    expected = evaluate(({"input_ids": IDS, "attention_mask": MASK}, target if labels else PADDED_LABELS))
    got = evaluate(FORMS[form](labels), batch_size=3)
    assert got == pytest.approx(expected, rel=1e-5)


def test_training_on_sequences_is_training_on_padded_batches() -> None:
    losses = []
    for data in ((SEQUENCES,), ({"input_ids": IDS, "attention_mask": MASK}, PADDED_LABELS)):
        trainer = Trainer(generation_model(), "causal_lm", learning_rate=3e-3, seed=1)
        history = trainer.fit(*data, epochs=4, batch_size=3, validation=0.3)
        losses.append([*history["loss"], *history["val_loss"], *history["val_perplexity"]])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    assert losses[0][3] < losses[0][0]


def test_a_rectangle_of_tokens_needs_neither_mask_nor_labels() -> None:
    ids = IDS[:, :1].repeat(4, 1) + np.arange(4)
    expected = evaluate(({"input_ids": ids, "attention_mask": np.ones_like(ids)}, ids))
    assert evaluate((ids,)) == pytest.approx(expected, rel=1e-6)


def test_weights_and_predictions_of_sequences() -> None:
    weights = np.arange(len(SEQUENCES)) / 2
    whole = {"input_ids": IDS, "attention_mask": MASK}
    expected = evaluate((whole, PADDED_LABELS), sample_weight=weights)
    assert evaluate((SEQUENCES,), sample_weight=weights, batch_size=2)["loss"] == pytest.approx(
        expected["loss"], rel=1e-5
    )
    trainer = Trainer(generation_model(), "causal_lm")
    logits = trainer.predict(SEQUENCES, batch_size=2)
    np.testing.assert_allclose(logits[MASK > 0], trainer.predict(whole)[MASK > 0], rtol=1e-4, atol=1e-4)  # type: ignore[call-overload]


def positions_model(length: int | str = "n") -> onnx.ModelProto:
    """Scores of the next token, or of a class of the whole, from tokens, their positions and a mask."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21]>
        g (int64[b, {length}] tokens, int64[b, {length}] position_ids, int64[b, {length}] attention_mask)
            => (float[b, {length}, {WORDS}] logits, float[b, {WORDS}] pooled)
        <int64[1] last = {{2}}, int64[1] one = {{1}}> {{
            e = Gather(table, tokens)
            p = Gather(places, position_ids)
            x = Add(e, p)
            m = Cast<to=1>(attention_mask)
            each = Unsqueeze(m, last)
            h = Mul(x, each)
            logits = MatMul(h, w)
            pooled = ReduceSum<keepdims=0>(logits, one)
        }}""")
    for name, rows in {"table": WORDS, "places": 8, "w": 6}.items():
        array = RNG.normal(size=(rows, WORDS if name == "w" else 6)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


@pytest.mark.parametrize("length", ["n", 7])
def test_positions_are_made_and_a_fixed_length_is_filled(length: int | str) -> None:
    model = positions_model(length)
    names = {7: "input_ids", "n": "tokens"}
    # Of integers with a fixed number of columns only the name tells that they are tokens.
    model.graph.node[0].input[1] = model.graph.input[0].name = names[length]
    trainer = Trainer(model, "causal_lm", loss_input_names="logits", metrics=[])
    whole = {names[length]: IDS, "position_ids": POSITIONS, "attention_mask": MASK}
    expected = trainer.evaluate(whole, PADDED_LABELS)
    assert trainer.evaluate(SEQUENCES, batch_size=2) == pytest.approx(expected, rel=1e-5)
    if length == 7:
        with pytest.raises(
            InputError, match="sample 1 has 8 tokens, but the model takes at most 7; truncate it"
        ):
            trainer.evaluate([SEQUENCES[0], np.ones(8, np.int64)])


def test_sequences_are_classified_with_one_label_each() -> None:
    trainer = Trainer(positions_model(), "cross_entropy", loss_input_names="pooled")
    labels = np.arange(len(SEQUENCES))
    whole = {"tokens": IDS, "position_ids": POSITIONS, "attention_mask": MASK}
    expected = trainer.evaluate(whole, labels)
    assert trainer.evaluate(SEQUENCES, labels, batch_size=3) == pytest.approx(expected, rel=1e-5)
    pairs = Trainer(positions_model(), CrossEntropyLoss(axis=-1), loss_input_names="logits")
    tags = pairs.evaluate(SEQUENCES, LABELS, batch_size=3)
    assert np.isfinite(tags["loss"])


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (([np.ones(3, np.int64), np.ones(0, np.int64)],), "sample 1 has no sequence of tokens 'input_ids'"),
        ((SEQUENCES, LABELS[:-1]), "input_ids: 7, labels: 6"),
        ((SEQUENCES, [SEQUENCES[1], *LABELS[1:]]), "sample 0 has 5 tokens 'input_ids' and 2 entries of 'labels'"),
        (({"input_ids": SEQUENCES, "lables": LABELS},), "needs targets"),
        (({"input_ids": SEQUENCES, "lables": LABELS}, LABELS), "unknown: lables"),
        (([[1, 2], [1.5]],), "float64|not an array of one shape|has no sequence"),
        (([[1, 2], [WORDS * 99, 1, 1]],), "class labels must be 0 to 31"),
    ],
    ids=["empty", "fewer labels", "shorter labels", "misspelt", "misspelt with labels", "no integers", "no token"],
)  # fmt: skip
def test_sequences_that_do_not_fit_are_refused(data: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        evaluate(data)


def test_padding_that_every_token_would_see_is_refused() -> None:
    trainer = Trainer(language_model("seq"), CrossEntropyLoss(axis=-1))
    with pytest.raises(InputError, match="no input 'attention_mask' to mask padding"):
        trainer.fit({"ids": SEQUENCES}, LABELS)
    # A causal model sees no padding, which comes after all tokens.
    causal = Trainer(language_model("seq"), "causal_lm")
    expected = causal.evaluate(IDS, PADDED_LABELS)
    assert causal.evaluate(SEQUENCES, batch_size=2) == pytest.approx(expected, rel=1e-5)


def test_packed_rows_hold_each_token_once_and_count_all_but_the_first() -> None:
    rows = pack_tokens(SEQUENCES, 6)
    assert rows["input_ids"].shape == rows["labels"].shape == (5, 6)
    whole = np.concatenate(SEQUENCES)
    np.testing.assert_array_equal(rows["input_ids"].ravel()[: len(whole)], whole)
    counted = rows["labels"].ravel()[: len(whole)]
    np.testing.assert_array_equal(counted[counted != -100], np.concatenate([ids[1:] for ids in SEQUENCES]))
    assert (rows["labels"].ravel()[len(whole) :] == -100).all()
    assert (rows["input_ids"].ravel()[len(whole) :] == 0).all()


def test_packed_rows_are_trained_and_evaluated_as_they_are() -> None:
    """This model predicts from one token, so that packing changes nothing but what a row cuts off."""
    trainer = Trainer(language_model("seq"), "causal_lm")
    packed = pack_tokens(SEQUENCES, sum(map(len, SEQUENCES)))
    by_name = {"ids": packed["input_ids"], "labels": packed["labels"]}
    assert trainer.evaluate(by_name) == pytest.approx(trainer.evaluate(SEQUENCES), rel=1e-5)
    history = Trainer(generation_model(), "causal_lm").fit(pack_tokens(SEQUENCES, 5, separator=3), epochs=2)
    assert history["loss"][1] < history["loss"][0]


@pytest.mark.parametrize(
    ("sequences", "length", "message"),
    [
        ([[1, 2]], 1, "length is 1"),
        ([[1, 2]], 4.0, r"length is 4\.0"),
        ([[]], 4, "no tokens"),
        ([[1, 2], [0.5]], 4, "sequence 1 is an array of float64"),
        ([[[1, 2]]], 4, r"sequence 0 is an array of int64 of shape \[1, 2\]"),
    ],
)
def test_nothing_else_is_packed(sequences: Any, length: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        pack_tokens(sequences, length)
