"""Captures integer attributes of modules as symbols once they have changed, e.g. a step counter.

Dynamo (PyTorch 2.13) specializes graphs to the integer attributes of modules, so that `self.step += 1` causes a
capture in each call (https://github.com/pytorch/pytorch/issues/128319). Its setting `allow_unspec_int_on_nn_module`
doesn't help: layers of one class share their code, and sizes that differ between layers would count as changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from onnxtrain.ortmodule._torch import ChainedSource, InstructionTranslator, dynamo_builder, dynamo_utils
from onnxtrain.ortmodule.capture.dynamo._process_wide import ProcessWide, replace

_seen: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, int | None]] = weakref.WeakKeyDictionary()
"""Maps a module and a path within it, e.g. ".step", to the integer at the first capture; None if it has changed."""


def _generalize_changed_integers() -> Callable[[], None]:
    """Patches Dynamo to make integer attributes of modules symbolic once they have changed.

    Returns:
        The undo function.
    """
    before = dynamo_utils.is_int_specialization_case

    def is_constant(value: Any, source: Any) -> bool:
        return bool(before(value, source)) and not _has_changed(value, source)

    # `dynamo_builder` imports the function by name.
    name = "is_int_specialization_case"
    return replace((dynamo_builder, name, is_constant), (dynamo_utils, name, is_constant))


module_integers = ProcessWide(_generalize_changed_integers)


def _has_changed(value: int, source: Any) -> bool:
    """Records an integer of a module; returns True if it has changed since the first capture.

    Args:
        value: the integer.
        source: Dynamo's description of where the integer is, e.g. `L['self'].step`.
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
