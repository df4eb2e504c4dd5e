"""Words of messages for a shell: options in place of arguments of the Python API."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping

from onnxtrain._words import Words
from onnxtrain.cli._declared import flag, off_flag, options_of
from onnxtrain.cli._options import MergeOptions, PlanOptions
from onnxtrain.cli._train_options import TrainOptions

# Values of `TableEncoder(encode=...)` by the options that choose them.
_ENCODE = {"one-hot": "--one-hot", "ordinal": "--ordinal"}

# Arguments of `check_gradients`, and of what it calls, by the options of `onnxtrain check`.
_OF_CHECK = {
    "requires_grad": "--parameter",
    "wrt": "--parameter",
    "of": "--of",
    "inputs": "--data",
    "dims": "--dim",
}


def _typed(value: object) -> list[str]:
    """Returns the values to type after an option.

    A Boolean is the option alone: `--overwrite`. A list is one value each: `--loss-input logits`. A mapping is
    NAME=VALUE each: `--impute age=mean`.
    """
    if isinstance(value, bool):
        return []
    if isinstance(value, Mapping):
        value = [f"{name}={item}" for name, item in value.items()]
    return [shlex.quote(str(item)) for item in (value if isinstance(value, list) else [value])]


class ShellWords(Words):
    """Names arguments of the Python API by the options of a command.

    Args:
        command: name of the command that runs, e.g. "check"; "" for any.
        spellings: the options that it has, e.g. {"--data", "--of"}; None for all.

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
        """Names the option that sets an argument; the argument itself where no option does."""
        if self._command == "check" and name in _OF_CHECK:
            return _OF_CHECK[name]
        if name == "encode":
            return " or ".join(_ENCODE[one] for one in map(str, value)) or " or ".join(_ENCODE.values())
        # Those of `train` are a superset of those of `artifacts`.
        declared = {**options_of(MergeOptions), **options_of(PlanOptions), **options_of(TrainOptions)}
        for option, found in declared.items():
            if name == (found.rule.python or option):
                items = [item for one in value for item in _typed(one)]
                spelling = off_flag(option) if any(one is False for one in value) else flag(option)
                # `ops` says why a model cannot be trained, which is advice for another command.
                has_it = self._spellings is None or spelling in self._spellings
                return " ".join([spelling, *items]) + ("" if has_it else " of `onnxtrain train`")
        return super().argument(name, *value)

    def dynamic_batch(self, function: str = "Trainer") -> str:
        """Names the option that makes a fixed batch dynamic."""
        return f"pass {flag('dynamic_batch')}"

    def resume(self, directory: object, where: str = "") -> str:
        """Writes the command that goes on with a run."""
        return f"Go on {where}with: onnxtrain train {directory} --data FILE"

    def open_run(self) -> str:
        """Says which commands write runs, as the end of a sentence."""
        return "Give the directory of a run, which `onnxtrain train` writes"

    def loss_setting(self, loss: str, name: str, value: object) -> str:
        """Writes the option that sets a parameter of the loss."""
        return f"--loss-option {name}={value}"

    def convert(self, dtype: str, what: str = "") -> str:
        """Says what the file is to hold."""
        return f"store {what or 'the values'} as {dtype} in the file of --data"

    def take_from_column(self) -> str:
        """Says what the file is to hold."""
        return "Store them without the last axis in the file of --data"

    def from_one_hot(self) -> str:
        """Says what the file is to hold, or which option takes it as it is."""
        return (
            "Store the number of each sample's class in the file of --data, or store them as float32 and train with "
            "--loss-option probabilities=true"
        )

    def drop_last(self) -> str:
        """Offers to leave the incomplete last batch out, as the end of a sentence."""
        return f", or leave incomplete batches out ({flag('drop_last')})"

    def untransformed(self, argument: str) -> str:
        """Returns "": transforms of the shell augment, and convert nothing."""
        return ""
