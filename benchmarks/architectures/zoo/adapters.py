"""Low-rank and other adapters of PEFT around frozen models."""

from __future__ import annotations

from functools import partial
from typing import Any

import peft
from torch import nn

from zoo.architecture import architecture
from zoo.hugging_face import made, pairs, text


def _adapted(head: str, kind: str, settings: dict[str, Any], adapter: Any) -> nn.Module:
    return peft.get_peft_model(made(head, kind, settings), adapter)  # type: ignore[no-any-return]


_LM = {"task_type": "CAUSAL_LM"}
for _name, _adapter in {
    "LoRA": lambda: peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], **_LM),
    "DoRA": lambda: peft.LoraConfig(r=4, use_dora=True, target_modules=["q_proj", "v_proj"], **_LM),
    "rsLoRA": lambda: peft.LoraConfig(r=4, use_rslora=True, target_modules="all-linear", **_LM),
    "IA3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **_LM
    ),
    "AdaLoRA": lambda: peft.AdaLoraConfig(
        init_r=4, target_r=2, total_step=10, target_modules=["q_proj"], **_LM
    ),
    "LoHa": lambda: peft.LoHaConfig(r=2, target_modules=["q_proj"], **_LM),
    "LoKr": lambda: peft.LoKrConfig(r=2, target_modules=["q_proj"], **_LM),
    "OFT": lambda: peft.OFTConfig(r=0, oft_block_size=8, target_modules=["q_proj"], **_LM),
    "BOFT": None,
    "VeRA": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"], **_LM),
    "PromptTuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, **_LM),
    "PrefixTuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, **_LM),
    "FourierFT": lambda: peft.FourierFTConfig(n_frequency=20, target_modules=["q_proj"], **_LM),
}.items():
    if _adapter is not None:
        architecture(
            f"peft/{_name}",
            lambda _adapter=_adapter: _adapted("AutoModelForCausalLM", "llama", {}, _adapter()),
            text,
        )
architecture(
    "peft/LoRA-t5",
    lambda: _adapted(
        "AutoModelForSeq2SeqLM",
        "t5",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 1},
        peft.LoraConfig(r=4, target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM"),
    ),
    partial(pairs),
)
