"""Defines `plan_training`, which measures the memory and the step time of a model's training configurations."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from onnxtrain._dialects import explains_arguments
from onnxtrain._printable import get_logger
from onnxtrain._words import argument
from onnxtrain.artifacts import generate_artifacts
from onnxtrain.errors import InputError, NothingToTrain, OnnxTrainError
from onnxtrain.lora import LoraConfig
from onnxtrain.passes import ModelSource, canonicalize, load_model
from onnxtrain.planning._choices import list_choices
from onnxtrain.planning._measure import Measured, check_sizes, run_steps, write_inputs
from onnxtrain.planning._memory import parse_memory
from onnxtrain.recipe import (
    Activations,
    BatchNormMode,
    DropoutRatios,
    LossSpec,
    OptimizerSpec,
    Precision,
    Profile,
    Recipe,
    filled_recipe,
)
from onnxtrain.runtime.manifest import parse_manifest

RANKS = (4, 8, 16, 32)
"""Ranks of the adapters that a plan measures by default."""
_BATCH_SIZE = 32
"""Size of a symbolic first axis, as in `Trainer.fit`."""
_STOP_AT = 4
"""A dry run is stopped at this multiple of the given memory: the choice does not fit anyway."""
_SHARE_OF_FREE_MEMORY = 0.8
"""Fraction of this machine's free memory that a dry run may use; the rest is left to other processes."""


@dataclass(frozen=True)
class PlanChoice:
    """A training configuration of a model, with its measured memory and time.

    To train with it, pass `recompute`, `requires_grad` and `lora` to `generate_artifacts` or `Trainer`.

    Attributes:
        name: description of the trained parameters, e.g. "LoRA of rank 8, all linear layers".
        recompute: True if activations are recomputed in the backward pass.
        requires_grad: names and patterns of the trained parameters, e.g. ["*.bias"]. None trains only the adapters if
            `lora` is set, otherwise all parameters that train by default.
        lora: configuration of the adapters, e.g. LoraConfig(r=8); None without adapters.
        trained: number of trained elements, e.g. 180224.
        share: `trained` divided by the number of elements in all parameters of the model, e.g. 0.01.
        peak: peak memory of the whole process in bytes, including the Python interpreter and ONNX Runtime. If the dry
            run was stopped because it used too much memory, `peak` is its memory limit, and training needs more. If
            `problem` is set, `peak` is meaningless.
        seconds: median time of a training step in seconds, including the optimizer step; None if `complete` is False.
        complete: False if the dry run was stopped or failed.
        fits: True if the dry run was completed within the given memory.
        problem: error message if the choice cannot be trained, otherwise empty.
        recommended: True for the recommended choice; False for all choices if none fits.
    """

    name: str
    recompute: bool
    requires_grad: list[str] | None
    lora: LoraConfig | None
    trained: int
    share: float
    peak: int
    seconds: float | None
    complete: bool
    fits: bool
    problem: str = ""
    recommended: bool = False


@contextmanager
def _each_warning_once() -> Iterator[None]:
    """Context manager that suppresses repeated messages from the package's logger."""
    # Otherwise, warnings about the exported model would be repeated for each set of artifacts.
    seen: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if text in seen:
            return False
        seen.add(text)
        return True

    logger = get_logger()
    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


@_each_warning_once()
@explains_arguments
def plan_training(
    model: ModelSource,
    memory: str | int,
    *,
    loss: LossSpec = None,
    optimizer: OptimizerSpec = "adamw",
    batch_size: int | None = None,
    dims: Mapping[str, int] | None = None,
    ranks: Sequence[int] = RANKS,
    requires_grad: list[str] | None = None,
    frozen_params: list[str] | None = None,
    batch_norm: BatchNormMode = "as_exported",
    dropout: DropoutRatios = None,
    straight_through: bool = False,
    precision: Precision = "fp32",
    activations: Activations = "float",
    profile: Profile = "default",
    additional_output_names: list[str] | None = None,
    steps: int = 3,
    threads: int | None = None,
    report: Callable[[str], None] | None = None,
    recipe: Recipe | None = None,
) -> list[PlanChoice]:
    """Measures which training configurations of a model fit into a given amount of memory.

    It tries training all parameters; LoRA adapters of each rank, on all linear layers or only on attention layers; the
    last layer; the last half of the layers; and biases and norms. It measures each choice with and without
    recomputation, if the training graphs differ. A measurement is a dry run: artifacts are written to a temporary
    directory, and a new process loads them with `onnxtrain.api`, trains a few steps on random inputs, evaluates a batch
    and saves a checkpoint. The measured memory is therefore the memory needed to train on a device. `Trainer` needs
    more, because it also builds the graphs.

    Of the choices that fit, the one that can change the most weights is recommended; LoRA adapters count as changing
    all weights of their layers. Among LoRA ranks, the highest is recommended. Recomputation is only recommended for
    choices that do not fit without it.

    Args:
        model: path of a `.onnx` file, `ModelProto` or `onnx_ir.Model`; it is not modified.
        memory: memory of the device for the whole process, in bytes or as a string such as "512MB" or "1.5GiB".
        loss: see :class:`onnxtrain.Recipe`.
        optimizer: see :class:`onnxtrain.Recipe`.
        batch_size: batch size. Default: the model's fixed batch size, or 32.
        dims: sizes of the other symbolic dimensions, e.g. {"sequence_length": 128}; required for all of them.
        ranks: LoRA ranks of the adapters.
        requires_grad: names and patterns of the parameters to choose from; setting it rules out adapters. Default: all
            parameters that train by default, and adapters.
        frozen_params: names and patterns of parameters that no choice trains.
        batch_norm: see :class:`onnxtrain.Recipe`.
        dropout: see :class:`onnxtrain.Recipe`.
        straight_through: see :class:`onnxtrain.Recipe`; True for int8 models.
        precision: see :class:`onnxtrain.Recipe`.
        activations: see :class:`onnxtrain.Recipe`.
        profile: see :class:`onnxtrain.Recipe`; "portable" measures the models for browsers and phones.
        additional_output_names: see :class:`onnxtrain.Recipe`; returned values stay in memory during a step.
        steps: number of training steps of a dry run, at least 1. The first one is not timed.
        threads: number of threads per op. Default: one per core.
        report: function that is called with a line of text before each dry run, e.g. `print`.
        recipe: training configuration, instead of the arguments of the same names. Its `lora` and `recompute` are
            ignored, because the plan varies them.

    Returns:
        All choices, including those that need more than `memory`.

    Raises:
        InputError: `memory` cannot be parsed, `optimizer` is None, the size of a symbolic dimension is missing, or
            `dims` names an unknown dimension.
        NothingToTrain: the model has no parameters to train.
        GraphBuildError: the loss or the optimizer does not suit the model, or no choice can be built.
        DifferentiationError: no choice can be differentiated.
        ModelError: the model cannot be loaded.
        OnnxTrainError: the platform is Windows.
    """
    recipe = filled_recipe(
        plan_training,
        recipe,
        {
            "loss": loss,
            "optimizer": optimizer,
            "requires_grad": requires_grad,
            "frozen_params": frozen_params,
            "batch_norm": batch_norm,
            "dropout": dropout,
            "straight_through": straight_through,
            "precision": precision,
            "activations": activations,
            "profile": profile,
            "additional_output_names": additional_output_names,
        },
    )
    limit = parse_memory(memory)
    if recipe.optimizer is None:
        raise InputError(f"planning: {argument('optimizer')} is None, but training needs one, e.g. 'adamw'")
    for name, number in (("batch_size", batch_size), ("steps", steps)):
        if number is not None and number < 1:
            raise InputError(f"planning: {argument(name)} is {number}; it must be at least 1")
    # On Windows, processes report their peak only with packages that a device lacks, and don't end by SIGKILL.
    if sys.platform == "win32":
        raise OnnxTrainError("planning: memory is measured on Linux and macOS only; plan there")
    canonical = canonicalize(load_model(model))
    listed = list_choices(model, canonical, recipe.requires_grad, recipe.frozen_params, ranks)
    if not listed.choices:
        raise NothingToTrain(
            "planning: the model has neither floating-point parameters nor linear layers for adapters"
        )
    stop_at = int(min(_STOP_AT * limit, _SHARE_OF_FREE_MEMORY * _free_memory()))

    def measure(directory: Path) -> Measured:
        manifest = parse_manifest((directory / "manifest.json").read_bytes(), "manifest of the dry run")
        check_sizes(manifest, batch_size, dims or {})
        write_inputs(directory / "inputs.npz", canonical, manifest, batch_size or _BATCH_SIZE, dims or {})
        return run_steps(directory, steps, stop_at, threads)

    plan: list[PlanChoice] = []
    errors: list[OnnxTrainError] = []
    for number, choice in enumerate(listed.choices):
        row = PlanChoice(
            choice.name, False, choice.requires_grad, choice.lora, choice.trained, choice.trained / listed.elements,
            stop_at, None, complete=False, fits=False,
        )  # fmt: skip
        plain_graph = b""
        for recompute in (False, True):
            if report is not None:
                way = ", recomputing" if recompute else ""
                report(f"{2 * number + recompute + 1} of {2 * len(listed.choices)}: {choice.name}{way}")
            row = replace(row, recompute=recompute)
            # Only one choice's files exist at a time, because each set contains the weights.
            with tempfile.TemporaryDirectory(prefix="onnxtrain-plan-") as folder:
                try:
                    # Learning rates take no memory, and a pattern may match no parameter of this choice.
                    varied = replace(
                        recipe,
                        requires_grad=choice.requires_grad,
                        lora=choice.lora,
                        recompute=recompute,
                        layer_decay=None,
                        learning_rate_scale=None,
                    )
                    generate_artifacts(model, artifact_directory=folder, recipe=varied)
                    graph = _graph(Path(folder) / "training_model.onnx")
                    # If nothing is worth recomputing, the second row would repeat the first.
                    if graph == plain_graph:
                        continue
                    plain_graph = graph
                    plan.append(_measured(row, measure(Path(folder)), limit))
                except InputError:
                    raise
                except OnnxTrainError as error:
                    # A gradient rule may be missing that other choices do not need.
                    errors.append(error)
                    plan.append(replace(row, problem=str(error)))
                    break
    if len(errors) == len(plan):
        raise errors[0]
    reach = {choice.name: (choice.reached, choice.trained) for choice in listed.choices}
    return list(_with_recommendation(plan, reach))


def _measured(choice: PlanChoice, measured: Measured, limit: int) -> PlanChoice:
    """Returns a choice with its measured memory and time; returns it unchanged if the dry run was stopped.

    Args:
        choice: the choice before the dry run.
        measured: result of the dry run.
        limit: memory in bytes that the choice must fit into.
    """
    if measured.peak is None:
        return choice
    fits = measured.peak <= limit
    return replace(choice, peak=measured.peak, seconds=measured.seconds, complete=True, fits=fits)


def _with_recommendation(
    plan: Sequence[PlanChoice], reach: Mapping[str, tuple[int, int]]
) -> Iterator[PlanChoice]:
    """Yields all choices; of those that fit into memory, the choice with the largest `reach` is marked as recommended.

    At equal reach, this is the choice without recomputation, because it is faster. If no choice fits into memory, none
    is marked.

    Args:
        plan: all choices with their measurements.
        reach: the number of elements that a choice can change, and the number that it trains, by the choice's name.
    """
    fitting = [choice for choice in plan if choice.fits]
    # Not by measured time, which is unreliable on a busy machine: recomputation is always slower.
    best = max(fitting, key=lambda choice: (*reach[choice.name], not choice.recompute), default=None)
    for choice in plan:
        yield replace(choice, recommended=choice is best)


def _graph(path: Path) -> bytes:
    """Serializes the nodes of a model file, to compare graphs.

    The metadata is left out, because it depends on how the model was built.
    """
    model = onnx.load(path, load_external_data=False)
    return b"".join(node.SerializeToString(deterministic=True) for node in model.graph.node)


def _free_memory() -> float:
    """Returns the memory available to new processes, in bytes; on macOS, the total memory; infinity if unknown."""
    information = Path("/proc/meminfo")
    if information.exists():
        line = next(
            (line for line in information.read_text().splitlines() if line.startswith("MemAvailable")), None
        )
        return int(line.split()[1]) * 1024 if line else float("inf")
    # macOS only reports the total memory.
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return float("inf")
