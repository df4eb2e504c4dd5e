"""The kernel of dropout that ORTModule's captures see is theirs alone: others meet PyTorch's."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher

from onnxtrain.ortmodule.capture._inactive_dropout import inactive_dropout_returns_its_input


def copies() -> bool:
    """Whether dropout that is off copies its input under the Python dispatcher, as PyTorch 2.13 does by itself."""
    x = torch.ones(3)
    with enable_python_dispatcher():
        return torch.ops.aten.dropout.default(x, 0.5, False) is not x


@pytest.fixture
def by_itself() -> bool:
    return copies()


def test_a_capture_sees_the_input_and_what_follows_does_not(by_itself: bool) -> None:
    for _ in range(2):
        with inactive_dropout_returns_its_input():
            assert not copies()
        assert copies() is by_itself


def test_captures_of_two_threads_that_overlap_leave_nothing_behind(by_itself: bool) -> None:
    """The first to begin is the first to end: putting back what was there when the second began would be wrong."""
    begun, ended = threading.Event(), threading.Event()

    def first() -> None:
        with inactive_dropout_returns_its_input():
            assert begun.wait(60)
        ended.set()

    def second() -> None:
        with inactive_dropout_returns_its_input():
            begun.set()
            assert ended.wait(60)
            assert not copies()

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(first), pool.submit(second)]:
            future.result()
    assert copies() is by_itself


def test_another_thread_meets_the_dropout_of_pytorch(by_itself: bool) -> None:
    with inactive_dropout_returns_its_input(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(copies).result() is by_itself
