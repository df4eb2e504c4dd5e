"""Builds the models of a training run and opens them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from onnxtrain.artifacts import generate_artifacts, returned_outputs
from onnxtrain.lora import LoraConfig
from onnxtrain.losses import make_loss
from onnxtrain.op_facts import RANDOM_OPS
from onnxtrain.passes import ModelSource, load_model
from onnxtrain.recipe import (
    Activations,
    BatchNormMode,
    DropoutRatios,
    LossSpec,
    LossType,
    OptimizerSpec,
    Precision,
    Profile,
    Recipe,
)
from onnxtrain.trainer._run.run import Run

# Dropout draws from a generator that each run of the training model seeds.
_STATEFUL = RANDOM_OPS - {"Dropout"}


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Arguments of `Trainer` that decide how its models are built.

    The fields from `requires_grad` on have the names of the arguments of `generate_artifacts` that they set.

    Attributes:
        loss, optimizer: objects or names, e.g. "cross_entropy", "adamw".
        clip_grad_norm: largest L2 norm of all gradients together; None for no limit.
        clip_grad_value: largest absolute value of an element of a gradient; None for no limit.
        requires_grad, frozen_params: names or patterns of parameters, e.g. ["fc.*"].
        batch_norm: mode of BatchNormalization and Dropout, e.g. "training", or modes by patterns.
        dropout: ratio of Dropout, e.g. 0.1, or ratios by patterns; None for the Dropout of the file.
        straight_through: pass gradients through rounding unchanged.
        precision: "fp32" or "bf16".
        recompute: recompute activations in the backward pass.
        sparse_gradients: names or patterns of embeddings that get row gradients.
        activations: "float" or "deployed".
        profile: "default" or "portable".
        loss_input_names: outputs that the loss reads; None for the first.
        lora: adapters to train; None for none.
    """

    loss: LossSpec
    optimizer: OptimizerSpec
    clip_grad_norm: float | None
    clip_grad_value: float | None
    requires_grad: Sequence[str] | str | None
    frozen_params: Sequence[str] | str | None
    batch_norm: BatchNormMode
    dropout: DropoutRatios
    straight_through: bool
    precision: Precision
    recompute: bool
    sparse_gradients: Sequence[str] | str | None
    activations: Activations
    profile: Profile
    loss_input_names: Sequence[str] | str | None
    lora: LoraConfig | None

    def __post_init__(self) -> None:
        # The dataclass is frozen; only its constructor may normalise what it was given.
        for name in ("requires_grad", "frozen_params", "sparse_gradients", "loss_input_names"):
            object.__setattr__(self, name, name_list(getattr(self, name)))

    def write(self, model: ModelSource, directory: Path, *, sample_weight: bool) -> None:
        """Writes the artifacts of a model to `directory`; the model's own outputs come after the loss.

        Raises:
            OnnxTrainError: as `generate_artifacts`.
        """
        loaded = load_model(model)
        recipe = Recipe(
            **{entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)},
            sample_weight=sample_weight,
        )
        recipe = dataclasses.replace(recipe, additional_output_names=returned_outputs(loaded.graph, recipe))
        generate_artifacts(loaded, artifact_directory=directory, recipe=recipe)


def build_run(
    model: ModelSource, directory: Path, device: str, threads: int | None, settings: ModelSettings
) -> Run:
    """Writes the artifacts of a model to `directory` and opens them. Raises OnnxTrainError: as `generate_artifacts`."""
    write = functools.partial(settings.write, model)
    write(directory, sample_weight=False)
    # The run keeps the function: a later fit with sample weights needs models that take them.
    return Run(directory, device, threads, write)


def random_ops(*paths: Path) -> list[str]:
    """Lists the ops of models whose random numbers have a state in the session, which no checkpoint can hold."""
    return sorted({node.op_type for path in paths for node in _all_nodes(load_model(path))} & _STATEFUL)


def _all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Yields the nodes of the graph, its subgraphs and the model's functions."""
    yield from ir.traversal.RecursiveGraphIterator(model.graph)
    # A Dropout inside of a function is inlined later and would keep its seed.
    for function in model.functions.values():
        yield from ir.traversal.RecursiveGraphIterator(function)


def name_list(names: Sequence[str] | str | None) -> list[str] | None:
    """Wraps a single name in a list; None stays None."""
    # A string is a sequence of names, too, of one letter each.
    return [names] if isinstance(names, str) else None if names is None else list(names)


def loss_name(spec: LossSpec) -> str:
    """Names the class of a loss, by which suitable metrics are found; empty for the model's own loss."""
    if spec is None:
        return ""
    if isinstance(spec, LossType):
        return spec.name
    return type(make_loss(spec) if isinstance(spec, str) else spec).__name__
