"""Lets workers prove to each other that they know the token of their group.

PyTorch authenticates neither its stores nor gloo's connections: whoever can reach a port can take a worker's place, and
objects are sent with pickle, which executes code. With a token, the addresses in the store are signed, and each pair of
workers completes a challenge-response exchange before the first object is read.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from onnxtrain.errors import WorkersError

_DIGEST = "sha256"
_SIZE = 32
"""Size of a challenge and of a digest in bytes."""
_ANSWERS_WITHIN = timedelta(seconds=60)
"""Timeout for a response. Connected workers all respond at once, however long they waited for each other to start."""


class SignedStore(dist.Store):  # type: ignore[name-defined, misc]
    """Wraps a PyTorch store and signs its values, so that reading a value written without the token raises an error.

    gloo publishes the workers' addresses with `set`, and reads them with `wait` and `get`. Counters, which barriers
    change with `add`, are not signed: a process without the token that changes them can only delay the workers.

    Args:
        store: the underlying store.
        token: token of the group.
    """

    def __init__(self, store: Any, token: str) -> None:
        super().__init__()
        # PyTorch's stores have no type annotations.
        self._store: Any = store
        self._token = token.encode()

    def set(self, key: str, value: bytes) -> None:
        """Stores the value, preceded by its signature."""
        self._store.set(key, self._sign(key, bytes(value)) + bytes(value))

    def get(self, key: str) -> bytes:
        """Returns the value.

        Raises:
            WorkersError: the value was written without the token.
        """
        signed: bytes = self._store.get(key)
        signature, value = signed[:_SIZE], signed[_SIZE:]
        if not hmac.compare_digest(signature, self._sign(key, value)):
            raise WorkersError(
                f"Joining the other workers: the entry '{key}' of their store is not signed with the token of this "
                "group. A process that does not belong to the group writes to the store, or the workers were started "
                "with different tokens. Restart all workers."
            )
        return value

    def add(self, key: str, amount: int) -> int:
        """Adds `amount` to a counter, and returns its new value."""
        return int(self._store.add(key, amount))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Waits until the keys exist."""
        self._store.wait(keys, timeout)

    def _sign(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self._token, f"{len(key)} {key} ".encode() + value, _DIGEST)


def prove_membership(token: str, timeout: timedelta) -> None:
    """Proves to all other workers that this worker knows the token, and verifies that each of them knows it.

    Args:
        token: token of the group.
        timeout: timeout of the group, e.g. 30 minutes; each exchange waits for at most one minute.

    Raises:
        WorkersError: a process that joined as a worker does not know the token.
        RuntimeError: a worker does not respond in time.
    """
    rank = dist.get_rank()

    # The response depends on the direction: a challenge that is sent back doesn't answer itself.
    def answer(challenge: bytes, prover: int, verifier: int) -> bytes:
        return hmac.digest(token.encode(), f"{prover} to {verifier} ".encode() + challenge, _DIGEST)

    timeout = min(timeout, _ANSWERS_WITHIN)
    ours = {peer: os.urandom(_SIZE) for peer in range(dist.get_world_size()) if peer != rank}
    theirs = _exchange(ours, timeout)
    answers = _exchange({peer: answer(theirs[peer], rank, peer) for peer in ours}, timeout)
    for peer, received in answers.items():
        if not hmac.compare_digest(received, answer(ours[peer], peer, rank)):
            raise WorkersError(
                f"Joining the other workers: the process that answers as worker {peer} does not know the token of this "
                "group. A process that does not belong to the group has taken its place, or the workers were started "
                "with different tokens. Restart all workers."
            )


def _exchange(messages: Mapping[int, bytes], timeout: timedelta) -> dict[int, bytes]:
    """Sends 32 bytes to each other worker; returns the 32 bytes received from each, by rank."""
    sent = {
        peer: torch.frombuffer(bytearray(message), dtype=torch.uint8) for peer, message in messages.items()
    }
    received = {peer: torch.empty(_SIZE, dtype=torch.uint8) for peer in messages}
    pending = [dist.irecv(tensor, peer) for peer, tensor in received.items()]
    pending += [dist.isend(tensor, peer) for peer, tensor in sent.items()]
    for work in pending:
        assert work is not None
        work.wait(timeout)
    return {peer: tensor.numpy().tobytes() for peer, tensor in received.items()}
