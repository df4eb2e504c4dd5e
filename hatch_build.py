"""Which distribution of ONNX Runtime the package depends on.

`pip install .` depends on `onnxruntime`. Where another build is wanted, it takes its place:

    ONNXTRAIN_ONNXRUNTIME=onnxruntime-gpu pip install .

An empty value leaves ONNX Runtime out, for builds that no index has.
"""

from __future__ import annotations

import os
import re
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "ONNXTRAIN_ONNXRUNTIME"
DEFAULT = "onnxruntime"
MINIMUM = "1.20"


class OnnxRuntimeHook(MetadataHookInterface):
    """Completes the dependencies of pyproject.toml by ONNX Runtime."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Sets the dependencies.

        Raises:
            ValueError: The variable holds no name of a distribution, with or without versions.
        """
        chosen = os.environ.get(VARIABLE, DEFAULT).strip()
        if chosen and not re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", chosen):
            raise ValueError(
                f"{VARIABLE}={chosen!r}: expected a name as 'onnxruntime-gpu' or 'onnxruntime-gpu==1.23.2'"
            )
        if re.fullmatch(r"[A-Za-z0-9._-]+", chosen):
            chosen = f"{chosen}>={MINIMUM}"
        metadata["dependencies"] = [*self.config["device"], *([chosen] if chosen else [])]
