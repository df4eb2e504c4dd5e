"""Defines `WorkerGroup`, the processes that train one model together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from onnxtrain._printable import get_logger
from onnxtrain.api import Optimizer
from onnxtrain.distributed._communicator import Communicator
from onnxtrain.distributed._join import join_group
from onnxtrain.distributed._strategy import DataParallel, Strategy, make_strategy
from onnxtrain.errors import InputError, OnnxTrainError, WorkersError
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.store import Store
from onnxtrain.trainer._fit.workers import Workers
from onnxtrain.trainer._metrics.metrics import Averages, Metric
from onnxtrain.trainer._run.history import History
from onnxtrain.trainer._run.run import Run, open_whole_optimizer
from onnxtrain.trainer._run.workspace import Workspace
from onnxtrain.trainer._workers.files import receive_files, run_files, send_files
from onnxtrain.trainer._workers.follower import FollowerWorkspace
from onnxtrain.trainer._workers.shards import Shards
from onnxtrain.trainer._workers.totals import total_averages
from onnxtrain.trainer.data import Pass, Source, Worker, dynamic_remedy, own_batches

_log = get_logger()


class WorkerGroup(Workers):
    """A group of processes that train one model together.

    Worker 0 leads: it owns the run's directory, calls the callbacks and shows the progress. The others work on copies
    of the models in temporary directories.

    Args:
        communicator: connection to the other processes.
        strategy: options of data-parallel training.

    Attributes:
        shards: the optimizer state that this process keeps; None without `shard_optimizer`.
        stop_asked: True after `Trainer.stop_training` in this process, until the workers have agreed to stop.
    """

    def __init__(self, communicator: Communicator, strategy: DataParallel) -> None:
        self.communicator = communicator
        self.strategy = strategy
        self.worker = Worker(communicator.rank, communicator.size)
        self.shards: Shards | None = None
        self.stop_asked = False
        self._by_itself = False
        # Otherwise each message would be printed once per worker.
        if not self.leads:
            _log.setLevel(logging.ERROR)

    @property
    def together(self) -> bool:
        """True if all workers run the same code; False inside a callback, which only worker 0 runs."""
        return not self._by_itself

    def agree(self, error: BaseException | None = None) -> None:
        """Raises an exception in all workers if any of them failed. This is a collective call.

        Args:
            error: exception that this worker caught, which is raised again; None if this worker did not fail.

        Raises:
            WorkersError: this worker did not fail, but another worker did.
        """
        # Exceptions of other packages may not survive pickle.
        texts = self.communicator.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text is not None:
                raise WorkersError(f"Worker {rank} of {self.worker.size} failed: {text}")

    def open(
        self, begin: Callable[[], tuple[Workspace, Run]], device: str, threads: int | None
    ) -> tuple[Workspace, Run]:
        """Opens the same run in all workers: worker 0 builds or reads it, and sends its files to the others.

        Args:
            begin: function that builds or reads the run; called on worker 0 only.
            device: execution device of the other workers, e.g. "cuda:1".
            threads: number of threads per op of the other workers; None for the number saved in the checkpoint, or
                else an equal share of the machine's cores.

        Returns:
            This worker's directory and its run.

        Raises:
            WorkersError: `begin` failed on worker 0; worker 0 itself raises the original exception.
        """
        # The others may have no access to the disk that holds the run's directory.
        opened, error = None, None
        if self.leads:
            try:
                opened = begin()
            # Any exception: the other workers would wait forever.
            except Exception as failure:
                error = failure
        self.agree(error)
        temporary = self.communicator.share(opened is not None and opened[0].temporary)
        if opened is None:
            workspace: Workspace = FollowerWorkspace(temporary)
            receive_files(self.communicator, workspace.path)
            opened = workspace, Run(workspace.path, device, threads)
        else:
            send_files(self.communicator, opened[0].path, run_files(opened[1]))
        self._attach(opened[1])
        return opened

    def _attach(self, run: Run) -> None:
        """Adapts a run to the group: only worker 0 rebuilds models, and the optimizer is sharded if requested."""
        write = run.rewrite

        def rewrite(folder: Path, *, sample_weight: bool) -> None:
            """Rebuilds the models on worker 0, and sends them to the other workers."""
            error = None
            if self.leads and write is not None:
                try:
                    write(folder, sample_weight=sample_weight)
                except Exception as failure:
                    error = failure
            self.agree(error)
            if self.leads:
                send_files(self.communicator, folder, [path.name for path in folder.iterdir()])
            else:
                receive_files(self.communicator, folder)

        # A resumed run cannot be rebuilt: without `rewrite`, all workers raise the same error.
        if self.communicator.share(write is not None):
            run.rewrite = rewrite
        if self.strategy.shard_optimizer and self.worker.size > 1:
            run.optimizer = self._shard(run, run.optimizer)
            run.open_optimizer = self._open_shard

    def _shard(self, run: Run, whole: Optimizer) -> Optimizer:
        self.shards = Shards(run, whole, self.communicator)
        return self.shards.optimizer

    def _open_shard(self, run: Run) -> Optimizer:
        """Opens this worker's shard of the optimizer after the models were rebuilt."""
        # The whole optimizer is opened first, and needs the moments of all parameters.
        if self.shards is not None:
            self.shards.fill(run.store)
        return self._shard(run, open_whole_optimizer(run))

    def check_fixed_batch(self, samples: int | None) -> None:
        """Raises InputError if several workers would share batches of a fixed size.

        Args:
            samples: fixed batch size of the model; None if it accepts any batch size.
        """
        if samples is not None and self.worker.size > 1:
            raise InputError(
                f"The model takes exactly {samples} samples at a time, but each of the {self.worker.size} "
                f"workers trains on its share of a batch. {dynamic_remedy()}"
            )

    def require_one(self, doing: str) -> None:
        """Raises InputError if there are several workers. The error message begins with `doing`."""
        if self.worker.size > 1:
            raise InputError(
                f"{doing} works only in a single process. Do it without strategy, before you start the "
                "workers."
            )

    def stop(self, history: History) -> None:
        """Asks all workers to end the fit after the current epoch."""
        self.stop_asked = True

    def read_share(self, data: Source) -> Iterator[list[Array]]:
        """Yields the batches that this worker evaluates: its share or, inside a callback, all batches."""
        return own_batches(data, self.worker) if self.together else data.read(Pass())

    def total(self, averages: Averages, metrics: Sequence[Metric], *, summed: bool) -> Averages:
        """Returns the averages over all workers; inside a callback, which only worker 0 runs, returns `averages`."""
        if not self.together:
            return averages
        return total_averages(self.communicator, averages, metrics, summed=summed)

    @contextlib.contextmanager
    def writing(self) -> Iterator[bool]:
        """Context manager for writing a file. Yields True on the worker that writes it, False on all others.

        The other workers wait at the end of the block until the file is written.
        """
        if not self.together:
            yield True
            return
        error = None
        try:
            yield self.leads
        except (OnnxTrainError, OSError) as failure:
            error = failure
        self.agree(error)

    @contextlib.contextmanager
    def saving(self, store: Store) -> Iterator[bool]:
        """Context manager for saving the run; yields the same value as :meth:`writing`.

        During the block, worker 0's store contains the optimizer state of all workers.
        """
        with self.writing() as writes:
            if self.shards is None:
                yield writes
                return
            # Within a callback, the others wait in `serve`.
            if not self.together:
                self.communicator.share(("moments",))
            with self.shards.collected(store):
                yield writes

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Context manager for code that only this worker runs, e.g. a callback.

        Inside the block, methods such as :meth:`total` make no collective calls, because the other workers would not
        take part. The exception is :meth:`saving`: its collective calls are matched by :meth:`serve` on the other
        workers.
        """
        before, self._by_itself = self._by_itself, True
        try:
            yield
        finally:
            self._by_itself = before

    def serve(self, store: Store) -> tuple[Any, ...]:
        """Takes part in saves while worker 0 runs callbacks; returns the message that worker 0 sends afterwards."""
        while True:
            command, *told = self.communicator.share()
            if command != "moments":
                return tuple(told)
            assert self.shards is not None
            with self.shards.collected(store):
                pass

    def broadcast_parameters(self, store: Store) -> None:
        """Broadcasts the trained parameters and running statistics of worker 0."""
        buffers = [*(store.parameters[name] for name in sorted(store.trainable)), *store.statistics.values()]
        self._broadcast([buffer.read() for buffer in buffers], [buffer.write for buffer in buffers])

    def broadcast_statistics(self, store: Store) -> None:
        """Broadcasts the running statistics of worker 0, like PyTorch's DistributedDataParallel."""
        buffers = list(store.statistics.values())
        self._broadcast([buffer.read() for buffer in buffers], [buffer.write for buffer in buffers])

    def _broadcast(self, arrays: list[Array], write: list[Callable[[Array], None]]) -> None:
        self.communicator.broadcast(arrays)
        if not self.leads:
            for array, put in zip(arrays, write, strict=True):
                put(array)


def join_workers(strategy: Strategy | None) -> Workers:
    """Joins the group of workers that a strategy describes; without a strategy, this process trains alone."""
    options = make_strategy(strategy)
    return Workers() if options is None else WorkerGroup(join_group(options), options)
