"""Train sentence embeddings with `Trainer` and in eager PyTorch, from the same weights and on the same batches.

The pairs are names of functions in Python's standard library and the first lines of their docstrings, the encoder is
the small BERT of docs/guides/train-sentence-embeddings.md. Every fifth pair is held out. PyTorch computes
MultipleNegativesRankingLoss as sentence-transformers does, without masking duplicates, and so does `Trainer` here.

Usage: python benchmarks/sentence_embeddings.py [--seeds 0 1 2] [--epochs 3]
Prints one JSON line per seed; --json PATH also writes them. Seconds are of processor time on one thread, with
tokenization.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from steps.machine import about_machine

from onnxtrain import Trainer
from onnxtrain.losses import InfoNCELoss
from onnxtrain.texts import TextTokenizer, retrieval_metrics
from onnxtrain.trainer import Callback
from onnxtrain.trainer.data._source import Pass, order_of

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "train-sentence-embeddings.md"
BATCH, LENGTH, RATE = 64, 32, 5e-3


class Losses(Callback):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_step_end(self, trainer: Trainer, loss: float) -> None:
        self.values.append(loss)


def embed(net: torch.nn.Module, tokenizer: TextTokenizer, texts: list[str]) -> torch.Tensor:
    """Returns the means over the attention mask."""
    arrays = tokenizer.arrays(texts, ["input_ids", "attention_mask"])
    ids, mask = (torch.from_numpy(arrays[name]) for name in arrays)
    wide = mask.unsqueeze(-1).float()
    return (net(ids, mask) * wide).sum(1) / wide.sum(1).clamp(min=1e-9)


def in_pytorch(
    net: torch.nn.Module, tokenizer: TextTokenizer, pairs: list[Any], epochs: int, seed: int
) -> list[float]:
    optimizer = torch.optim.AdamW(net.parameters(), RATE)
    losses = []
    for epoch in range(epochs):
        order = order_of(len(pairs), Pass(seed, epoch, shuffle=True)).tolist()
        for start in range(0, len(order), BATCH):
            rows = [pairs[i] for i in order[start : start + BATCH]]
            both = F.normalize(embed(net, tokenizer, [text for row in rows for text in row]))
            loss = F.cross_entropy(both[::2] @ both[1::2].T * 20, torch.arange(len(rows)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # The page makes the data, the tokenizer and the class Encoder.
    data, model = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[:2]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        prepared = model.replace('"tokenizer.json"', f'"{folder}/tokenizer.json"').split("torch.manual_seed")[
            0
        ]
        space: dict[str, Any] = {}
        exec(data.replace('"pairs.csv"', f'"{folder}/pairs.csv"') + prepared, space)
        pairs = [(name, line) for line, name in space["names"].items()]
        held_out, training = pairs[::5], [pair for i, pair in enumerate(pairs) if i % 5]
        tokenizer = TextTokenizer(Path(folder), LENGTH)
        # Two functions of a module may have one name.
        queries, corpus = (list(dict.fromkeys(row[i] for row in held_out)) for i in (0, 1))
        relevant = [[corpus.index(line) for name, line in held_out if name == query] for query in queries]
        for seed in options.seeds:
            torch.manual_seed(seed)
            net = space["Encoder"]().eval()
            tokens = torch.ones(2, 5, dtype=torch.int64)
            dynamic = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
            torch.onnx.export(
                net,
                (tokens, torch.ones_like(tokens)),
                f"{folder}/model.onnx",
                input_names=["input_ids", "attention_mask"],
                output_names=["last_hidden_state"],
                dynamic_shapes=(dynamic, dynamic),
                optimize=False,
                verbose=False,
            )
            loss = InfoNCELoss(mask_duplicates=False)
            trainer = Trainer(
                f"{folder}/model.onnx",
                loss,
                "adamw",
                RATE,
                dropout=0.0,
                max_length=LENGTH,
                seed=seed,
                threads=1,
            )
            before, ours = trainer.evaluate(held_out), Losses()
            start = time.process_time()
            trainer.fit(training, epochs=options.epochs, batch_size=BATCH, callbacks=[ours], verbose=False)
            seconds = time.process_time() - start
            start = time.process_time()
            theirs = in_pytorch(net, tokenizer, training, options.epochs, seed)
            seconds_pytorch = time.process_time() - start
            with torch.no_grad():
                rows = [embed(net, tokenizer, part).numpy() for part in (queries, corpus)]
            found = retrieval_metrics(*rows, relevant)
            after = trainer.evaluate(held_out)
            gap = np.abs(np.array(ours.values) / theirs - 1)
            results.append(
                {
                    "seed": seed,
                    "recall@1": {
                        "before": before["recall@1"],
                        "Trainer": after["recall@1"],
                        "PyTorch": found["recall@1"],
                    },
                    "recall@5": {
                        "before": before["recall@5"],
                        "Trainer": after["recall@5"],
                        "PyTorch": found["recall@5"],
                    },
                    "last loss": {"Trainer": ours.values[-1], "PyTorch": theirs[-1]},
                    "relative difference of losses": {
                        "first ten steps": gap[:10].max(),
                        "all steps": gap.max(),
                    },
                    "seconds": {"Trainer": seconds, "PyTorch": seconds_pytorch},
                }
            )
            print(json.dumps(results[-1]))
    if options.json:
        document = {
            "machine": about_machine(),
            "pairs": len(pairs),
            "epochs": options.epochs,
            "seeds": results,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
