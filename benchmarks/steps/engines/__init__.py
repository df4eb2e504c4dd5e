"""The engines: each is a module with `make`, run by `steps/worker.py` in a process, and often a Python, of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ENGINES", "REFERENCES", "EngineSpec"]

WITHOUT_KERNELS = {"ONNXTRAIN_KERNELS": "off"}


@dataclass(frozen=True)
class EngineSpec:
    """An engine, and how its process is started.

    Attributes:
        title: its name in tables.
        module: in this package.
        options: what its `make` is given beside the case.
        environment: variables of its process.
        python: whose Python runs it: "" is the one that runs the benchmark, others are options of the command.
        only_images: whether it is another engine for all but images.
        needs: a package without which it cannot run.
        ours: whether its failure is a failure of the benchmark.
        on_cuda: whether it has a GPU for another device.
        tolerance: largest relative difference of its losses from those of PyTorch.
    """

    title: str
    module: str
    options: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str = ""
    only_images: bool = False
    needs: str = ""
    ours: bool = False
    on_cuda: bool = False
    tolerance: float = 2e-3


def _ours(title: str, module: str, kernels: bool) -> EngineSpec:
    if kernels:
        return EngineSpec(f"{title}, kernels", module, needs="onnxtrain_kernels", ours=True)
    return EngineSpec(title, module, environment=WITHOUT_KERNELS, ours=True, on_cuda=True)


_LAST = {"layout": "channels_last"}
_COMPILED = {"compile": "yes"}

ENGINES: dict[str, EngineSpec] = {
    "torch": EngineSpec("torch eager", "in_torch", on_cuda=True),
    "torch-cl": EngineSpec("torch eager, channels_last", "in_torch", _LAST, only_images=True, on_cuda=True),
    "compile": EngineSpec("torch.compile", "in_torch", _COMPILED, on_cuda=True),
    "compile-cl": EngineSpec(
        "torch.compile, channels_last", "in_torch", _COMPILED | _LAST, only_images=True, on_cuda=True
    ),
    "device": _ours("on-device API", "on_device", kernels=False),
    "device-kernels": _ours("on-device API", "on_device", kernels=True),
    "ortmodule": _ours("ORTModule", "in_ortmodule", kernels=False),
    "ortmodule-kernels": _ours("ORTModule", "in_ortmodule", kernels=True),
    # Their AdamW is Hugging Face's without decay, that of onnxsim has no decay: losses are close, not equal.
    "ort-training": EngineSpec(
        "onnxruntime-training 1.19.2", "in_ort_training", python="ort-training", tolerance=2e-2
    ),
    "onnxsim": EngineSpec("onnxsim 0.8.1", "in_onnxsim", python="onnxsim", tolerance=2e-2),
}
"""All engines; "again" after the name of one is a control."""

REFERENCES = ("torch", "torch-cl", "compile", "compile-cl")
"""Ratios are against the best of these."""
