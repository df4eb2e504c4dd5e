"""Declares ops on sequences and optionals, whose cotangents would not be tensors."""

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
    reason="only tensors have gradients, not sequences. A sequence whose tensors are known when the model is built is "
    "replaced by them. Positions or sizes of this one depend on the run: make them constant, or use Split and Concat",
)
not_yet(
    "Optional",
    "OptionalGetElement",
    reason="only tensors have gradients, not optionals. An optional whose element is known when the model is built is "
    "replaced by it. This one comes from an input or a branch: pass the tensor itself",
)
