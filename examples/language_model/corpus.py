"""Two kinds of text that come with what this package needs: documentation in NumPy, source code in Python's library."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY, LENGTH = 2048, 128


def documentation() -> list[str]:
    """Returns the docstrings of NumPy, a text for each of its files."""
    folder = Path(np.__file__).parent
    paths = [path for path in sorted(folder.rglob("*.py")) if "tests" not in path.parts]
    seen: set[str] = set()
    return [text for path in paths if len(text := "\n\n".join(_docstrings(path, seen))) > 500]


def _docstrings(path: Path, seen: set[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        text = None
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.Module):
            text = ast.get_docstring(node)
        # NumPy documents what is written in C by `add_newdoc("numpy", "dot", "...")`.
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "add_newdoc":
            texts = [leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)]
            text = max((value for value in texts if isinstance(value, str)), key=len, default=None)
        if text and text not in seen:
            seen.add(text)
            yield text


def code() -> list[str]:
    """Returns the modules of Python's standard library that are one file, up to 60 kB of each."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [
        path.read_text(encoding="utf-8", errors="ignore")[:60_000] for path in sorted(folder.glob("*.py"))
    ]


def parts(documents: list[str]) -> tuple[list[str], list[str]]:
    """Returns the texts to train on, and those that are held out: every fifth."""
    held_out = documents[4::5]
    return [text for place, text in enumerate(documents) if place % 5 != 4], held_out


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Learns a vocabulary of byte pairs. Bytes make every text readable to it, also of another kind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokens(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Returns the tokens of all texts in one row, int64."""
    return np.array([i for encoding in tokenizer.encode_batch(texts) for i in encoding.ids], np.int64)


def batches(row: np.ndarray, steps: int, size: int, seed: int) -> Iterator[np.ndarray]:
    """Yields that many batches of windows at random places, int64 [size, LENGTH]."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        starts = rng.integers(0, len(row) - LENGTH, size)
        yield row[starts[:, None] + np.arange(LENGTH)]


def spread(row: np.ndarray, count: int = 256) -> Iterator[np.ndarray]:
    """Yields batches of 16 windows, `count` in all, at even distances over the whole row."""
    starts = np.linspace(0, len(row) - LENGTH, count).astype(np.int64)
    for some in np.split(starts, max(count // 16, 1)):
        yield row[some[:, None] + np.arange(LENGTH)]
