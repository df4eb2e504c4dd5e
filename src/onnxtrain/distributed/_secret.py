"""Names the secret that the workers of a group share, and keeps workers of one machine off the network."""

from __future__ import annotations

import contextlib
import secrets
import socket
import tempfile
from collections.abc import Iterator

FOLDER = "ONNXTRAIN_WORKERS_FOLDER"
"""Environment variable: private folder through which the workers of one machine find one another."""

TOKEN = "ONNXTRAIN_WORKERS_TOKEN"
"""Environment variable: random text that the workers of a group know, and nobody else."""


def new_token() -> str:
    """Returns a token for one group, 64 hexadecimal digits."""
    return secrets.token_hex(32)


def private_folder() -> tempfile.TemporaryDirectory[str]:
    """Returns a folder that only this user can open; it is removed when the object is closed."""
    return tempfile.TemporaryDirectory(prefix="onnxtrain-workers-", ignore_cleanup_errors=True)


def one_machine(folder: str) -> dict[str, str]:
    """Returns the environment variables of workers that are all on this machine, without the token."""
    # A store in a file needs no port. gloo would listen where the host's name leads; its loopback device has one name
    # on Linux and another on macOS.
    names = {name for _, name in socket.if_nameindex()}
    device = next((name for name in ("lo", "lo0") if name in names), None)
    return {FOLDER: folder} | ({} if device is None else {"GLOO_SOCKET_IFNAME": device})


@contextlib.contextmanager
def private_group() -> Iterator[dict[str, str]]:
    """Yields the environment variables of a group on this machine; its folder is removed when the block ends."""
    with private_folder() as folder:
        yield one_machine(folder) | {TOKEN: new_token()}
