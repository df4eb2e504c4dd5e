"""Takes steps of LoRA with PyTorch and PEFT, and prints peak memory, seconds per step and losses as JSON.

Usage: python peft_steps.py FLOAT_MODEL DTYPE TOKENS STEPS, where DTYPE is float32, bfloat16 or nf4 (bitsandbytes).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from shapes import ALPHA, LEARNING_RATE, RANK, VOCABULARY, peak_mb


def load(path: str, dtype: str) -> Any:
    """Loads the model; for nf4 its linear layers in 4 bits and the rest in float32."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if dtype != "nf4":
        return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    return AutoModelForCausalLM.from_pretrained(
        path, quantization_config=config, device_map="cpu", dtype=torch.float32
    )


def main(path: str, dtype: str, tokens: int, steps: int) -> None:
    import numpy as np
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(load(path, dtype), config)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, LEARNING_RATE)
    # The peak counts from here on: loading holds the file in memory for a moment, beside the weights.
    Path("/proc/self/clear_refs").write_text("5")
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY, (1, tokens)))
    seconds, processor, losses = [], [], []
    for _ in range(steps):
        start, start_processor = time.perf_counter(), time.process_time()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        processor.append(time.process_time() - start_processor)
        losses.append(float(loss))
    print(
        json.dumps(
            {
                "mb": peak_mb(),
                "seconds": statistics.median(seconds[1:]),
                "losses": losses,
                "processor_seconds": statistics.median(processor[1:]),
                "threads": torch.get_num_threads(),
                "trained": sum(p.numel() for p in trained),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
