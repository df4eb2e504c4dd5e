"""Device names of the API (`"cpu"`, `"cuda"`, `"cuda:1"`) and the execution providers behind them."""

from __future__ import annotations

from dataclasses import dataclass

import onnxruntime as ort

from onnxtrain.errors import InputError

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


@dataclass(frozen=True)
class Device:
    """Where tensors live: `type` is "cpu" or "cuda"."""

    type: str
    index: int = 0

    def __str__(self) -> str:
        return self.type if self.type == "cpu" else f"{self.type}:{self.index}"

    @property
    def providers(self) -> list[str | tuple[str, dict[str, int]]]:
        """Execution providers for a session on this device, preferred first."""
        if self.type == "cpu":
            return ["CPUExecutionProvider"]
        return [(_PROVIDERS[self.type], {"device_id": self.index}), "CPUExecutionProvider"]


CPU = Device("cpu")


def parse_device(name: str) -> Device:
    """Returns the device that `name` means, after checking that this onnxruntime can use it.

    Raises:
        InputError: Unknown name, or the installed onnxruntime lacks the execution provider.
    """
    kind, colon, index = name.partition(":")
    if (
        kind not in _PROVIDERS
        or (colon and not index.isdecimal())
        or (kind == "cpu" and index not in ("", "0"))
    ):
        raise InputError(f"Unknown device '{name}': expected 'cpu', 'cuda' or 'cuda:<index>'.")
    available = ort.get_available_providers()
    if _PROVIDERS[kind] not in available:
        raise InputError(
            f"Device '{name}' needs {_PROVIDERS[kind]}, and this onnxruntime {ort.__version__} has only "
            f"{', '.join(available)}. Install onnxruntime-gpu in place of onnxruntime, or use device='cpu'."
        )
    return Device(kind, int(index or 0))
