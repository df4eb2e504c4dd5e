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
    """Page that answers it, below docs/, e.g. "guides/fix-a-training-run.md"."""
    answer: str
    """Text of the page that is the answer, as it stands in the Markdown."""


QUESTIONS = [
    Question(
        "train only the head",
        "guides/train-part-of-a-model.md",
        'requires_grad="head.*"',
    ),
    Question("freeze layers", "guides/train-part-of-a-model.md", "frozen_params"),
    Question(
        "loss for binary classification",
        "guides/choose-a-loss-and-weights.md",
        "bce_with_logits",
    ),
    Question(
        "save trained model",
        "guides/save-stop-and-resume.md",
        'trainer.export("trained.onnx")',
    ),
    Question("loss nan", "guides/fix-a-training-run.md", "The learning rate is too high."),
    Question("gpu", "guides/train-on-a-gpu.md", 'device="cuda"'),
    Question("out of memory", "guides/fit-training-into-memory.md", "recompute=True"),
    Question("model soup", "guides/average-and-calibrate.md", "average_models"),
    Question("early stopping", "guides/save-stop-and-resume.md", "restore_best=True"),
    Question("resume training", "guides/save-stop-and-resume.md", "Trainer.resume"),
    Question(
        "imbalanced classes",
        "guides/choose-a-loss-and-weights.md",
        'class_weight="balanced"',
    ),
    Question("android", "devices/ship-training-to-a-device.md", "generate_artifacts"),
    Question("unsupported op", "guides/prepare-your-model.md", "onnxtrain ops model.onnx"),
    Question("pytorch", "tutorials/from-pytorch.md", "ORTModule"),
    Question("hugging face trainer", "pytorch/with-other-tools.md", "ORTModule("),
    Question("csv pandas", "guides/train-on-a-table.md", "--target survived"),
    Question("folder of images", "guides/train-on-images.md", "--data photos"),
    Question(
        "learning rate schedule",
        "reference/losses-and-optimizers.md",
        "cosine_with_restarts",
    ),
    Question("federated learning", "devices/federated.md", "client_app("),
    Question("several gpus", "guides/train-with-several-processes.md", "strategy="),
    Question("lora adapter", "guides/train-lora-adapters.md", "LoraConfig"),
    # In the order of CONTRIBUTING.md, "What readers stumbled over".
    Question(
        "train only the head of an onnx model",
        "guides/train-part-of-a-model.md",
        'requires_grad="head.*"',
    ),
    Question("model already has softmax", "guides/fix-a-training-run.md", "loss_input_names"),
    Question(
        "which loss two classes",
        "guides/choose-a-loss-and-weights.md",
        "bce_with_logits",
    ),
    Question("one logit or two", "guides/choose-a-loss-and-weights.md", "bce_with_logits"),
    Question("deploy with onnxruntime", "guides/save-stop-and-resume.md", "InferenceSession"),
    Question(
        "export trained model use without onnxtrain",
        "guides/save-stop-and-resume.md",
        "InferenceSession",
    ),
    Question("loss does not go down", "guides/fix-a-training-run.md", "Train on one batch"),
    Question("not learning", "guides/fix-a-training-run.md", "Train on one batch"),
    Question("accuracy stuck", "guides/fix-a-training-run.md", "Train on one batch"),
    Question("use gpu", "guides/train-on-a-gpu.md", 'device="cuda"'),
    Question("fine-tune a pytorch model", "tutorials/from-pytorch.md", "ORTModule"),
    Question("nn.Module", "tutorials/from-pytorch.md", "ORTModule"),
    Question("pytorch training loop", "tutorials/from-pytorch.md", "ORTModule"),
    Question(
        "missing values text categories",
        "guides/train-on-a-table.md",
        "--impute median",
    ),
    Question("train from shell with csv", "guides/train-on-a-table.md", "--one-hot"),
    Question("train in a browser", "devices/browser.md", "TrainingSession.create"),
    Question("train on a phone", "devices/ship-training-to-a-device.md", "generate_artifacts"),
    Question("llm", "guides/train-lora-adapters.md", "save_adapter"),
    Question("int4 lora genai", "guides/train-lora-adapters.md", "save_adapter"),
    Question("onnxruntime-genai", "guides/train-lora-adapters.md", "set_active_adapter"),
    Question("continue training tomorrow", "guides/save-stop-and-resume.md", "Trainer.resume"),
    Question(
        "load checkpoint and continue",
        "guides/save-stop-and-resume.md",
        "Trainer.resume",
    ),
    Question(
        "class imbalance",
        "guides/choose-a-loss-and-weights.md",
        'class_weight="balanced"',
    ),
    Question("lr scheduler warmup", "reference/losses-and-optimizers.md", "warmup_ratio=0.1"),
    Question("tensorboard", "guides/extend-the-trainer.md", "TensorBoardLogger"),
    Question("own metric", "guides/extend-the-trainer.md", "worst_class"),
    Question("custom loss", "guides/extend-the-trainer.md", "AsymmetricError"),
    Question("fixed batch size", "guides/prepare-your-model.md", "make_batch_dynamic"),
    Question("export from pytorch", "guides/prepare-your-model.md", "optimize=False"),
    Question("perplexity", "guides/train-a-language-model.md", "perplexity"),
    Question("sentence embeddings", "guides/train-sentence-embeddings.md", "--loss info_nce"),
    Question("accumulate gradients", "reference/trainer.md", "accumulate=4"),
    Question("which optimizers", "reference/losses-and-optimizers.md", "`adafactor`"),
    Question("gradient clipping", "reference/trainer.md", "clip_grad_norm=1.0"),
    Question("weight decay", "reference/losses-and-optimizers.md", "weight_decay"),
    Question("mixed precision", "guides/mixed-precision.md", 'precision="bf16"'),
    Question("custom op", "guides/own-ops.md", "register_custom_ops_library"),
    Question("knowledge distillation", "guides/distil-a-model.md", 'teacher="teacher.onnx"'),
    Question("multi-label thresholds", "guides/train-multi-label.md", "best_threshold"),
    Question("object detection", "guides/train-a-detection-head.md", "DetectorWithLoss"),
    Question("huggingface", "pytorch/with-other-tools.md", "ORTModule("),
    Question("tensorflow", "guides/prepare-your-model.md", "tf2onnx"),
    Question("windows", "install.md", "Windows"),
]

WORDS = {
    "guides/mixed-precision.md": ["bf16", "fp16", "loss scaling", "mixed precision"],
    "guides/own-ops.md": ["custom", "op"],
    "devices/browser.md": [
        "browser",
        "javascript",
        "node",
        "npm",
        "wasm",
        "web",
        "webgpu",
    ],
    "guides/extend-the-trainer.md": [
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
    "guides/command-line.md": ["cli", "shell", "terminal"],
    "guides/feed-your-data.md": ["dataloader", "dataset", "pandas"],
    "concepts/how-exact-it-is.md": [
        "bf16",
        "deterministic",
        "fp16",
        "reproducible",
        "seed",
    ],
    "devices/federated.md": ["federated", "flower", "privacy"],
    "guides/prepare-your-model.md": [
        "batch",
        "batchnorm",
        "check",
        "dropout",
        "export",
        "op",
        "unsupported",
    ],
    "guides/fit-training-into-memory.md": ["accumulate", "memory", "oom"],
    "install.md": ["linux", "macos", "pip", "windows"],
    "reference/losses-and-optimizers.md": [
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
    "reference/trainer.md": ["accumulate", "averages", "clip", "ema", "gradient"],
    "guides/train-lora-adapters.md": [
        "genai",
        "int4",
        "language model",
        "llama",
        "llm",
        "lora",
        "peft",
        "qlora",
    ],
    "pytorch/with-other-tools.md": [
        "ddp",
        "distributed",
        "fsdp",
        "hugging face",
        "huggingface",
        "torchrun",
        "transformers",
    ],
    "guides/fine-tune-a-hugging-face-model.md": ["bert", "from_pretrained", "save_pretrained"],
    "pytorch/use-ortmodule.md": ["nn.module"],
    "pytorch/migrate.md": ["migrate", "onnxruntime-training", "torch-ort"],
    "devices/own-host.md": ["c++", "java", "swift"],
    "guides/train-an-int8-model.md": ["qat", "quantization"],
    "guides/train-with-several-processes.md": [
        "distributed",
        "gpus",
        "machines",
        "parallel",
        "several",
    ],
    "guides/train-on-images.md": ["folder", "imagefolder", "photos"],
    "guides/train-on-a-table.md": ["categorical", "csv", "missing values", "table"],
    "guides/read-tables-of-other-formats.md": ["tsv", "decimal comma", "semicolon", "encoding"],
    "guides/train-without-a-model-file.md": ["mlp", "perceptron", "no model"],
    "guides/train-a-language-model.md": ["padding", "perplexity", "tokens"],
    "guides/train-sentence-embeddings.md": ["embeddings", "retrieval", "sentence-transformers", "similarity"],
    "tutorials/from-pytorch.md": ["loop", "nn.module", "pytorch", "torch"],
    "guides/average-and-calibrate.md": ["soup", "ensemble", "calibration", "temperature"],
    "guides/save-stop-and-resume.md": [
        "checkpoint",
        "continue",
        "crash",
        "deploy",
        "early stopping",
        "export",
        "load",
        "overfitting",
        "patience",
        "resume",
        "save",
        "weights",
    ],
    "devices/ship-training-to-a-device.md": ["ios", "mobile", "phone"],
    "guides/train-part-of-a-model.md": ["freeze", "frozen", "head"],
    "guides/choose-a-loss-and-weights.md": [
        "binary",
        "class weights",
        "imbalance",
        "imbalanced",
        "logits",
        "loss",
    ],
    "guides/train-on-a-gpu.md": ["cuda", "gpu", "nvidia"],
    "guides/fix-a-training-run.md": [
        "converge",
        "diverges",
        "learning",
        "loss",
        "nan",
        "softmax",
        "stuck",
    ],
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
        fields = {
            "location": entry["location"],
            "title": title,
            "text": text,
            "tags": tags,
        }
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
    """Returns the Markdown file of a page: "how-to/stop-early/" is made from "guides/save-stop-and-resume.md"."""
    return f"{location.rstrip('/') or 'index'}.md"
