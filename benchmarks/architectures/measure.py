"""Trains one architecture for two steps in ORTModule, in eager PyTorch and in eager PyTorch in float64.

Prints a JSON object: what ran where, and how far outputs, gradients and buffers are from float64.

Usage: python measure.py NAME [--verbose]
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import numpy
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import load

import onnxtrain.ortmodule.module._engine  # noqa: F401  before the models import what changes Dynamo
from onnxtrain.ortmodule import ORTModule

FACTOR, FLOOR = 10, 1e-6
"""An error is no more than that of eager float32 times the factor, plus the floor times the size of the values."""
UNSTABLE = 1e-2
"""If eager float32 is further than this from float64 (other random numbers, ties, chaos), float32 is the judge."""
UNSTABLE_TOLERANCE = 1e-3
PERTURBATION, PERTURBED, PERTURBED_FACTOR = 2.0**-17, 6, 3
"""If ours is further off, eager float32 also runs, so many times, with parameters that are off by about what
rounding errors add up to in a deep network: where rounding decides on which side of zero a ReLU is, it decides by
chance, and ours may be as far off as these are, times their factor."""

Values = dict[str, torch.Tensor | None]


class InFloat64(TorchDispatchMode):
    """Makes float64 of every float32 that a model asks for: some cast parts of themselves to it, whatever they get."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}

        def widened(value: Any) -> Any:
            return wide.get(value, value) if isinstance(value, torch.dtype) else value

        return func(*map(widened, args), **{name: widened(value) for name, value in (kwargs or {}).items()})


def widened(value: Any) -> Any:
    """Floating-point tensors in float64."""
    if isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.complex64):
        return value.to(torch.float64 if value.dtype == torch.float32 else torch.complex128)
    return value


def score(outputs: Any) -> torch.Tensor:
    """A scalar of which every output is a part, with weights that depend on the place."""
    given = outputs.get("loss") if isinstance(outputs, dict) else None
    tensors = [
        t for t in pytree.tree_leaves(_plain(outputs)) if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    total = given if given is not None else 0.0
    for tensor in tensors:
        if given is tensor:
            continue
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        weights = torch.cos(torch.arange(real.numel(), dtype=torch.float64)).to(real.dtype).view(real.shape)
        total = total + (real * weights).sum() / max(real.numel(), 1)
    return total  # type: ignore[return-value]


def _plain(outputs: Any) -> Any:
    """Without caches, which outputs of language models carry beside the tensors."""
    if isinstance(outputs, dict):
        return {name: _plain(value) for name, value in outputs.items() if "past_key" not in name}
    return outputs


def train(model: nn.Module, batches: list[dict[str, Any]]) -> Values:
    """Returns the outputs, gradients and buffers of every step."""
    found: Values = {}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        torch.manual_seed(step)
        numpy.random.seed(step)
        random.seed(step)
        leaves = [t for t in pytree.tree_leaves(batch) if isinstance(t, torch.Tensor) and t.requires_grad]
        outputs = model(**batch)
        score(outputs).backward()
        tensors = [t for t in pytree.tree_leaves(_plain(outputs)) if isinstance(t, torch.Tensor)]
        found |= {f"{step} output {i}": t.detach().clone() for i, t in enumerate(tensors)}
        found |= {f"{step} gradient input {i}": leaf.grad for i, leaf in enumerate(leaves)}
        for name, parameter in model.named_parameters():
            grad = parameter.grad
            found[f"{step} gradient {name}"] = None if grad is None else grad.to_dense().detach().clone()
        found |= {f"{step} buffer {name}": b.detach().clone() for name, b in model.named_buffers()}
        optimizer.step()
    return found


def _numbers(value: torch.Tensor) -> torch.Tensor:
    value = torch.view_as_real(value) if value.is_complex() else value
    return value.double()


def _error(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """Norms of the difference and of the finite values; equal values that are not finite do not differ."""
    a, b = _numbers(got), _numbers(want)
    same = (a == b) | (a.isnan() & b.isnan())
    return float((a - b).masked_fill(same, 0.0).norm()), float(b.masked_fill(~b.isfinite(), 0.0).norm())


def perturbed(model: nn.Module, batches: list[dict[str, Any]]) -> list[Values]:
    """Train in eager float32 from parameters that are off by a rounding."""
    found = []
    for number in range(PERTURBED):
        generator = torch.Generator().manual_seed(number)
        other = copy.deepcopy(model)
        for parameter in other.parameters():
            if parameter.dtype == torch.float32:
                noise = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                parameter.data = parameter.data * (1 + PERTURBATION * noise)
        found.append(train(other, copy.deepcopy(batches)))
    return found


def compare(ours: Values, eager: Values, exact: Values, others: Sequence[Values] = ()) -> dict[str, Any]:
    """Says which values are wrong, and the largest ratio of our error to eager float32's, or those of `others`."""
    wrong: list[str] = []
    worst = 0.0
    if ours.keys() != eager.keys():
        wrong.append(f"other outputs: {sorted(ours.keys() ^ eager.keys())[:4]}")
    largest: dict[str, float] = {}
    eager_total: dict[str, list[float]] = {}
    judged = exact.keys() == eager.keys()
    for name, want in (exact if judged else eager).items():
        kind = " ".join(name.split()[:2])
        if want is None or eager[name] is None:
            continue
        if want.shape != eager[name].shape:  # type: ignore[union-attr]
            judged = False
            continue
        difference, size = _error(eager[name], want)  # type: ignore[arg-type]
        totals = eager_total.setdefault(kind, [0.0, 0.0])
        totals[0] += difference**2
        totals[1] += size**2
        largest[kind] = max(largest.get(kind, 0.0), size)
    unstable = not judged or any(d > (UNSTABLE**2) * s for d, s in eager_total.values())
    for name, mine in ours.items():
        theirs, want = eager.get(name), exact.get(name)
        if mine is None or theirs is None:
            if (mine is None) != (theirs is None):
                wrong.append(f"{name}: {'none' if mine is None else 'given'}")
            continue
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            wrong.append(f"{name}: {mine.dtype}{list(mine.shape)} for {theirs.dtype}{list(theirs.shape)}")
            continue
        kind = " ".join(name.split()[:2])
        judge = theirs if unstable or want is None else want
        difference, size = _error(mine, judge)
        rounded = [other[name] for other in others if other.get(name) is not None]
        own = FACTOR * _error(theirs, judge)[0]
        own = max([own, *(PERTURBED_FACTOR * _error(each, judge)[0] for each in rounded)])  # type: ignore[arg-type]
        bound = own + FLOOR
        if judge is theirs:
            bound += UNSTABLE_TOLERANCE * max(size, 1e-2 * largest.get(kind, 0.0))
        else:
            bound += FLOOR * max(size, largest[kind])
        worst = max(worst, difference / bound)
        if not difference <= bound:
            wrong.append(f"{name}: off by {difference:.1e} of {size:.1e}, {bound:.1e} allowed")
    return {"wrong": wrong[:8], "wrong_count": len(wrong), "worst": worst, "unstable": unstable}


def _anywhere(reason: str) -> str:
    """Without what tells one machine and one process from another."""
    return re.sub(r" at 0x\w+", "", re.sub(r"/\S*/site-packages/", "", reason))


def measure(name: str, verbose: bool) -> dict[str, Any]:
    """Returns the verdict on an architecture and what it rests on."""
    found = load(name)[name]
    torch.manual_seed(0)
    model, batches = found.make().train(), found.batches()
    plain, exact, first = copy.deepcopy(model), copy.deepcopy(model), copy.deepcopy(model)
    for parameter in exact.parameters():
        parameter.data = widened(parameter.data)
    for module in exact.modules():
        module._buffers = {key: widened(value) for key, value in module._buffers.items()}
        # The grouped product of experts knows no float64.
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "eager"
    eager = train(plain, copy.deepcopy(batches))
    try:
        with InFloat64():
            truth = train(exact, pytree.tree_map(widened, copy.deepcopy(batches)))
    except Exception as error:
        if verbose:
            traceback.print_exc()
        truth = {}
        judge = f"float32 ({type(error).__name__})"
    else:
        judge = "float64"
    wrapped = ORTModule(model)
    start = time.perf_counter()
    try:
        ours = train(wrapped, copy.deepcopy(batches))
    except Exception as error:
        if verbose:
            traceback.print_exc()
        return {"verdict": "raises", "reason": f"{type(error).__name__}: {str(error)[:500]}"}
    seconds = time.perf_counter() - start
    compared = compare(ours, eager, truth)
    if compared["unstable"]:
        judge = "float32"
    if compared["wrong"]:
        compared = compare(ours, eager, truth, perturbed(first, batches))
        judge += ", perturbed"
    report = wrapped.report()
    if verbose:
        print(report, file=sys.stderr)
    fallbacks = sorted({_anywhere(str(graph.fallback_reason))[:300] for graph in report.fallbacks})
    breaks = sorted({_anywhere(graph.break_reason)[:300] for graph in report if graph.break_reason})
    native = [graph for graph in report if graph.share > 0]
    if compared["wrong"]:
        said = "wrong"
    elif not native:
        said = "PyTorch"
    elif fallbacks or breaks:
        said = "partly"
    else:
        said = "wholly"
    return {
        "verdict": said,
        "graphs": len(report),
        "graphs_in_pytorch": len(report.fallbacks),
        "fallbacks": fallbacks,
        "breaks": breaks,
        "judge": judge,
        "seconds": round(seconds, 1),
        **compared,
    }


def verdict(name: str, verbose: bool = False) -> dict[str, Any]:
    """Returns what `measure` does, or that eager PyTorch cannot run the architecture either."""
    try:
        return measure(name, verbose)
    except Exception as error:
        if verbose:
            traceback.print_exc()
        return {"verdict": "eager fails", "reason": f"{type(error).__name__}: {str(error)[:500]}"}


def main() -> None:
    """Prints the verdict on the architecture named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print(json.dumps({"name": arguments.name, **verdict(arguments.name, arguments.verbose)}))


if __name__ == "__main__":
    main()
