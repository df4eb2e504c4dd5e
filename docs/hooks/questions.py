"""Asks the search of the built site what newcomers ask, and checks which pages it finds.

The index is that of the built site, `search/search_index.json`. It is read as mkdocs-material's search reads it in the
browser: the same fields and weights, every word also as the beginning of a longer word, pages before their sections.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Question(NamedTuple):
    """A question of a newcomer."""

    words: str
    """Words that he types into the search field, e.g. "loss nan"."""
    page: str
    """Page that answers it, below docs/, e.g. "how-to/why-is-my-loss-nan.md"."""
    answer: str
    """Text of the page that is the answer, as it stands in the Markdown."""


QUESTIONS = [
    Question("train only the head", "how-to/train-only-the-last-layers.md", 'requires_grad="head.*"'),
    Question("freeze layers", "how-to/train-only-the-last-layers.md", "frozen_params"),
    Question("loss for binary classification", "how-to/which-loss-for-two-classes.md", "bce_with_logits"),
    Question("save trained model", "how-to/save-the-result.md", 'trainer.export("trained.onnx")'),
    Question("loss nan", "how-to/why-is-my-loss-nan.md", "The learning rate is too high."),
    Question("gpu", "how-to/what-runs-on-my-gpu.md", 'device="cuda"'),
    Question("out of memory", "how-to/use-fewer-megabytes.md", "recompute=True"),
    Question("early stopping", "how-to/stop-early.md", "restore_best=True"),
    Question("resume training", "how-to/continue-an-interrupted-run.md", "Trainer.resume"),
    Question("imbalanced classes", "how-to/train-with-class-weights.md", 'class_weight="balanced"'),
    Question("android", "how-to/ship-a-model-that-learns-on-the-phone.md", "generate_artifacts"),
    Question("unsupported op", "how-to/can-my-model-be-trained.md", "onnxtrain ops model.onnx"),
    Question("pytorch", "tutorials/from-pytorch.md", "ORTModule"),
    Question("hugging face trainer", "how-to/use-hugging-face-trainer.md", "ORTModule("),
    Question("csv pandas", "tabular-data.md", "--target survived"),
    Question("learning rate schedule", "losses-and-optimizers.md", "cosine_with_restarts"),
    Question("federated learning", "federated.md", "client_app("),
    Question("several gpus", "several-workers.md", "strategy="),
    Question("lora adapter", "lora.md", "LoraConfig"),
    # In the order of CONTRIBUTING.md, "What readers stumbled over".
    Question(
        "train only the head of an onnx model",
        "how-to/train-only-the-last-layers.md",
        'requires_grad="head.*"',
    ),
    Question("model already has softmax", "how-to/why-does-my-loss-not-go-down.md", "loss_input_names"),
    Question("which loss two classes", "how-to/which-loss-for-two-classes.md", "bce_with_logits"),
    Question("one logit or two", "how-to/which-loss-for-two-classes.md", "bce_with_logits"),
    Question("deploy with onnxruntime", "how-to/save-the-result.md", "InferenceSession"),
    Question("export trained model use without onnxtrain", "how-to/save-the-result.md", "InferenceSession"),
    Question("loss does not go down", "how-to/why-does-my-loss-not-go-down.md", "Train on one batch"),
    Question("not learning", "how-to/why-does-my-loss-not-go-down.md", "Train on one batch"),
    Question("accuracy stuck", "how-to/why-does-my-loss-not-go-down.md", "Train on one batch"),
    Question("use gpu", "how-to/what-runs-on-my-gpu.md", 'device="cuda"'),
    Question("fine-tune a pytorch model", "tutorials/from-pytorch.md", "ORTModule"),
    Question("nn.Module", "tutorials/from-pytorch.md", "ORTModule"),
    Question("pytorch training loop", "tutorials/from-pytorch.md", "ORTModule"),
    Question("missing values text categories", "tabular-data.md", "--impute median"),
    Question("train from shell with csv", "tabular-data.md", "--one-hot"),
    Question("train in a browser", "browser.md", "TrainingSession.create"),
    Question("train on a phone", "how-to/ship-a-model-that-learns-on-the-phone.md", "generate_artifacts"),
    Question("llm", "how-to/fine-tune-a-language-model-for-genai.md", "save_adapter"),
    Question("int4 lora genai", "how-to/fine-tune-a-language-model-for-genai.md", "save_adapter"),
    Question("onnxruntime-genai", "how-to/fine-tune-a-language-model-for-genai.md", "set_active_adapter"),
    Question("continue training tomorrow", "how-to/continue-an-interrupted-run.md", "Trainer.resume"),
    Question("load checkpoint and continue", "how-to/continue-an-interrupted-run.md", "Trainer.resume"),
    Question("class imbalance", "how-to/train-with-class-weights.md", 'class_weight="balanced"'),
    Question("lr scheduler warmup", "losses-and-optimizers.md", "warmup_ratio=0.1"),
    Question("tensorboard", "callbacks.md", "TensorBoardLogger"),
    Question("own metric", "callbacks.md", "worst_class"),
    Question("custom loss", "callbacks.md", "FocusedCrossEntropy"),
    Question("fixed batch size", "exported-models.md", "make_batch_dynamic"),
    Question("export from pytorch", "exported-models.md", "optimize=False"),
    Question("perplexity", "tokens.md", "perplexity"),
    Question("accumulate gradients", "fine-tuning.md", "accumulate=4"),
    Question("which optimizers", "losses-and-optimizers.md", "`adafactor`"),
    Question("gradient clipping", "fine-tuning.md", "Clipping by norm"),
    Question("weight decay", "losses-and-optimizers.md", "weight_decay"),
    Question("mixed precision", "explanations/how-exact-the-numbers-are.md", "bfloat16"),
    Question("huggingface", "how-to/use-hugging-face-trainer.md", "ORTModule("),
    Question("tensorflow", "files.md", "tf2onnx"),
    Question("windows", "install.md", "Windows"),
]

WORDS = {
    "browser.md": ["browser", "web", "javascript", "wasm", "webgpu", "node", "npm"],
    "callbacks.md": [
        "callback",
        "custom",
        "hyperparameters",
        "logger",
        "metric",
        "mlflow",
        "optuna",
        "tensorboard",
        "wandb",
    ],
    "command-line.md": ["cli", "shell", "terminal"],
    "data.md": ["dataset", "dataloader", "pandas"],
    "explanations/how-exact-the-numbers-are.md": [
        "bf16",
        "deterministic",
        "fp16",
        "mixed precision",
        "reproducible",
        "seed",
    ],
    "federated.md": ["federated", "flower", "privacy"],
    "files.md": ["keras", "tensorflow"],
    "exported-models.md": ["batch", "batchnorm", "dropout", "export"],
    "fine-tuning.md": ["accumulate", "clipping"],
    "install.md": ["linux", "macos", "pip", "windows"],
    "losses-and-optimizers.md": [
        "adam",
        "decay",
        "learning rate",
        "losses",
        "metrics",
        "optimizers",
        "regression",
        "schedule",
        "warmup",
    ],
    "lora.md": ["lora", "peft", "qlora"],
    "many-machines.md": ["ddp", "fsdp", "distributed", "torchrun"],
    "ortmodule.md": ["nn.module", "ortmodule"],
    "own-host.md": ["c++", "java", "swift"],
    "performance.md": ["benchmark", "speed"],
    "quantisation-aware-training.md": ["qat", "quantization"],
    "several-workers.md": ["distributed", "gpus", "parallel", "machines", "several"],
    "tabular-data.md": ["categorical", "csv", "missing values", "table"],
    "tokens.md": ["padding", "perplexity", "tokens"],
    "tutorials/from-pytorch.md": ["loop", "nn.module", "pytorch", "torch"],
    "how-to/can-my-model-be-trained.md": ["unsupported", "op", "check"],
    "how-to/continue-an-interrupted-run.md": ["resume", "crash", "checkpoint", "continue"],
    "how-to/fine-tune-a-language-model-for-genai.md": [
        "genai",
        "int4",
        "language model",
        "llama",
        "llm",
        "qlora",
    ],
    "how-to/save-the-result.md": ["deploy", "export", "load", "save", "weights"],
    "how-to/ship-a-model-that-learns-on-the-phone.md": ["ios", "mobile", "phone"],
    "how-to/stop-early.md": ["early stopping", "patience", "overfitting"],
    "how-to/train-only-the-last-layers.md": ["freeze", "head", "frozen"],
    "how-to/train-with-class-weights.md": ["imbalance", "imbalanced", "class weights"],
    "how-to/use-hugging-face-trainer.md": ["hugging face", "huggingface", "transformers", "orttrainer"],
    "how-to/use-fewer-megabytes.md": ["memory", "oom"],
    "how-to/what-runs-on-my-gpu.md": ["cuda", "gpu", "nvidia"],
    "how-to/which-loss-for-two-classes.md": ["binary", "logits", "loss"],
    "how-to/why-does-my-loss-not-go-down.md": ["converge", "learning", "loss", "softmax", "stuck"],
    "how-to/why-is-my-loss-nan.md": ["nan", "diverges"],
}
"""Words under which the search finds a page first, since people ask for it by them. They need not occur in its text.

The search takes each word that is typed as the beginning of a longer one, short words like "a", "in" and "on", too. So
a word here must not begin with such a word: "android" would be found by "fine-tune a model".
"""


def check_questions(site: Path) -> None:
    """Searches for the words of every question.

    Raises:
        LookupError: a page is not among the first three results.
    """
    path = site / "search" / "search_index.json"
    search = build_search(json.loads(path.read_text(encoding="utf-8"))["docs"])
    if lost := unanswered(search):
        raise LookupError("questions that the search does not answer: " + "; ".join(lost))


def unanswered(search: Callable[[str], list[str]]) -> list[str]:
    """Lists the questions whose page is not among the first three results, with what was found instead."""
    lost = []
    for question in QUESTIONS:
        found = search(question.words)[:3]
        if question.page not in found:
            lost.append(f"{question.words!r} finds {', '.join(found) or 'nothing'}, and not {question.page}")
    return lost


def build_search(documents: list[dict[str, Any]]) -> Callable[[str], list[str]]:
    """Makes a search of pages and sections, as the browser does.

    Args:
        documents: entries of the index: dicts with `location`, e.g. "lora/#which-layers", `title`, `text` in HTML, and
            possibly `tags` and `boost`.

    Returns:
        A function from words to the Markdown files of the pages found, the best first.
    """
    from lunr.builder import Builder
    from lunr.stop_word_filter import stop_word_filter

    pages = {entry["location"] for entry in documents if "#" not in entry["location"]}
    builder = Builder()
    builder.pipeline.add(stop_word_filter)
    builder.ref("location")
    builder.field("title", 1000)
    builder.field("text", 1)
    builder.field("tags", 1e6)
    for entry in documents:
        text = html.unescape(re.sub(r"<[^>]*>", " ", entry["text"]))
        title, tags = html.unescape(entry["title"]), " ".join(entry.get("tags", []))
        fields = {"location": entry["location"], "title": title, "text": text, "tags": tags}
        builder.add(fields, {"boost": entry.get("boost", 1)})
    index = builder.build()

    def search(words: str) -> list[str]:
        terms = words.lower().split()
        scores: dict[str, float] = {}
        for result in index.search(" ".join(f"{term}*" for term in terms)):
            matched = result["match_data"].metadata
            share = sum(any(word.startswith(term) for word in matched) for term in terms) / len(terms)
            is_page = result["ref"] in pages
            page = result["ref"].partition("#")[0]
            score = result["score"] * (1 + (is_page + share) ** 2)
            scores[page] = max(scores.get(page, 0), score)
        return [_source(page) for page in sorted(scores, key=lambda page: -scores[page])]

    return search


def _source(location: str) -> str:
    """Returns the Markdown file of a page: "how-to/stop-early/" is made from "how-to/stop-early.md"."""
    return f"{location.rstrip('/') or 'index'}.md"
