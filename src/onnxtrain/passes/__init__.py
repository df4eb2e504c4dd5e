"""One transformation of a model per file: from what a user holds to the canonical form, and on."""

from __future__ import annotations

from onnxtrain.passes.canonical import canonicalize, is_constant
from onnxtrain.passes.inline import inline_functions
from onnxtrain.passes.inline_schema import has_schema_function, inline_schema_functions
from onnxtrain.passes.load import ModelSource, load_model
from onnxtrain.passes.shapes import infer_shapes

__all__ = [
    "ModelSource",
    "canonicalize",
    "has_schema_function",
    "infer_shapes",
    "inline_functions",
    "inline_schema_functions",
    "is_constant",
    "load_model",
]
