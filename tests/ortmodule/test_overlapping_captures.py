"""Captures of ORTModule that change PyTorch while they last put it back, whichever of two threads ends first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher

from onnxtrain.ortmodule._torch import fake_impls
from onnxtrain.ortmodule.capture.dynamo._fast_path import fast_path_disabled
from onnxtrain.ortmodule.capture.dynamo.patches._inactive_dropout import inactive_dropout
from onnxtrain.ortmodule.capture.dynamo.patches._missing_fakes import missing_fakes

Capturing = Callable[[], AbstractContextManager[None]]


def copies() -> bool:
    """Tell if dropout that is off copies its input under the Python dispatcher, as PyTorch 2.13 does by itself."""
    x = torch.ones(3)
    with enable_python_dispatcher():
        return torch.ops.aten.dropout.default(x, 0.5, False) is not x


@pytest.fixture
def by_itself() -> bool:
    return copies()


def test_a_capture_sees_the_input_and_what_follows_does_not(by_itself: bool) -> None:
    for _ in range(2):
        with inactive_dropout():
            assert not copies()
        assert copies() is by_itself


def overlap(capturing: Capturing, check: Callable[[], None]) -> None:
    """Opens it in two threads: the first to begin is the first to end, and the other one checks behind this end."""
    begun, ended = threading.Event(), threading.Event()

    def first() -> None:
        with capturing():
            assert begun.wait(60)
        ended.set()

    def second() -> None:
        with capturing():
            begun.set()
            assert ended.wait(60)
            check()

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(first), pool.submit(second)]:
            future.result()


def test_dropout_is_that_of_pytorch_behind_captures_that_overlap(by_itself: bool) -> None:
    def check() -> None:
        assert not copies()

    overlap(inactive_dropout, check)
    assert copies() is by_itself


def test_fakes_of_data_dependent_operators_are_those_of_pytorch_behind_captures_that_overlap() -> None:
    before = dict(fake_impls.op_implementations_dict)

    def check() -> None:
        assert torch.ops.aten.cummax.default in fake_impls.op_implementations_dict

    overlap(missing_fakes, check)
    assert dict(fake_impls.op_implementations_dict) == before
    with missing_fakes(), missing_fakes():
        check()
    assert dict(fake_impls.op_implementations_dict) == before


def test_another_thread_meets_the_dropout_of_pytorch(by_itself: bool) -> None:
    with inactive_dropout(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(copies).result() is by_itself


@pytest.mark.parametrize("enabled", [True, False])
def test_the_fast_path_is_as_it_was_behind_calls_that_overlap(enabled: bool) -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:

        def check() -> None:
            assert not torch.backends.mha.get_fastpath_enabled()

        overlap(fast_path_disabled, check)
        assert torch.backends.mha.get_fastpath_enabled() is enabled
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
