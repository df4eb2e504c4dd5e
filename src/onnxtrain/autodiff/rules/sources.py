"""Declares ops without a gradient: random numbers, box selection, text, image decoding."""

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
nondifferentiable("NonMaxSuppression", reason="its output consists of indices")
nondifferentiable(
    "ImageDecoder",
    "RegexFullMatch",
    "StringConcat",
    "StringNormalizer",
    "StringSplit",
    "TfIdfVectorizer",
    reason="works on bytes or text",
)
