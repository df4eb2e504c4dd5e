"""Declares the com.microsoft ops that have no gradient."""

from __future__ import annotations

from onnxtrain.autodiff._registry import not_yet
from onnxtrain.autodiff.rules.contrib._shared import MS

not_yet(
    *("BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch"),
    reason="its output is the selected tokens, which have no gradient; train the decoder that it calls",
    domain=MS,
)
