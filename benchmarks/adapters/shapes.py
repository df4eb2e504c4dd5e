"""Names the models of the comparison, and what both of its environments need to know of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 32000
SHAPES: dict[str, dict[str, Any]] = {
    "113M": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 9,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
    },
    "502M": {
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 24,
        "num_key_value_heads": 24,
        "tie_word_embeddings": True,
    },
}
"""Arguments of LlamaConfig, by the name of the model, which is its number of parameters."""

RANK, ALPHA, LEARNING_RATE = 8, 16, 1e-4


def peak_mb() -> float:
    """Returns the largest resident memory of this process so far, in MB of 1024 kB."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    return int(line.split()[1]) / 1024
