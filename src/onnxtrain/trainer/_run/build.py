"""Builds the models of a training run and opens them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx_ir as ir

from onnxtrain._artifact_files import Describe, Files
from onnxtrain.artifacts import build_and_write, loss_for, returned_outputs
from onnxtrain.op_facts import RANDOM_OPS
from onnxtrain.passes import ModelSource, load_model
from onnxtrain.recipe import LossSpec, Recipe
from onnxtrain.trainer._run.run import Run

# Dropout draws from a generator that each run of the training model seeds.
_STATEFUL = RANDOM_OPS - {"Dropout"}


def build_run(
    model: ModelSource, directory: Path, device: str, threads: int | None, recipe: Recipe, describe: Describe
) -> Run:
    """Generates the artifacts for training a model, and opens them as a run.

    Args:
        model: the model to train.
        directory: directory of the artifacts.
        device: "cpu", "cuda" or "cuda:<index>".
        threads: number of threads per op; None for onnxruntime's default.
        recipe: the training settings, e.g. loss and optimizer.
        describe: function that returns the trainer's settings as properties of the checkpoint.

    Raises:
        OnnxTrainError: the model cannot be trained with these settings.
    """

    def write(path: Path, *, sample_weight: bool) -> None:
        loaded = load_model(model)
        # The training model returns the model's own outputs, too, so that metrics need no second pass.
        returned = [*returned_outputs(loaded.graph, recipe), *(recipe.additional_output_names or ())]
        build_and_write(
            loaded,
            dataclasses.replace(
                recipe, additional_output_names=list(dict.fromkeys(returned)), sample_weight=sample_weight
            ),
            Files(path, describe=describe),
        )

    write(directory, sample_weight=False)
    # The run keeps the function: a later fit with sample weights needs models that take them.
    return Run(directory, device, threads, write)


def random_ops(models: Sequence[ir.Model]) -> list[str]:
    """Lists the models' ops whose random state is inside the session and cannot be saved in a checkpoint."""
    return sorted({node.op_type for model in models for node in _all_nodes(model)} & _STATEFUL)


def _all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Yields the nodes of the graph, its subgraphs and the model's functions."""
    yield from ir.traversal.RecursiveGraphIterator(model.graph)
    # A Dropout inside of a function is inlined later and would keep its seed.
    for function in model.functions.values():
        yield from ir.traversal.RecursiveGraphIterator(function)


def loss_name(spec: LossSpec) -> str:
    """Returns the class name of a loss, which determines the default metrics; "" for the model's own loss."""
    loss = loss_for(spec)
    return "" if loss is None else type(loss).__name__
