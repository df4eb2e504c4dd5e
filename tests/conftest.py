"""Settings of all tests."""

import functools
import gc
import importlib.util
import logging
import os
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from on_device import DEVICE
from onnxtrain._building import with_room

# PyTorch's threads wait asleep, not spinning: with two workers on two processors that halves the time of many tests.
# PyTorch reads it when it is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# By default PyTorch runs a few calls of an ORTModule before another mode, size or dtype is captured. Tests are about
# the captures; `tests/ortmodule/test_break_even.py` is about these calls.
os.environ.setdefault("ORTMODULE_CAPTURE_ALL", "1")

# Dynamo's trace for tlparse: pytest would print hundreds of its records, without their contents, behind each failure,
# and keep the parameters that they hold alive.
logging.getLogger("torch.__trace").disabled = True

# A shell without job control has background processes ignore Ctrl-C, which tests of interrupts send to themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.set_threshold(10000, 20, 20)  # a capture makes objects by the hundred thousand

# Flower has an environment of its own, as it pins versions of packages that the other tests have newer ones of.
collect_ignore = [] if importlib.util.find_spec("flwr") else ["integrations"]
if DEVICE == "cpu":
    collect_ignore.append("cuda")

_ON_STOCK_ONNXRUNTIME = {
    *("autodiff", "cli", "functional", "onnxblock", "surgery", "trainer"),
    *("test_bad_input.py", "test_kills.py", "test_losses.py", "test_optimizers.py"),
    "test_optimizers_on_device.py",
}
"""Whose tests run as without native kernels, unless ONNXTRAIN_KERNELS is set; the others use those installed."""

_SPINNING = "session.intra_op.allow_spinning"


def _threads_wait_asleep() -> None:
    """Let threads of ONNX Runtime wait asleep, too, unless a test says otherwise: there are thousands of sessions."""
    create = ort.InferenceSession.__init__

    @functools.wraps(create)
    def asleep(self: Any, model: Any, sess_options: Any = None, *arguments: Any, **named: Any) -> None:
        sess_options = sess_options or ort.SessionOptions()
        try:
            sess_options.get_session_config_entry(_SPINNING)
        except RuntimeError:  # it has not been set
            sess_options.add_session_config_entry(_SPINNING, "0")
        create(self, model, sess_options, *arguments, **named)

    ort.InferenceSession.__init__ = asleep


def _calls_have_room() -> None:
    """Give all tests a deep stack: PyTorch's exports and captures for other back ends are as deep as ORTModule's."""
    run = pytest.Function.runtest
    pytest.Function.runtest = lambda test: with_room(run, test)  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def _default_device_of_torch(request: pytest.FixtureRequest) -> None:
    """With a GPU under test, PyTorch makes tensors of ORTModule's tests there if they name no device."""
    if DEVICE != "cpu":
        import torch

        torch.set_default_device(DEVICE if request.path.parent.name in ("ortmodule", "cuda") else None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--left-out", metavar="FILE", help="write the number of deselected tests to this file")
    parser.addoption(
        "--part",
        metavar="NUMBER/COUNT",
        type=_part,
        help="of the tests marked thorough, run one part of COUNT, e.g. 0/4; together the parts 0 to COUNT - 1 are all",
    )


def _part(text: str) -> tuple[int, int]:
    """Parses the value of `--part`, e.g. "1/4"."""
    number, count = map(int, text.split("/"))
    if not 0 <= number < count:
        raise ValueError
    return number, count


class _LeftOut:
    """Counts deselected tests. With xdist each worker deselects the same tests and tells the main process how many."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.count = config, 0

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self.count += len(items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.count = max(self.count, getattr(node, "workeroutput", {}).get("left out", 0))

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["left out"] = self.count
        elif file := self.config.getoption("left_out"):
            Path(file).write_text(f"{self.count:,}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked `sample(every=n)`, marks all cases thorough but one of each n; deselects by `--part`.

    That is the first of the first n cases, the second of the next n, and so on: a stride of n would keep a single value
    of a parameter that has n values.
    """
    seen: Counter[str] = Counter()
    for item in items:
        if sample := item.get_closest_marker("sample"):
            test, every = item.nodeid.partition("[")[0], sample.kwargs["every"]
            group, place = divmod(seen[test], every)
            if place != group % every:
                item.add_marker(pytest.mark.thorough)
            seen[test] += 1
    if part := config.getoption("part"):
        number, count = part
        thorough: dict[Path, list[pytest.Item]] = {}
        for item in items:
            if item.get_closest_marker("thorough"):
                thorough.setdefault(item.path, []).append(item)
        # Neighbours often share what a fixture of their module makes. Which part begins a file depends on its name, as
        # most files have few such tests.
        left_out = {
            item
            for path, tests in thorough.items()
            for place, item in enumerate(tests)
            if (place * count // len(tests) + zlib.crc32(path.name.encode())) % count != number
        }
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_LeftOut(config), "left-out")


_threads_wait_asleep()
_calls_have_room()


@pytest.fixture(scope="module", autouse=True)
def _what_earlier_tests_left() -> None:
    """Puts it aside: modules and caches of PyTorch are a million objects, which every full collection walks through."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """A session takes 5 ms less without them, and so both ways are tested."""
    with pytest.MonkeyPatch.context() as patch:
        if {request.path.name, request.path.parent.name} & _ON_STOCK_ONNXRUNTIME:
            patch.setenv("ONNXTRAIN_KERNELS", os.environ.get("ONNXTRAIN_KERNELS", "off"))
        yield


@pytest.fixture(scope="module", autouse=True)
def _captures_end_with_the_graph() -> None:
    """Dynamo would collect garbage, and empty the processor's caches to time guards for a message nobody asked for."""
    if guards := sys.modules.get("torch._dynamo.guards"):
        guards.profile_guard_manager = lambda *_: 0.0
        sys.modules["torch._dynamo.config"].run_gc_after_compile = False
