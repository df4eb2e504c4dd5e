"""Gradients that PyTorch does not implement: ORTModule raises where eager PyTorch does, in its words."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchgen
from torch import nn

from onnxtrain.ortmodule import ORTModule, ORTModuleTorchModelException
from onnxtrain.ortmodule.capture.autograd._refused_gradients import _MAY_LACK_DERIVATIVE
from ortmodule.eager import Of, strict

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]

Function = Callable[[torch.Tensor], torch.Tensor]


def applied(function: Function) -> Of:
    return Of(lambda m, x: function(x * m.scale), scale=nn.Parameter(torch.tensor(1.5)))


REFUSED: dict[str, Function] = {
    "unique": torch.unique,
    "unique with counts": lambda x: torch.unique(x, return_counts=True)[0] * 2,
    "unique rows": lambda x: torch.unique(x, dim=0).sum(0),
    "unique_consecutive": torch.unique_consecutive,
    "consecutive rows": lambda x: torch.unique_consecutive(x, dim=0),
    "zeta": lambda x: torch.special.zeta(x + 2, torch.ones(())),
    "igamma": lambda x: torch.igamma(x, torch.ones(())),
    "igammac": lambda x: torch.special.gammaincc(x, x),
}

TAKEN: dict[str, Function] = {
    "unique of a constant": lambda x: x * torch.unique(x.detach()).sum(),
    "unique that is not returned": lambda x: x * torch.unique(x).shape[0],
    "counts": lambda x: x.sum() * torch.unique(x, return_counts=True)[1],
    "zeta's second argument": lambda x: torch.special.zeta(torch.full((), 3.0), x),
    "igamma's second argument": lambda x: torch.igamma(torch.ones(()), x),
}

X = torch.tensor([[0.5, 1.0], [0.5, 1.0], [2.0, 0.25]])


@pytest.mark.filterwarnings("ignore:ORTModule. graph 0")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_where_eager_pytorch_refuses(name: str) -> None:
    plain = applied(REFUSED[name])
    expected = plain(X)
    with pytest.raises(NotImplementedError) as error:
        expected.sum().backward()
    found = ORTModule(plain)(X)
    torch.testing.assert_close(found, expected)
    with pytest.raises(NotImplementedError, match=re.escape(str(error.value))):
        found.sum().backward()


@pytest.mark.filterwarnings("ignore:ORTModule. graph 0")
@pytest.mark.parametrize("name", TAKEN)
def test_taken_where_eager_pytorch_takes(name: str) -> None:
    plain = applied(TAKEN[name])
    (want,) = torch.autograd.grad(plain(X).sum(), plain.scale)
    (got,) = torch.autograd.grad(ORTModule(plain)(X).sum(), plain.scale)
    torch.testing.assert_close(got, want)


def test_policy_forbids_the_fallback() -> None:
    model = strict(applied(torch.unique))
    with pytest.raises(ORTModuleTorchModelException, match=r"_unique2.*detach"):
        model(X)


def test_all_operators_that_refuse_are_known() -> None:
    """By PyTorch's own table of derivatives; backward operators, and other devices', cannot be called by a module."""
    table = (Path(torchgen.__file__).parent / "packaged/autograd/derivatives.yaml").read_text()
    entries = re.split(r"^- name: ", table, flags=re.MULTILINE)[1:]
    refusing = {
        re.split(r"[.(]", entry)[0]
        for entry in entries
        if re.search(r"^ +\w+: '?not_imp", entry, re.MULTILINE)
    }
    assert {"_unique2", "special_zeta", "igamma"} <= refusing
    internal = ("_backward", "acosh_", "asinh_", "atanh_", "chunk", "embedding_renorm_")
    steps = {f"{name.title().replace('_', '')}Backward0" for name in refusing if not name.endswith(internal)}
    assert {step for step in steps if not _MAY_LACK_DERIVATIVE.fullmatch(step)} == set()
