"""At the desk: trains a language model on documentation, quantizes it to int4, and makes trainings of the files.

Usage: python desk.py FOLDER [--steps N]
"""

from __future__ import annotations

import argparse
import logging
import warnings
from pathlib import Path

import corpus
import numpy as np
import onnx
import torch
from model import Decoder
from onnxruntime.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    MatMulNBitsQuantizer,
)

from onnxtrain import generate_artifacts
from onnxtrain.lora import LoraConfig, adapter_model, copy_module_names

BATCH, RATE = 16, 2e-3
ADAPTERS = LoraConfig(r=16, lora_alpha=32)


def train(model: torch.nn.Module, row: np.ndarray, steps: int, seed: int = 0) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    model.train()
    for step, batch in enumerate(corpus.batches(row, steps, BATCH, seed), start=1):
        tokens = torch.from_numpy(batch)
        logits = model(tokens)[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


def export(model: torch.nn.Module, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        program = torch.onnx.export(
            model.eval(),
            (torch.zeros(2, corpus.LENGTH, dtype=torch.int64),),
            dynamo=True,
            verbose=False,
            input_names=["tokens"],
            output_names=["logits"],
            dynamic_shapes=({0: "batch"},),
        )
    onnx.save(program.model_proto, path)


def quantize(source: Path, target: Path) -> None:
    """Writes the weights of all linear layers in int4, as onnxruntime's quantizer does."""
    settings = DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=True, bits=4)
    quantizer = MatMulNBitsQuantizer(onnx.load(source), algo_config=settings)
    quantizer.process()
    # The quantizer drops the names of modules, by which the output layer is known: it gets no adapter.
    onnx.save(copy_module_names(quantizer.model.model, source), target)


def prepare(folder: Path, steps: int) -> None:
    """Writes the models, the tokens, and the files that a device trains from."""
    folder.mkdir(parents=True, exist_ok=True)
    (docs, held_out_docs), (code, held_out_code) = (
        corpus.parts(texts) for texts in (corpus.documentation(), corpus.code())
    )
    tokenizer = corpus.train_tokenizer(docs)
    tokenizer.save(str(folder / "tokenizer.json"))
    rows = {"docs": docs, "docs_held_out": held_out_docs, "code": code, "code_held_out": held_out_code}
    rows = {name: corpus.tokens(tokenizer, texts) for name, texts in rows.items()}
    np.savez(folder / "tokens.npz", **rows)
    torch.manual_seed(0)
    model = Decoder()
    print(", ".join(f"{name}: {len(row):,} tokens" for name, row in rows.items()))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    train(model, rows["docs"], steps)
    export(model, folder / "float.onnx")
    make_trainings(folder)


def make_trainings(folder: Path) -> None:
    """Quantizes the float model, and writes the files from which a device trains both."""
    quantize(folder / "float.onnx", folder / "int4.onnx")
    # Adapters on the int4 file, and, to compare with, all parameters of the float file.
    common = {"loss": "causal_lm", "optimizer": "adamw"}
    generate_artifacts(folder / "int4.onnx", lora=ADAPTERS, artifact_directory=folder / "lora", **common)
    generate_artifacts(folder / "float.onnx", artifact_directory=folder / "full", **common)
    onnx.save(adapter_model(folder / "int4.onnx", ADAPTERS), folder / "deployed.onnx")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    logging.getLogger().setLevel(logging.WARNING)  # onnxruntime's quantizer logs each node
    prepare(options.folder, options.steps)


if __name__ == "__main__":
    main()
