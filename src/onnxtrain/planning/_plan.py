"""Defines `plan_training`, which measures memory and time of the trainings that a model has."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from onnxtrain._words import argument
from onnxtrain.artifacts import LossSpec, OptimizerSpec, generate_artifacts
from onnxtrain.errors import InputError, NothingToTrain, OnnxTrainError
from onnxtrain.lora import LoraConfig
from onnxtrain.passes import ModelSource, canonicalize, load_model
from onnxtrain.planning._choices import Choice, list_choices
from onnxtrain.planning._measure import Measured, check_sizes, run_steps, write_inputs
from onnxtrain.planning._memory import parse_memory
from onnxtrain.runtime.manifest import parse_manifest
from onnxtrain.training.layer_modes import BatchNormMode, DropoutRatios
from onnxtrain.training.training_graph import Activations, Precision, Profile

_BATCH_SIZE = 32
"""Size of a symbolic first axis, as in `Trainer.fit`."""
_STOP_AT = 4
"""Stop a dry run at this multiple of the given memory: by then the table has shown that it is far too much."""
_SHARE_OF_FREE_MEMORY = 0.8
"""Leave the rest of the free memory of this machine to its other processes."""


@dataclass(frozen=True)
class PlanChoice:
    """One training of a model, with its measured memory and time.

    Attributes:
        name: description of the trained parameters, e.g. "LoRA of rank 8, all linear layers".
        recompute: True if activations are recomputed for the gradients; argument of `generate_artifacts` and `Trainer`.
        requires_grad: names and patterns of the trained parameters, e.g. ["*.bias"]; None for all that train by default
            or, with `lora`, for the adapters alone. Argument of both functions.
        lora: the adapters, e.g. LoraConfig(r=8), or None. Argument of both functions.
        trained: number of trained elements, e.g. 180224.
        share: `trained` divided by the number of elements of all parameters of the model, e.g. 0.01.
        peak: largest memory of the whole process in bytes, interpreter and ONNX Runtime included. If `complete` is
            False, the memory at which the process was stopped: training needs more.
        seconds: median time of a training step with its optimizer step; None if `complete` is False.
        complete: False if the dry run was stopped or failed.
        fits: True if the dry run was completed within the given memory.
        problem: message of an error for which the choice cannot be trained; else empty.
        recommended: True for the recommended choice; at most one has it.
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
    """Makes the package's log give each message once."""
    # Warnings of what an exporter has done to the model would come with each set of artifacts.
    seen: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if text in seen:
            return False
        seen.add(text)
        return True

    logger = logging.getLogger("onnxtrain")
    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


@_each_warning_once()
def plan_training(
    model: ModelSource,
    memory: str | int,
    *,
    loss: LossSpec = None,
    optimizer: OptimizerSpec = "adamw",
    batch_size: int | None = None,
    dims: Mapping[str, int] | None = None,
    ranks: Sequence[int] = (4, 8, 16, 32),
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
) -> list[PlanChoice]:
    """Measures which trainings of a model fit into a memory.

    The choices are all parameters; LoRA adapters of each rank on all linear layers, and on those of attention; the last
    half of the layers; the last layer; biases and norms. Each is measured with and without recomputation, if that
    changes anything. A measurement is a dry run: artifacts are written to a temporary directory, and a new process
    loads them by `onnxtrain.api`, trains a few steps on random inputs, evaluates a batch and saves a checkpoint. So the
    memory is that of a training on a device. A training at the desk (`Trainer`) also holds what builds the graphs.

    The recommended choice is, of those that fit, the one that reaches the largest part of the weights. An adapter
    reaches the weights that it stands beside. Of several ranks it is the highest one; and it recomputes only if the
    training does not fit otherwise.

    Args:
        model: path of a `.onnx` file, `ModelProto` or `onnx_ir.Model`; not changed.
        memory: memory of the device for the whole process: bytes, or a text such as "512MB" or "1.5GiB".
        loss: as in `generate_artifacts`; None if the model's first output is the loss.
        optimizer: as in `generate_artifacts`.
        batch_size: samples of a batch. Default: 32, or what the model has fixed.
        dims: sizes of the other symbolic dimensions, e.g. {"sequence_length": 128}; each must be given.
        ranks: ranks of the adapters.
        requires_grad: names and patterns to choose from; adapters are left out then. None: all that train by default.
        frozen_params: names and patterns of parameters that no choice trains.
        batch_norm: as in `generate_artifacts`.
        dropout: as in `generate_artifacts`.
        straight_through: as in `generate_artifacts`; True for models in int8.
        precision: as in `generate_artifacts`.
        activations: as in `generate_artifacts`.
        profile: as in `generate_artifacts`; "portable" measures the models for browsers and phones.
        additional_output_names: as in `generate_artifacts`: values that are returned stay in memory during a step.
        steps: training steps of a dry run, at least 1. The first one does not count for the time.
        threads: threads per operation. Default: one per core.
        report: called with a line of text before each dry run, e.g. `print`.

    Returns:
        All choices, also those that do not fit.

    Raises:
        InputError: `memory` cannot be read; the size of a dimension is missing or its name unknown.
        NothingToTrain: the model has no parameters to train.
        GraphBuildError: the loss or the optimizer does not fit, or no choice can be built; also DifferentiationError.
        ModelError: the model cannot be loaded.
        OnnxTrainError: this is Windows.
    """
    limit = parse_memory(memory)
    if optimizer is None:
        raise InputError(f"planning: {argument('optimizer')} is None, but a training has one; e.g. 'adamw'")
    for name, number in (("batch_size", batch_size), ("steps", steps)):
        if number is not None and number < 1:
            raise InputError(f"planning: {argument(name)} is {number}; it must be at least 1")
    # Its processes neither tell their peak without packages that a device lacks, nor end by SIGKILL.
    if sys.platform == "win32":
        raise OnnxTrainError("planning: memory is measured on Linux and macOS only; plan there")
    canonical = canonicalize(load_model(model))
    listed = list_choices(model, canonical, requires_grad, frozen_params, ranks)
    if not listed.choices:
        raise NothingToTrain(
            "planning: the model has neither floating-point parameters nor linear layers for adapters"
        )
    settings = {
        "loss": loss,
        "optimizer": optimizer,
        "frozen_params": frozen_params,
        "batch_norm": batch_norm,
        "dropout": dropout,
        "straight_through": straight_through,
        "precision": precision,
        "activations": activations,
        "profile": profile,
        "additional_output_names": additional_output_names,
    }
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
            # The files of one choice alone are on the disk at a time: each set holds the weights.
            with tempfile.TemporaryDirectory(prefix="onnxtrain-plan-") as folder:
                try:
                    _generate(model, choice, recompute, Path(folder), settings)
                    graph = _graph(Path(folder) / "training_model.onnx")
                    # Nothing is worth recomputing here, so that the second row would repeat the first.
                    if graph == plain_graph:
                        continue
                    plain_graph = graph
                    plan.append(_measured(row, measure(Path(folder)), limit))
                except InputError:
                    raise
                except OnnxTrainError as error:
                    # One choice may lack a gradient rule that another does not need.
                    errors.append(error)
                    plan.append(replace(row, problem=str(error)))
                    break
    if len(errors) == len(plan):
        raise errors[0]
    reach = {choice.name: (choice.reached, choice.trained) for choice in listed.choices}
    return list(_with_recommendation(plan, reach))


def _generate(
    model: ModelSource, choice: Choice, recompute: bool, directory: Path, settings: Mapping[str, Any]
) -> None:
    """Writes the artifacts of a choice; `settings` are arguments of `generate_artifacts` that all choices share."""
    generate_artifacts(
        model,
        requires_grad=choice.requires_grad,
        lora=choice.lora,
        recompute=recompute,
        artifact_directory=directory,
        **settings,
    )


def _measured(choice: PlanChoice, measured: Measured, limit: int) -> PlanChoice:
    """Returns a choice with the result of its dry run."""
    if measured.peak is None:
        return choice
    fits = measured.peak <= limit
    return replace(choice, peak=measured.peak, seconds=measured.seconds, complete=True, fits=fits)


def _with_recommendation(
    plan: Sequence[PlanChoice], reach: Mapping[str, tuple[int, int]]
) -> Iterator[PlanChoice]:
    """Yields the choices, of which one is marked; none if none fits."""
    fitting = [choice for choice in plan if choice.fits]
    # Not by the measured times, which a busy machine turns round: recomputing always costs some.
    best = max(fitting, key=lambda choice: (*reach[choice.name], not choice.recompute), default=None)
    for choice in plan:
        yield replace(choice, recommended=choice is best)


def _graph(path: Path) -> bytes:
    """Reads the nodes of a model; its metadata tells how it was made."""
    model = onnx.load(path, load_external_data=False)
    return b"".join(node.SerializeToString(deterministic=True) for node in model.graph.node)


def _free_memory() -> float:
    """Returns the memory that new processes can have, in bytes; infinity where the system does not tell."""
    information = Path("/proc/meminfo")
    if information.exists():
        line = next(
            (line for line in information.read_text().splitlines() if line.startswith("MemAvailable")), None
        )
        return int(line.split()[1]) * 1024 if line else float("inf")
    # macOS tells the whole memory only.
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return float("inf")
