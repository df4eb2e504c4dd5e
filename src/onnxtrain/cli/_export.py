"""Exports the trained model of a run, including the encoding of table columns."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from onnxtrain.cli._integer_weights import has_integers, with_integers
from onnxtrain.cli._loss import label_targets
from onnxtrain.losses import loss_class
from onnxtrain.passes import load_model, save_model
from onnxtrain.tables import TableEncoder
from onnxtrain.trainer import Trainer


def export_model(
    trainer: Trainer,
    encoder: TableEncoder | None,
    path: Path,
    outputs: Sequence[str] | None = None,
    *,
    include_preprocessing: bool = False,
) -> list[str]:
    """Writes the trained model to an .onnx file.

    Args:
        trainer: trainer of the run.
        encoder: the run's table encoder, which is placed before the network; None to write only the network.
        path: file to write.
        outputs: names of the values that the written model returns; None for the network's outputs.
        include_preprocessing: True to write the preprocessing of images into the model.

    Returns:
        The output names of the written model.
    """
    chosen = list(outputs) if outputs else None
    if encoder is None and not has_integers(trainer):
        trainer.export(path, chosen, include_preprocessing=include_preprocessing)
        return chosen or trainer.outputs
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        network = Path(folder) / "network.onnx"
        with trainer._state.workers.alone():
            trainer.export(network, chosen, include_preprocessing=include_preprocessing)
        model = with_integers(trainer, load_model(network))
        if encoder is None:
            save_model(model, path)
            return chosen or trainer.outputs
        activation = loss_class(trainer.loss_name).activation
        # Scores of sequences, which no table has.
        activation = None if activation == "softmax_last" else activation
        targets = label_targets(trainer)
        classifies = bool(targets) and (activation == "sigmoid" or targets[0].class_labels is not None)
        model = encoder.attach(
            model, logits=trainer.prediction if classifies else None, activation=activation
        )
        save_model(model, path)
        return [str(value.name) for value in model.graph.outputs]
