"""Maps device names of the API (`"cpu"`, `"cuda"`, `"cuda:1"`) to execution providers of ONNX Runtime."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

import onnxruntime as ort

from onnxtrain.errors import InputError

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


@dataclass(frozen=True)
class Device:
    """A device that holds tensors and runs sessions.

    Attributes:
        type: "cpu" or "cuda".
        index: number of the GPU, e.g. 1 for "cuda:1".
    """

    type: str
    index: int = 0

    def __str__(self) -> str:
        return self.type if self.type == "cpu" else f"{self.type}:{self.index}"

    @property
    def providers(self) -> list[str | tuple[str, dict[str, int]]]:
        """Execution providers for a session on this device, preferred first."""
        if self.type == "cpu":
            return ["CPUExecutionProvider"]
        # The CPU second, for ops for which ONNX Runtime has no CUDA kernel. Without TF32, which would round the factors
        # of float32 products to 10 bits.
        options = {"device_id": self.index, "use_tf32": 0}
        return [(_PROVIDERS[self.type], options), "CPUExecutionProvider"]


CPU = Device("cpu")


def parse_device(name: str) -> Device:
    """Parses the name of a device and checks that the installed onnxruntime supports it.

    Args:
        name: "cpu", "cuda" or "cuda:<index>".

    Raises:
        InputError: the name is unknown, or the installed onnxruntime lacks the execution provider.
    """
    kind, colon, index = name.partition(":")
    if (
        kind not in _PROVIDERS
        or (colon and not index.isdecimal())
        or (kind == "cpu" and index not in ("", "0"))
    ):
        raise InputError(f"Unknown device '{name}': expected 'cpu', 'cuda' or 'cuda:<index>'.")
    # Checked first: ONNX Runtime would only warn and run the session on the CPU.
    available = ort.get_available_providers()
    if _PROVIDERS[kind] not in available:
        raise InputError(
            f"Device '{name}' needs {_PROVIDERS[kind]}, but this onnxruntime {ort.__version__} has only "
            f"{', '.join(available)}. Install onnxruntime-gpu instead of onnxruntime, or use device='cpu'."
        )
    if kind == "cuda":
        _load_nvidia_libraries()
    return Device(kind, int(index or 0))


@functools.cache
def _load_nvidia_libraries() -> None:
    """Loads CUDA and cuDNN from NVIDIA's pip packages, which the dynamic loader does not search."""
    # Added in onnxruntime 1.21. It prints what it cannot load; a session then reports what is missing.
    load = getattr(ort, "preload_dlls", None)
    if load is not None:
        with contextlib.redirect_stdout(None):
            load()
