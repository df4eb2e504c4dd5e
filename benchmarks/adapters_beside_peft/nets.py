"""Tiny language models of transformers with random weights: Llama, Qwen2, Qwen3, Phi and Phi-3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY, WIDTH, LENGTH, HEAD = 320, 128, 256, 32
"""Number of tokens, size of a token's vector, the longest sequence, and the size of a head of attention."""
END = 2
"""The token that ends a text."""
_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": WIDTH // HEAD, "max_position_embeddings": LENGTH, "initializer_range": 0.1,
    "bos_token_id": 1, "eos_token_id": END, "pad_token_id": 0,
}  # fmt: skip
_GROUPED = {"num_key_value_heads": 2}
# The builder of genai (0.18) writes 1e-6 for the epsilon of Phi's norms, whatever the model has.
NETS: dict[str, tuple[type[nn.Module], type, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {**_GROUPED, "tie_word_embeddings": False}),
    "llama tied": (LlamaForCausalLM, LlamaConfig, {**_GROUPED, "tie_word_embeddings": True}),
    # With biases in the projections of attention.
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {**_GROUPED, "tie_word_embeddings": False}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {**_GROUPED, "head_dim": HEAD, "tie_word_embeddings": True}),
    "phi": (PhiForCausalLM, PhiConfig, {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-6}),
    "phi3": (
        Phi3ForCausalLM,
        Phi3Config,
        # With another original length the builder writes a model of long contexts.
        {**_GROUPED, "original_max_position_embeddings": LENGTH, "rms_norm_eps": 1e-6},
    ),
}


def make(name: str) -> Any:
    """Returns the net, of which no parameter has a value of which errors might make nothing, such as 0 or 1."""
    kind, config, settings = NETS[name]
    torch.manual_seed(0)
    net: Any = kind(config(**_COMMON, **settings)).eval()
    net.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in net.parameters():
            # Biases begin at 0, and norms at 1.
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return net


def save(net: Any, folder: Path) -> None:
    """Writes the net as transformers does, with a tokenizer, which the builder of genai wants."""
    net.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="t0", bos_token="t1", eos_token=f"t{END}", pad_token="t0"
    )
    tokenizer.save_pretrained(folder)
