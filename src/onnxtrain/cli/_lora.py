"""Creates the LoRA configuration from `--lora-rank` and the other `--lora` options."""

from __future__ import annotations

from typing import Any

from onnxtrain.cli._options import LoraOptions
from onnxtrain.errors import InputError
from onnxtrain.lora import LoraConfig


def chosen_lora(options: LoraOptions) -> LoraConfig | None:
    """Returns the LoRA configuration; None if `--lora-rank` is not given.

    Raises:
        InputError: `--lora-targets`, `--lora-alpha` or `--lora-dropout` is given without `--lora-rank`.
        GraphBuildError: a value is out of range.
    """
    others: dict[str, Any] = {
        "target_modules": options.lora_targets,
        "lora_alpha": options.lora_alpha,
        "lora_dropout": options.lora_dropout,
    }
    given = {name: value for name, value in others.items() if value is not None}
    if options.lora_rank is None:
        if given:
            raise InputError(
                "--lora-targets, --lora-alpha and --lora-dropout need --lora-rank, e.g. --lora-rank 8."
            )
        return None
    return LoraConfig(r=options.lora_rank, **given)
