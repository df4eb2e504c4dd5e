"""Starts workers on this machine by `torch.distributed.elastic`, the library behind `torchrun`."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from onnxtrain.errors import WorkersError


def launch_here(
    function: Callable[..., Any] | Sequence[str], arguments: Sequence[Any], workers: int, restarts: int
) -> list[Any]:
    """Starts and watches the workers; see :func:`onnxtrain.distributed.launch`."""
    # One machine: PyTorch's agent watches its processes, and starts all of them again if one ends with an error.
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        # Port 0: a free one.
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        # Seconds between two looks at the workers.
        monitor_interval=0.1,
        # A forked process would inherit the threads' locks of ONNX Runtime.
        start_method="spawn",
    )
    # The agent takes a function with its arguments, or a program with its own.
    command = not callable(function)
    entrypoint = function[0] if isinstance(function, Sequence) else function
    passed = [*function[1:], *arguments] if isinstance(function, Sequence) else arguments
    try:
        results = elastic_launch(config, entrypoint)(*passed)
    except SignalException as signalled:
        # The workers have got the signal, have saved, and have ended.
        if signalled.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise
    except ChildFailedError as error:
        # The worker that failed first: the others fail because of it.
        rank, failure = error.get_first_failure()
        reason = failure.message if isinstance(failure.message, str) else failure.message.get("message", "")
        raise WorkersError(
            f"Worker {rank} of {workers} ended with exit code {failure.exitcode}, after {restarts} restarts: "
            f"{reason.strip()}"
        ) from error
    return [None] * workers if command else [results[rank] for rank in range(workers)]
