"""Starts workers with Ray, on one machine or on a cluster, watches them, and restarts them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from onnxtrain._printable import get_logger
from onnxtrain.distributed._secret import TOKEN, new_token, one_machine, private_folder
from onnxtrain.errors import MissingPackageError, WorkersError

_log = get_logger()

# Ray's name of the resource that each machine of a cluster has under its own address.
_NODE = "node:{}"


class _Worker:
    """A Ray actor that runs one worker."""

    def __init__(self) -> None:
        self._cleanup = contextlib.ExitStack()

    def address(self) -> tuple[str, int, str]:
        """Returns this machine's IP address, a free port on it, and its Ray node ID."""
        import ray

        # Another program may take the port before worker 0 does: then joining fails, and the group is restarted.
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        context = ray.get_runtime_context()
        return ray.util.get_node_ip_address(), port, context.get_node_id()

    def one_machine(self) -> dict[str, str]:
        """Creates a private folder through which workers find each other if all of them run on this machine.

        The folder is removed at the end of :meth:`work`.

        Returns:
            The environment variables to set for these workers, except for their token.
        """
        self._cleanup.enter_context(folder := private_folder())
        return one_machine(folder.name)

    def work(
        self,
        function: Callable[..., Any] | Sequence[str],
        arguments: Sequence[Any],
        variables: dict[str, str],
        directory: str,
    ) -> Any:
        """Calls the function, or runs the command, in `directory`, the launcher's working directory.

        `variables` are the environment variables that describe the group.
        """
        os.environ.update(variables)
        # Paths in the arguments are relative to the launcher's directory. Without a shared file system, only worker 0
        # uses them.
        with contextlib.suppress(OSError):
            os.chdir(directory)
        with self._cleanup:
            # In the actor's own process, so that Ray notices if it dies.
            if callable(function):
                return function(*arguments)
            subprocess.run([*function, *map(str, arguments)], check=True)
            return None


def launch_on_ray(
    function: Callable[..., Any] | Sequence[str],
    arguments: Sequence[Any],
    workers: int,
    restarts: int,
    hosts: str | Sequence[str],
) -> list[Any]:
    """Starts the workers with Ray, and restarts all of them if one fails.

    Args:
        function: function or command that each worker runs.
        arguments: its arguments.
        workers: number of workers.
        restarts: maximum number of restarts.
        hosts: "local", "auto", or the IP addresses of machines; see :func:`onnxtrain.distributed.launch`.

    Returns:
        The results of the workers, in rank order.

    Raises:
        MissingPackageError: Ray is not installed.
        WorkersError: a worker failed, and no restarts are left; or there is no cluster.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "Starting workers with Ray: Ray is not installed. Install it: pip install 'onnxtrain[ray]'."
        ) from error
    address, nodes = _cluster(hosts)
    with _connected(ray, address, workers):
        for attempt in range(restarts + 1):
            try:
                return _run_once(ray, function, arguments, workers, nodes, attempt)
            except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:
                failure = error
    # A RayTaskError contains the worker's traceback; its cause is the worker's own exception.
    reason = str(getattr(failure, "cause", None) or failure).strip().splitlines()
    raise WorkersError(
        f"A worker of {workers} ended, after {restarts} restarts: {reason[-1] if reason else type(failure).__name__}"
    ) from failure


def _cluster(hosts: str | Sequence[str]) -> tuple[str | None, list[str]]:
    """Parses the argument `hosts` of :func:`onnxtrain.distributed.launch`.

    Returns:
        Ray's address argument ("local" for a new cluster on this machine, "auto" for the cluster that this machine
        belongs to), and the IP addresses of the machines to use, or [] for any machine.
    """
    if isinstance(hosts, str) and hosts not in ("auto", "local"):
        hosts = [host.strip() for host in hosts.split(",") if host.strip()]
    if isinstance(hosts, str):
        # "local" starts a cluster on this machine, which ends with the program.
        return ("auto" if hosts == "auto" else "local"), []
    return "auto", list(hosts)


@contextlib.contextmanager
def _connected(ray: Any, address: str | None, workers: int) -> Iterator[None]:
    """Context manager that connects to a Ray cluster, and disconnects at the end; reuses an existing connection."""
    if ray.is_initialized():
        _warn_of_waiting(ray, workers)
        yield
        return
    # Ray sends the function to the workers by name: they import it from the same path as the launcher.
    import sys

    path = os.pathsep.join(entry for entry in sys.path if entry)
    # A worker takes one CPU of the cluster. On one machine, there may be more workers than CPUs, as with PyTorch's
    # launcher: otherwise, Ray would wait for a machine that nobody adds.
    processors = {"num_cpus": max(workers, os.cpu_count() or 1)} if address == "local" else {}
    try:
        ray.init(
            address=address,
            **processors,
            runtime_env={"env_vars": {"PYTHONPATH": path}},
            log_to_driver=True,
            configure_logging=False,
        )
    except ConnectionError as error:
        raise WorkersError(
            f"Starting workers with Ray: there is no cluster to connect to ({error}). Start one with 'ray start "
            "--head' on one machine and 'ray start --address=...' on the others, or use hosts='local'."
        ) from error
    try:
        _warn_of_waiting(ray, workers)
        yield
    finally:
        ray.shutdown()


def _warn_of_waiting(ray: Any, workers: int) -> None:
    """Warns if the cluster, which may still grow, has fewer CPUs than workers."""
    processors = int(ray.cluster_resources().get("CPU", 0))
    if processors < workers:
        _log.warning(
            "Starting workers with Ray: the cluster has %d CPUs, but each of %d workers takes one. Ray waits until "
            "machines are added; otherwise, stop and start fewer workers.",
            processors,
            workers,
        )


def _run_once(
    ray: Any,
    function: Callable[..., Any] | Sequence[str],
    arguments: Sequence[Any],
    workers: int,
    nodes: list[str],
    attempt: int,
) -> list[Any]:
    """Runs the function or command once in all workers; stops all workers at the end, or as soon as one fails.

    Args:
        ray: the `ray` module, connected to a cluster.
        function: function or command that each worker runs.
        arguments: its arguments.
        workers: number of workers.
        nodes: IP addresses of the machines to use, assigned round-robin; [] for any machine.
        attempt: number of restarts so far.

    Returns:
        The results of the workers, in rank order.

    Raises:
        RayActorError: the process of a worker died.
        RayTaskError: the function or command failed in a worker.
    """
    # Restarts are done here, for the whole group: Ray would restart a single worker.
    remote = ray.remote(num_cpus=1, max_restarts=0)(_Worker)
    actors = []
    try:
        for rank in range(workers):
            # A small amount of the resource that only this machine has.
            placed = {"resources": {_NODE.format(nodes[rank % len(nodes)]): 0.001}} if nodes else {}
            actors.append(remote.options(**placed).remote())
        # Waits until Ray has found machines for all workers. The group needs the address of worker 0.
        places = ray.get([actor.address.remote() for actor in actors])
        names = [name for _, _, name in places]
        together = ray.get(actors[0].one_machine.remote()) if len(set(names)) == 1 else {}
        token = new_token()
        results = []
        for rank, actor in enumerate(actors):
            # The variables that torchrun sets and `join_group` reads.
            variables = {
                "RANK": rank,
                "WORLD_SIZE": workers,
                "LOCAL_RANK": names[:rank].count(names[rank]),
                "LOCAL_WORLD_SIZE": names.count(names[rank]),
                "MASTER_ADDR": places[0][0],
                "MASTER_PORT": places[0][1],
                "TORCHELASTIC_RESTART_COUNT": attempt,
                TOKEN: token,
                **together,
            }
            texts = {key: str(value) for key, value in variables.items()}
            results.append(actor.work.remote(function, arguments, texts, os.getcwd()))
        waiting = list(results)
        # The first failure raises here, while other workers may be waiting for the failed worker.
        while waiting:
            done, waiting = ray.wait(waiting)
            ray.get(done)
        return list(ray.get(results))
    finally:
        # Also after success: an actor keeps its process, with the models in memory, until it is killed.
        for actor in actors:
            ray.kill(actor)
