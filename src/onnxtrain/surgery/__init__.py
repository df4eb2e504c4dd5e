"""Change what a model is before it is trained: a new head, Dropout where it was."""

from __future__ import annotations

import onnxtrain._desk  # noqa: F401  # isort: skip

from onnxtrain.surgery._dropout import restore_dropout
from onnxtrain.surgery._replace import replace_head

__all__ = ["replace_head", "restore_dropout"]
