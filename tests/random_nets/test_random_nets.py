"""Random networks train as in PyTorch, with native kernels and without, in float32 and float64.

`ONNXTRAIN_FUZZ_NETS` is their number; `ONNXTRAIN_FUZZ_SEED` the seed of the first one.
"""

from __future__ import annotations

import os

import pytest
import torch

from . import judge as judging
from .drawing import draw
from .judge import WAYS, judge

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]

NETS = int(os.environ.get("ONNXTRAIN_FUZZ_NETS", "6"))
SEED = int(os.environ.get("ONNXTRAIN_FUZZ_SEED", "0"))


@pytest.fixture
def fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("seed", range(SEED, SEED + NETS))
def test_random_net_trains_as_in_pytorch(seed: int) -> None:
    net = draw(seed)
    found = judge(net)
    assert not found, f"{net.module}\n" + "\n".join(found)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("kind", ["loss 1", "gradient 0", "state"])
def test_judge_sees_what_is_wrong_in_one_way(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, right = draw(3), judging._by

    def wrong(way: str, net: judging.Net) -> judging.Numbers:
        numbers = right(way, net)
        if way == WAYS[2]:
            name = max(
                (name for name in numbers if name.startswith(kind)), key=lambda n: numbers[n].abs().max()
            )
            numbers[name] = numbers[name] * (1 + 1e-6)
        return numbers

    monkeypatch.setattr(judging, "_by", wrong)
    assert [line.split(": ")[0] for line in judge(net)] == [WAYS[2]]
