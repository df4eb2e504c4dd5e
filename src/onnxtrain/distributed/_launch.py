"""Starts the workers of a training run as processes, watches them, and restarts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onnxtrain.errors import InputError, MissingPackageError


def launch(
    function: Callable[..., Any] | Sequence[str],
    *arguments: Any,
    workers: int,
    restarts: int = 0,
    hosts: str | Sequence[str] | None = None,
) -> list[Any]:
    """Runs a function in several worker processes; returns the results in rank order.

    If the function creates a `Trainer` with a `strategy`, the workers train one model together. If a worker fails or is
    killed, the others are stopped and all workers are restarted, so the function should resume the run from its
    directory.

    Args:
        function: module-level function, which each worker imports; or a command, e.g. [sys.executable, "train.py"],
            whose results are all None.
        *arguments: arguments of the function, the same for all workers.
        workers: number of workers, e.g. 4.
        restarts: maximum number of restarts of all workers, e.g. 3.
        hosts: None starts the workers as processes on this machine. Otherwise, Ray starts them: "local" on this
            machine, "auto" on any machines of the Ray cluster that this machine belongs to. A list of IP addresses, or
            a comma-separated string, selects machines of the cluster, to which workers are assigned round-robin.

    Returns:
        The results of the workers, in rank order.

    Raises:
        InputError: the number of workers or restarts is out of range.
        MissingPackageError: PyTorch or Ray is not installed.
        WorkersError: a worker failed, and no restarts are left.
    """
    for name, value, least in (("workers", workers, 1), ("restarts", restarts, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"launch: {name} must be an integer >= {least}, received {value!r}.")
    if hosts is not None:
        from onnxtrain.distributed._ray import launch_on_ray

        return launch_on_ray(function, arguments, workers, restarts, hosts)
    try:
        from onnxtrain.distributed._torch_launch import launch_here
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "Starting several workers: PyTorch starts and connects them, but is not installed. Install it: pip "
            "install 'onnxtrain[torch]'."
        ) from error
    return launch_here(function, arguments, workers, restarts)
