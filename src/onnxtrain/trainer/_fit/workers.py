"""Defines the interface between a fit and its worker processes, implemented here for a single process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.store import Store
from onnxtrain.trainer._metrics.metrics import Averages, Metric
from onnxtrain.trainer._run.history import History
from onnxtrain.trainer._run.run import Run
from onnxtrain.trainer._run.workspace import Workspace
from onnxtrain.trainer.data import Pass, Source, Worker


class Workers:
    """The group of processes that train one model. This base class is for a single process; see also `WorkerGroup`.

    Attributes:
        worker: rank of this process and size of the group.
    """

    worker = Worker()

    @property
    def leads(self) -> bool:
        """True in the process that writes files and calls callbacks."""
        return self.worker.rank == 0

    def open(
        self, begin: Callable[[], tuple[Workspace, Run]], device: str, threads: int | None
    ) -> tuple[Workspace, Run]:
        """Opens the same run in all processes; worker 0 builds or reads it, and sends its files to the others.

        Args:
            begin: function that builds or reads the run; returns its directory and the run.
            device: execution device of this process.
            threads: number of threads per op; None for the number saved in the run.

        Raises:
            OnnxTrainError: worker 0 could not build or read the run.
        """
        return begin()

    def require_one(self, doing: str) -> None:
        """Raises InputError if there are several processes. The error message begins with `doing`."""

    def check_fixed_batch(self, samples: int | None) -> None:
        """Raises InputError if several processes would share batches of a fixed size.

        Args:
            samples: fixed batch size of the model; None if it accepts any batch size.
        """

    def stop(self, history: History) -> None:
        """Ends the current fit after the current epoch, in all processes.

        Args:
            history: history of the fit, which records that the fit was stopped early.
        """
        history.stopped = "early"

    def writing(self) -> contextlib.AbstractContextManager[bool]:
        """Context manager for writing a file. Yields True in the process that writes it, False in all others.

        The other processes wait at the end of the block until the file is written.

        Raises:
            WorkersError: worker 0 could not write the file.
        """
        return contextlib.nullcontext(True)

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Context manager for code that only this process runs: it may write files, but must not wait for others."""
        return contextlib.nullcontext()

    def saving(self, store: Store) -> contextlib.AbstractContextManager[bool]:
        """Context manager for saving the run; yields the same value as :meth:`writing`.

        During the block, worker 0's store contains the optimizer state of all processes.
        """
        return contextlib.nullcontext(True)

    def read_share(self, data: Source) -> Iterator[list[Array]]:
        """Yields the batches that this process evaluates: its share of all batches of the dataset."""
        return data.read(Pass())

    def total(self, averages: Averages, metrics: Sequence[Metric], *, summed: bool) -> Averages:
        """Combines the averages that all processes computed over their shares of a dataset.

        Args:
            averages: averages of this process.
            metrics: recorded metrics.
            summed: True if the loss is a sum over samples, not a mean.
        """
        return averages
