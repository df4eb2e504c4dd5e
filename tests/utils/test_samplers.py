"""Samplers that balance the load: what every process gets, counted."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from onnxtrain.utils.data import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

pytestmark = pytest.mark.torch

LENGTHS = np.random.default_rng(0).permutation(23).tolist()
DATA: Any = [[0] * (length + 1) for length in LENGTHS]


def samplers(world: int, **options: Any) -> list[LoadBalancingDistributedSampler]:
    return [LoadBalancingDistributedSampler(DATA, len, world, rank, **options) for rank in range(world)]


@pytest.mark.parametrize("world", [1, 2, 4, 30])
@pytest.mark.parametrize("group_size", [None, 1, 5, 100])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_every_sample_once(world: int, group_size: int | None, shuffle: bool, drop_last: bool) -> None:
    given = [list(s) for s in samplers(world, group_size=group_size, shuffle=shuffle, drop_last=drop_last)]
    assert {len(own) for own in given} == {23 // world if drop_last else -(-23 // world)}
    counts = Counter(itertools.chain(*given))
    assert sum(counts.values()) == len(given[0]) * world
    if drop_last:
        assert max(counts.values(), default=1) == 1
    else:
        assert set(counts) == set(range(23))
        assert max(counts.values()) <= 1 + (len(given[0]) * world - 1) // 23


def test_a_step_has_neighbours_in_complexity() -> None:
    steps = zip(*samplers(4, drop_last=True), strict=True)
    for step in steps:
        lengths = [LENGTHS[i] for i in step]
        assert max(lengths) - min(lengths) == 3  # the lengths are 0 to 22


def test_groups_stay_together() -> None:
    (sampler,) = samplers(1, group_size=5)
    seen = [(group, list(members)) for group, members in itertools.groupby(sampler, key=lambda i: i // 5)]
    assert sorted(group for group, _ in seen) == [0, 1, 2, 3, 4]
    for _, members in seen:
        assert members == sorted(members, key=lambda i: LENGTHS[i])


def test_epochs_differ_and_repeat() -> None:
    (sampler,) = samplers(1)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert sorted(sampler) == sorted(first)
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_noise_unbalances_steps() -> None:
    def spread(level: float) -> int:
        steps = zip(*samplers(4, random_level=level, drop_last=True), strict=True)
        return sum(np.ptp([LENGTHS[i] for i in step]) for step in steps)

    assert spread(0) == 15
    assert spread(1) > 30


@pytest.mark.parametrize("drop_last", [True, False])
def test_batches_of_at_most_twenty_elements(drop_last: bool) -> None:
    def batches(samples: list[int]) -> list[list[int]]:
        made: list[list[int]] = [[]]
        for sample in samples:
            if made[-1] and sum(len(DATA[i]) for i in made[-1]) + len(DATA[sample]) > 20:
                made.append([])
            made[-1].append(sample)
        return made

    parts = [LoadBalancingDistributedBatchSampler(s, batches, drop_last) for s in samplers(3)]
    wanted = [len(batches(list(part.sampler))) for part in parts]
    assert {len(part) for part in parts} == {len(list(part)) for part in parts}
    assert {len(part) for part in parts} == {min(wanted) if drop_last else max(wanted)}
    part = parts[1]
    loaded = list(DataLoader(DATA, batch_sampler=part, collate_fn=list))
    assert [[len(x) for x in batch] for batch in loaded] == [[len(DATA[i]) for i in batch] for batch in part]
    before = list(part)
    part.set_epoch(3)
    assert list(part) != before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2}, "the rank must be from 0 to 1, received 2"),
        ({"random_level": 1.5}, "random_level"),
        ({"group_size": 0}, "group_size"),
        ({"dataset": []}, "no samples"),
    ],
)
def test_wrong_arguments_are_errors(options: dict[str, Any], message: str) -> None:
    arguments = {"dataset": DATA, "complexity_fn": len, "world_size": 2, "rank": 0, **options}
    with pytest.raises(ValueError, match=message):
        LoadBalancingDistributedSampler(**arguments)


def test_a_batch_sampler_wants_a_whole_balancing_sampler() -> None:
    with pytest.raises(ValueError, match="received list"):
        LoadBalancingDistributedBatchSampler([1], list)  # type: ignore[arg-type, list-item]
    with pytest.raises(ValueError, match="drop_last=False"):
        LoadBalancingDistributedBatchSampler(samplers(2, drop_last=True)[0], lambda samples: [samples])
