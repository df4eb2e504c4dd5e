"""Creates the secret shared by a group's workers, and keeps workers on a single machine off the network."""

from __future__ import annotations

import contextlib
import secrets
import socket
import tempfile
from collections.abc import Iterator

FOLDER = "ONNXTRAIN_WORKERS_FOLDER"
"""Environment variable with the path of the private folder through which workers on one machine find each other."""

TOKEN = "ONNXTRAIN_WORKERS_TOKEN"
"""Environment variable with the token of a group, a random text that only its workers know."""


def new_token() -> str:
    """Returns a random token, 64 hexadecimal digits, with which the workers of a group authenticate each other."""
    return secrets.token_hex(32)


def private_folder() -> tempfile.TemporaryDirectory[str]:
    """Creates a temporary folder that only this user can open; exiting its `with` block removes it."""
    return tempfile.TemporaryDirectory(prefix="onnxtrain-workers-", ignore_cleanup_errors=True)


def one_machine(folder: str) -> dict[str, str]:
    """Returns the environment variables for workers that all run on this machine, except :data:`TOKEN`.

    Args:
        folder: path of the folder through which the workers find each other.
    """
    # A file store needs no port. By default, gloo would listen on the interface of the host name; the loopback device
    # is named differently on Linux and macOS.
    names = {name for _, name in socket.if_nameindex()}
    device = next((name for name in ("lo", "lo0") if name in names), None)
    return {FOLDER: folder} | ({} if device is None else {"GLOO_SOCKET_IFNAME": device})


@contextlib.contextmanager
def private_group() -> Iterator[dict[str, str]]:
    """Creates a private folder and a token for a group of workers on this machine; removes the folder on exit.

    Yields:
        The environment variables that the workers need to find and authenticate each other.
    """
    with private_folder() as folder:
        yield one_machine(folder) | {TOKEN: new_token()}
