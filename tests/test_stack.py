"""Calls far down the stack."""

from __future__ import annotations

import sys

import pytest

from onnxtrain._building import with_room

resource = pytest.importorskip("resource", reason="there are no page faults to count")

CALLS = 1000


def _leaf() -> None:
    pass


def _faults(depth: int) -> int:
    """Page faults of calls from a loop that is so many frames further down."""
    if depth:
        return _faults(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        _leaf()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(sys.platform != "linux", reason="counts page faults")
def test_no_loop_calls_across_a_border_of_blocks() -> None:
    """Without room one does, at one of these depths, unless a Python keeps blocks that it will need again."""
    depths = range(400)
    assert max(with_room(lambda: [_faults(depth) for depth in depths])) < CALLS / 2


def test_arguments_results_and_errors_pass() -> None:
    assert with_room(int, "12", base=3) == 5
    with pytest.raises(ValueError, match="invalid literal"):
        with_room(int, "x")
