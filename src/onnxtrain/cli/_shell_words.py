"""Adapts messages to a shell, so that they refer to command-line options instead of Python arguments."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping

from onnxtrain._words import Words
from onnxtrain.cli._command_options import (
    AverageOptions,
    CalibrateOptions,
    ExportOptions,
    MergeOptions,
    PlanOptions,
)
from onnxtrain.cli._declared import flag, off_flag, options_of
from onnxtrain.cli._train_options import TrainOptions

# Options by the value of `TableEncoder(encode=...)` that they set.
_ENCODE = {"one-hot": "--one-hot", "ordinal": "--ordinal"}

# Options of `onnxtrain check` by the argument that they set, of `check_gradients` or of the functions that it calls.
_OF_CHECK = {
    "requires_grad": "--parameter",
    "wrt": "--parameter",
    "of": "--of",
    "inputs": "--data",
    "dims": "--dim",
}


def _typed(value: object) -> list[str]:
    """Returns the words that follow an option on the command line to set it to `value`.

    There is no word for a Boolean (`--overwrite`), one word per item for a list (`--loss-input logits`), and one
    NAME=VALUE per item for a mapping (`--impute age=mean`).
    """
    if isinstance(value, bool):
        return []
    if isinstance(value, Mapping):
        value = [f"{name}={item}" for name, item in value.items()]
    return [shlex.quote(str(item)) for item in (value if isinstance(value, list) else [value])]


class ShellWords(Words):
    """Wording of messages on the command line: refers to options instead of arguments of the Python API.

    Args:
        command: name of the running command, e.g. "check"; "" for no particular command.
        spellings: options that the command has, e.g. {"--data", "--parameter"}; None to use those of all commands.

    >>> words = ShellWords()
    >>> words.argument("clip_grad_norm", 1.0), words.argument("batch_size"), words.argument("overwrite", True)
    ('--clip-norm 1.0', '--batch-size', '--overwrite')
    >>> words.argument("loss_input_names", ["logits"])
    '--loss-input logits'
    >>> ShellWords("check", {"--parameter"}).argument("requires_grad")
    '--parameter'
    >>> words.argument("encode", "one-hot"), words.argument("impute", {"age": "mean"}), words.argument("missing", "N A")
    ('--one-hot', '--impute age=mean', "--missing 'N A'")
    """

    def __init__(self, command: str = "", spellings: Collection[str] | None = None) -> None:
        self._command = command
        self._spellings = spellings

    def argument(self, name: str, *value: object) -> str:
        """Returns the command-line option that sets a Python argument, e.g. `--clip-norm 1.0`.

        If no option sets the argument, returns the Python wording, e.g. `name=1.0`. If the running command lacks the
        option, " of `onnxtrain train`" is appended.

        Args:
            name: name of the argument.
            value: value to include; if several are given, all of them are included.
        """
        if self._command == "check" and name in _OF_CHECK:
            return _OF_CHECK[name]
        if name == "encode":
            return " or ".join(_ENCODE[one] for one in map(str, value)) or " or ".join(_ENCODE.values())
        # The options of `train` are a superset of those of `artifacts`.
        kinds = (AverageOptions, CalibrateOptions, ExportOptions, MergeOptions, PlanOptions, TrainOptions)
        declared = {key: found for kind in kinds for key, found in options_of(kind).items()}
        for option, found in declared.items():
            # Some arguments have an option's name in one class, and another name in `Trainer`.
            if name in (found.rule.python, option):
                items = [item for one in value for item in _typed(one)]
                spelling = off_flag(option) if any(one is False for one in value) else flag(option)
                # A command without the option, such as `ops`, may give advice for `onnxtrain train`.
                has_it = self._spellings is None or spelling in self._spellings
                return " ".join([spelling, *items]) + ("" if has_it else " of `onnxtrain train`")
        return super().argument(name, *value)

    def dynamic_batch(self, function: str = "Trainer") -> str:
        """Returns advice on making a fixed batch size dynamic.

        `function` is ignored, because a shell passes an option instead of calling a function.
        """
        return f"pass {flag('dynamic_batch')}"

    def resume(self, directory: object, where: str = "") -> str:
        """Returns advice on resuming the run in `directory`; `where` is an optional phrase, e.g. "from there "."""
        return f"Resume {where}with: onnxtrain train {directory}"

    def open_run(self) -> str:
        """Returns the remedy for a directory that does not contain a run, as a sentence without the final period."""
        return "Pass the directory of a run, as written by `onnxtrain train`"

    def loss_setting(self, loss: str, name: str, value: object) -> str:
        """Returns the option that sets a parameter of the loss, e.g. `--loss-option axis=1`."""
        return f"--loss-option {name}={value}"

    def or_function(self, arguments: str = "") -> str:
        """Returns nothing: a shell passes no functions."""
        return ""

    def metric_of_output(self, name: str) -> str:
        """Returns the option for a metric of another output, e.g. `--metric OUTPUT:accuracy`."""
        return f"For another output of the model: --metric OUTPUT:{name}."

    def convert(self, dtype: str, what: str = "") -> str:
        """Returns advice on converting an array in the data file; `what` refers to the array, e.g. "it"."""
        return f"store {what or 'the values'} as {dtype} in the file of --data"

    def take_from_column(self) -> str:
        """Returns advice to store labels with shape `[N]` instead of `[N, 1]`."""
        return "Store them without the last axis in the file of --data"

    def from_one_hot(self) -> str:
        """Returns advice on training with one-hot labels."""
        return (
            "Store the class index of each sample in the file of --data, or store the labels as float32 and train with "
            "--loss-option probabilities=true"
        )

    def new_head(self, classes: int) -> str:
        """Returns the option that gives a model a last layer for a number of classes."""
        return f"Give it a new last layer with {self.argument('replace_head', classes)}"

    def drop_last(self) -> str:
        """Returns advice to drop the incomplete last batch, as a clause that ends a sentence."""
        return f", or drop incomplete batches ({flag('drop_last')})"

    def untransformed(self, argument: str) -> str:
        """Returns an empty hint, because the command line has no transforms that convert data.

        MixUp and CutMix only augment samples that are already valid, so a missing transform never causes an error.
        """
        return ""
