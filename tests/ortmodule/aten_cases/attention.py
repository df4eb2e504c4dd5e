"""Attention and embeddings."""

from functools import partial

import torch
import torch.nn.functional as F

from ortmodule.aten_case import Case, T

_attention = F.scaled_dot_product_attention
_QKV = (T(2, 4, 5, 8), T(2, 4, 6, 8), T(2, 4, 6, 8))
_SQUARE = (T(2, 4, 5, 8), T(2, 4, 5, 8), T(2, 4, 5, 8))
_MASK = torch.arange(30).view(5, 6) % 4 != 0
_WITH_EMPTY_ROWS = _MASK & (torch.arange(5) != 2)[:, None]

CASES = [
    Case("attention", _attention, _QKV),
    Case("attention_causal", partial(_attention, is_causal=True), _SQUARE),
    Case("attention_bool_mask", _attention, (*_QKV, _MASK)),
    Case("attention_fully_masked_rows", _attention, (*_QKV, _WITH_EMPTY_ROWS)),
    Case("attention_float_mask", _attention, (*_QKV, T(5, 6))),
    Case("attention_scale", partial(_attention, scale=0.3), _QKV),
    Case(
        "attention_grouped",
        partial(_attention, enable_gqa=True),
        (T(2, 4, 5, 8), T(2, 2, 6, 8), T(2, 2, 6, 8)),
    ),
    Case("attention_dropout", partial(_attention, dropout_p=0.3), _QKV, random=True),
    Case("embedding", F.embedding, (torch.tensor([[0, 2, 2], [1, 0, 4]]), T(5, 3))),
    Case(
        "embedding_padding",
        partial(F.embedding, padding_idx=2),
        (torch.tensor([[0, 2, 2], [1, 0, 4]]), T(5, 3)),
    ),
    Case(
        "embedding_padding_from_the_end",
        partial(F.embedding, padding_idx=-1),
        (torch.tensor([[0, 2, 2], [1, 0, 4]]), T(5, 3)),
    ),
    Case("embedding_int32", F.embedding, (torch.tensor([0, 2], dtype=torch.int32), T(5, 3))),
    Case("one_hot", lambda i, w: F.one_hot(i, 5).to(w.dtype) @ w, (torch.tensor([0, 4, 2]), T(5, 3))),
]
