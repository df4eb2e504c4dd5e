"""Shards the optimizer state: each worker keeps the moments of some parameters (ZeRO-1, Rajbhandari et al. 2020)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from onnxtrain.api import Optimizer
from onnxtrain.distributed._communicator import Communicator
from onnxtrain.runtime.store import Buffer, Store
from onnxtrain.trainer._run.optimizer_part import OptimizerPart
from onnxtrain.trainer._run.run import Run


def assign_owners(sizes: dict[str, int], workers: int) -> dict[str, int]:
    """Assigns each parameter to a worker, balancing the number of elements per worker.

    Args:
        sizes: number of elements of each parameter.
        workers: number of workers.

    Returns:
        The rank of the worker that owns each parameter.

    >>> assign_owners({"a": 5, "b": 4, "c": 3, "d": 2}, 2)
    {'a': 0, 'b': 1, 'c': 1, 'd': 0}
    """
    loads = [0] * workers
    owners: dict[str, int] = {}
    # Largest first, to the worker with the fewest elements. The sort is stable, so all workers get the same result.
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return {name: owners[name] for name in sizes}


class Shards:
    """Assigns each parameter to a worker, and keeps only the moments of this worker's parameters.

    Args:
        run: the run. The moments of other workers' parameters are dropped from the run's store.
        whole: the optimizer for all parameters.
        communicator: connection to the other workers.

    Attributes:
        optimizer: updates this worker's parameters, then broadcasts them and receives the other workers' parameters.
    """

    def __init__(self, run: Run, whole: Optimizer, communicator: Communicator) -> None:
        self._communicator = communicator
        store = run.store
        sizes = {name: store.parameters[name].size for name in store.parameters if name in store.trainable}
        self._owners = assign_owners(sizes, communicator.size)
        # Determines the order of the moments in a checkpoint.
        self._moments = {
            moment: {name: (buffer.dtype, buffer.shape) for name, buffer in group.items()}
            for moment, group in store.moments.items()
        }
        self.optimizer = _ShardedOptimizer(run, whole, communicator, self._owners)
        self._drop(store)

    def _drop(self, store: Store) -> None:
        """Drops the moments of other workers' parameters."""
        for group in store.moments.values():
            for name in [name for name in group if self._owners[name] != self._communicator.rank]:
                del group[name]

    def fill(self, store: Store) -> None:
        """Adds zeros for the moments of other workers' parameters to the store.

        Call it before gathering the moments, and before opening the optimizer for all parameters.
        """
        for moment, group in self._moments.items():
            own = store.moments[moment]
            # np.zeros allocates memory only when written to.
            store.moments[moment] = {
                name: own.get(name) or Buffer.zeros(dtype, shape, store.device)
                for name, (dtype, shape) in group.items()
            }

    @contextlib.contextmanager
    def collected(self, store: Store) -> Iterator[None]:
        """Context manager that gathers the moments of all parameters in worker 0's store; all workers must enter it."""
        rank = self._communicator.rank
        if rank == 0:
            self.fill(store)
        for moment, group in self._moments.items():
            for name in group:
                owner = self._owners[name]
                if owner == 0 or rank not in (0, owner):
                    continue
                buffer = store.moments[moment][name]
                # On the CPU, the array is the moment itself; on other devices, a copy.
                array = buffer.read()
                self._communicator.move(array, owner, 0)
                if rank == 0:
                    buffer.write(array)
        try:
            yield
        finally:
            if rank == 0:
                self._drop(store)


class _ShardedOptimizer(Optimizer):
    """Updates this worker's parameters, then exchanges the updated parameters with the other workers.

    Args:
        run: the run.
        whole: the optimizer for all parameters, which the sharded optimizer replaces.
        communicator: connection to the other workers.
        owners: rank of the worker that updates each parameter.
    """

    def __init__(
        self, run: Run, whole: Optimizer, communicator: Communicator, owners: dict[str, int]
    ) -> None:
        store = run.store
        # Shares learning rate, step and progress with the checkpoint state, as the whole optimizer does.
        self.__dict__.update(whole.__dict__)
        self._communicator = communicator
        names = [name for name in owners if owners[name] == communicator.rank]
        self._owned = [
            [store.parameters[name] for name in owners if owners[name] == rank]
            for rank in range(communicator.size)
        ]
        # Deleting the whole optimizer's binding frees the moments of other workers' parameters.
        self.bound_inputs = {}
        del self._binding
        self._idle = not names
        if self._idle:
            return
        part = OptimizerPart(run, whole, names)
        self._row_gradients, self._binding = part.row_gradients, part.binding

    def _update(self) -> None:
        """Updates this worker's parameters, then exchanges updated parameters with the other workers."""
        if not self._idle:
            super()._update()
        # By rank, so that all workers send and receive in the same order.
        for rank, buffers in enumerate(self._owned):
            values = [buffer.read() for buffer in buffers]
            self._communicator.broadcast(values, rank)
            for buffer, value in zip(buffers, values, strict=True):
                if buffer.device.type != "cpu":
                    buffer.write(value)
