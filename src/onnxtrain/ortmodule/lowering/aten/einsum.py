"""Lowers `torch.einsum`.

PyTorch's tracing decomposes it into permutations and `bmm`, in an order that is not the cheapest and with transposed
copies of operands. `EINSUM` traces it as the custom op `onnxtrain::einsum` instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils.flop_counter import register_flop_formula

from onnxtrain.ortmodule import _torch
from onnxtrain.ortmodule.lowering._table import Lowering, lower
from onnxtrain.passes.canonical.einsum_pairs import split_equation

_LIBRARY = torch.library.Library("onnxtrain", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("einsum(str equation, Tensor[] operands) -> Tensor")  # type: ignore[no-untyped-call]


@torch.library.register_fake("onnxtrain::einsum")  # type: ignore[untyped-decorator]
def _fake_einsum(equation: str, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    terms, output = split_equation(equation)
    sizes = _sizes(terms, operands)
    return operands[0].new_empty([sizes[label] for label in output])


def _sizes(terms: Sequence[str], operands: Sequence[torch.Tensor]) -> dict[str, Any]:
    return {
        label: size
        for term, operand in zip(terms, operands, strict=True)
        for label, size in zip(term, operand.shape, strict=True)
    }


@register_flop_formula(torch.ops.onnxtrain.einsum)
def _flops(equation: str, shapes: Sequence[Sequence[int]], *args: Any, **named: Any) -> int:
    """Returns the number of floating-point operations if two operands are contracted at a time, left to right."""
    terms, output = split_equation(equation)
    sizes = {
        label: size
        for term, shape in zip(terms, shapes, strict=True)
        for label, size in zip(term, shape, strict=True)
    }
    total, labels = 0, set(terms[0])
    for index, term in enumerate(terms[1:], start=2):
        labels |= set(term)
        total += 2 * math.prod(sizes[label] for label in labels)
        labels &= set(output).union(*terms[index:])
    return total


def _einsum(*args: Any) -> Any:
    """Replaces `torch.einsum`: calls the op `onnxtrain::einsum` if it supports the arguments, else `torch.einsum`."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    if isinstance(equation, str) and _is_supported(equation.replace(" ", ""), operands):
        return torch.ops.onnxtrain.einsum(equation.replace(" ", ""), operands)
    return torch.einsum(*args)


def _is_supported(equation: str, operands: Sequence[Any]) -> bool:
    """True if the operands are floats of one dtype, and no axis is broadcast, unlabeled, repeated or empty."""
    if len(operands) < 2 or "." in equation or not all(isinstance(x, torch.Tensor) for x in operands):
        return False
    # The op has no rule for vmap.
    if any(_torch.is_functorch_wrapped_tensor(x) for x in operands):
        return False
    first = operands[0]
    # Autocast computes products in a narrow dtype.
    if torch.is_autocast_enabled(first.device.type) or first.dtype not in (torch.float32, torch.float64):
        return False
    # PyTorch raises its own error for a wrong equation.
    terms, output = split_equation(equation)
    if len(terms) != len(operands) or not set(output) <= set("".join(terms)):
        return False
    for term, operand in zip(terms, operands, strict=True):
        if operand.dtype != first.dtype or operand.device != first.device or operand.dim() != len(term):
            return False
    if any(len(set(term)) < len(term) or (term and not term.isalpha()) for term in (*terms, output)):
        return False
    sizes = _sizes(terms, operands)
    return all(
        statically_known_true(size == sizes[label]) and not statically_known_true(size == 0)
        for term, operand in zip(terms, operands, strict=True)
        for label, size in zip(term, operand.shape, strict=True)
    )


EINSUM: dict[Any, Callable[..., Any]] = {torch.einsum: _einsum, torch.functional.einsum: _einsum}
"""Replacements for `torch.einsum` when a Dynamo graph is traced."""


@lower("onnxtrain.einsum.default")
def einsum(low: Lowering, equation: str, operands: Sequence[ir.Value]) -> ir.Value:
    # `EinsumPairsPass` then contracts two operands at a time.
    terms, output = split_equation(equation)
    return low.op.Einsum(*operands, equation=f"{','.join(terms)}->{output}")
