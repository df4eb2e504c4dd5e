"""Adapts messages to the caller: Python code passes `batch_size=32`, a shell `--batch-size 32`.

A message calls :func:`argument` for the name of an argument, and a method of :func:`words` for a suggested remedy.
While a command runs, the command line replaces the wording for Python with its own.

>>> f"Pass {argument('batch_norm', 'training')}, or leave {argument('batch_size')} out."
"Pass batch_norm='training', or leave batch_size out."
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Words:
    """The parts of messages that depend on the caller: names of arguments, and advice on how to fix an error.

    This class phrases them for Python code; its subclass in `onnxtrain.cli` phrases them for the command line.
    """

    def argument(self, name: str, *value: object) -> str:
        """Returns the name of an argument, followed by its value if given, e.g. `batch_norm='training'`."""
        return "=".join([name, *map(repr, value)])

    def dynamic_batch(self, function: str = "Trainer") -> str:
        """Returns advice on making a fixed batch size dynamic: a call to `function` with the converted model."""
        return f"convert it: {function}(onnxtrain.make_batch_dynamic(model), ...)"

    def resume(self, directory: object, where: str = "") -> str:
        """Returns advice on resuming the training run in `directory`.

        Args:
            directory: directory of the run.
            where: words to insert after "Resume ", ending with a space, e.g. "from there ".
        """
        return f"Resume {where}with Trainer.resume('{directory}')"

    def open_run(self) -> str:
        """Returns advice on which directories can be opened as a training run, without a period at the end."""
        return "Pass a directory written by Trainer.save or generate_artifacts"

    def loss_setting(self, loss: str, name: str, value: object) -> str:
        """Returns the code that passes a loss with a changed setting, e.g. `loss=CrossEntropyLoss(axis=1)`."""
        return f"loss={loss}({name}={value})"

    def or_function(self, arguments: str = "") -> str:
        """Returns the end of a list of metrics: that a function is possible, too."""
        return f", or pass a function {arguments}".rstrip()

    def metric_of_output(self, name: str) -> str:
        """Returns advice on choosing a metric of another output of the model."""
        return f"For another output of the model: metrics={{'OUTPUT': '{name}'}}."

    def convert(self, dtype: str, what: str = "") -> str:
        """Returns advice on converting an array to `dtype`, e.g. "convert it with .astype('int64')".

        Args:
            dtype: NumPy name of the dtype, e.g. "int64".
            what: object of the verb "convert", e.g. "it"; empty for no object.
        """
        return " ".join(filter(None, ("convert", what, f"with .astype('{dtype}')")))

    def take_from_column(self) -> str:
        """Returns advice to pass labels with shape `[N]` instead of `[N, 1]`."""
        return "Pass labels[:, 0]"

    def from_one_hot(self) -> str:
        """Returns advice on training with one-hot labels."""
        return "Pass labels.argmax(axis=1), or train with CrossEntropyLoss(probabilities=True)"

    def new_head(self, classes: int) -> str:
        """Returns advice on giving a model a last layer for a number of classes, without a period at the end."""
        return f"Give it a new last layer: Trainer(onnxtrain.replace_head(model, {classes}), ...)"

    def drop_last(self) -> str:
        """Returns advice on dropping the incomplete last batch, as a clause to append to a sentence."""
        return ", or drop incomplete batches (drop_last=True)"

    def untransformed(self, argument: str) -> str:
        """Returns a hint for errors in data to which the training transform is not applied, e.g. validation data.

        Args:
            argument: argument that takes a transform for this data, e.g. "validation_transform".
        """
        return f" The training transform is not applied to this data; to convert it, pass {argument}=..."


# A context variable rather than a global: one thread may serve a shell while another runs Python code.
_words: ContextVar[Words] = ContextVar("onnxtrain_words")


def words() -> Words:
    """Returns the wording for the current caller: Python code, unless :func:`speaking` has set a different wording."""
    return _words.get(_PYTHON)


def argument(name: str, *value: object) -> str:
    """Returns an argument, and its value if given, in the caller's syntax: `batch_size=32` or `--batch-size 32`."""
    return words().argument(name, *value)


@contextmanager
def speaking(caller_words: Words) -> Iterator[None]:
    """Context manager that sets the wording of messages, e.g. to `ShellWords()` for the command line."""
    token = _words.set(caller_words)
    try:
        yield
    finally:
        _words.reset(token)


_PYTHON = Words()
