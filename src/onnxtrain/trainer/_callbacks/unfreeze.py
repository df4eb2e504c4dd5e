"""Unfreezes parameters after some epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnxtrain.errors import InputError
from onnxtrain.passes import load_model
from onnxtrain.selection import match_names, some_names
from onnxtrain.trainer._trainer import Callback, Trainer
from onnxtrain.training.layer_depth import layers_behind


class Unfreeze(Callback):
    """Keeps parameters frozen, and trains them after some epochs: first the head, then the rest of a model.

    A frozen parameter doesn't move and isn't decayed. When it is unfrozen, its optimizer state begins, as if the
    parameter had been added to an optimizer of PyTorch. The running statistics of frozen BatchNormalization layers
    don't change. Epochs are counted over all fits of the trainer. Pass one callback for each group; if a parameter
    matches several of them, the first one decides.

    Args:
        epoch: number of epochs after which the parameters are trained, e.g. 3.
        patterns: names or patterns of the parameters, e.g. "layer4.*". Default: all but the head, i.e. the last layer
            on the way to the model's outputs.

    Example:
        >>> from onnxtrain.trainer import Unfreeze
        >>> callbacks = [Unfreeze(1, "layer4.*"), Unfreeze(3)]
    """

    def __init__(self, epoch: int, patterns: str | Sequence[str] | None = None) -> None:
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 1:
            raise InputError(f"Unfreeze: epoch must be an integer from 1, received {epoch!r}.")
        names = [patterns] if isinstance(patterns, str) else patterns
        if names is not None and not (
            isinstance(names, Sequence) and names and all(isinstance(name, str) for name in names)
        ):
            raise InputError(
                f"Unfreeze: patterns must be names or patterns of parameters, received {patterns!r}."
            )
        self.epoch = epoch
        self.patterns = None if names is None else list(names)

    def _frozen_until(self, trainer: Trainer) -> Mapping[str, int]:
        store = trainer.state._store
        trained, statistics = list(store.trainable), list(store.statistics)
        if self.patterns is None:
            head = _head(trainer, trained)
            return dict.fromkeys((name for name in [*trained, *statistics] if name not in head), self.epoch)
        matched = match_names(self.patterns, trained)
        if unmatched := next((pattern for pattern, names in matched.items() if not names), None):
            raise InputError(
                f"Unfreeze: no trained parameter matches {unmatched!r}; the trained parameters are "
                f"{some_names(trained)}."
            )
        of_layers = match_names(self.patterns, statistics)
        return dict.fromkeys(
            (name for found in (matched, of_layers) for names in found.values() for name in names), self.epoch
        )


def _head(trainer: Trainer, trained: Sequence[str]) -> set[str]:
    """Returns the names of the parameters of the last layer.

    Raises:
        InputError: the run has no inference model.
    """
    run = trainer._state.run
    path = None if run.files.inference_model is None else run.directory / run.files.inference_model
    if path is None or not path.is_file():
        raise InputError(
            "Unfreeze: the models return only the loss, so that the head is unknown. Pass the names or patterns of the "
            "parameters that are frozen at first."
        )
    inputs = {spec.name for spec in trainer.manifest.inputs} | set(trainer.manifest.inference_inputs)
    behind = layers_behind(load_model(path), trained, inputs)
    return {name for name, count in behind.items() if count == 0}
