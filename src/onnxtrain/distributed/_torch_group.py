"""Exchanges arrays and objects through `torch.distributed`."""

from __future__ import annotations

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

# Buckets that are on their way at a time: one is copied while others are sent, and never all gradients at once.
_IN_FLIGHT = 3


class TorchGroup(Communicator):
    """The workers of a process group of PyTorch.

    The process group is made once per process, and all trainers of the process share it.

    Args:
        strategy: backend and timeout.
        place: number of this worker and count of all workers; None if the program has made the process group.

    Raises:
        WorkersError: the other workers did not come in time.
        InputError: the backend "nccl" is asked for and there is no GPU for it.
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
            with _told("Joining the other workers"):
                dist.init_process_group(
                    # Objects and files go through the hosts' memory, also where gradients go through that of GPUs.
                    "gloo" if strategy.backend == "gloo" else "cpu:gloo,cuda:nccl",
                    store=_store(*place, timeout, token),
                    rank=place[0],
                    world_size=place[1],
                    timeout=timeout,
                )
                if token is not None:
                    prove_membership(token, timeout)
        # A group that the program has made may have a backend of its own; its numbers count, not those of variables.
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def sum(self, arrays: Sequence[Array], bucket_bytes: int = 2**20, *, compressed: bool = False) -> None:
        """Sums in buckets, several of which are on their way at a time."""
        pending: list[Callable[[], None]] = []
        with _told("Summing over the workers"):
            for group in group_arrays(arrays, bucket_bytes):
                pending.append(self._begin_sum([arrays[index] for index in group], compressed))
                if len(pending) == _IN_FLIGHT:
                    pending.pop(0)()
            for finish in pending:
                finish()

    def _begin_sum(self, members: list[Array], compressed: bool) -> Callable[[], None]:
        """Sends a bucket; the returned function waits for the sum and writes it into the arrays."""
        # A large array is sent from its own memory.
        flat = (
            members[0].reshape(-1) if len(members) == 1 else np.concatenate([m.reshape(-1) for m in members])
        )
        tensor = torch.from_numpy(flat)
        small = compressed and tensor.dtype in (torch.float32, torch.float64)
        sent = tensor.to(device=self._device, dtype=torch.bfloat16 if small else tensor.dtype)
        work = dist.all_reduce(sent, async_op=True)

        # Called when the next buckets are on their way.
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
        """Sends small arrays together, as bytes."""
        with _told("Receiving from another worker"):
            for group in group_arrays(arrays, 2**20):
                members = [_bytes(arrays[index]) for index in group]
                flat = members[0] if len(members) == 1 else np.concatenate(members)
                dist.broadcast(torch.from_numpy(flat), root)
                if len(members) > 1 and self.rank != root:
                    ends = np.cumsum([member.size for member in members])
                    for member, part in zip(members, np.split(flat, ends[:-1]), strict=True):
                        np.copyto(member, part)

    def move(self, array: Array, source: int, target: int) -> None:
        """Sends from one worker to another."""
        with _told("Moving a tensor between workers"):
            if source != target and self.rank == source:
                dist.send(torch.from_numpy(_bytes(array)), target)
            elif source != target and self.rank == target:
                dist.recv(torch.from_numpy(_bytes(array)), source)

    def gather(self, value: Any) -> list[Any]:
        """Sends the objects by pickle."""
        values: list[Any] = [None] * self.size
        with _told("Gathering from the workers"):
            dist.all_gather_object(values, value)
        return values

    def share(self, value: Any = None) -> Any:
        """Sends the object by pickle."""
        values = [value if self.rank == 0 else None]
        with _told("Waiting for worker 0"):
            dist.broadcast_object_list(values, src=0)
        return values[0]


def _store(rank: int, size: int, timeout: timedelta, token: str | None) -> Any:
    """Returns the store by which the workers find one another: a file of this machine, or a port at MASTER_ADDR."""
    # torchrun of PyTorch 2.13 starts workers again with the store of the killed ones, in which gloo finds addresses of
    # processes that are gone: the new workers wait for them until the timeout.
    attempt = f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store: Any
    if folder := os.environ.get(FOLDER):
        # A worker that starts other workers hands its variables down to them.
        run = os.environ.get("TORCHELASTIC_RUN_ID", "group")
        store = dist.FileStore(  # type: ignore[attr-defined]
            os.path.join(folder, f"{run}-{attempt}"), size
        )
    else:
        tcp_store, _, _ = next(rendezvous("env://", rank, size, timeout=timeout))
        store = dist.PrefixStore(attempt, tcp_store)  # type: ignore[attr-defined]
    return store if token is None else SignedStore(store, token)


def _bytes(array: Array) -> Array:
    """Views an array as its bytes: gloo knows few dtypes, and arrays of bfloat16 are raw bits anyway."""
    return array.reshape(-1).view(np.uint8)


@contextmanager
def _told(doing: str) -> Iterator[None]:
    """Turns PyTorch's error about a worker that has ended, or does not answer, into ours."""
    try:
        yield
    # DistBackendError, DistStoreError and DistNetworkError are RuntimeErrors; gloo raises plain ones.
    except WorkersError:
        raise
    except RuntimeError as error:
        raise WorkersError(
            f"{doing}: another worker has ended, or did not answer in time ({str(error).splitlines()[0]}). Its own "
            "message, if there is one, says why. The run goes on from its last save: start all workers again."
        ) from error
