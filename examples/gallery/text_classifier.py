"""Fine-tunes a Hugging Face classifier from a local folder: is a sentence a docstring, a comment or an error message?

The sentences come from Python's standard library; those of every fourth module are held out. Without --model, the
program first saves a BERT with random weights and a tokenizer of its own to a folder, because nothing is downloaded.

Usage: python examples/gallery/text_classifier.py [--seed 0] [--model FOLDER]
"""

import argparse
import ast
import sysconfig
import tempfile
import time
import tokenize
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from tokenizers import (
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    pipeline,
)

from onnxtrain import Trainer

KINDS = ["docstring", "comment", "message"]
PACKAGES = [
    "asyncio",
    "email",
    "http",
    "importlib",
    "logging",
    "multiprocessing",
    "unittest",
    "urllib",
    "xml",
]
SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
}


def sentences(path: Path) -> list[tuple[str, int]]:
    """Returns the sentences of a module, each with the index of its kind."""
    found = []
    with tokenize.open(path) as file:
        tree = ast.parse(file.read())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and (
            text := ast.get_docstring(node)
        ):
            found.append((text.splitlines()[0], 0))
        if (
            isinstance(node, ast.Raise)
            and isinstance(node.exc, ast.Call)
            and node.exc.args
        ):
            message = node.exc.args[0]
            if isinstance(message, ast.Constant) and isinstance(message.value, str):
                found.append((message.value, 2))
    with path.open("rb") as file:
        comments = [
            t for t in tokenize.tokenize(file.readline) if t.type == tokenize.COMMENT
        ]
    # The first line of a paragraph only: a comment on its own line, without one on the line above.
    rows = {t.start[0] for t in comments}
    found += [
        (t.string.lstrip("# "), 1)
        for t in comments
        if t.line.lstrip().startswith("#") and t.start[0] - 1 not in rows
    ]
    # Without the marks of punctuation at the end, and in lower case, which alone would tell many kinds.
    return [
        (text.strip(" .:").lower(), kind)
        for text, kind in found
        if len(text.split()) >= 3
    ]


def collect(
    rng: np.random.Generator,
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Returns the training and the held-out sentences, as many of each kind."""
    parts: list[list[tuple[str, int]]] = [[], []]
    stdlib = Path(sysconfig.get_path("stdlib"))
    modules = sorted(
        [
            *stdlib.glob("*.py"),
            *(p for name in PACKAGES for p in stdlib.glob(f"{name}/*.py")),
        ]
    )
    for place, module in enumerate(modules):
        parts[place % 4 == 3] += sentences(module)
    for part, count in zip(parts, (900, 250), strict=True):
        of_kinds = [
            [s for s in dict.fromkeys(part) if s[1] == kind]
            for kind in range(len(KINDS))
        ]
        size = min(count, *map(len, of_kinds))
        part[:] = [
            s
            for found in of_kinds
            for s in (found[i] for i in rng.permutation(len(found))[:size])
        ]
    return parts[0], parts[1]


def save_untrained(folder: Path, texts: list[str], seed: int) -> None:
    """Saves a tokenizer for these texts and a small BERT with random weights, as `save_pretrained` does."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(
        texts,
        trainers.WordPieceTrainer(
            vocab_size=4000, special_tokens=list(SPECIAL.values())
        ),
    )
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=ends
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=48, **SPECIAL
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=64,
        num_labels=len(KINDS),
        id2label=dict(enumerate(KINDS)),
        label2id={kind: index for index, kind in enumerate(KINDS)},
    )
    BertForSequenceClassification(config).save_pretrained(folder)


def export(model: torch.nn.Module, path: Path) -> None:
    """Exports a classifier of token ids, for any batch size and length."""
    tokens = torch.ones(2, 7, dtype=torch.int64)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    torch.onnx.export(
        model.eval(),
        (tokens, torch.ones_like(tokens)),  # one object would become one input
        path,
        input_names=["input_ids", "attention_mask"],
        output_names=["logits"],
        dynamic_shapes={"input_ids": sizes, "attention_mask": sizes},
        optimize=False,  # keeps all parameters, and marks where Dropout was
        verbose=False,
    )


def classify(folder: Path, part: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """Returns the answers of the package's pipeline for a model of `save_pretrained`."""
    classifier = pipeline("text-classification", model=str(folder), device="cpu")
    return classifier([text for text, _ in part], batch_size=32, truncation=True)


def accuracy(answers: list[dict[str, Any]], part: list[tuple[str, int]]) -> float:
    """Returns the fraction of sentences with the right label."""
    kinds = [KINDS[kind] for _, kind in part]
    return float(
        np.mean([a["label"] == k for a, k in zip(answers, kinds, strict=True)])
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--model", type=Path, help="folder of save_pretrained, with three labels"
    )
    arguments = parser.parse_args()
    train, test = collect(np.random.default_rng(arguments.seed))
    with tempfile.TemporaryDirectory() as directory:
        folder = arguments.model or Path(directory) / "untrained"
        if arguments.model is None:
            save_untrained(folder, [text for text, _ in train], arguments.seed)

        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForSequenceClassification.from_pretrained(folder)
        before = accuracy(classify(folder, test), test)
        export(model, Path(directory) / "model.onnx")

        def encoded(
            part: list[tuple[str, int]],
        ) -> tuple[dict[str, list[list[int]]], np.ndarray]:
            tokens = tokenizer(
                [text for text, _ in part], truncation=True, return_token_type_ids=False
            )
            return dict(tokens), np.array([kind for _, kind in part])

        began = time.process_time()
        trainer = Trainer(
            Path(directory) / "model.onnx",
            loss="cross_entropy",
            learning_rate=1e-3,
            scheduler="linear",
            warmup_ratio=0.1,
            dropout=0.1,
            seed=arguments.seed,
        )
        trainer.fit(*encoded(train), epochs=5, batch_size=32, verbose=False)
        trainer.export(Path(directory) / "tuned.onnx")
        seconds = time.process_time() - began

        # Back into the package: the parameters have the names that they have in the module.
        tuned = {
            name: torch.from_numpy(parameter.data.copy())
            for name, parameter in trainer.parameters
        }
        model.load_state_dict(tuned, strict=False)
        model.save_pretrained(Path(directory) / "tuned")
        tokenizer.save_pretrained(Path(directory) / "tuned")
        answers = classify(Path(directory) / "tuned", test)
        after = accuracy(answers, test)
        print(f"{len(train)} sentences, {len(test)} held out, of other modules")
        print(
            f"accuracy before {before:.3f}, after {after:.3f}, {seconds:.0f} s of processor time"
        )

        answer, text = answers[0], test[0][0]
        print(f"the package says {answer['label']}, score {answer['score']:.3f}")
        session = onnxruntime.InferenceSession(Path(directory) / "tuned.onnx")
        tokens = tokenizer([text], return_tensors="np", return_token_type_ids=False)
        (logits,) = session.run(None, dict(tokens))
        scores = np.exp(logits[0]) / np.exp(logits[0]).sum()
        kind, score = KINDS[scores.argmax()], scores.max()
        print(f"the exported file says {kind}, score {score:.3f}")


if __name__ == "__main__":
    main()
