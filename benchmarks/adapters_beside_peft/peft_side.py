"""Trains the same adapters by PyTorch and PEFT."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from files import quiet
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

Array = np.ndarray[Any, Any]


def with_adapters(net: Any, *, random_b: bool) -> Any:
    """Returns a copy of a net with adapters, which PEFT initialises; B is zero, or random."""
    torch.manual_seed(1)
    config = LoraConfig(
        r=8, lora_alpha=16, target_modules="all-linear", init_lora_weights=not random_b, task_type="CAUSAL_LM"
    )
    with quiet():
        return get_peft_model(copy.deepcopy(net), config)


def loaded(net: Any, folder: Path) -> Any:
    """Returns a copy of a net with the adapters of a folder."""
    with quiet():
        return PeftModel.from_pretrained(copy.deepcopy(net), folder, is_trainable=True)


class Training:
    """A training in a floating-point type, e.g. torch.float64."""

    def __init__(self, model: Any, dtype: torch.dtype, learning_rate: float) -> None:
        self.model = copy.deepcopy(model).to(dtype)
        self.trained = {
            _plain(name): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        # PyTorch's own defaults.
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=learning_rate)

    def loss_and_gradients(self, tokens: Array, labels: Array) -> tuple[float, dict[str, Array]]:
        """Computes the loss of a batch, and gradients by parameter, transposed as graphs have them."""
        self.optimizer.zero_grad()
        loss = self._loss(tokens, labels)
        loss.backward()
        return loss.item(), {name: p.grad.double().numpy().T.copy() for name, p in self.trained.items()}

    def steps(self, batches: Sequence[tuple[Array, Array]]) -> list[float]:
        """Takes a step for each batch; returns the losses."""
        losses = []
        for tokens, labels in batches:
            losses.append(self.loss_and_gradients(tokens, labels)[0])
            self.optimizer.step()
        return losses

    def logits(self, tokens: Array) -> Array:
        """Computes logits."""
        with torch.no_grad():
            return self.model(input_ids=torch.from_numpy(tokens), use_cache=False).logits.double().numpy()

    def _loss(self, tokens: Array, labels: Array) -> torch.Tensor:
        logits = self.model(input_ids=torch.from_numpy(tokens), use_cache=False).logits
        following = torch.from_numpy(labels[:, 1:]).reshape(-1)
        return nn.functional.cross_entropy(logits[:, :-1].reshape(len(following), -1), following)


def _plain(name: str) -> str:
    """Returns the name of a parameter without what PEFT puts around it."""
    return name.removeprefix("base_model.model.").replace(".default.", ".")
