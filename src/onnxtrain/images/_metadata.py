"""Describes the images of a run or an exported model: preprocessing and names of classes."""

from __future__ import annotations

import json
from dataclasses import dataclass

from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.images._preprocessing import Preprocessing
from onnxtrain.runtime.json_text import parse_json

PROPERTY = "onnxtrain.images"
"""Key of the JSON text, in the properties of a run's checkpoint and the metadata of an exported model."""

_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ImageMetadata:
    """Preprocessing and classes of a model for images.

    Attributes:
        preprocessing: how images become inputs; all fields that the model needs are known.
        classes: names of the classes in the order of their indices; empty if they are unknown.
        activation: function that makes probabilities of the model's outputs: "softmax", "sigmoid" or "exp"; None if
            there is none.
    """

    preprocessing: Preprocessing
    classes: tuple[str, ...] = ()
    activation: str | None = None

    def to_json(self) -> str:
        """Returns the object as JSON text; floats round-trip exactly."""
        content = {
            "version": _VERSION,
            "preprocessing": self.preprocessing.to_dict(),
            "classes": list(self.classes),
            "activation": self.activation,
        }
        return json.dumps(content)

    @classmethod
    def from_json(cls, text: str, source: str) -> ImageMetadata:
        """Restores the object from the text that :meth:`to_json` returned.

        Args:
            text: JSON text.
            source: name of the file or run that contains the text, for error messages.

        Raises:
            CheckpointError: the text is damaged, or was written by a newer onnxtrain.
        """
        try:
            content = parse_json(text)
            if content["version"] != _VERSION:
                raise ValueError(f"version {content['version']}")
            classes, activation = content["classes"], content["activation"]
            if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
                raise ValueError("the names of classes are no list of strings")
            if len(set(classes)) < len(classes):
                raise ValueError("two classes have the same name")
            if activation not in (None, "softmax", "sigmoid", "exp"):
                raise ValueError(f"the activation is {str(activation)[:60]!r}")
            preprocessing = Preprocessing.from_dict(content["preprocessing"])
        except (KeyError, TypeError, ValueError, InputError) as error:
            raise CheckpointError(
                f"Reading '{source}': its property '{PROPERTY}' does not describe images ({error}). It may have been "
                "written by a newer onnxtrain; upgrade."
            ) from error
        return cls(preprocessing=preprocessing, classes=tuple(classes), activation=activation)
