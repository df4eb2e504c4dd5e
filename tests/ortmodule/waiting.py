"""Prints ATen ops without a lowering; in the folder of the tests `python -m ortmodule.waiting pool` those named so.

Left out are ops that PyTorch writes in others before they are lowered, variants that write to an argument, backward
ops, since gradients are made of ONNX ops, and kernels of other devices, layouts and number formats.
"""

from __future__ import annotations

import sys

import torch

import onnxtrain.ortmodule.lowering.aten  # noqa: F401
from onnxtrain.ortmodule.lowering._functional_graph import _decompositions
from onnxtrain.ortmodule.lowering._table import LOWERINGS

_LEFT_OUT = (
    *(
        "backward",
        "cudnn",
        "miopen",
        "mkldnn",
        "mps",
        "philox",
        "cslt",
        "sparse",
        "nested",
        "jagged",
        "quantize",
    ),
    *(
        "int4pack",
        "int8pack",
        "qkv",
        "indices_copy",
        "_foreach",
        "_test",
        "_fused_adag",
        "_fused_adam",
        "_fused_sgd",
    ),
)


def waiting(word: str = "") -> list[str]:
    """Lists overloads without a lowering, as `lower` takes them, e.g. ["aten.fractional_max_pool2d.default"]."""
    decomposed = {str(overload) for overload in _decompositions()}
    names = []
    for qualified in torch._C._dispatch_get_all_op_names():
        domain, _, rest = qualified.partition("::")
        op, _, overload = rest.partition(".")
        overload = overload or "default"
        if domain != "aten" or word not in op or any(part in op for part in _LEFT_OUT):
            continue
        packet = getattr(torch.ops.aten, op)
        if overload not in packet.overloads() or getattr(packet, overload)._schema.is_mutable:
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CompositeImplicitAutograd"):
            continue
        # As the lowering looks them up: copying variants of views have the name of the view.
        name, short = f"aten.{op}.{overload}", f"aten.{op.replace('_copy', '')}"
        if name not in decomposed and not {short, f"{short}.{overload}"} & LOWERINGS.keys():
            names.append(name)
    return sorted(names)


if __name__ == "__main__":
    print("\n".join(waiting(*sys.argv[1:])))
