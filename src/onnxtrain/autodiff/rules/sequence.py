"""Declares ops on sequences and optionals, whose cotangents would not be tensors."""

from __future__ import annotations

from onnxtrain.autodiff._registry import nondifferentiable, not_yet

nondifferentiable("SequenceLength", "OptionalHasElement", reason="its output is an integer or a Boolean")
nondifferentiable("SequenceEmpty", reason="has no inputs")

not_yet(
    "ConcatFromSequence",
    "SequenceAt",
    "SequenceConstruct",
    "SequenceErase",
    "SequenceInsert",
    "SequenceMap",
    "SplitToSequence",
    reason="only tensors have gradients, not sequences. A sequence with constant positions and sizes is replaced by "
    "its tensors, but those of this sequence are computed at run time: make them constant, or use Split and Concat",
)
not_yet(
    "Optional",
    "OptionalGetElement",
    reason="only tensors have gradients, not optionals. An optional with a known element is replaced by the element, "
    "but this optional comes from an input or a branch: pass the tensor itself",
)
