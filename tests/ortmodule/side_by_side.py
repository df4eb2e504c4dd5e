"""Cases in ONNX Runtime beside eager PyTorch in float64: outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from onnxtrain.ortmodule.capture.dynamo.patches._missing_fakes import missing_fakes
from onnxtrain.ortmodule.module._engine import onnxruntime_backend
from ortmodule.aten_case import Case

Values = tuple[list[torch.Tensor], list[torch.Tensor | None]]


def batches(cases: Sequence[Case], size: int) -> list[list[Case]]:
    """Cases to be compiled as one function, at most `size`; those with random numbers are on their own.

    Most of the time of a small capture is what any capture costs. A generator is read in the order of the cases.
    """
    others = [case for case in cases if not case.random]
    return [[case] for case in cases if case.random] + [
        others[first : first + size] for first in range(0, len(others), size)
    ]


def differences(
    cases: Sequence[Case],
    dtype: torch.dtype = torch.float32,
    *,
    dynamic: bool = False,
    tolerance: Callable[[Case], float] = lambda case: case.tolerance,
) -> dict[str, str]:
    """Compiles the cases as one function; returns in what each differs from eager PyTorch, by name.

    Args:
        cases: without random numbers, or one of them.
        dtype: what they are computed in.
        dynamic: whether sizes are symbols.
        tolerance: norm-relative, of a case.
    """

    def together(*arguments: list[Any]) -> list[Any]:
        return [fn(*values) for fn, values in zip(functions, arguments, strict=True)]

    functions = [case.fn for case in cases]
    torch._dynamo.reset()
    compiled = torch.compile(together, backend=onnxruntime_backend(fallback=False), fullgraph=True)
    arguments = [case.sample(dtype) for case in cases]
    if dynamic:
        for case, values in zip(cases, arguments, strict=True):
            _mark_dynamic(values if case.dynamic is True else [values[i] for i in case.dynamic or ()])
    # Equal sizes are not one symbol: a case that fixes one would fix it for those that stand beside it.
    sizes = torch.fx.experimental._config.patch(use_duck_shape=False)
    settings = torch._dynamo.config.patch(allow_rnn=True, capture_dynamic_output_shape_ops=True)
    with sizes, settings, missing_fakes():
        results = _values_and_gradients(compiled, arguments)
    references = [case.sample(dtype if case.random else torch.float64) for case in cases]
    expected = _values_and_gradients(together, references)
    found = {}
    for case, got, want in zip(cases, results, expected, strict=True):
        difference = _difference(got, want, dtype, tolerance(case))
        if difference is not None:
            found[case.name] = difference
    return found


def assert_no_differences(cases: Sequence[Case], *arguments: Any, **named: Any) -> None:
    """Fails with a line for each case that differs or ends in an error; takes the arguments of :func:`differences`."""
    try:
        found = differences(cases, *arguments, **named)
    except Exception as error:
        # One case that cannot be lowered ends the capture of all: each is compiled alone.
        found = {}
        for case in cases:
            try:
                found |= differences([case], *arguments, **named)
            except Exception as of_one:
                # Dynamo wraps the error of a back end.
                reason = getattr(of_one, "inner_exception", of_one)
                found[case.name] = f"{type(reason).__name__}: {reason}"
        if not found:
            raise AssertionError(f"none of {[case.name for case in cases]} fails alone") from error
    # Without the traceback through Dynamo, so that a failure ends with names and reasons.
    if found:
        pytest.fail("\n".join(f"{name}: {reason}" for name, reason in found.items()), pytrace=False)


def _values_and_gradients(fn: Callable[..., Any], arguments: list[list[Any]]) -> list[Values]:
    torch.manual_seed(0)
    outputs = [_tensors(result) for result in fn(*arguments)]
    leaves = [[a for a in _tensors(values) if a.requires_grad] for values in arguments]
    scored = [out for case in outputs for out in case if out.requires_grad]
    every = [leaf for case in leaves for leaf in case]
    gradients: list[torch.Tensor | None] = [None] * len(every)
    if scored and every:
        weights = [torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape) for out in scored]
        gradients = list(torch.autograd.grad(scored, every, weights, allow_unused=True))
    following = iter(gradients)
    return [(out, [next(following) for _ in case]) for out, case in zip(outputs, leaves, strict=True)]


def _tensors(result: Any) -> list[torch.Tensor]:
    parts = result if isinstance(result, tuple | list) else (result,)
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _mark_dynamic(arguments: list[Any]) -> None:
    for tensor in _tensors(arguments):
        for axis, size in enumerate(tensor.shape):
            if size > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, axis)


def _difference(got: Values, want: Values, dtype: torch.dtype, tolerance: float) -> str | None:
    if len(got[0]) != len(want[0]):
        return f"{len(got[0])} outputs instead of {len(want[0])}"
    for value, reference in zip(got[0], want[0], strict=True):
        narrowed = dtype if reference.dtype == torch.float64 else reference.dtype
        if (value.shape, value.dtype) != (reference.shape, narrowed):
            return f"{value.dtype} {value.shape} instead of {narrowed} {reference.shape}"
        if not _close(value, reference, tolerance):
            return f"output {_brief(value, reference)}"
    for gradient, expected in zip(got[1], want[1], strict=True):
        if (gradient is None) != (expected is None) or (
            gradient is not None and expected is not None and not _close(gradient, expected, tolerance)
        ):
            return f"gradient {_brief(gradient, expected)}"
    return None


def _brief(got: torch.Tensor | None, want: torch.Tensor | None) -> str:
    """The largest difference of two tensors of one shape: several cases that fail then fit on one screen."""
    if got is None or want is None:
        return "None instead of a tensor" if got is None else "instead of None"
    # Infinity and NaN, which differences hide, count as the furthest.
    distance = (got.detach().double() - want.detach().double()).abs().nan_to_num(torch.inf)
    distance[(got.detach() == want.detach()) | (got.detach().isnan() & want.detach().isnan())] = 0.0
    place = tuple(int(i) for i in torch.unravel_index(distance.argmax(), distance.shape))
    return f"{got[place].item()} instead of {want[place].item()} at {list(place)} of {list(got.shape)}"


def _close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> bool:
    if not want.is_floating_point():
        return torch.equal(got, want)
    value, reference = got.detach().double(), want.detach().double()
    finite = reference.isfinite()
    if not torch.equal(value.isfinite(), finite):
        return False
    if not torch.equal(value[~finite].nan_to_num(), reference[~finite].nan_to_num()):
        return False
    value, reference = value[finite], reference[finite]
    difference = (value - reference).norm()
    return bool(difference <= tolerance * max(float(reference.norm()), 1e-2))
