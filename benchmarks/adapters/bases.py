"""Writes a Llama with random weights, and its int4 file by the model builder of onnxruntime-genai.

Runs in the environment that has torch, transformers and onnxruntime-genai: python bases.py NAME DIRECTORY
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from shapes import SHAPES, VOCABULARY


def write_float_model(name: str, directory: Path) -> None:
    """Saves the model as transformers loads it, with a tokenizer, which the builder copies."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[name], vocab_size=VOCABULARY, max_position_embeddings=2048)
    model = LlamaForCausalLM(config)
    print(f"{name}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters")
    model.save_pretrained(directory)
    words = {f"w{k}": k for k in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w1").save_pretrained(
        directory
    )


def main(name: str, directory: Path) -> None:
    """Writes `DIRECTORY/float` and `DIRECTORY/int4` unless they are there."""
    floats, int4 = directory / "float", directory / "int4"
    if not (floats / "config.json").exists():
        write_float_model(name, floats)
    if not (int4 / "model.onnx").exists():
        places = ["-i", floats, "-o", int4, "-c", directory / "cache"]
        builder = [
            sys.executable,
            "-m",
            "onnxruntime_genai.models.builder",
            *places,
            "-p",
            "int4",
            "-e",
            "cpu",
        ]
        subprocess.run(builder, env=os.environ | {"HF_HUB_OFFLINE": "1"}, check=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
