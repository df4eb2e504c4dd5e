"""Two kinds of text that come with Python: its language reference, and the source code of its standard library."""

from __future__ import annotations

import inspect
import pydoc_data.topics
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
"""The vocabulary; other characters are left out."""
CODE = ("argparse", "ast", "configparser", "csv", "dataclasses", "inspect", "json/decoder", "logging/__init__",
        "mailbox", "optparse", "pathlib", "pprint", "shutil", "statistics", "subprocess", "tarfile", "textwrap",
        "threading", "unittest/case", "zipfile", "zipfile/__init__")  # fmt: skip
"""Modules of the standard library; each Python has most of them."""


def prose() -> list[str]:
    """Returns the topics of the language reference, as `help()` shows them."""
    topics = pydoc_data.topics.topics
    return [inspect.cleandoc(topics[name]) for name in sorted(topics)]


def code() -> list[str]:
    """Returns source files of the standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = (folder / f"{name}.py" for name in CODE)
    return [path.read_text(encoding="utf-8") for path in paths if path.is_file()]


def encoded(text: str) -> np.ndarray:
    """Returns indices into the vocabulary, int64 [characters]."""
    table = {character: index for index, character in enumerate(CHARACTERS)}
    return np.array([table[character] for character in text if character in table], np.int64)


def parts(documents: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the text to train on, and what is held out: every fifth document."""
    training = [text for place, text in enumerate(documents) if place % 5 != 4]
    held_out = [text for place, text in enumerate(documents) if place % 5 == 4]
    return encoded("\n\n".join(training)), encoded("\n\n".join(held_out))


def windows(text: np.ndarray, length: int, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the characters from each start on and, for each of them, the one that follows: int64 [starts, length]."""
    rows = text[starts[:, None] + np.arange(length + 1)]
    return rows[:, :-1], rows[:, 1:]


def batches(
    text: np.ndarray, length: int, steps: int, size: int, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields that many batches of random places."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        yield windows(text, length, rng.integers(0, len(text) - length - 1, size))


def spread(text: np.ndarray, length: int, count: int = 8) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields that many batches of 64 windows, which lie at even distances over the whole text."""
    starts = np.linspace(0, len(text) - length - 2, 64 * count).astype(np.int64)
    for some in np.split(starts, count):
        yield windows(text, length, some)
