"""Compare ORTModule with eager PyTorch, or, if they differ, with `torch.compile(backend="aot_eager")`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from ortmodule.fuzz.extremes import LONG_ROW
from ortmodule.fuzz.known import ZERO_SECOND_DERIVATIVES
from ortmodule.fuzz.run import Record, Seen, run

__all__ = ["FINDINGS", "Verdict", "judge"]

FINDINGS = ("value", "gradient", "dtype", "aliases", "structure", "raises", "accepts", "modes", "fails")

_TIMES_OWN_ERROR = 10
_RELATIVE = 1e-6
_NOISE = 200  # 2e-5 of what the program starts with: rounding errors of some hundred operations, all one way
_OF_LONG_SUMS = 1e-4  # eager PyTorch adds up to 10^6 numbers in float32
_LOW_PRECISION = {torch.bfloat16: 2**-7, torch.float16: 2**-10}


@dataclass(frozen=True)
class Verdict:
    """A verdict on a program.

    Attributes:
        kind: "same", "refused" (by all), "none for zero" (a gradient is None, or zeros, in the place of the other),
            "as torch.compile", "rounding" (float64 with noise differs as much), "unstable" (eager PyTorch itself is),
            or what differs: "value", "gradient", "dtype", "aliases", "structure", "raises", "accepts", "modes";
            "fails" if ONNX Runtime refuses at run time what it is given, so that PyTorch computes it.
        where: the name of the first thing that differs.
        detail: both values.
    """

    kind: str
    where: str = ""
    detail: str = ""
    fallbacks: tuple[str, ...] = field(default=())
    graphs: int = 0

    @property
    def is_finding(self) -> bool:
        return self.kind in FINDINGS


_DERIVATIVE_MISSING = "requires_grad: eager True, own False"


@dataclass(frozen=True)
class _Difference:
    kind: str
    where: str
    detail: str


def judge(text: str, features: frozenset[str] = frozenset()) -> Verdict:
    """Runs a program in all ways that are needed."""
    eager = run(text, "eager")
    own = run(text, "ORTModule")
    double = eager if "draws" in features else run(text, "float64")
    if len(double.seen) != len(eager.seen):
        double = eager
    coarse = _coarse(eager, text) if double is eager else 0.0
    differences = _differences(eager, own, double, coarse)
    if any(padding in text for padding in ZERO_SECOND_DERIVATIVES):
        for place, one in differences.items():
            if ".grad" in one.where and one.detail == _DERIVATIVE_MISSING:
                differences[place] = replace(one, kind="none for zero")
    if not differences:
        failed = next((reason for reason in own.fallbacks if "ONNX Runtime failed" in reason), None)
        if failed is not None:
            return _verdict(own, "fails", "", failed)
        return _verdict(own, "refused" if eager.error else "same")
    found = next((one for one in differences.values() if one.kind != "none for zero"), None)
    if found is None:
        return _verdict(own, *vars(next(iter(differences.values()))).values())
    compiled = run(text, "aot_eager")
    from_compiled = _differences(compiled, own, double, coarse)
    both = min(len(compiled.seen), len(own.seen))  # what comes later, the one has and the other has not
    left = {
        place: one
        for place, one in differences.items()
        if one.kind != "none for zero" and (place in from_compiled or place > both)
    }
    if not left or (own.error and compiled.error):
        return _verdict(own, "as torch.compile", found.where, found.detail)
    if all(one.kind in ("value", "gradient") for one in left.values()):
        noise = "noise in float32" if "draws" in features else "noise"
        if any(
            not _differences(eager, own, double, coarse, run(text, noise, attempt)) for attempt in range(3)
        ):
            return _verdict(own, "rounding", found.where, found.detail)
        if _differences(eager, run(text, "eager"), double, coarse):
            return _verdict(own, "unstable", found.where, found.detail)
    found = next(iter(left.values()))
    of_compiled = _differences(eager, compiled, double, coarse)
    said = next(iter(of_compiled.values())).detail if of_compiled else "as eager"
    return _verdict(own, found.kind, found.where, f"{found.detail}; aot_eager: {said}")


def _verdict(own: Record, kind: str, where: str = "", detail: str = "") -> Verdict:
    return Verdict(kind, where, detail, tuple(own.fallbacks), own.graphs)


def _differences(
    eager: Record, own: Record, double: Record, coarse: float, noisy: Record | None = None
) -> dict[int, _Difference]:
    """In what two runs differ, by the place among what they have shown; what ended them comes last."""
    found: dict[int, _Difference] = {}
    for index, ((name, mine), (name_too, theirs)) in enumerate(zip(own.seen, eager.seen, strict=False)):
        if name != name_too:
            found[index] = _Difference("structure", name, f"eager has {name_too}")
            return found
        exact = double.seen[index][1] if index < len(double.seen) else theirs
        moved = noisy.seen[index][1] if noisy is not None and index < len(noisy.seen) else None
        difference = _compare(name, theirs, mine, exact, moved, coarse)
        if difference is not None:
            found[index] = difference
    if bool(eager.error) != bool(own.error) or len(eager.seen) != len(own.seen):
        kind = "raises" if own.error and len(own.seen) <= len(eager.seen) else "accepts"
        said = f"own after {len(own.seen)}: {_short(own.error)}; eager after {len(eager.seen)}: {_short(eager.error)}"
        found[min(len(own.seen), len(eager.seen))] = _Difference(kind, f"after {len(own.seen)}", said)
    elif own.modes != eager.modes:
        left = {
            name: (value, own.modes[name]) for name, value in eager.modes.items() if own.modes[name] != value
        }
        found[len(own.seen)] = _Difference("modes", "at the end", f"(eager, own): {left}")
    return found


def _coarse(eager: Record, text: str) -> float:
    """Returns the relative error of numbers from narrow floats and long reductions, where no float64 says what it is.

    A program that eager PyTorch differentiates under autocast may be refused in float64: autocast saves copies of what
    it casts, and float64 it does not cast, so that a write to an argument reaches what backward reads.
    """
    seen = [
        leaf for _, value in eager.seen for leaf in pytree.tree_leaves(value, lambda v: isinstance(v, Seen))
    ]
    steps = [_LOW_PRECISION.get(leaf.value.dtype, 0.0) for leaf in seen if isinstance(leaf, Seen)]
    # Eager PyTorch itself is off by half a step, or more.
    return max(_TIMES_OWN_ERROR * max(steps, default=0.0) / 2, _OF_LONG_SUMS if LONG_ROW in text else 0.0)


def _short(error: BaseException | None) -> str:
    return "no error" if error is None else f"{type(error).__name__}: {str(error)[:250]}"


def _compare(name: str, eager: Any, own: Any, exact: Any, moved: Any, coarse: float) -> _Difference | None:
    is_leaf: Callable[[Any], bool] = lambda value: isinstance(value, Seen)
    (theirs, shape), (mine, own_shape) = (pytree.tree_flatten(value, is_leaf) for value in (eager, own))
    exacts = pytree.tree_leaves(exact, is_leaf)
    moves = pytree.tree_leaves(moved, is_leaf) if moved is not None else []
    if name.endswith(".grad") and (eager is None) != (own is None):
        there = own if eager is None else eager
        kind = "gradient" if there.value.any() else "none for zero"
        return _Difference(kind, name, f"eager {_said(eager)}, own {_said(own)}")
    if name == "aliases":
        return None if eager == own else _Difference("aliases", name, f"eager {eager}, own {own}")
    if shape != own_shape:
        return _Difference("structure", name, f"eager {shape}, own {own_shape}")
    for index, (a, b) in enumerate(zip(theirs, mine, strict=True)):
        if not isinstance(a, Seen) or not isinstance(b, Seen):
            if a != b:
                return _Difference("structure", f"{name}[{index}]", f"eager {_said(a)}, own {_said(b)}")
            continue
        x = exacts[index] if index < len(exacts) and isinstance(exacts[index], Seen) else a
        y = moves[index] if index < len(moves) and isinstance(moves[index], Seen) else None
        found = _tensors(f"{name}[{index}]", a, b, x, y, coarse)
        if found is not None:
            return found
    return None


def _tensors(
    name: str, eager: Seen, own: Seen, exact: Seen, moved: Seen | None, coarse: float
) -> _Difference | None:
    a, b, x = eager.value, own.value, exact.value
    if a.shape != b.shape or a.dtype != b.dtype:
        return _Difference("dtype", name, f"eager {a.dtype} {list(a.shape)}, own {b.dtype} {list(b.shape)}")
    if eager.requires_grad != own.requires_grad:
        detail = _DERIVATIVE_MISSING if eager.requires_grad else "requires_grad: eager False, own True"
        return _Difference("dtype", name, detail)
    if x.shape != a.shape:
        x = a
    floating = a.is_floating_point()
    if not floating:
        same = bool((a == b).all()) or (
            moved is not None and moved.value.shape == a.shape and bool((moved.value != x).any())
        )
        return None if same else _Difference("value", name, f"eager {_said(eager)}, own {_said(own)}")
    a, b, x = a.double(), b.double(), x.double()
    if not a.numel():
        return None
    finite = a.isfinite() & x.isfinite()
    if not torch.equal(b.isfinite() | ~finite, torch.ones_like(finite)) or not torch.equal(
        a.isnan() & ~finite, b.isnan() & ~finite
    ):
        return _Difference("value", name, f"eager {_said(eager)}, own {_said(own)}")
    scale = max(_largest(x[finite]), 1.0)
    narrow = max(_LOW_PRECISION.get(eager.value.dtype, 0.0), coarse)
    allowed = _TIMES_OWN_ERROR * _largest((a - x)[finite]) + max(_RELATIVE, narrow) * scale
    if moved is not None and moved.value.shape == a.shape:
        allowed += _NOISE * _largest((moved.value.double() - x)[finite].nan_to_num(0))
    off = _largest((b - x)[finite])
    if off > allowed:
        kind = "gradient" if ".grad" in name else "value"
        said = f"off by {off:.3g}, allowed {allowed:.3g}: eager {_said(eager)}, own {_said(own)}"
        return _Difference(kind, name, said)
    return None


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _said(value: Any) -> str:
    if isinstance(value, Seen):
        return f"{list(value.value.shape)} {value.value.reshape(-1)[:6].tolist()}"
    return repr(value)[:80]
