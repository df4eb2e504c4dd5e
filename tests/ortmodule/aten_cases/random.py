"""Random numbers: the same as eager PyTorch's from the same seed."""

from functools import partial

import torch
import torch.nn.functional as F

from ortmodule.aten_case import Case, T


def _several_dropouts(x):
    return F.dropout(torch.tanh(F.dropout(x, 0.3)), 0.6) + F.dropout(x, 0.1)


def _unused_numbers(x):
    torch.rand(3)
    F.dropout(x, 0.5)
    return x * torch.rand(4)


CASES = [
    Case("dropout", partial(F.dropout, p=0.3), (T(5, 7),), random=True),
    Case("dropout_several", _several_dropouts, (T(5, 7),), random=True),
    Case("dropout_transposed", lambda x: F.dropout(x.transpose(0, 1), 0.4), (T(5, 7),), random=True),
    Case("dropout_permuted", lambda x: F.dropout(x.permute(2, 0, 1), 0.4), (T(5, 7, 3),), random=True),
    Case("native_dropout", lambda x: torch.native_dropout(x, 0.3, True), (T(5, 7),), random=True),
    Case("native_dropout_none", lambda x: torch.native_dropout(x, 0.0, True), (T(5, 7),), random=True),
    Case("native_dropout_all", lambda x: torch.native_dropout(x, 1.0, True), (T(5, 7),), random=True),
    Case("native_dropout_off", lambda x: torch.native_dropout(x, 0.3, False)[0], (T(5, 7),), random=True),
    Case("dropout_all", partial(F.dropout, p=1.0), (T(5, 7),), random=True),
    Case("dropout2d", partial(F.dropout2d, p=0.4), (T(4, 6, 2, 3),), random=True),
    Case(
        "alpha_dropout",
        partial(F.alpha_dropout, p=0.4, training=True),
        (T(5, 7),),
        random=True,
        dynamic=False,
    ),
    Case("rand", lambda x: x * torch.rand(4) + torch.rand_like(x), (T(3, 4),), random=True),
    Case(
        "rand_symbolic", lambda x: x * torch.rand(x.shape[0], 2 * x.shape[1])[:, ::2], (T(3, 4),), random=True
    ),
    Case("rand_like_transposed", lambda x: x.t() * torch.rand_like(x.t()), (T(3, 4),), random=True),
    Case("randn", lambda x: x * torch.randn(4) + torch.randn_like(x), (T(3, 4),), random=True),
    Case("normal", lambda x: x + torch.normal(1.0, 2.0, (3, 4)), (T(3, 4),), random=True),
    Case(
        "in_place_fills",
        lambda x: x * torch.empty(4).uniform_(1, 2) + torch.empty(4).normal_(1, 2),
        (T(3, 4),),
        random=True,
    ),
    Case("exponential", lambda x: x * torch.empty(4).exponential_(2.0), (T(3, 4),), random=True),
    Case(
        "randint", lambda x: x * torch.randint(2, 9, (4,)) + torch.randint(5, (3, 1)), (T(3, 4),), random=True
    ),
    Case("randint_like", lambda x: x * torch.randint_like(x, 3, 7), (T(3, 4),), random=True),
    Case("randperm", lambda x: x * torch.randperm(4), (T(3, 4),), random=True),
    Case("random_numbers_unused", _unused_numbers, (T(3, 4),), random=True),
    Case("multinomial", lambda x: torch.multinomial(x.detach(), 1) + x, (T(3, 5, low=0.1),), random=True),
    Case(
        "multinomial_several", lambda x: torch.multinomial(x, 3), (T(3, 5, low=0.1, grad=False),), random=True
    ),
    Case(
        "multinomial_transposed",
        lambda x: torch.multinomial(x.t(), 3),
        (T(5, 3, low=0.1, grad=False),),
        random=True,
    ),
    Case(
        "multinomial_replacement",
        lambda x: torch.multinomial(x, 6, replacement=True),
        (T(3, 5, low=0.1, grad=False),),
        random=True,
    ),
    Case(
        "categorical",
        lambda x: torch.distributions.Categorical(logits=x, validate_args=False).sample((2,)) + x[:, 0],
        (T(3, 5),),
        random=True,
    ),
]
