"""Samplers for distributed training that give all processes samples of similar cost in each step.

Since processes wait for each other in every step, a step takes as long as its most expensive sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed
from torch.utils.data import Dataset, Sampler

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"]


class LoadBalancingDistributedSampler(Sampler[int]):
    """Distributed sampler that gives all processes samples of similar complexity in each step.

    The samples are sorted by complexity, and neighbors go to different processes. Shuffling permutes the steps. If
    `group_size` is given, samples are instead sorted within groups of consecutive samples, and shuffling permutes the
    groups.

    Args:
        dataset: map-style dataset with a length.
        complexity_fn: function that returns the complexity of a sample as an integer, e.g. its sequence length.
        world_size: number of processes, e.g. 8. Default: the size of the process group.
        rank: rank of this process. Default: its rank in the process group.
        shuffle: True to shuffle, in an order that depends on `seed` and on the epoch; call :meth:`set_epoch` before
            each epoch.
        group_size: number of consecutive samples to sort together, e.g. 1024. Default: all samples.
        seed: seed for shuffling, the same in all processes.
        drop_last: if samples cannot be divided evenly among the processes, True drops some, and False repeats some.
        random_level: noise to add to the complexities, as a fraction (0 to 1) of their range, e.g. 0.1. It varies
            which samples share a step.

    Raises:
        ValueError: an argument is out of range, or there are no samples.

    Example:
        >>> sampler = LoadBalancingDistributedSampler(["aaa", "b", "cc", "dddd"], len, 2, 0, shuffle=False)
        >>> list(sampler)
        [1, 0]
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        complexity_fn: Callable[..., int],
        world_size: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        group_size: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0,
    ) -> None:
        self.world_size = torch.distributed.get_world_size() if world_size is None else world_size
        self.rank = torch.distributed.get_rank() if rank is None else rank
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"{type(self).__name__}: the rank must be from 0 to {self.world_size - 1}, received {self.rank}"
            )
        if not 0 <= random_level <= 1:
            raise ValueError(
                f"{type(self).__name__}: random_level must be from 0 to 1, received {random_level}"
            )
        if group_size is not None and group_size < 1:
            raise ValueError(f"{type(self).__name__}: group_size must be positive, received {group_size}")
        count = len(cast(Sized, dataset))
        if count == 0:
            raise ValueError(f"{type(self).__name__}: the dataset has no samples; pass a non-empty dataset")
        self.dataset, self.complexity_fn = dataset, complexity_fn
        self.shuffle, self.group_size, self.seed, self.drop_last = shuffle, group_size, seed, drop_last
        self.random_level = random_level
        self.epoch = 0
        # Rounded down or up, because all processes must take the same number of steps: they wait for each other.
        self.num_samples = count // self.world_size if drop_last else -(-count // self.world_size)
        self.total_size = self.num_samples * self.world_size
        self._complexities: npt.NDArray[np.int64] | None = None

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps()[:, self.rank].tolist())

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, which together with the seed determines the shuffled order."""
        self.epoch = epoch

    def steps(self) -> npt.NDArray[np.int64]:
        """Returns the indices of this epoch's samples: int64 [num_samples, world_size], one row per step."""
        # Computed once rather than per epoch, because the complexity may require reading the whole sample.
        if self._complexities is None:
            count = len(cast(Sized, self.dataset))
            self._complexities = np.array(
                [self.complexity_fn(self.dataset[i]) for i in range(count)], np.int64
            )
        # Seeded equally in all processes, which therefore agree on the order without communication.
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        complexities, size = self._complexities, self.group_size or len(self._complexities)
        # `randint` excludes its bound, hence + 1; with a bound of 1 it would only draw zeros.
        noise = int((complexities.max() - complexities.min()) * self.random_level + 1)
        if noise > 1:
            complexities = (
                complexities + torch.randint(noise, complexities.shape, generator=generator).numpy()
            )
        groups = [
            start + np.argsort(complexities[start : start + size], kind="stable")
            for start in range(0, len(complexities), size)
        ]
        if self.shuffle and self.group_size is not None:
            groups = [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]
        # Repeats samples from the start if there are too few, and cuts off surplus ones.
        steps = np.resize(np.concatenate(groups), (self.num_samples, self.world_size))
        # Permutes rows, so that the samples of a row, which have similar costs, stay together.
        if self.shuffle and self.group_size is None:
            steps = steps[torch.randperm(self.num_samples, generator=generator).numpy()]
        return steps


class LoadBalancingDistributedBatchSampler(Sampler[list[int]]):
    """Groups the samples of a :class:`LoadBalancingDistributedSampler` into batches, whose sizes may differ.

    Args:
        sampler: the sampler, created with drop_last=False.
        batch_fn: function that splits a list of indices into batches, e.g. [0, 1, 2] into [[0, 1], [2]], so that each
            batch fits in memory.
        drop_last: if processes have different numbers of batches, True drops surplus batches at the end; False makes
            processes with fewer batches repeat their first ones.

    Raises:
        ValueError: `sampler` is not a LoadBalancingDistributedSampler, or was created with drop_last=True.
    """

    def __init__(
        self,
        sampler: LoadBalancingDistributedSampler,
        batch_fn: Callable[[list[int]], list[list[int]]],
        drop_last: bool = False,
    ) -> None:
        if not isinstance(sampler, LoadBalancingDistributedSampler):
            raise ValueError(
                f"sampler must be a LoadBalancingDistributedSampler, received {type(sampler).__name__}"
            )
        if sampler.drop_last:
            raise ValueError("the sampler must not drop samples itself: create it with drop_last=False")
        self.sampler, self.batch_fn, self.drop_last = sampler, batch_fn, drop_last
        self.world_size, self.rank = sampler.world_size, sampler.rank
        self._make()

    def _make(self) -> None:
        """Creates this process's batches for the sampler's current epoch."""
        # Every process computes the batches of all processes, so that all know the common number of batches without
        # communication.
        batches = [self.batch_fn(samples) for samples in self.sampler.steps().T.tolist()]
        counts = [len(of_process) for of_process in batches]
        self.total_batch = min(counts) if self.drop_last else max(counts)
        own_batches = batches[self.rank]
        self._batches = [own_batches[i % len(own_batches)] for i in range(self.total_batch)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return self.total_batch

    def set_epoch(self, epoch: int) -> None:
        """Sets the sampler's epoch, and creates the batches for it."""
        self.sampler.set_epoch(epoch)
        self._make()
