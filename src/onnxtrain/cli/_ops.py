"""Runs `onnxtrain ops`."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import onnx_ir as ir

from onnxtrain.autodiff import OpCoverage, add_gradients, coverage, coverage_of
from onnxtrain.cli._command_options import OpsOptions
from onnxtrain.cli._output import print_json, print_next, print_table, table
from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.errors import GraphBuildError, InputError, NothingToTrain, OnnxTrainError
from onnxtrain.losses import MSELoss, attach_loss
from onnxtrain.passes import canonicalize, infer_shapes, load_model
from onnxtrain.passes.portable import Obstacle, draw_from_input
from onnxtrain.passes.profiles import PROFILES
from onnxtrain.recipe import Recipe
from onnxtrain.selection import is_float, select_parameters
from onnxtrain.training.key_value_cache import trained_outputs
from onnxtrain.training.training_graph import build_training_graphs

_MEANING = {
    "rule": "gradient rule",
    "function": "through its function body",
    "nondifferentiable": "no gradient flows",
    "not yet": "not yet",
    "unknown": "not known",
}


def run_command(options: OpsOptions) -> None:
    """Lists all ops, or checks a model; exits with code 1 if the model cannot be trained.

    Raises:
        InputError: there is no such status, domain or profile.
    """
    if options.model is None:
        list_ops(options.domain, options.status, options.json)
    else:
        model_ops(options.model, options.json, options.profile)


def list_ops(domain: str, status: str | None, json: bool) -> None:
    """Prints one row per op of a domain.

    Args:
        domain: the domain, e.g. "com.microsoft"; "" for the ONNX standard domain.
        status: status of the ops to print, e.g. "rule"; None for all.
        json: True to print JSON.

    Raises:
        InputError: there is no such status or domain.
    """
    # A shell splits words at blanks, so that completion offers "not-yet".
    status = None if status is None else status.replace("-", " ")
    if status is not None and status not in _MEANING:
        raise InputError(f"--status is {status!r}; choose from {', '.join(_MEANING)}")
    # "ai.onnx" is another name of the standard domain.
    rows = coverage("" if domain == "ai.onnx" else domain)
    if not rows:
        raise InputError(
            f"--domain is {domain!r}, in which onnxruntime has no ops; try com.microsoft or ai.onnx.ml"
        )
    rows = [row for row in rows if status is None or row.status == status]
    if json:
        print_json([asdict(row) for row in rows])
        return
    columns = ("op", "gradient", "differentiable inputs", "remark")
    lines = [(row.op_type, _MEANING[row.status], ", ".join(row.inputs), row.reason) for row in rows]
    counts = Counter[str](row.status for row in rows)
    print_table(table(f"Ops of {domain}" if domain else "Ops of opsets 21 to 28", columns, lines))
    print_table(", ".join(f"{_MEANING[name]}: {counts[name]}" for name in _MEANING if counts[name]))
    print_next("ops", "MODEL")


def model_ops(path: Path, json: bool, profile: str | None = None) -> None:
    """Prints the ops of a model, and whether it can be trained; exits with code 1 if it cannot.

    To check this, it builds the training models with a loss on the first floating-point output. If `profile` is given,
    it also prints the nodes that the profile does not support, and exits with code 1 if there are any.

    Raises:
        InputError: there is no such profile.
    """
    if profile is not None and profile not in PROFILES:
        raise InputError(f"--profile is {profile!r}; choose from {', '.join(PROFILES)}")
    model = canonicalize(load_model(path))
    # Counted in the canonical form, for which gradients are built.
    counts = Counter((node.domain, node.op_type) for node in model.graph)
    problem, parameters = None, []
    try:
        # The models are built as a test, because the table of ops ignores attributes, shapes and subgraphs.
        parameters = _trainable(model)
    except OnnxTrainError as error:
        problem = str(error)
    rows = [
        {
            "op": op if not domain else f"{domain}::{op}",
            "nodes": count,
            **_describe(coverage_of(domain, op), domain),
        }
        for (domain, op), count in sorted(counts.items())
    ]
    obstacles = _obstacles(model, profile) if profile else []
    if json:
        document = {"model": str(path), "trainable": problem is None, "problem": problem, "ops": rows}
        listed = {"profile": profile, "fits": not obstacles, "obstacles": [asdict(o) for o in obstacles]}
        print_json(document | (listed if profile else {}))
    else:
        lines = [tuple(row.values()) for row in rows]
        print_table(table(f"Ops of {path.name}", ("op", "nodes", "gradient", "remark"), lines, right=(1,)))
        print_table(
            f"Cannot be trained: {problem}" if problem else f"Can be trained ({len(parameters)} parameters)."
        )
        if obstacles:
            lines = [(obstacle.op, obstacle.node, obstacle.reason) for obstacle in obstacles]
            print_table(table(f"Not in profile {profile}", ("op", "node", "reason"), lines))
        elif profile:
            print_table(f"Fits profile {profile}.")
        if not problem:
            print_next("train", path, "--data", "FILE", "--loss", "NAME")
    if problem or obstacles:
        sys.exit(1)


def _obstacles(model: ir.Model, profile: str) -> list[Obstacle]:
    """Returns the nodes of a model and of its gradient graph that a profile does not support."""
    model, hosts = model.clone(), PROFILES[profile]
    try:
        # Only Dropout: other random ops remain in the eval model.
        draw_from_input(model, hosts.drawn & {"Dropout"})
    except GraphBuildError as error:
        return [Obstacle("Dropout", "", str(error))]
    # Gradients are checked, too: they may need ops that the model lacks. A model without gradients is checked alone.
    with contextlib.suppress(OnnxTrainError, StopIteration):
        model = _with_gradients(model.clone())
    return hosts.obstacles(hosts.rewrite(infer_shapes(model)))


def _with_gradients(model: ir.Model) -> ir.Model:
    """Adds the gradients of a model's first floating-point output. Returns the new model; `model` may be changed."""
    output = next(v for v in model.graph.outputs if v.dtype is not None and v.dtype.is_floating_point())
    names = select_parameters(model, None, None).trainable
    return add_gradients(model, str(output.name), names, cotangent="onnxtrain.cotangent")[0]


def _describe(row: OpCoverage, domain: str) -> dict[str, str]:
    remark = row.reason or ("not an op of the ONNX standard" if domain and row.status == "unknown" else "")
    return {"gradient": _MEANING[row.status], "remark": remark}


def _trainable(model: ir.Model) -> list[str]:
    """Returns the names of a model's trained parameters, after checking that its training models can be built.

    The loss is the first floating-point output if it is a scalar, otherwise mean squared error on that output.

    Raises:
        OnnxTrainError: the model cannot be trained. `Trainer` would raise the same error.
    """
    model = model.clone()
    output = next((value for value in model.graph.outputs if is_float(value)), None)
    if output is None:
        raise NothingToTrain("it has no floating-point output")
    outputs = trained_outputs(model.graph)
    loss = output
    # A scalar output is taken as the loss.
    if static_dims(output) != ():
        loss = attach_loss(Emitter(model.graph, functions=model.functions), MSELoss(), str(output.name))
    else:
        outputs = [name for name in outputs if name != output.name]
    # Inference mode, to silence warnings about layer modes: the command has no options for them.
    recipe = Recipe(additional_output_names=outputs, batch_norm="inference")
    return build_training_graphs(model, str(loss.name), recipe, inference_outputs=outputs).trainable
