"""Connectionist temporal classification."""

from typing import Any

import torch
import torch.nn.functional as F

from ortmodule.aten_case import Case, T

TARGETS = torch.tensor([[1, 2, 2], [3, 1, 0], [2, 0, 0]])
LENGTHS = torch.tensor([3, 2, 1])
TIMES = torch.tensor([7, 6, 4])
JOINED = torch.tensor([1, 2, 2, 3, 1, 2])


def _loss(targets: torch.Tensor, times: Any, lengths: Any, **options: Any) -> Any:
    return lambda x: F.ctc_loss(x.log_softmax(2), targets, times, lengths, **options)


X = T(7, 3, 4)
CASES = [
    Case("ctc", _loss(TARGETS, TIMES, LENGTHS, reduction="none"), (X,), dynamic=False),
    Case("ctc_mean", _loss(TARGETS, TIMES, LENGTHS), (X,), dynamic=False),
    Case("ctc_joined", _loss(JOINED, TIMES, LENGTHS, reduction="sum"), (X,), dynamic=False),
    Case("ctc_lists", _loss(JOINED, [7, 6, 4], [3, 2, 1], reduction="sum"), (X,), dynamic=False),
    Case(
        "ctc_no_labels",
        _loss(TARGETS, TIMES, LENGTHS * torch.tensor([1, 0, 1]), reduction="none"),
        (X,),
        dynamic=False,
    ),
    Case("ctc_blank", _loss(TARGETS % 3, TIMES, LENGTHS, blank=3, reduction="none"), (X,), dynamic=False),
    Case(
        "ctc_impossible",
        _loss(TARGETS, torch.tensor([2, 6, 4]), LENGTHS, zero_infinity=True, reduction="none"),
        (X,),
        dynamic=False,
    ),
    Case(
        "ctc_of_scores",
        lambda x: F.ctc_loss(x, TARGETS, TIMES, LENGTHS, reduction="none"),
        (X,),
        dynamic=False,
    ),
]
