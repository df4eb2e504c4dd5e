"""Training on pairs of texts beside the same job in PyTorch in float64, and what a run on texts can do."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F

from onnxtrain import Trainer
from onnxtrain.errors import CheckpointError, GraphBuildError, InputError
from onnxtrain.losses import CosineSimilarityLoss, InfoNCELoss, TripletLoss
from onnxtrain.texts import TextPairs, TextTokenizer, add_pooling, mine_hard_negatives, retrieval_metrics
from onnxtrain.texts._settings import PROPERTY, open_tokenizer
from onnxtrain.trainer import Callback
from texts import small
from texts.test_losses_of_texts import cosine, info_nce, triplet

LOSSES: dict[str, tuple[Any, list[tuple[Any, ...]], Any]] = {
    "info_nce": (InfoNCELoss(mask_duplicates=False), small.PAIRS, info_nce),
    "negatives": (InfoNCELoss(mask_duplicates=False), small.TRIPLES, info_nce),
    "triplet": (TripletLoss(), small.TRIPLES, triplet),
    "cosine_similarity": (CosineSimilarityLoss(), small.SCORED, cosine),
}


class Losses(Callback):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_step_end(self, trainer: Trainer, loss: float) -> None:
        self.values.append(loss)


def in_pytorch(
    rows: list[tuple[Any, ...]],
    twin: Any,
    *,
    epochs: int,
    batch: int,
    accumulate: int = 1,
    weights: Any = None,
) -> list[float]:
    """Trains in PyTorch in float64 with SGD, in the order of the file; returns the loss of each step."""
    torch.manual_seed(0)
    net = small.Encoder()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(epochs):
        batches = [range(start, min(start + batch, len(rows))) for start in range(0, len(rows), batch)]
        for first in range(0, len(batches), accumulate):
            optimizer.zero_grad()
            terms, total = [], []
            for part in batches[first : first + accumulate]:
                texts = [text for i in part for text in rows[i] if isinstance(text, str)]
                embeddings = net(texts).reshape(len(part), -1, small.DIM)
                scores = [torch.tensor([rows[i][2] for i in part])] if twin is cosine else []
                terms.append(twin(embeddings, *scores))
                total.append(
                    torch.ones(len(part)) if weights is None else torch.tensor([weights[i] for i in part])
                )
            weight = torch.cat(total).double()
            loss = (torch.cat(terms) * weight).sum() / weight.sum()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


def trained(model: Any, loss: Any, data: Any, **arguments: Any) -> tuple[Trainer, list[float]]:
    trainer, losses = Trainer(model, loss, "sgd", 0.1), Losses()
    trainer.fit(data, shuffle=False, verbose=False, callbacks=[losses], **arguments)
    return trainer, losses.values


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_all_steps_are_those_of_pytorch(tmp_path: Path, name: str, accumulate: int) -> None:
    """Seven samples in batches of three: the last batch is smaller, and texts differ in length."""
    loss, rows, twin = LOSSES[name]
    _, losses = trained(small.write(tmp_path), loss, rows, epochs=3, batch_size=3, accumulate=accumulate)
    wanted = in_pytorch(rows, twin, epochs=3, batch=3, accumulate=accumulate)
    assert np.abs(np.array(losses) - wanted).max() < 1e-5 * max(1, *wanted)
    assert wanted[-1] < wanted[0]


def test_mined_negatives_are_learned_without_those_of_the_batch(tmp_path: Path) -> None:
    """The loss of a pair then depends on the sample alone, not on the batch."""
    path = small.write(tmp_path)
    loss = InfoNCELoss(in_batch_negatives=False)
    trainer = Trainer(path, loss, "sgd", 0.1)
    corpus = [*dict.fromkeys(text for pair in small.PAIRS for text in pair), "blue tree here"]
    mined = mine_hard_negatives(trainer, small.PAIRS, corpus, num_negatives=2)
    embeddings = dict(zip(corpus, trainer.predict(corpus), strict=True))
    unit = {text: row / np.linalg.norm(row) for text, row in embeddings.items()}
    for anchor, positive, *negatives in mined.texts:
        others = sorted(set(corpus) - {anchor, positive}, key=lambda text: -float(unit[anchor] @ unit[text]))
        assert negatives == others[:2]
    wanted = [
        float(-np.log(np.exp(scores[0]) / np.exp(scores).sum()))
        for anchor, *others in mined.texts
        for scores in [np.array([20 * float(unit[anchor] @ unit[text]) for text in others], np.float64)]
    ]
    for size in (1, 3, 7):
        assert trainer.evaluate(mined, batch_size=size)["loss"] == pytest.approx(np.mean(wanted), rel=1e-4)
    history = trainer.fit(mined, epochs=20, verbose=False)
    assert history.epochs[-1]["loss"] < 0.5 * history.epochs[0]["loss"]
    with pytest.raises(
        InputError, match=r"samples have no negatives, but with loss=InfoNCELoss\(in_batch_negatives"
    ):
        trainer.fit(small.PAIRS)


@pytest.mark.parametrize("name", ["info_nce", "triplet"])
def test_weights_are_those_of_a_weighted_mean(tmp_path: Path, name: str) -> None:
    loss, rows, twin = LOSSES[name]
    weights = [0.5, 2.0, 1.0, 0.0, 3.0, 1.5, 1.0]
    _, losses = trained(small.write(tmp_path), loss, rows, epochs=2, batch_size=3, sample_weight=weights)
    wanted = in_pytorch(rows, twin, epochs=2, batch=3, weights=weights)
    assert np.abs(np.array(losses) - wanted).max() < 1e-5 * max(1, *wanted)


def test_float16_model(tmp_path: Path) -> None:
    """As PyTorch in float64 within float16's rounding."""
    path = small.write(tmp_path, dtype="float16")
    trainer, losses = trained(path, "info_nce", small.PAIRS, epochs=1, batch_size=7)
    assert losses[0] == pytest.approx(in_pytorch(small.PAIRS, info_nce, epochs=1, batch=7)[0], rel=5e-3)
    assert trainer.predict(["red cat"]).dtype == np.float32


def test_embeddings_are_those_of_pytorch_and_do_not_depend_on_batches(tmp_path: Path) -> None:
    trainer = Trainer(small.write(tmp_path), "info_nce")
    texts = [text for row in small.PAIRS for text in row] + ["red cat"]
    wanted = small.Encoder()(texts).detach().numpy()
    for size in (None, 1, 3):
        found = trainer.predict(texts, batch_size=size)
        assert found.shape == (len(texts), small.DIM)
        assert np.abs(found - wanted).max() < 1e-5


def test_evaluate_adds_retrieval_metrics(tmp_path: Path) -> None:
    trainer = Trainer(small.write(tmp_path), InfoNCELoss(mask_duplicates=False))
    # Two answers to one question, and one answer to two.
    rows = [*small.PAIRS, ("red cat", "tree grows"), ("green cat", "tree grows")]
    values = trainer.evaluate(rows, batch_size=4)
    queries, corpus = list(dict.fromkeys(a for a, _ in rows)), list(dict.fromkeys(b for _, b in rows))
    relevant = [[corpus.index(b) for a, b in rows if a == query] for query in queries]
    encoder = small.Encoder()
    wanted = retrieval_metrics(encoder(queries).detach().numpy(), encoder(corpus).detach().numpy(), relevant)
    assert {name: values[name] for name in wanted} == pytest.approx(wanted)
    parts = [rows[:4], rows[4:8], rows[8:]]
    embedded = [encoder([t for row in part for t in row]).reshape(len(part), 2, -1) for part in parts]
    assert values["loss"] == pytest.approx(
        float(torch.cat([info_nce(e) for e in embedded]).mean().detach()), rel=1e-5
    )


def test_evaluate_of_scored_pairs_adds_correlations(tmp_path: Path) -> None:
    trainer = Trainer(small.write(tmp_path), "cosine_similarity")
    values = trainer.evaluate(small.SCORED)
    net = small.Encoder()
    a, b = (net([row[i] for row in small.SCORED]) for i in (0, 1))
    wanted = np.corrcoef(F.cosine_similarity(a, b).detach().numpy(), [row[2] for row in small.SCORED])[0, 1]
    assert values["pearson"] == pytest.approx(wanted, abs=1e-5)
    assert values.keys() == {"loss", "pearson", "spearman"}


def test_resumed_fit_is_bit_equal(tmp_path: Path) -> None:
    path = small.write(tmp_path)

    class Stop(Callback):
        def on_step_end(self, trainer: Trainer, loss: float) -> None:
            if trainer.global_step == 4:
                os.kill(os.getpid(), signal.SIGINT)

    arguments = {"epochs": 3, "batch_size": 3, "validation": 0.3, "verbose": False}
    whole = Trainer(path, "info_nce", directory=tmp_path / "whole")
    whole.fit(small.PAIRS, **arguments)
    part = Trainer(path, "info_nce", directory=tmp_path / "part")
    part.fit(small.PAIRS, callbacks=[Stop()], **arguments)
    assert part.history.stopped == "interrupted"
    # The run contains its tokenizer.
    (tmp_path / "tokenizer.json").unlink()
    resumed = Trainer.resume(tmp_path / "part")
    resumed.fit(small.PAIRS, **arguments)
    for name, parameter in whole.parameters:
        assert (parameter.data == resumed.parameters[name].data).all()
    assert (whole.predict(["red cat"]) == resumed.predict(["red cat"])).all()
    copy = tmp_path / "copy"
    resumed.save(copy)
    assert (Trainer.resume(copy).predict(["red cat"]) == whole.predict(["red cat"])).all()


def test_exported_model_keeps_its_interface(tmp_path: Path) -> None:
    path = small.write(tmp_path)
    trainer, _ = trained(path, "info_nce", small.PAIRS, epochs=1)
    trainer.export(tmp_path / "trained.onnx")
    before, after = (ort.InferenceSession(file) for file in (path, tmp_path / "trained.onnx"))
    for side in ("get_inputs", "get_outputs"):
        values = [[(v.name, v.type, v.shape) for v in getattr(s, side)()] for s in (before, after)]
        assert values[0] == values[1]
    save = add_pooling(tmp_path / "trained.onnx", "mean", normalize=True)
    onnx.save(onnx.load_from_string(_bytes(save)), tmp_path / "pooled.onnx")
    pooled = ort.InferenceSession(tmp_path / "pooled.onnx")
    tokens = small.tokenizer()
    tokens.enable_padding()
    texts = ["red cat", "old red house there"]
    encoded = tokens.encode_batch(texts)
    feeds = {
        "input_ids": np.array([e.ids for e in encoded]),
        "attention_mask": np.array([e.attention_mask for e in encoded]),
    }
    result = pooled.run(["sentence_embedding"], feeds)[0]
    wanted = trainer.predict(texts)
    assert np.abs(result - wanted / np.linalg.norm(wanted, axis=1, keepdims=True)).max() < 1e-6
    with pytest.raises(InputError, match="can be exported only with outputs of the file"):
        trainer.export(tmp_path / "other.onnx", ["h"])


def _bytes(model: Any) -> bytes:
    import onnx_ir as ir

    return ir.to_proto(model).SerializeToString()


@pytest.mark.parametrize(
    ("mode", "pooling"),
    [("cls_token", "cls"), ("max_tokens", "max"), ("lasttoken", "last"), ("mean_tokens", "mean")],
)
def test_pooling_of_sentence_transformers_is_read(tmp_path: Path, mode: str, pooling: str) -> None:
    path = small.write(tmp_path)
    small.pooling_files(tmp_path, mode, normalize=True)
    files = Trainer(path, "info_nce")
    given = Trainer(onnx.load(path), InfoNCELoss(pooling=pooling, normalize=True), tokenizer=tmp_path)  # type: ignore[arg-type]
    found, wanted = (trainer.predict(["old red house", "cat"]) for trainer in (files, given))
    assert (found == wanted).all()
    assert np.allclose(np.linalg.norm(found, axis=1), 1)
    assert files.evaluate(small.PAIRS) == given.evaluate(small.PAIRS)
    others = {"cls", "max", "last", "mean"} - {pooling}
    for other in others:
        trainer = Trainer(onnx.load(path), InfoNCELoss(pooling=other), tokenizer=tmp_path)  # type: ignore[arg-type]
        assert np.abs(trainer.predict(["old red house"]) - found[:1]).max() > 1e-3


def test_unknown_pooling_is_refused(tmp_path: Path) -> None:
    path = small.write(tmp_path)
    small.pooling_files(tmp_path, "mean_sqrt_len_tokens")
    with pytest.raises(InputError, match="asks for pooling_mode_mean_sqrt_len_tokens"):
        Trainer(path, "info_nce")
    Trainer(path, InfoNCELoss(pooling="mean"))


def test_model_that_pools_itself(tmp_path: Path) -> None:
    path = small.write(tmp_path, pooled=True)
    # It is of the token embeddings, which this model does not return.
    small.pooling_files(tmp_path, "cls_token")
    trainer, losses = trained(path, "info_nce", small.PAIRS, epochs=1, batch_size=1)
    assert trainer.predict(["red cat"]).shape == (1, small.DIM)
    assert losses[0] == 0


def test_files_one_folder_above(tmp_path: Path) -> None:
    """As sentence-transformers exports: tokenizer.json, and onnx/model.onnx."""
    path = small.write(tmp_path)
    (tmp_path / "onnx").mkdir()
    path = path.rename(tmp_path / "onnx" / "model.onnx")
    assert Trainer(path, "info_nce").predict(["red cat"]).shape == (1, small.DIM)


def test_fixed_sequence_length_pads_and_truncates(tmp_path: Path) -> None:
    path = small.write(tmp_path, sequence="5")
    dynamic = small.write(tmp_path / "dynamic")
    fixed = Trainer(path, "info_nce")
    cut = Trainer(dynamic, "info_nce", max_length=5)
    for trainer in (fixed, cut):
        trainer.fit(small.PAIRS, verbose=False, batch_size=3)
    assert np.allclose(fixed.predict(["old red cat"]), cut.predict(["old red cat"]), atol=1e-5)


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, None),
        ({"config": {"max_position_embeddings": 6, "pad_token_id": 0}}, 6),
        # As RoBERTa, whose 514 positions are for 512 tokens.
        ({"config": {"max_position_embeddings": 8, "pad_token_id": 1, "model_type": "xlm-roberta"}}, 6),
        ({"config": {"max_position_embeddings": 6}, "tokenizer_config": {"model_max_length": 512}}, 6),
        ({"config": {"max_position_embeddings": 6}, "tokenizer_config": {"model_max_length": 5}}, 5),
        ({"config": {"max_position_embeddings": 6}, "sentence_bert_config": {"max_seq_length": 4}}, 4),
        # As sentence-transformers, which reads its own file first.
        ({"tokenizer_config": {"model_max_length": 4}, "sentence_bert_config": {"max_seq_length": 5}}, 5),
        ({"config": {"max_position_embeddings": -1}}, None),
        ({"config": {"model_type": "t5"}, "tokenizer_config": {"model_max_length": 1e30}}, None),
    ],
)
def test_default_of_max_length_is_known_from_the_files_beside_the_model(
    tmp_path: Path, files: dict[str, Any], wanted: int | None
) -> None:
    path = small.write(tmp_path)
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    # The length with [CLS] and [SEP] of a text of 17 words.
    tokenizer = TextTokenizer.beside(tmp_path)
    assert tokenizer is not None
    length = tokenizer.arrays([" ".join(small.WORDS)], ["input_ids"])["input_ids"].shape[1]
    assert length == (wanted or 2 + len(small.WORDS))
    assert tokenizer.max_length == wanted
    chosen = TextTokenizer.beside(tmp_path, 9)
    assert chosen is not None
    assert chosen.max_length == 9
    # Of a tokenizer that is given, only the model's positions are a limit.
    positions = 6 if files.get("config", {}).get("max_position_embeddings", 0) > 0 else None
    assert open_tokenizer(path.parent / "tokenizer.json", tmp_path, None).max_length == positions


def test_texts_that_are_longer_than_the_positions_of_the_model_are_explained(tmp_path: Path) -> None:
    path = small.write(tmp_path, positions=6)
    long = " ".join(small.WORDS)
    pairs = [*small.PAIRS, ("cat", long)]
    trainer = Trainer(path, "info_nce")
    wanted = (
        rf"{len(small.WORDS) + 2} tokens. If the model takes fewer, start a new run .* as max_length, which"
    )
    for use in (
        lambda: trainer.fit(pairs, batch_size=len(pairs), verbose=False),
        lambda: trainer.evaluate(pairs),
        lambda: trainer.predict([long]),
    ):
        with pytest.raises(InputError, match=wanted):
            use()
    Trainer(path, "info_nce", max_length=6).fit(pairs, verbose=False)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 6}')
    for tokenizer in (None, tmp_path / "tokenizer.json"):
        Trainer(path, "info_nce", tokenizer=tokenizer).fit(pairs, verbose=False)


def test_fixed_batch_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GraphBuildError, match=r"need a symbolic first axis.*make_batch_dynamic"):
        Trainer(small.write(tmp_path, batch="4"), "info_nce")


def test_arrays_of_token_ids_are_trained_as_texts_are(tmp_path: Path) -> None:
    path = small.write(tmp_path)
    tokens = small.tokenizer()
    tokens.enable_padding()
    encoded = tokens.encode_batch([text for row in small.PAIRS for text in row])
    arrays = {
        "input_ids": np.array([e.ids for e in encoded]).reshape(7, 2, -1),
        "attention_mask": np.array([e.attention_mask for e in encoded]).reshape(7, 2, -1),
    }
    _, losses = trained(path, "info_nce", small.PAIRS, epochs=2, batch_size=3)
    _, of_arrays = trained(
        path, "info_nce", arrays, targets=np.arange(14).reshape(7, 2), epochs=2, batch_size=3
    )
    assert np.allclose(losses, of_arrays, atol=1e-6)


def test_forms_of_data_and_validation(tmp_path: Path) -> None:
    path = small.write(tmp_path)
    file = tmp_path / "pairs.csv"
    file.write_text("anchor,positive\n" + "\n".join(",".join(row) for row in small.PAIRS) + "\n")
    anchors, positives = (list(column) for column in zip(*small.PAIRS, strict=True))
    wanted = None
    for inputs, targets, validation in (
        (small.PAIRS, None, small.PAIRS[:2]),
        (file, None, str(file)),
        (anchors, positives, (anchors[:2], positives[:2])),
        (TextPairs(small.PAIRS), None, TextPairs(small.PAIRS[:2])),
    ):
        trainer = Trainer(path, "info_nce", "sgd", 0.1)
        history = trainer.fit(inputs, targets, validation=validation, verbose=False)
        assert "val_loss" in history.last
        wanted = wanted or history.last["loss"]
        assert history.last["loss"] == wanted


@pytest.mark.parametrize(
    ("loss", "data", "message"),
    [
        ("triplet", small.PAIRS, "samples have 2 texts, but the loss compares 3"),
        ("cosine_similarity", small.PAIRS, "it has no scores, which the loss needs"),
        ("info_nce", [("a", "")], "sample 1 has an empty text"),
        ("info_nce", [("a", "b"), ("a",)], "sample 2 has 1 texts, and sample 1 has 2"),
        ("info_nce", ["a", "b"], "the loss compares pairs"),
        ("info_nce", [], "needs targets"),
        ("info_nce", "pairs.txt", "pass a .csv, .tsv or .jsonl file"),
    ],
)
def test_data_that_does_not_fit_is_refused(tmp_path: Path, loss: str, data: Any, message: str) -> None:
    trainer = Trainer(small.write(tmp_path), loss)
    with pytest.raises(InputError) as error:
        trainer.fit(data, verbose=False)
    assert message in str(error.value)
    assert trainer.global_step == 0


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    path = small.write(tmp_path)
    with pytest.raises(InputError, match="metrics need a target"):
        Trainer(path, "info_nce", metrics=["mae"])
    with pytest.raises(InputError, match="max_length is for losses over texts"):
        Trainer(path, "mse", max_length=3)
    with pytest.raises(InputError, match="A transform augments arrays"):
        Trainer(path, "info_nce").fit(small.PAIRS, transform=lambda x, y: (x, y), verbose=False)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"there is no tokenizer.json beside the model"):
        Trainer(path, "info_nce").fit(small.PAIRS, verbose=False)
    trainer = Trainer(path, "info_nce", tokenizer=small.tokenizer())
    with pytest.raises(InputError, match="class_weight"):
        trainer.fit(small.PAIRS, class_weight={0: 2.0}, verbose=False)


def test_damaged_settings_of_texts_are_an_error(tmp_path: Path) -> None:
    trainer = Trainer(small.write(tmp_path), "info_nce", directory=tmp_path / "run")
    for text in (
        "{",
        "{}",
        json.dumps({"version": 2}),
        json.dumps({"version": 1, "tokenizer": "x", "max_length": 1}),
    ):
        trainer.state.properties[PROPERTY] = text
        with pytest.raises(CheckpointError, match="is not a record of texts"):
            trainer.predict(["a"])
