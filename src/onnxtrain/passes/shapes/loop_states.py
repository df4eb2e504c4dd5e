"""Find the shapes that the state of loops keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx_ir as ir

_Dims = tuple[int | str | None, ...]


class LoopStatePass(ir.passes.InPlacePass):
    """Give the state of each Loop the shape that it has before and after every iteration, in subgraphs too.

    The state may change its shape from one iteration to the next, so that shape inference says nothing of it. What is
    true of its first value, and what an iteration then keeps, is true of all: sizes that an iteration changes are given
    up, one round of inference after another.

    Args:
        infer: Annotates a model with shapes, in place.
    """

    def __init__(self, infer: Callable[[ir.Model], ir.Model]) -> None:
        super().__init__()
        self._infer = infer

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Annotate in place."""
        guesses = [_first_guess(node) for node in _loops(model)]
        if not any(_tells(node, guess) for node, guess in zip(_loops(model), guesses, strict=True)):
            return ir.passes.PassResult(model, False)
        changed = True
        while changed:
            trial = model.clone()
            for node, guess in zip(_loops(trial), guesses, strict=True):
                _assume(node, guess)
            self._infer(trial)
            kept = [_kept(node, guess) for node, guess in zip(_loops(trial), guesses, strict=True)]
            changed, guesses = kept != guesses, kept
        modified = False
        for node, guess in zip(_loops(model), guesses, strict=True):
            modified |= _assume(node, guess)
        return ir.passes.PassResult(model, modified)


def _loops(model: ir.Model) -> Iterator[ir.Node]:
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_type == "Loop" and node.domain == "":
            yield node


def _states(node: ir.Node) -> tuple[list[ir.Value], list[ir.Value]]:
    """Return the state as an iteration sees it, and as the node returns it."""
    count = len(node.inputs) - 2
    return list(node.attributes["body"].as_graph().inputs[2:]), list(node.outputs[:count])


def _first_guess(node: ir.Node) -> list[_Dims | None]:
    declared = node.attributes["body"].as_graph().inputs[2:]
    return [_dims(own) or _dims(first) for own, first in zip(declared, node.inputs[2:], strict=True)]


def _tells(node: ir.Node, guess: list[_Dims | None]) -> bool:
    """Whether a guess says more than is known already."""
    return any(
        dims is not None and (state.shape is None or result.shape is None)
        for state, result, dims in zip(*_states(node), guess, strict=True)
    )


def _dims(value: ir.Value | None) -> _Dims | None:
    if value is None or value.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)


def _assume(node: ir.Node, guess: list[_Dims | None]) -> bool:
    """Annotate the state of a loop; return whether that is new."""
    modified = False
    for state, result, dims in zip(*_states(node), guess, strict=True):
        for value in (state, result):
            if dims is not None and value.shape is None:
                value.shape = ir.Shape(dims)
                modified = True
    return modified


def _kept(node: ir.Node, guess: list[_Dims | None]) -> list[_Dims | None]:
    """Return what of the guess an iteration keeps."""
    after = node.attributes["body"].as_graph().outputs[1:]
    return [_common(dims, _dims(value)) for dims, value in zip(guess, after, strict=False)]


def _common(guess: _Dims | None, found: _Dims | None) -> _Dims | None:
    if guess is None or found is None or len(guess) != len(found):
        return None
    return tuple(own if own == other else None for own, other in zip(guess, found, strict=True))
