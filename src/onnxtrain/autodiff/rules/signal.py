"""Signal processing."""

from __future__ import annotations

from onnxtrain.autodiff._registry import nondifferentiable, not_yet

nondifferentiable(
    "BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix", reason="a table for an integer size"
)
not_yet("DFT", "STFT", reason="export the transform as a MatMul with the Fourier matrix instead")
