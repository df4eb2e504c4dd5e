"""From a model to an opened training run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx_ir as ir

from onnxtrain.artifacts import (
    LossSpec,
    LossType,
    OptimizerSpec,
    OptimType,
    generate_artifacts,
    optimizer_for,
)
from onnxtrain.errors import GraphBuildError
from onnxtrain.losses import make_loss
from onnxtrain.op_facts import RANDOM_OPS
from onnxtrain.optimizers import ClipGradNorm, ClipGradValue, Optimizer, make_optimizer
from onnxtrain.passes import ModelSource, load_model
from onnxtrain.trainer._run import Run
from onnxtrain.training.layer_modes import BatchNormMode
from onnxtrain.training.training_graph import Precision

# Dropout is random too, but `_forget_seeds` makes it draw from the session's generator, whose state a checkpoint holds.
_STATEFUL = RANDOM_OPS - {"Dropout"}


def build_run(
    model: ModelSource,
    directory: Path,
    device: str,
    threads: int | None,
    *,
    loss: LossSpec,
    optimizer: OptimizerSpec,
    requires_grad: Sequence[str] | None,
    frozen_params: Sequence[str] | None,
    clip_grad_norm: float | None,
    clip_grad_value: float | None,
    batch_norm: BatchNormMode,
    straight_through: bool,
    precision: Precision,
    recompute: bool,
    sparse_gradients: Sequence[str] | None,
    loss_input_names: Sequence[str] | None,
) -> Run:
    """Writes the artifacts of a model to `directory` and opens them; its own outputs come after the loss.

    Raises:
        OnnxTrainError: as `generate_artifacts`.
    """

    def write(directory: Path, *, sample_weight: bool) -> None:
        loaded = load_model(model)
        _forget_seeds(loaded)
        outputs = [str(value.name) for value in loaded.graph.outputs]
        if loss is None:  # the first output is the loss itself
            outputs.remove((loss_input_names or outputs)[0])
        generate_artifacts(
            loaded,
            requires_grad=None if requires_grad is None else list(requires_grad),
            frozen_params=None if frozen_params is None else list(frozen_params),
            loss=loss,
            optimizer=with_clipping(optimizer, clip_grad_norm, clip_grad_value),
            artifact_directory=directory,
            additional_output_names=outputs,
            loss_input_names=None if loss_input_names is None else list(loss_input_names),
            batch_norm=batch_norm,
            straight_through=straight_through,
            precision=precision,
            recompute=recompute,
            sparse_gradients=None if sparse_gradients is None else list(sparse_gradients),
            sample_weight=sample_weight,
        )

    write(directory, sample_weight=False)
    return Run(directory, device, threads, write)


def _forget_seeds(model: ir.Model) -> None:
    """Makes Dropout draw from ONNX Runtime's generator, which the trainer seeds for each step.

    With a seed of its own a node has a state of its own, which no checkpoint can hold.
    """
    for node in _all_nodes(model):
        if node.op_type == "Dropout" and node.domain == "":
            node.attributes.pop("seed", None)


def random_ops(path: Path) -> list[str]:
    """Returns the ops of a model whose random numbers have a state in the session, which no checkpoint can hold."""
    return sorted({node.op_type for node in _all_nodes(load_model(path))} & _STATEFUL)


def _all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Yields the nodes of the graph, its subgraphs and the model's functions."""
    yield from ir.traversal.RecursiveGraphIterator(model.graph)
    for function in model.functions.values():
        yield from ir.traversal.RecursiveGraphIterator(function)


def name_list(given: Sequence[str] | str | None) -> Sequence[str] | None:
    """Returns a single name as a list of one: a string is a sequence of names too, of one letter each."""
    return [given] if isinstance(given, str) else given


def with_clipping(spec: OptimizerSpec, norm: float | None, value: float | None) -> OptimizerSpec:
    """Returns the optimizer of a name with PyTorch's defaults, or an object as it is, with gradient clipping.

    An `OptimType`, a name of onnxruntime-training, has the defaults of that package.

    Raises:
        GraphBuildError: Both ways of clipping are asked for, or the optimizer clips already, or is a block.
    """
    if isinstance(spec, str):
        spec = make_optimizer(spec)
    if isinstance(spec, OptimType):
        spec = optimizer_for(spec)
    if norm is None and value is None:
        return spec
    if norm is not None and value is not None:
        raise GraphBuildError("choosing an optimizer: pass clip_grad_norm or clip_grad_value, not both")
    if not isinstance(spec, Optimizer) or spec.clip_grad is not None:
        raise GraphBuildError(
            f"choosing an optimizer: clip_grad_norm and clip_grad_value do not go together with {spec!r}; "
            "set its own "
            "clip_grad"
        )
    return dataclasses.replace(
        spec, clip_grad=ClipGradNorm(norm) if norm is not None else ClipGradValue(value or 0)
    )


def loss_name(spec: LossSpec) -> str:
    """Returns the class name of a loss, by which suitable metrics are found."""
    if isinstance(spec, LossType):
        return spec.name
    return type(make_loss(spec) if isinstance(spec, str) else spec).__name__
