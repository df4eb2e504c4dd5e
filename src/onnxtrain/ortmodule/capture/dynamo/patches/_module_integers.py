"""Capture integers that modules hold as symbols once they have changed, e.g. a counter of steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from onnxtrain.ortmodule._torch import ChainedSource, InstructionTranslator, dynamo_builder, dynamo_utils
from onnxtrain.ortmodule.capture.dynamo._process_wide import ProcessWide, replace

_seen: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, int | None]] = weakref.WeakKeyDictionary()
"""By module and place in it, e.g. ".step": the integer at the first capture, or None if it has changed since."""


def _watch_integers() -> Callable[[], None]:
    """Has Dynamo take changing integers as it takes those of arguments; returns what takes that back."""
    before = dynamo_utils.is_int_specialization_case

    # Dynamo (PyTorch 2.13) takes all integers of modules as constants, so that each step of a counter is captured. With
    # its setting `allow_unspec_int_on_nn_module` it would compare layers of one class, whose sizes differ, with one
    # another.
    def is_constant(value: Any, source: Any) -> bool:
        return bool(before(value, source)) and not _has_changed(value, source)

    # `dynamo_builder` has imported the function by name.
    name = "is_int_specialization_case"
    return replace((dynamo_builder, name, is_constant), (dynamo_utils, name, is_constant))


changed_integers_are_symbols = ProcessWide(_watch_integers)
"""Makes integers of modules that have changed since an earlier capture inputs of graphs, while it is open."""


def _has_changed(value: int, source: Any) -> bool:
    """Notes the integer of a module, and returns whether it has changed since the first capture.

    Args:
        value: the integer.
        source: Dynamo's description of where it is, e.g. `L['self'].step`.
    """
    owner = source
    while isinstance(owner, ChainedSource):
        owner = owner.base
        module = InstructionTranslator.current_tx().output.resolve_source_value(owner)
        if isinstance(module, torch.nn.Module):
            break
    else:
        return False
    integers = _seen.setdefault(module, {})
    place = source.name.removeprefix(owner.name)
    if integers.setdefault(place, value) != value:
        integers[place] = None
    return integers[place] is None
