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
    Question("learning rate schedule", "fine-tuning.md", "cosine_with_restarts"),
    Question("federated learning", "federated.md", "client_app("),
    Question("several gpus", "several-workers.md", "strategy="),
    Question("lora adapter", "lora.md", "LoraConfig"),
]

WORDS = {
    "data.md": ["arrays", "dataset", "dataloader", "pandas"],
    "federated.md": ["federated", "flower", "privacy"],
    "many-machines.md": ["ddp", "fsdp", "distributed", "torchrun"],
    "several-workers.md": ["distributed", "gpus", "parallel", "machines", "several"],
    "fine-tuning.md": ["learning rate", "schedule", "metrics", "losses", "optimizers"],
    "how-to/can-my-model-be-trained.md": ["unsupported", "op", "check"],
    "how-to/continue-an-interrupted-run.md": ["resume", "crash", "checkpoint", "continue"],
    "how-to/save-the-result.md": ["save", "export", "weights"],
    "how-to/ship-a-model-that-learns-on-the-phone.md": ["android", "ios", "mobile"],
    "how-to/stop-early.md": ["early stopping", "patience", "overfitting"],
    "how-to/train-only-the-last-layers.md": ["freeze", "head", "frozen"],
    "how-to/train-with-class-weights.md": ["imbalanced", "class weights"],
    "how-to/use-hugging-face-trainer.md": ["hugging face", "transformers", "orttrainer"],
    "how-to/use-fewer-megabytes.md": ["memory", "oom"],
    "how-to/what-runs-on-my-gpu.md": ["gpu", "cuda"],
    "how-to/which-loss-for-two-classes.md": ["binary", "loss"],
    "how-to/why-is-my-loss-nan.md": ["nan", "diverges", "infinite"],
    "tabular-data.md": ["csv", "table"],
}
"""Words under which the search finds a page first, since people ask for it by them. They need not occur in its text."""


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
