"""Starts workers on this machine with `torch.distributed.elastic`, the library behind `torchrun`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from onnxtrain.distributed._secret import private_group
from onnxtrain.errors import WorkersError

_BACKEND = "onnxtrain-one-machine"


class _OneMachine(RendezvousHandler):
    """Rendezvous handler for one machine; unlike PyTorch's own handlers, it does not listen on the network."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._store = dist.HashStore()  # type: ignore[attr-defined]
        self._round = 0

    def get_backend(self) -> str:
        return _BACKEND

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        self._round += 1
        store = dist.PrefixStore(f"round-{self._round}", self._store)  # type: ignore[attr-defined]
        # Our own workers use no port. A function that creates its own process group finds a free port here.
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return RendezvousInfo(store, 0, 1, RendezvousStoreInfo("127.0.0.1", free.getsockname()[1]))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


rendezvous_handler_registry.register(_BACKEND, _OneMachine)


def launch_here(
    function: Callable[..., Any] | Sequence[str], arguments: Sequence[Any], workers: int, restarts: int
) -> list[Any]:
    """Starts the workers as processes on this machine, and restarts all of them if one fails.

    Args:
        function: function or command that each worker runs.
        arguments: its arguments.
        workers: number of workers.
        restarts: maximum number of restarts.

    Returns:
        The results of the workers, in rank order; None for each worker that runs a command.

    Raises:
        WorkersError: a worker failed, and no restarts are left.
    """
    # PyTorch's agent watches the processes on this machine, and restarts all of them if one fails.
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend=_BACKEND,
        max_restarts=restarts,
        # Seconds between checks of the workers.
        monitor_interval=0.1,
        # A forked process would inherit locks held by ONNX Runtime's threads.
        start_method="spawn",
    )
    # The agent takes a function and its arguments, or a program and its arguments.
    command = not callable(function)
    entrypoint = function[0] if isinstance(function, Sequence) else function
    passed = [*function[1:], *arguments] if isinstance(function, Sequence) else arguments
    try:
        with private_group() as variables, _environment(variables):
            results = elastic_launch(config, entrypoint)(*passed)
    except SignalException as signalled:
        # The workers have received the signal, have saved, and have ended.
        if signalled.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise
    except ChildFailedError as error:
        # The worker that failed first: the others failed because of it.
        rank, failure = error.get_first_failure()
        reason = failure.message if isinstance(failure.message, str) else failure.message.get("message", "")
        raise WorkersError(
            f"Worker {rank} of {workers} ended with exit code {failure.exitcode}, after {restarts} restarts: "
            f"{reason.strip()}"
        ) from error
    return [None] * workers if command else [results[rank] for rank in range(workers)]


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Context manager that sets environment variables, which the workers inherit, and restores them at the end."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
