from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest
import torch

from onnxtrain.ortmodule.sessions import _session, _threads
from onnxtrain.ortmodule.sessions._threads import CoreSharing, threads_for
from onnxtrain.passes import infer_shapes

pytestmark = pytest.mark.torch

TEAM = """
import os, sklearn.cluster, torch  # scikit-learn has a libgomp of its own
from torch.utils.data import DataLoader
from onnxtrain.ortmodule.sessions._threads import share_cores

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
alone = threads()
w = torch.nn.Parameter(torch.arange(300_000.0))
w.grad = torch.ones_like(w)
optimizer = torch.optim.SGD([w], lr=1.0)
optimizer.step()
team = threads() - alone
share_cores()
share_cores()
optimizer.step()
print(team, threads() - alone)
assert torch.equal(w, torch.arange(300_000.0) - 2)
assert threads() - alone == 2
assert [batch.tolist() for batch in DataLoader([1, 2, 3], 2, num_workers=1)] == [[1, 2], [3]]  # in a forked process
"""


class Clock:
    """Seconds that pass where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def run(self, seconds: float, result: int = 0) -> Callable[[], int]:
        """Returns a run that takes so long."""

        def work() -> int:
            self.now += seconds
            return result

        return work


@pytest.mark.parametrize(("seconds", "shared"), [(0.9e-3, 0), (1.1e-3, 1)])
def test_cores_are_shared_where_runs_are_long(
    seconds: float, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(_threads, "share_cores", lambda: calls.append(None))
    clock = Clock()
    sharing = CoreSharing(torch.device("cpu"), clock)
    for count in range(4):
        assert not sharing.is_settled
        assert sharing.watch(clock.run(seconds, count)) == count
    assert sharing.is_settled
    assert len(calls) == shared


def test_one_long_run_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one takes memory, another may have been interrupted."""
    monkeypatch.setattr(_threads, "share_cores", lambda: pytest.fail("runs are short"))
    clock = Clock()
    sharing = CoreSharing(torch.device("cpu"), clock)
    for seconds in (5e-3, 0.0, 5e-3, 5e-3):
        sharing.watch(clock.run(seconds))
    assert sharing.is_settled


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads by /proc")
@pytest.mark.parametrize(("settings", "left"), [({}, 0), ({"OMP_WAIT_POLICY": "active"}, 2)])
def test_threads_end_with_a_step(settings: dict[str, str], left: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    found = subprocess.run(
        [sys.executable, "-c", TEAM], env=environment | settings, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["2", str(left)]


def test_other_devices_have_nothing_to_share() -> None:
    assert CoreSharing(torch.device("cuda")).is_settled


@pytest.mark.parametrize(
    "paths",
    [
        [],
        ["/opt/intel/libiomp5.so"],
        ["/usr/lib/libgomp.so.1", "/opt/other/libgomp.so.1"],  # which of them PyTorch has cannot be told
    ],
)
def test_nothing_is_done_with_another_openmp(paths: list[str], tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    assert _threads._pause(maps) is None
    maps.write_text("".join(f"7f00-7f01 r-xp 00000000 08:01 1234    {path}\n" for path in paths))
    assert _threads._pause(maps) is None


def product(rows: str, columns: int = 64) -> ir.Model:
    return ir.from_onnx_text(f"""<ir_version: 10, opset_import: ["": 21]>
        net (float[{rows}, 256] x, float[256, {columns}] w) => (float[{rows}, {columns}] y) {{
            a = MatMul(x, w)  y = Tanh(a) }}""")


@pytest.mark.parametrize(
    ("model", "threads"),
    [
        (lambda: infer_shapes(product("1")), 1),
        (lambda: infer_shapes(product("32")), 1),  # 0.5 million multiplications
        (lambda: infer_shapes(product("128")), 3),  # 2 million
        (lambda: infer_shapes(product("n")), 3),
        (lambda: product("1"), 3),  # nothing is known of what is between
        (lambda: infer_shapes(product("1", 8192)), 3),  # weights of 2 million
    ],
    ids=["one row", "few rows", "many rows", "symbolic", "no shapes", "large weights"],
)
def test_little_work_is_done_by_one_thread(model: Callable[[], ir.Model], threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert threads_for(model()) == threads
    finally:
        torch.set_num_threads(before)


def test_a_session_begins_with_threads_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    rested: list[object] = []
    monkeypatch.setattr(_session, "rest_threads", rested.append)
    session = _session.Session(infer_shapes(product("n")), torch.device("cpu"), 3)
    assert rested == [session._session]


@pytest.mark.parametrize("op", ["LSTM", "Conv", "Attention", "Loop"])
def test_what_ops_with_loops_take_is_not_told_by_their_sizes(op: str) -> None:
    x, y = (
        ir.Value(name=name, shape=ir.Shape([2, 2]), type=ir.TensorType(ir.DataType.FLOAT)) for name in "xy"
    )
    graph = ir.Graph([x], [y], nodes=[ir.node(op, [x], outputs=[y])], opset_imports={"": 21})
    assert threads_for(ir.Model(graph, ir_version=10)) == torch.get_num_threads()
