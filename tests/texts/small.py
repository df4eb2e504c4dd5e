"""A small encoder of texts as an ONNX model and in PyTorch, and a tokenizer beside it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import tokenizers
import torch
from tokenizers import models as token_models
from tokenizers import pre_tokenizers, processors

_WORDS = "red green blue small large old new cat dog house tree runs sleeps shines grows here there"
WORDS = _WORDS.split()
DIM = 8
PAIRS = [
    ("red cat", "cat sleeps here"),
    ("green dog", "large dog runs"),
    ("blue house", "old house there"),
    ("small tree", "tree grows"),
    ("old red house", "house shines red here there"),
    ("new cat", "small cat runs here"),
    ("large green tree", "green tree grows there"),
]
TRIPLES = [(*pair, PAIRS[(i + 3) % len(PAIRS)][1]) for i, pair in enumerate(PAIRS)]
SCORED = [(*pair, i / 6) for i, pair in enumerate(PAIRS)]


def tokenizer() -> tokenizers.Tokenizer:
    """Returns a tokenizer of words, with [CLS] and [SEP]."""
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    result = tokenizers.Tokenizer(token_models.WordLevel(vocabulary, unk_token="[UNK]"))
    result.pre_tokenizer = pre_tokenizers.Whitespace()
    result.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return result


def parameters(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"table": (4 + len(WORDS), DIM), "first": (DIM, DIM), "second": (DIM, DIM)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def model(
    dtype: str = "float",
    *,
    pooled: bool = False,
    batch: str = "batch",
    sequence: str = "sequence",
    positions: int | None = None,
) -> onnx.ModelProto:
    """Returns the encoder: each token sees the mean of all tokens of its text.

    With `positions`, it fails on texts with more tokens than that.
    """
    looked_up = "x = Gather(table, input_ids)"
    if positions is not None:
        looked_up = f"""
        rows = Constant<value = float[{positions}, 1] {{{", ".join("0" * positions)}}}>()
        sizes = Shape<start = 1, end = 2>(input_ids)  none = Constant<value_int = 0>()
        step = Constant<value_int = 1>()  size = Squeeze(sizes)  places = Range(none, size, step)
        word = Gather(table, input_ids)  place = Gather(rows, places)  x = Add(word, place)"""
    of = f"{dtype}[{batch}, {sequence}"
    last = (
        "embedding = ReduceMean<keepdims=0>(tokens, one)"
        if pooled
        else "last_hidden_state = Identity(tokens)"
    )
    output = f"{dtype}[{batch}, {DIM}] embedding" if pooled else f"{of}, {DIM}] last_hidden_state"
    graph = onnx.parser.parse_model(f"""
      <ir_version: 10, opset_import: ["": 21]>
      encoder (int64[{batch}, {sequence}] input_ids, int64[{batch}, {sequence}] attention_mask) => ({output})
      <int64[1] one = {{1}}, int64[1] end = {{-1}}>
      {{
        {looked_up}
        wide = Cast<to={1 if dtype == "float" else 10}>(attention_mask)
        mask = Unsqueeze(wide, end)
        hidden = MatMul(x, first)
        h = Tanh(hidden)
        kept = Mul(h, mask)
        total = ReduceSum<keepdims=1>(kept, one)
        count = ReduceSum<keepdims=1>(mask, one)
        context = Div(total, count)
        mixed = Add(h, context)
        tokens = MatMul(mixed, second)
        {last}
      }}""")
    kind = np.float32 if dtype == "float" else np.float16
    for name, array in parameters().items():
        graph.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(kind), name))
    return graph


def write(folder: Path, **arguments: object) -> Path:
    """Writes model and tokenizer into a folder; returns the path of the model."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model(**arguments), folder / "model.onnx")  # type: ignore[arg-type]
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder / "model.onnx"


class Encoder(torch.nn.Module):
    """The same encoder in float64, followed by the mean over the attention mask."""

    def __init__(self) -> None:
        super().__init__()
        for name, array in parameters().items():
            setattr(self, name, torch.nn.Parameter(torch.tensor(array, dtype=torch.float64)))

    def forward(self, texts: list[str]) -> torch.Tensor:
        encoded = [torch.tensor(entry.ids) for entry in tokenizer().encode_batch(texts)]
        rows = []
        # One text at a time: no padding, so nothing can be masked wrongly.
        for ids in encoded:
            h = torch.tanh(self.table[ids] @ self.first)
            rows.append(((h + h.mean(0)) @ self.second).mean(0))
        return torch.stack(rows)


def pooling_files(folder: Path, mode: str, *, normalize: bool = False) -> None:
    """Writes the files of sentence-transformers that describe the pooling."""
    (folder / "1_Pooling").mkdir()
    modes = dict.fromkeys(
        ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken"), False
    )
    config = {f"pooling_mode_{name}": value for name, value in (modes | {mode: True}).items()}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": DIM, **config}))
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [{"idx": i, "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
