"""Writes the artifacts of LoRA on an int4 model: python our_files.py MODEL DIRECTORY [--recompute]."""

from __future__ import annotations

import sys

from shapes import ALPHA, RANK

from onnxtrain import generate_artifacts
from onnxtrain.lora import LoraConfig

if __name__ == "__main__":
    model, directory, *options = sys.argv[1:]
    generate_artifacts(
        model,
        loss="causal_lm",
        optimizer="adamw",
        lora=LoraConfig(r=RANK, lora_alpha=ALPHA),
        artifact_directory=directory,
        recompute="--recompute" in options,
    )
