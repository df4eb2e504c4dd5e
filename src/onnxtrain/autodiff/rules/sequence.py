"""Declares ops of sequences and optionals, whose cotangents would be no tensors."""

from __future__ import annotations

from onnxtrain.autodiff._registry import nondifferentiable, not_yet

nondifferentiable("SequenceLength", "OptionalHasElement", reason="its result is an integer or a boolean")
nondifferentiable("SequenceEmpty", reason="has no inputs")

not_yet(
    "ConcatFromSequence",
    "SequenceAt",
    "SequenceConstruct",
    "SequenceErase",
    "SequenceInsert",
    "SequenceMap",
    "SplitToSequence",
    reason="cotangents are tensors, not sequences. Sequences whose tensors are known when the model is built are taken "
    "apart; this one's positions or sizes depend on the run: make them constant, or use Split and Concat",
)
not_yet(
    "Optional",
    "OptionalGetElement",
    reason="cotangents are tensors, not optionals. Optionals whose element is known when the model is built are taken "
    "away; this one comes from an input or a branch: give the tensor itself",
)
