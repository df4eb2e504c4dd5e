"""Words of messages for a shell: options in place of arguments of the Python API."""

from __future__ import annotations

from onnxtrain._words import Words
from onnxtrain.cli._declared import flag, options_of
from onnxtrain.cli._options import PlanOptions
from onnxtrain.cli._train_options import TrainOptions


class ShellWords(Words):
    """Names arguments of the Python API by the options of `onnxtrain train`.

    >>> words = ShellWords()
    >>> words.argument("clip_grad_norm", 1.0), words.argument("batch_size"), words.argument("overwrite", True)
    ('--clip-norm 1.0', '--batch-size', '--overwrite')
    >>> words.argument("loss_input_names", ["logits"])
    '--loss-input logits'
    """

    def argument(self, name: str, *value: object) -> str:
        """Names the option that sets an argument; the argument itself where no option does."""
        # Those of `train` are a superset of those of `artifacts`.
        for option, declared in {**options_of(PlanOptions), **options_of(TrainOptions)}.items():
            if name == (declared.rule.python or option):
                # A truth value is the option alone: `--overwrite`, not `--overwrite True`.
                # A list is one value each: `--loss-input logits`.
                items = [
                    str(v)
                    for one in value
                    if one is not True
                    for v in (one if isinstance(one, list) else [one])
                ]
                return " ".join([flag(option), *items])
        return super().argument(name, *value)

    def dynamic_batch(self, function: str = "Trainer") -> str:
        """Names the option that makes a fixed batch dynamic."""
        return f"pass {flag('dynamic_batch')}"

    def resume(self, directory: object, where: str = "") -> str:
        """Writes the command that goes on with a run."""
        return f"Go on {where}with: onnxtrain train {directory} --data FILE"

    def drop_last(self) -> str:
        """Offers to leave the incomplete last batch out, as the end of a sentence."""
        return f", or leave incomplete batches out ({flag('drop_last')})"

    def untransformed(self, argument: str) -> str:
        """Returns "": transforms of the shell augment, and convert nothing."""
        return ""
