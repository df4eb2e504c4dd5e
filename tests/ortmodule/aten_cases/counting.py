"""Sizes that depend on the data: repeated rows, counts, bags."""

from functools import partial

import torch
import torch.nn.functional as F

from ortmodule.aten_case import Case, T

COUNTS = torch.tensor([2, 0, 3, 1])
CLASSES = torch.tensor([1, 4, 1, 0, 4, 4])
BAGS = torch.tensor([0, 2, 2, 5])
ROWS = torch.tensor([1, 3, 0, 3, 2, 4, 1])


def _bags(mode: str, **options: object) -> Case:
    return Case(
        f"embedding_bag_{mode}" + "".join(f"_{name}" for name in options),
        lambda w: F.embedding_bag(ROWS, w, BAGS, mode=mode, **options),
        (T(5, 3),),
    )


CASES = [
    Case(
        "repeat_interleave_counts", lambda x, n: torch.repeat_interleave(x, n, 0) * 2, (T(4, 3), COUNTS),
        dynamic=False,
    ),
    Case("repeat_interleave_of_counts", lambda n: torch.repeat_interleave(n), (COUNTS,)),
    Case(
        "repeat_interleave_nothing", lambda x, n: x.repeat_interleave(n * 0, 0), (T(4, 3), COUNTS),
        dynamic=False,
    ),
    Case("bincount", lambda i: (torch.bincount(i), torch.bincount(i, minlength=7)), (CLASSES,)),
    Case("bincount_weights", lambda i, w: torch.bincount(i, w) / 2, (CLASSES, T(6, grad=False))),
    *(_bags(mode) for mode in ("sum", "mean", "max")),
    *(_bags(mode, padding_idx=3) for mode in ("sum", "mean", "max")),
    _bags("sum", include_last_offset=True),
    Case(
        "embedding_bag_rows", lambda i, w: F.embedding_bag(i, w),
        (torch.tensor([[0, 2, 2], [1, 0, 4]]), T(5, 3)),
    ),
    Case(
        "embedding_bag_weights", lambda w,
        s: F.embedding_bag(ROWS, w, BAGS, mode="sum", per_sample_weights=s), (T(5, 3), T(7)),
    ),
    Case(
        "embedding_bag_used", partial(torch.nn.functional.embedding_bag, mode="mean"),
        (CLASSES.view(2, 3), T(5, 2)),
    ),
]  # fmt: skip
