"""Modules in which Python decides by numbers of the data. Not in a test file: pytest would rewrite the assertions."""

from __future__ import annotations

import torch
from torch import nn

NAMES = (1.0, 2.0, 4.0, 8.0, 16.0)


class Counting(nn.Module):
    """A linear layer beside a count of tokens above zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().sum() * self.factor(x, tokens, int((tokens > 0).sum()))

    def factor(self, x: torch.Tensor, tokens: torch.Tensor, count: int) -> float:
        """Returns what the sum is multiplied by."""
        raise NotImplementedError


class Truth(Counting):
    def factor(self, x: torch.Tensor, tokens: torch.Tensor, count: int) -> float:
        return 2 if count else 3


class Default(Counting):
    def factor(self, x: torch.Tensor, tokens: torch.Tensor, count: int) -> float:
        return count or 7


class Both(Counting):
    def factor(self, x: torch.Tensor, tokens: torch.Tensor, count: int) -> float:
        return 5 if count and tokens.max().item() - 2 else 1 / (count + 1)


class Table(Counting):
    def factor(self, x: torch.Tensor, tokens: torch.Tensor, count: int) -> float:
        return NAMES[count]


class Loop(Counting):
    def factor(self, x: torch.Tensor, tokens: torch.Tensor, count: int) -> float:
        factor = 1.0
        while count:
            count, factor = count - 1, factor * 3
        return factor


class Real(Counting):
    def factor(self, x: torch.Tensor, tokens: torch.Tensor, count: int) -> float:
        return float(tokens.double().mean()) or 2.5


class Asserted(Counting):
    def factor(self, x: torch.Tensor, tokens: torch.Tensor, count: int) -> float:
        assert count > 1, "too few"
        return 1


class AssertedTruth(Counting):
    def factor(self, x: torch.Tensor, tokens: torch.Tensor, count: int) -> float:
        assert count
        return count


class AssertedRows(Counting):
    def factor(self, x: torch.Tensor, tokens: torch.Tensor, count: int) -> float:
        rows = tokens[tokens > 0].shape[0]
        assert rows > 1, f"only {rows}"
        return 1 / rows


class Caught(Counting):
    def factor(self, x: torch.Tensor, tokens: torch.Tensor, count: int) -> float:
        try:
            assert count > 1, "too few"
        except AssertionError:
            return 100
        return 1


class Check(Counting):
    def factor(self, x: torch.Tensor, tokens: torch.Tensor, count: int) -> float:
        torch._check(count > 1, lambda: "too few")
        return count


class CheckWithoutText(Counting):
    def factor(self, x: torch.Tensor, tokens: torch.Tensor, count: int) -> float:
        torch._check(count > 1)
        return 1


class CheckFormatted(Counting):
    def factor(self, x: torch.Tensor, tokens: torch.Tensor, count: int) -> float:
        torch._check(count > 1, lambda: f"{count} of {x.shape[0]}")
        return 1


class CheckValue(Counting):
    def factor(self, x: torch.Tensor, tokens: torch.Tensor, count: int) -> float:
        torch._check_value(count > 1, lambda: f"of {list(x.shape)}")
        return 1


class CheckTensors(Counting):
    def factor(self, x: torch.Tensor, tokens: torch.Tensor, count: int) -> float:
        torch._check_tensor_all(tokens < 3, lambda: "large")
        return 1


class CheckCounts(Counting):
    def factor(self, x: torch.Tensor, tokens: torch.Tensor, count: int) -> float:
        # As language models for pictures compare the tokens of pictures with their features.
        torch._check(count == tokens[tokens > 1].numel(), lambda: "they do not match")
        return 1
