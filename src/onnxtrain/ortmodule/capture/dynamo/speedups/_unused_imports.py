"""Keeps Dynamo from importing Inductor, AOTAutograd and its other backends, which takes 0.14 s and 17 MB.

Dynamo (PyTorch 2.13) imports them in the first capture for any backend: to wrap the backend for debugging, to
compare the backend with "eager", to find repeated regions of a graph (off by default), to name the line of code that a
symbol comes from, and to list the side effects of an export.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from onnxtrain.ortmodule import _torch
from onnxtrain.ortmodule._torch import (
    OutputGraph,
    dynamo_config,
    eval_frame,
    graph_region_tracker,
    symbolic_shapes,
)
from onnxtrain.ortmodule.capture.dynamo._process_wide import ProcessWide, replace

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


class _FilesOfPyTorch:
    """A set of the paths of PyTorch's source files, which PyTorch skips to find the user's line of code.

    Supports only `in`.
    """

    def __contains__(self, file: str) -> bool:
        return file.startswith(_TORCH)


def _leave_out() -> Callable[[], None]:
    """Replaces functions of Dynamo that import modules ORTModule doesn't use; returns the undo function."""
    lookup = _torch.dynamo.lookup_backend
    replacements: list[tuple[Any, str, Any]] = [
        # ORTModule's backend is never the backend "eager".
        (_torch.dynamo, "lookup_backend", lambda name: None if name == "eager" else lookup(name)),
        (symbolic_shapes, "uninteresting_files", _FilesOfPyTorch),
        (OutputGraph, "get_replayed_side_effect_source_refs", lambda graph, **export: []),
    ]
    if not dynamo_config.repro_after:
        replacements.append((eval_frame, "get_compiler_fn", lambda backend: backend))
    if not (dynamo_config.use_graph_deduplication or dynamo_config.track_nodes_for_deduplication):
        replacements.append((graph_region_tracker, "InputPickler", object))
    # Other versions of PyTorch lack some of these names.
    return replace(*(r for r in replacements if hasattr(r[0], r[1])))


without_unused_imports = ProcessWide(_leave_out)
