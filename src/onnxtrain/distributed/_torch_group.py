"""Exchanges arrays and objects through `torch.distributed`."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from onnxtrain.distributed._buckets import group_arrays
from onnxtrain.distributed._communicator import Communicator
from onnxtrain.distributed._secret import FOLDER, TOKEN
from onnxtrain.distributed._strategy import DataParallel
from onnxtrain.distributed._torch_secret import SignedStore, prove_membership
from onnxtrain.errors import InputError, WorkersError
from onnxtrain.runtime.dtypes import Array

# Maximum number of buckets in flight: one is copied while others are sent, without copies of all gradients at once.
_IN_FLIGHT = 3


class TorchGroup(Communicator):
    """Communicator for the workers of a PyTorch process group.

    The process group is created once per process and shared by all trainers of the process.

    Args:
        strategy: backend and timeout.
        place: rank of this worker and number of workers; None if the program has already created the process group.

    Raises:
        WorkersError: the other workers did not join in time.
        InputError: the backend is "nccl" but there is no GPU.
    """

    def __init__(self, strategy: DataParallel, place: tuple[int, int] | None) -> None:
        self._device = torch.device("cpu")
        if strategy.backend == "nccl":
            if not torch.cuda.is_available():
                raise InputError("DataParallel(backend='nccl') needs an NVIDIA GPU; use backend='gloo'.")
            self._device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if not dist.is_initialized():
            assert place is not None
            timeout, token = timedelta(seconds=strategy.timeout), os.environ.get(TOKEN)
            with _raising_workers_error("Joining the other workers"):
                dist.init_process_group(
                    # Objects and files are sent through host memory, even if gradients are sent through GPU memory.
                    "gloo" if strategy.backend == "gloo" else "cpu:gloo,cuda:nccl",
                    store=_store(*place, timeout, token),
                    rank=place[0],
                    world_size=place[1],
                    timeout=timeout,
                )
                atexit.register(_leave)
                if token is not None:
                    prove_membership(token, timeout)
        # If the program has created the group, its rank and size are used instead of the environment variables.
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def sum(self, arrays: Sequence[Array], bucket_bytes: int = 2**20, *, compressed: bool = False) -> None:
        """All-reduces the arrays in buckets, several of which are in flight at a time."""
        pending: list[Callable[[], None]] = []
        with _raising_workers_error("Summing over the workers"):
            for group in group_arrays(arrays, bucket_bytes):
                pending.append(self._begin_sum([arrays[index] for index in group], compressed))
                if len(pending) == _IN_FLIGHT:
                    pending.pop(0)()
            for finish in pending:
                finish()

    def _begin_sum(self, members: list[Array], compressed: bool) -> Callable[[], None]:
        """Starts the all-reduce of a bucket.

        Returns:
            A function that waits for the sum and writes it into the arrays.
        """
        # A single large array is sent from its own memory.
        flat = (
            members[0].reshape(-1) if len(members) == 1 else np.concatenate([m.reshape(-1) for m in members])
        )
        tensor = torch.from_numpy(flat)
        small = compressed and tensor.dtype in (torch.float32, torch.float64)
        sent = tensor.to(device=self._device, dtype=torch.bfloat16 if small else tensor.dtype)
        work = dist.all_reduce(sent, async_op=True)

        # Called once the next buckets are in flight.
        def finish() -> None:
            work.wait()
            if sent is not tensor:
                tensor.copy_(sent)
            if len(members) > 1:
                ends = np.cumsum([member.size for member in members])
                for member, part in zip(members, np.split(flat, ends[:-1]), strict=True):
                    np.copyto(member, part.reshape(member.shape))

        return finish

    def broadcast(self, arrays: Sequence[Array], root: int = 0) -> None:
        """Broadcasts the arrays in place, as bytes; small arrays are sent together."""
        with _raising_workers_error("Receiving from another worker"):
            for group in group_arrays(arrays, 2**20):
                members = [_bytes(arrays[index]) for index in group]
                flat = members[0] if len(members) == 1 else np.concatenate(members)
                dist.broadcast(torch.from_numpy(flat), root)
                if len(members) > 1 and self.rank != root:
                    ends = np.cumsum([member.size for member in members])
                    for member, part in zip(members, np.split(flat, ends[:-1]), strict=True):
                        np.copyto(member, part)

    def move(self, array: Array, source: int, target: int) -> None:
        """Sends the array from worker `source` to worker `target`."""
        with _raising_workers_error("Moving a tensor between workers"):
            if source != target and self.rank == source:
                dist.send(torch.from_numpy(_bytes(array)), target)
            elif source != target and self.rank == target:
                dist.recv(torch.from_numpy(_bytes(array)), source)

    def gather(self, value: Any) -> list[Any]:
        """All-gathers pickled objects."""
        values: list[Any] = [None] * self.size
        with _raising_workers_error("Gathering from the workers"):
            dist.all_gather_object(values, value)
        return values

    def share(self, value: Any = None) -> Any:
        """Broadcasts a pickled object from worker 0."""
        values = [value if self.rank == 0 else None]
        with _raising_workers_error("Waiting for worker 0"):
            dist.broadcast_object_list(values, src=0)
        return values[0]


def _leave() -> None:
    """Ends gloo's threads, because a thread that frees a NumPy array while Python exits would abort the process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _store(rank: int, size: int, timeout: timedelta, token: str | None) -> Any:
    """Returns the store through which the workers find each other.

    It is a file if all workers are on this machine, else a server at MASTER_ADDR. With a token, its values are signed.
    """
    # torchrun of PyTorch 2.13 restarts workers with the store of the killed workers, where gloo finds the addresses of
    # dead processes: the new workers would wait for them until the timeout. Hence the prefix per attempt.
    attempt = f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store: Any
    if folder := os.environ.get(FOLDER):
        # A worker that starts further workers passes its variables on to them; the run id keeps the groups apart.
        run = os.environ.get("TORCHELASTIC_RUN_ID", "group")
        store = dist.FileStore(  # type: ignore[attr-defined]
            os.path.join(folder, f"{run}-{attempt}"), size
        )
    else:
        tcp_store, _, _ = next(rendezvous("env://", rank, size, timeout=timeout))
        store = dist.PrefixStore(attempt, tcp_store)  # type: ignore[attr-defined]
    return store if token is None else SignedStore(store, token)


def _bytes(array: Array) -> Array:
    """Returns a view of an array as bytes, because gloo supports only a few dtypes."""
    return array.reshape(-1).view(np.uint8)


@contextmanager
def _raising_workers_error(doing: str) -> Iterator[None]:
    """Context manager that converts RuntimeErrors, which PyTorch raises if another worker fails, to WorkersError.

    Args:
        doing: description of the operation, e.g. "Summing over the workers", which starts the error message.
    """
    try:
        yield
    # DistBackendError, DistStoreError and DistNetworkError are RuntimeErrors; gloo raises plain RuntimeErrors.
    except WorkersError:
        raise
    except RuntimeError as error:
        raise WorkersError(
            f"{doing}: another worker has ended, or did not answer in time ({str(error).splitlines()[0]}). Its own "
            "message, if there is one, says why. The run resumes from its last save: restart all workers."
        ) from error
