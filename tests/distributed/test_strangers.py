"""Workers of one machine listen on its loopback device alone, and take no stranger for one of them."""

from __future__ import annotations

import ipaddress
import socket
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from distributed import stranger_jobs as jobs
from onnxtrain.distributed import launch

psutil = pytest.importorskip("psutil")
pytestmark = pytest.mark.torch


class Stranger(threading.Thread):
    """Connects to every port of worker 0, while it waits for worker 1 and while it trains.

    Args:
        folder: folder of the job's signals.
        messages: what is sent, each over a connection of its own.
    """

    def __init__(self, folder: Path, messages: list[bytes]) -> None:
        super().__init__(daemon=True)
        self.folder, self.messages = folder, messages
        self.connections: list[socket.socket] = []

    def run(self) -> None:
        for signal, answer in (("joining", "knocked"), ("running", "knocked again")):
            jobs.wait_for(self.folder / signal)
            pid = int((self.folder / signal).read_text())
            while not (ports := jobs.listening(pid)):
                time.sleep(0.005)
            for address in ports:
                for message in self.messages:
                    connection = socket.create_connection(address)
                    connection.sendall(message)
                    # Left open, as one that waits would.
                    self.connections.append(connection)
            (self.folder / answer).touch()


# gloo tells connections apart by a number of 8 bytes, counted from 0. These take the place of worker 1, in one test as
# a process that waits, in the other as one that answers.
NUMBERS = [struct.pack("<q", number) for number in range(4)]
NOISE = [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x80\x04." * 100, b"\x07" * 5]


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(
    "messages", [NOISE + NUMBERS, [n + b"\xff" * 100 for n in NUMBERS]], ids=["silent", "answers"]
)
def test_strangers_change_nothing(tmp_path: Path, messages: list[bytes]) -> None:
    stranger = Stranger(tmp_path, messages)
    stranger.start()
    results = launch(jobs.meet, tmp_path, workers=2, restarts=3)
    stranger.join(60)
    for connection in stranger.connections:
        connection.close()
    assert len(stranger.connections) >= 2 * len(messages)
    for result in results:
        np.testing.assert_array_equal(result["sum"], np.full(1000, 3.0))
        assert result["ranks"] == [0, 1]
        assert result["shared"] == {"of": 0}
        addresses = [
            address for worker in result["listens"] for group in worker.values() for address, _ in group
        ]
        assert addresses
        assert all(ipaddress.ip_address(address).is_loopback for address in addresses), addresses


def test_worker_with_another_token_is_refused(tmp_path: Path) -> None:
    for error in launch(jobs.meet_with_wrong_token, tmp_path, workers=2):
        assert "token" in error


def test_store_returns_what_was_signed_and_refuses_everything_else() -> None:
    import torch.distributed as dist

    from onnxtrain.distributed._torch_secret import SignedStore
    from onnxtrain.errors import WorkersError

    plain = dist.HashStore()
    store, same, other = (SignedStore(plain, token) for token in ("a" * 64, "a" * 64, "b" * 64))
    store.set("address", b"127.0.0.1:5")
    assert same.get("address") == b"127.0.0.1:5"
    signed = plain.get("address")
    other.set("other token", b"127.0.0.1:6")
    plain.set("unsigned", b"127.0.0.1:6")
    plain.set("empty", b"")
    plain.set("other key", signed)
    plain.set("other value", signed[:-1] + b"6")
    for key in ("other token", "unsigned", "empty", "other key", "other value"):
        with pytest.raises(WorkersError, match=key):
            store.get(key)
