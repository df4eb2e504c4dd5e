"""Runs a program with eager PyTorch, `torch.compile(backend="aot_eager")` or ORTModule, and keeps what it shows."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import UninitializedTensorMixin

from onnxtrain.ortmodule import ORTModule
from ortmodule.fuzz import prelude

__all__ = ["KINDS", "Record", "Seen", "run"]

KINDS = ("eager", "float64", "noise", "noise in float32", "aot_eager", "ORTModule")


@dataclass
class Seen:
    """A tensor at one moment."""

    value: torch.Tensor
    requires_grad: bool


@dataclass
class Record:
    """Observations of one run of a program.

    Attributes:
        seen: names and values, tensors as `Seen`, in the order of the scenario.
        error: what ended the run, if anything did.
        fallbacks: why ORTModule ran graphs in PyTorch.
        graphs: how many graphs ORTModule had.
        modes: what the program has left switched in the thread.
    """

    seen: list[tuple[str, Any]] = field(default_factory=list)
    error: BaseException | None = None
    fallbacks: list[str] = field(default_factory=list)
    graphs: int = 0
    modes: dict[str, Any] = field(default_factory=dict)


def run(text: str, kind: str, attempt: int = 0) -> Record:
    """Runs a program; eager PyTorch with an attention that it can differentiate twice, where the program needs that.

    Args:
        text: the program.
        kind: one of `KINDS`; "noise" is float64 with noise in all numbers that the program begins with, and
            "noise in float32" the same with the random numbers of float32.
        attempt: which noise.
    """
    record = _run(text, kind, attempt)
    if kind != "ORTModule" and "attention_for_cpu_backward is not implemented" in str(record.error):
        with sdpa_kernel(SDPBackend.MATH):
            return _run(text, kind, attempt)
    return record


def _run(text: str, kind: str, attempt: int) -> Record:
    record = Record()
    torch.set_grad_enabled(True)  # which an earlier program may have left off
    torch.use_deterministic_algorithms(False)

    def see(name: str, value: Any) -> None:
        record.seen.append((name, pytree.tree_map_only(torch.Tensor, _snapshot, value)))

    torch._dynamo.reset()
    with _numbers(kind, attempt), warnings.catch_warnings(), tempfile.TemporaryDirectory() as directory:
        warnings.simplefilter("ignore")
        program = _imported(text, Path(directory))
        torch.manual_seed(0)
        net = _net(program, text, kind, Path(directory))
        prelude.wrap = {"aot_eager": _compiled, "ORTModule": ORTModule}.get(kind, _itself)
        model = prelude.wrap(net)
        try:
            program.scenario(net, model, see)
        except Exception as error:
            record.error = error
        record.modes = prelude.modes()
        if isinstance(model, ORTModule):
            report = list(model.report())
            record.graphs = len(report)
            record.fallbacks = [graph.fallback_reason for graph in report if graph.fallback_reason]
        sys.modules.pop(program.__name__, None)
    return record


def _net(program: ModuleType, text: str, kind: str, directory: Path) -> torch.nn.Module:
    net: torch.nn.Module = program.Net()
    if kind not in ("float64", "noise"):
        return net
    with _numbers("eager", 0):
        torch.manual_seed(0)
        plain = _imported(text, directory)
        own = plain.Net()
        sys.modules.pop(plain.__name__, None)
    with torch.no_grad():
        for (name, value), (_, of_float32) in zip(_held(net), _held(own), strict=True):
            del name
            if isinstance(value, UninitializedTensorMixin):
                continue
            wanted = of_float32.to(value.dtype)
            value.copy_(
                prelude.disturbed(wanted) if kind == "noise" and wanted.is_floating_point() else wanted
            )
    return net


def _held(net: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*net.named_parameters(), *net.named_buffers()]


def _compiled(net: torch.nn.Module) -> Any:
    net.compile(backend="aot_eager")
    return net


def _itself(net: torch.nn.Module) -> Any:
    return net


@contextlib.contextmanager
def _numbers(kind: str, attempt: int) -> Iterator[None]:
    relative = {"noise": 1e-7, "noise in float32": 3e-7}.get(kind, 0.0)
    noise, prelude.noise = prelude.noise, relative * (1 + attempt)
    before = prelude.FLOAT
    try:
        if kind in ("float64", "noise"):
            with prelude.in_float64():
                yield
        else:
            prelude.FLOAT = torch.float32
            torch.set_default_dtype(torch.float32)
            yield
    finally:
        prelude.noise, prelude.FLOAT = noise, before
        torch.set_default_dtype(before)


_numbers_of_modules = itertools.count()


def _imported(text: str, directory: Path) -> ModuleType:
    """The program as a module in a file, which Dynamo wants to see."""
    name = f"fuzzed_{next(_numbers_of_modules)}"
    path = directory / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _snapshot(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, UninitializedTensorMixin):
        return type(tensor).__name__
    return Seen(tensor.detach().clone(), tensor.requires_grad)
