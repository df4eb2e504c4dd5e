"""Ops that make values from what has no gradient: random numbers, tables, text, images."""

from __future__ import annotations

from onnxtrain.autodiff._registry import nondifferentiable

nondifferentiable(
    "RandomNormal",
    "RandomUniform",
    "RandomNormalLike",
    "RandomUniformLike",
    reason="draws random numbers from constant parameters",
)
nondifferentiable("Bernoulli", "Multinomial", reason="draws discrete random numbers")
nondifferentiable(
    "BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix", reason="a table for an integer size"
)
nondifferentiable(
    "ImageDecoder",
    "RegexFullMatch",
    "StringConcat",
    "StringNormalizer",
    "StringSplit",
    "TfIdfVectorizer",
    reason="works on bytes or text",
)
