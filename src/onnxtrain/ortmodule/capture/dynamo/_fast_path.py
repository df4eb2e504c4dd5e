"""Disables PyTorch's fused inference kernels for Transformer layers, which have no counterpart in ONNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onnxtrain.ortmodule._torch import skip
from onnxtrain.ortmodule.capture.dynamo._process_wide import ProcessWide

_WITH_FAST_PATH = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer)


def without_fast_path(module: torch.nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `call` so that Transformer layers of the module run operator by operator.

    In inference, eager PyTorch runs such a layer as one kernel. The results are equal except at padded positions, where
    the kernel of `TransformerEncoder` returns zeros.

    Args:
        module: the module. If it has no Transformer layers, `call` is returned unchanged.
        call: calls the module.
    """
    if any(isinstance(layer, _WITH_FAST_PATH) for layer in module.modules()):
        return _WithoutFastPath(call).run
    return call


class _WithoutFastPath:
    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    @skip
    def run(self, *args: Any, **kwargs: Any) -> Any:
        with fast_path_disabled():
            return self._call(*args, **kwargs)


def _disable() -> Callable[[], None]:
    """Disables PyTorch's fused inference kernels for Transformer layers, process-wide; returns the undo function."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return lambda: torch.backends.mha.set_fastpath_enabled(before)


fast_path_disabled = ProcessWide(_disable)
