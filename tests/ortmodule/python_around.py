"""Modules whose Python raises, catches, compares or keeps numbers. Not a test file: pytest would rewrite assertions."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections import deque
from collections.abc import Iterator

import torch
from torch import nn


class Layer(nn.Module):
    """A linear layer; subclasses put Python around it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.calls = 0
        self.recent: deque[int] = deque(maxlen=2)


def rows(x: torch.Tensor) -> int:
    """Returns how many rows begin with a positive number."""
    return int((x[:, 0] > 0).sum())


# Python raises for some numbers, of which ONNX has infinities and NaN.
class Quotient(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * (1 / rows(x))


class FloatQuotient(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * (1.0 / x.clamp(min=0).sum().item())


class FloorQuotient(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * (7.5 // x.clamp(min=0).sum().item())


class NegativePower(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * rows(x) ** -1


class Share(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * (1 / x[x[:, 0] > 0].shape[0])


class Root(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * math.sqrt(x.sum().item())


class Whole(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * int(x[x[:, 0] > 0].mean())


class View(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).view(rows(x), -1).sum()


class Mismatch(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[x[:, 0] > 0] + x[x[:, 1] > 0]


# Errors of the data that the module itself catches.
class CaughtQuotient(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            factor = 1 / rows(x)
        except ZeroDivisionError:
            factor = -5.0
        return self.layer(x) * factor


class CaughtIndex(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = rows(x)
        try:
            return self.layer(x)[count]
        except IndexError:
            return self.layer(x)[0] * 2


class CaughtLookup(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x[:, 0] > 0).long().cumsum(0)
        try:
            return torch.nn.functional.embedding(ids, self.layer.weight) + x
        except IndexError:
            return self.layer(x)
        finally:
            self.calls += 1


class CaughtInCallee(Layer):
    def chosen(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[rows(x)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.chosen(x)
        except IndexError:
            return self.layer(x)[0] * 3


class CaughtAssertion(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            assert x.sum() > 0, "not positive"
            return self.layer(x)
        except AssertionError as error:
            return self.layer(x) * len(str(error))


class CaughtCheck(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            torch._check(rows(x) > 1, lambda: "too few")
        except RuntimeError:
            return self.layer(x) * 2
        return self.layer(x)


class CaughtFactorisation(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for jitter in (0.0, 10.0, 100.0):
            try:
                factor = torch.linalg.cholesky(x.T @ x + (jitter - 2) * torch.eye(3))
                break
            except torch.linalg.LinAlgError:
                self.calls += 1
        return self.layer(x) @ factor


class RaisedFrom(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.layer(x)[rows(x)]
        except IndexError as error:
            raise ValueError(rows(x), "rows") from error


class Suppressed(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(IndexError):
            return self.layer(x)[rows(x)]
        return self.layer(x)


class ReportedLookup(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            found = torch.nn.functional.embedding(x.argmax(1), self.layer.weight)
        except IndexError as error:
            raise IndexError("no such row") from error
        finally:
            self.calls += 1
        return self.layer(x) + found


class WithinManager(Layer):
    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        self.calls += 1
        yield

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.counted():
            return self.layer(x)[rows(x) // 2] * self.calls


# Containers and functions of Python that take sizes and numbers of the data.
class SizeAmong(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * (2 if 6 in x.shape else 3) * (5 if 4 not in [x.shape[0], 1] else 7)


class ShapeAmong(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            self.layer(x)
            * (2 if (6, 3) in [tuple(x.shape), (1, 1)] else 3)
            * (5 if "a" in [x.shape[0]] else 7)
        )


class NumberAmong(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        largest = x.argmax(1).tolist()
        return self.layer(x) * sum(2**k for k in range(3) if k in largest)


class Recent(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.recent.append(x.shape[0])
        return self.layer(x) * sum(self.recent) / len(self.recent)


class Seeded(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * random.Random(x.shape[0]).random()


class GradientBySize(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and x.shape[0] != 6):
            hidden = self.layer(x)
        return self.layer(hidden)


class FrozenBySize(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer.bias.requires_grad_(x.shape[0] != 6)
        return self.layer(x)


class Pairs(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.layer(x)
        for a, b in itertools.product(range(2), range(rows(x))):
            result = result + a * b
        return result


# Means of what may be nothing.
class MeanOfSome(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        some = self.layer(x)[x[:, 0] > 0]
        return some.mean() + some.mean(0).sum() + torch.nn.functional.mse_loss(some, some * 2)
