"""The fields of `LoraConfig` have PEFT's names and defaults."""

from __future__ import annotations

import dataclasses

import pytest

from onnxtrain.lora import LoraConfig

pytestmark = pytest.mark.torch

# PEFT looks the modules up by the type of the model, which a file does not tell, and draws from PyTorch's generator.
OURS = {"target_modules": "all-linear", "seed": 0}


def test_defaults_are_those_of_peft() -> None:
    import peft

    theirs = {
        field.name: getattr(peft.LoraConfig(), field.name) for field in dataclasses.fields(peft.LoraConfig)
    }
    ours = {field.name: getattr(LoraConfig(), field.name) for field in dataclasses.fields(LoraConfig)}

    assert {name: value for name, value in ours.items() if name not in OURS} == {
        name: theirs[name] or None if name.endswith("_pattern") else theirs[name]
        for name in ours
        if name not in OURS
    }
    assert {name: ours[name] for name in OURS} == OURS
    assert theirs["target_modules"] is None
    assert "seed" not in theirs
