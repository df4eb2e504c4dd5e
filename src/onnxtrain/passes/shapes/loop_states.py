"""Finds the shapes of loop states that don't change between iterations."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx_ir as ir

_Dims = tuple[int | str | None, ...]


class LoopStatePass(ir.passes.InPlacePass):
    """Annotates Loop states, also those of Loops in subgraphs, with the dimensions that no iteration changes.

    onnx infers no shapes for states, because these may change between iterations. The pass proves shapes by induction:
    it assumes the declared shape or the initial value's, infers the shape after one iteration, drops dimensions that
    differ, and repeats this until nothing differs. Expects inferred shapes of the initial values.

    Args:
        infer: infers the shapes of a model, in place.
    """

    def __init__(self, infer: Callable[[ir.Model], ir.Model]) -> None:
        super().__init__()
        self._infer = infer

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Annotates values of the model in place."""
        guesses = [_first_guess(node) for node in _loops(model)]
        if not any(_adds_shapes(node, guess) for node, guess in zip(_loops(model), guesses, strict=True)):
            return ir.passes.PassResult(model, False)
        # Each round drops at least one dimension, or ends the loop. Assumptions are tested on a copy, because wrong
        # ones must not remain in the model.
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
    """Yields all Loops of a model, in the same order for a model and its copy."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_type == "Loop" and node.domain == "":
            yield node


def _states(node: ir.Node) -> tuple[list[ir.Value], list[ir.Value]]:
    """Returns the states of a Loop: as inputs of the body, and as outputs of the node."""
    # Inputs 0 and 1 are the trip count and the condition; those of the body are the iteration number and the condition.
    count = len(node.inputs) - 2
    return list(node.attributes["body"].as_graph().inputs[2:]), list(node.outputs[:count])


def _first_guess(node: ir.Node) -> list[_Dims | None]:
    """Returns the dimensions of each Loop state: as declared in the body, or else the initial value's dimensions."""
    declared = node.attributes["body"].as_graph().inputs[2:]
    return [_dims(state) or _dims(first) for state, first in zip(declared, node.inputs[2:], strict=True)]


def _adds_shapes(node: ir.Node, guess: list[_Dims | None]) -> bool:
    """True if `guess` has a shape for a state that is not annotated yet."""
    return any(
        dims is not None and (state.shape is None or result.shape is None)
        for state, result, dims in zip(*_states(node), guess, strict=True)
    )


def _dims(value: ir.Value | None) -> _Dims | None:
    """Returns the dimensions of a value: sizes, names for symbolic dimensions, and None for unknown dimensions.

    Returns None if the rank is unknown.
    """
    if value is None or value.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)


def _assume(node: ir.Node, guess: list[_Dims | None]) -> bool:
    """Annotates a Loop's states that have no shape with `guess`. Returns True if there were any."""
    modified = False
    for state, result, dims in zip(*_states(node), guess, strict=True):
        for value in (state, result):
            if dims is not None and value.shape is None:
                value.shape = ir.Shape(dims)
                modified = True
    return modified


def _kept(node: ir.Node, guess: list[_Dims | None]) -> list[_Dims | None]:
    """Returns the next guess: the guessed dimensions, with None where one iteration has changed the dimension.

    A state gets None instead of dimensions if its rank changes or is unknown.

    Args:
        node: a Loop whose body has inferred shapes.
        guess: the dimensions that each state was assumed to have before the iteration.
    """
    after = node.attributes["body"].as_graph().outputs[1:]
    return [_common(dims, _dims(value)) for dims, value in zip(guess, after, strict=False)]


def _common(guess: _Dims | None, inferred: _Dims | None) -> _Dims | None:
    """Returns the dimensions of a guess, with None where they differ from the inferred ones."""
    # A state whose rank changes has no shape at all.
    if guess is None or inferred is None or len(guess) != len(inferred):
        return None
    return tuple(ours if ours == theirs else None for ours, theirs in zip(guess, inferred, strict=True))
