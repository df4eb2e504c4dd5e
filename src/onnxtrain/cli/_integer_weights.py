"""Trains the integer weights of a quantized model with `onnxtrain train --straight-through`."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.cli._output import info
from onnxtrain.passes import canonicalize
from onnxtrain.passes.parameters.integer_weights import constant, integer_weights
from onnxtrain.qat import convert, prepare
from onnxtrain.qat._convert import has_masters
from onnxtrain.recipe import Recipe
from onnxtrain.trainer import Trainer

_PROPERTY = "onnxtrain.integer_weights"
"""Name of the checkpoint property of a run whose exported model gets integer weights again."""


def with_masters(model: ir.Model, recipe: Recipe) -> tuple[ir.Model, bool]:
    """Makes a model's int8 and uint8 weights trainable if `--straight-through` is given.

    With LoRA adapters, the integer weights stay frozen, so the model is not changed.

    Returns:
        The model to train, and True if its integer weights have been replaced with float32 master weights.
    """
    if not recipe.straight_through or recipe.lora is not None:
        return model, False
    count = sum(constant(w.value).size for w in integer_weights(canonicalize(model)) if not w.is_bias)
    if not count:
        return model, False
    info(f"Integer weights: {count:,} are trained, in float32, and rounded to integers in the trained model.")
    return prepare(model), True


def note_masters(trainer: Trainer) -> None:
    """Stores in a new run that its exported model gets integer weights."""
    trainer.state.properties[_PROPERTY] = 1


def with_integers(trainer: Trainer, model: ir.Model) -> ir.Model:
    """Rounds the master weights of an exported model to integers if the run is one of :func:`with_masters`."""
    # A model that returns an early value of the network may have no weights left to round.
    return convert(model) if has_integers(trainer) and has_masters(model) else model


def has_integers(trainer: Trainer) -> bool:
    """True if the exported model of a run gets integer weights."""
    return _PROPERTY in trainer.state.properties
