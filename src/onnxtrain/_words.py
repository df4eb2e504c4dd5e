"""Words of messages that depend on the caller: Python code passes `batch_size=32`, a shell `--batch-size 32`.

A message names an argument by :func:`argument` and a remedy by a method of :func:`words`, so that the text is right for
whoever reads it. The command line replaces the words of Python by its own for as long as a command runs.

>>> f"Pass {argument('batch_norm', 'training')}, or leave {argument('batch_size')} out."
"Pass batch_norm='training', or leave batch_size out."
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Words:
    """Names of arguments and remedies as Python code writes them; `onnxtrain.cli` overrides them for shells."""

    def argument(self, name: str, *value: object) -> str:
        """Names an argument, with a value where one is given: `batch_norm='training'`."""
        return "=".join([name, *map(repr, value)])

    def dynamic_batch(self, function: str = "Trainer") -> str:
        """Says how to make a fixed batch dynamic; `function` is the function that takes the model."""
        return f"make it so: {function}(onnxtrain.make_batch_dynamic(model), ...)"

    def resume(self, directory: object, where: str = "") -> str:
        """Says how to go on with the run in a directory; `where` is e.g. "from there "."""
        return f"Go on {where}with Trainer.resume('{directory}')"

    def open_run(self) -> str:
        """Says what the directory of a run is, as the end of a sentence."""
        return "Pass a directory that Trainer.save or generate_artifacts has written"

    def loss_setting(self, loss: str, name: str, value: object) -> str:
        """Writes a loss with another setting, e.g. `loss=CrossEntropyLoss(axis=1)`."""
        return f"loss={loss}({name}={value})"

    def convert(self, dtype: str, what: str = "") -> str:
        """Says how to convert an array; `what` is e.g. "it"."""
        return " ".join(filter(None, ("convert", what, f"with .astype('{dtype}')")))

    def take_from_column(self) -> str:
        """Says how to make labels `[N, 1]` labels `[N]`."""
        return "Take them out of their column: labels[:, 0]"

    def from_one_hot(self) -> str:
        """Says how to train with one-hot labels."""
        return "Pass labels.argmax(axis=1), or train with CrossEntropyLoss(probabilities=True)"

    def drop_last(self) -> str:
        """Offers to leave the incomplete last batch out, as the end of a sentence."""
        return ", or leave incomplete batches out (drop_last=True)"

    def untransformed(self, argument: str) -> str:
        """Names the argument that converts data which the transform of training data does not reach, as a sentence."""
        return f" The transform of the training data is for training alone: to convert this data, pass {argument}=..."


# A context variable, not a global: of two threads one may serve a shell while the other runs Python code.
_words: ContextVar[Words] = ContextVar("onnxtrain_words")


def words() -> Words:
    """Returns the words of the caller: those of Python unless :func:`speaking` has set others."""
    return _words.get(_PYTHON)


def argument(name: str, *value: object) -> str:
    """Names an argument of the Python API in the caller's words: see :meth:`Words.argument`."""
    return words().argument(name, *value)


@contextmanager
def speaking(caller_words: Words) -> Iterator[None]:
    """Writes the messages inside the `with` block in the words of a caller, e.g. of the command line."""
    token = _words.set(caller_words)
    try:
        yield
    finally:
        _words.reset(token)


_PYTHON = Words()
