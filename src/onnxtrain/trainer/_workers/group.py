"""Defines `Workers`, the group of processes that train one model, as a trainer sees it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from onnxtrain._printable import get_logger
from onnxtrain.distributed._communicator import Communicator
from onnxtrain.distributed._join import join_group
from onnxtrain.distributed._strategy import DataParallel, Strategy, make_strategy
from onnxtrain.errors import InputError, OnnxTrainError, WorkersError
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.store import Store
from onnxtrain.trainer._run.run import Run
from onnxtrain.trainer._run.workspace import Workspace
from onnxtrain.trainer._workers.files import receive_files, run_files, send_files
from onnxtrain.trainer._workers.follower import FollowerWorkspace
from onnxtrain.trainer._workers.shards import Shards
from onnxtrain.trainer.data import Worker, dynamic_remedy

_log = get_logger()


class Workers:
    """The processes that train one model together.

    Worker 0 leads: the run's directory, the callbacks and the progress are its. The others work in a temporary
    directory, to which they get copies of the models.

    Args:
        communicator: connects the processes.
        strategy: options.

    Attributes:
        worker: number of this process, and count of all.
        shards: the moments that this process keeps; None without `shard_optimizer`.
        stop_asked: True once `Trainer.stop_training` was called in this process, until the workers agree on it.
    """

    def __init__(self, communicator: Communicator, strategy: DataParallel) -> None:
        self.communicator = communicator
        self.strategy = strategy
        self.worker = Worker(communicator.rank, communicator.size)
        self.shards: Shards | None = None
        self.stop_asked = False
        self._by_itself = False
        # Each message of the trainer would be printed once per worker.
        if not self.leads:
            _log.setLevel(logging.ERROR)

    @property
    def leads(self) -> bool:
        """True in the process that writes files and calls callbacks."""
        return self.worker.rank == 0

    @property
    def together(self) -> bool:
        """True if all workers run the same code; False in a callback, which the leader runs alone."""
        return not self._by_itself

    def agree(self, error: BaseException | None = None) -> None:
        """Raises in every worker if one has failed: its own error there, and WorkersError in the others."""
        # The text, not the exception: those of other packages need not survive pickle.
        texts = self.communicator.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text is not None:
                raise WorkersError(f"Worker {rank} of {self.worker.size} failed: {text}")

    def open(
        self, begin: Callable[[], tuple[Workspace, Run]], device: str, threads: int | None
    ) -> tuple[Workspace, Run]:
        """Opens the same run in all workers: worker 0 builds or reads it, the others get its files.

        Args:
            begin: builds or reads the run, and returns its directory and the run; called by worker 0.
            device: device of this worker.
            threads: threads per operation; None for the number saved in the run.

        Raises:
            OnnxTrainError: worker 0 could not build or read the run.
        """
        # The others have no directory of the run, and may have no access to the disk that holds it.
        opened, error = None, None
        if self.leads:
            try:
                opened = begin()
            # Of any kind: the others would wait for ever.
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
        """Makes a run one of several workers."""
        run.workers = self
        write = run.rewrite

        def rewrite(folder: Path, *, sample_weight: bool) -> None:
            """Writes the models again on the leader, from which the others receive them."""
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

        # A run that was read cannot be rebuilt, and says so in every worker.
        if self.communicator.share(write is not None):
            run.rewrite = rewrite
        self.attach_optimizer(run)

    def detach_optimizer(self, run: Run) -> None:
        """Prepares the store of a run for an optimizer that is opened anew."""
        if self.shards is not None:
            self.shards.fill(run.store)

    def attach_optimizer(self, run: Run) -> None:
        """Replaces the optimizer of a run by one that keeps the moments of its share of the parameters."""
        if self.strategy.shard_optimizer and self.worker.size > 1:
            self.shards = Shards(run, self.communicator)
            run.optimizer = self.shards.optimizer

    def check_fixed_batch(self, samples: int | None) -> None:
        """Raises InputError if a model that takes a fixed number of samples would get shares of a batch."""
        if samples is not None and self.worker.size > 1:
            raise InputError(
                f"The model takes exactly {samples} samples at a time, and {self.worker.size} workers train on shares "
                f"of a batch. {dynamic_remedy()}"
            )

    def require_one(self, doing: str) -> None:
        """Raises InputError if there are several workers; `doing` begins the message."""
        if self.worker.size > 1:
            raise InputError(
                f"{doing} works in one process. Do it without strategy before you start the workers."
            )

    @contextlib.contextmanager
    def writing(self) -> Iterator[bool]:
        """Gives True to the process that writes a file; the others wait at the end until the file is there.

        Raises:
            WorkersError: the file could not be written by worker 0.
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
        """Gives True to the process that saves the run, with all moments in its store until the block ends."""
        with self.writing() as writes:
            if self.shards is None:
                yield writes
                return
            # The others are waiting for the end of the leader's callback.
            if not self.together:
                self.communicator.share(("moments",))
            with self.shards.collected(store):
                yield writes

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Marks that this worker does until the block ends what the others do not, such as calling a callback."""
        before, self._by_itself = self._by_itself, True
        try:
            yield
        finally:
            self._by_itself = before

    def serve(self, store: Store) -> tuple[Any, ...]:
        """Helps the leader while it runs callbacks; returns what the leader tells at their end."""
        while True:
            command, *told = self.communicator.share()
            if command != "moments":
                return tuple(told)
            assert self.shards is not None
            with self.shards.collected(store):
                pass

    def broadcast_parameters(self, store: Store) -> None:
        """Copies trained parameters and statistics of the leader to the others."""
        buffers = [*(store.parameters[name] for name in sorted(store.trainable)), *store.statistics.values()]
        self._broadcast([buffer.read() for buffer in buffers], [buffer.write for buffer in buffers])

    def broadcast_statistics(self, store: Store) -> None:
        """Copies the running statistics of the leader to the others, as PyTorch's DistributedDataParallel does."""
        buffers = list(store.statistics.values())
        self._broadcast([buffer.read() for buffer in buffers], [buffer.write for buffer in buffers])

    def _broadcast(self, arrays: list[Array], write: list[Callable[[Array], None]]) -> None:
        self.communicator.broadcast(arrays)
        if not self.leads:
            for array, put in zip(arrays, write, strict=True):
                put(array)


def join_workers(strategy: Strategy | None) -> Workers | None:
    """Joins the workers of a strategy; None without one."""
    options = make_strategy(strategy)
    return None if options is None else Workers(join_group(options), options)
