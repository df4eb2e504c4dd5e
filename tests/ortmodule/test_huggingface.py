"""Models of Hugging Face transformers trained in ONNX Runtime against eager PyTorch, with float64 as the judge."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from ortmodule.eager import compare, error, strict

transformers = pytest.importorskip(
    "transformers", reason="Hugging Face transformers, whose models these tests train, is not installed"
)

pytestmark = pytest.mark.torch

STEPS = 20
TOKENS = 50
IGNORED = -100
"""The label that Hugging Face's losses leave out."""

Batch = dict[str, torch.Tensor]


SMALL = {
    "vocab_size": TOKENS,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
}


GROUPED = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0}


"""Four heads of queries share two of keys and values."""


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, num_labels=3))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=TOKENS, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, attention_dropout=0.1))


def llama_checkpointed() -> nn.Module:
    model = llama()
    model.gradient_checkpointing_enable()
    return model


def mixtral() -> nn.Module:
    """A mixture of experts: tokens are sorted by expert, and multiplied group by group."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**GROUPED, **experts))


def t5() -> nn.Module:
    sizes = {"vocab_size": TOKENS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    places = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
    config = transformers.T5Config(
        **sizes, **places, num_decoder_layers=1, pad_token_id=0, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    sizes = {name: SMALL[name] for name in SMALL if name not in ("vocab_size", "max_position_embeddings")}
    dropped = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    config = transformers.ViTConfig(**sizes, **dropped, image_size=16, patch_size=4, num_labels=3)
    return transformers.ViTForImageClassification(config)


def _padding(batch: int, length: int) -> torch.Tensor:
    """Ones where there is a token: the sequences get shorter by one from row to row."""
    return (torch.arange(length) < torch.arange(length, length - batch, -1)[:, None]).long()


def classified_text(batch: int, length: int) -> Batch:
    return {
        "input_ids": torch.randint(1, TOKENS, (batch, length)),
        "attention_mask": _padding(batch, length),
        "labels": torch.randint(3, (batch,)),
    }


def text(batch: int, length: int) -> Batch:
    ids, mask = torch.randint(1, TOKENS, (batch, length)), _padding(batch, length)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}


def translated_text(batch: int, length: int) -> Batch:
    """The labels are longer than the input."""
    labels = torch.randint(1, TOKENS, (batch, length + 2))
    return {
        "input_ids": torch.randint(1, TOKENS, (batch, length)),
        "attention_mask": _padding(batch, length),
        "labels": labels.masked_fill(_padding(batch, length + 2) == 0, IGNORED),
    }


def images(batch: int, _: int) -> Batch:
    return {"pixel_values": torch.randn(batch, 3, 16, 16), "labels": torch.randint(3, (batch,))}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


@dataclass(frozen=True)
class Setting:
    """A model, what it learns from, and its optimizer.

    The gradient of a key projection's bias is zero but for rounding, which AdamW makes into whole steps. It is for
    models without such biases only, since for the others it tells nothing.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    optimizer: Callable[[Any], torch.optim.Optimizer]


SETTINGS = {
    "bert": Setting(bert, classified_text, sgd),
    "gpt2": Setting(gpt2, text, sgd),
    "llama": Setting(llama, text, adamw),
    "llama_checkpointed": Setting(llama_checkpointed, text, adamw),
    "mixtral": Setting(mixtral, text, adamw),
    "t5": Setting(t5, translated_text, adamw),
    "vit": Setting(vit, images, sgd),
}

SIZES = ((4, 7), (3, 9), (5, 6))
"""Batch size and sequence length of the batches, which take turns."""


MEMORY_AND_NOISE = frozenset(
    {
        *("as_strided", "bernoulli_", "detach", "empty", "empty_like", "empty_permuted", "empty_strided"),
        *("fill_", "ones_like", "view", "zero_", "zeros"),
        *("resolve_conj", "resolve_neg", "to"),  # nothing but calls: what they would do has names of its own
    }
)
"""All that PyTorch does in a step: it allocates, draws for dropout, and starts the backward pass with a one."""


class InFloat64(TorchDispatchMode):
    """Makes float64 of every float32 that a model asks for: some cast parts of themselves to it, whatever they get."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


def _train(model: nn.Module, setting: Setting, batches: list[Batch]) -> list[torch.Tensor]:
    """Returns the losses, then the parameters after all steps, in float64."""
    model.train()
    optimizer = setting.optimizer(model.parameters())
    torch.manual_seed(7)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batches[step % len(batches)]).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [value.detach().double() for value in (torch.stack(losses), *model.parameters())]


def _wide(batch: Batch) -> Batch:
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def _pytorch_ops(model: nn.Module, batch: Batch) -> set[str]:
    """Names of the ATen operators that run in a forward and backward pass."""
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU]) as events:
        model(**batch).loss.backward()
    names = {event.name for event in events.events()}
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", SETTINGS)
def test_trains_as_eager_pytorch(name: str) -> None:
    """No graph may fall back. Dropout draws the same in both precisions, so float64 judges it too."""
    setting = SETTINGS[name]
    torch.manual_seed(0)
    model = setting.model()
    batches = [setting.batch(*size) for size in SIZES]
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()

    for module in exact.modules():
        if hasattr(module, "config"):  # the grouped product of experts knows no float64
            module.config._experts_implementation = "eager"
    torch._dynamo.reset()
    wrapped = strict(model)
    got = _train(wrapped, setting, batches)
    eager = _train(plain, setting, batches)
    with InFloat64():
        want = _train(exact, setting, [_wide(batch) for batch in batches])
    for part in (slice(0, 1), slice(1, None)):  # the losses, the parameters
        assert error(got[part], want[part]) <= 3 * error(eager[part], want[part]) + 1e-6
    assert wrapped.report().runs_in_onnxruntime
    # The report knows only of what Dynamo captured; PyTorch's profiler would see what it passed over.
    assert _pytorch_ops(wrapped, batches[0]) <= MEMORY_AND_NOISE


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("make", [gpt2, t5], ids=lambda make: make.__name__)
def test_generated_tokens_are_those_of_eager_pytorch(make: Callable[[], nn.Module]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain, prompt = make().eval(), torch.randint(1, TOKENS, (2, 3))
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(prompt)
    ours = compare(
        plain,
        lambda model: model.generate(prompt, attention_mask=mask, **settings),
        wrap=strict,
        rtol=0,
        atol=0,
    )
    assert ours.report().runs_in_onnxruntime
