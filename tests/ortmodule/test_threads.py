from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from onnxtrain.fusion import ProductPass
from onnxtrain.ortmodule import ORTModule
from onnxtrain.ortmodule.sessions import _session, _threads
from onnxtrain.ortmodule.sessions._threads import CoreSharing, _StepThreads, threads_for
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
assert torch.get_num_threads() == 3
torch.arange(300_000.0).exp()
assert threads() - alone == 2
assert [batch.tolist() for batch in DataLoader([1, 2, 3], 2, num_workers=1)] == [[1, 2], [3]]  # in a forked process
"""


class OpenMP:
    """Notes what is asked of OpenMP."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def omp_set_num_threads(self, count: int) -> None:
        self.asked.append(f"threads {count}")

    def omp_pause_resource_all(self, kind: int) -> None:
        assert kind == 1  # soft
        self.asked.append("end")


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


@pytest.mark.sample(every=2)
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads by /proc")
@pytest.mark.parametrize(("settings", "left"), [({}, 0), ({"OMP_WAIT_POLICY": "active"}, 2)])
def test_threads_end_with_a_step(settings: dict[str, str], left: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    found = subprocess.run(
        [sys.executable, "-c", TEAM], env=environment | settings, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["2", str(left)]


SHORT = ["threads 1", "threads 3"]
"""Requests to OpenMP of a step on one thread where PyTorch has three threads."""


def parameters(*sizes: int) -> list[torch.nn.Parameter]:
    """Returns parameters with gradients."""
    made = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    return made


@pytest.fixture(params=[True, False], ids=["threads end", "threads stay"])
def hooked(request: pytest.FixtureRequest) -> Iterator[tuple[OpenMP, list[str]]]:
    """Installs the hooks of optimizers; yields what they ask, and the list of it for the end of a step."""
    openmp = OpenMP()
    threads = _StepThreads(openmp)  # type: ignore[arg-type]
    threads.ends_threads = request.param
    handles = [
        register_optimizer_step_pre_hook(threads.before_step),
        register_optimizer_step_post_hook(threads.after_step),
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        yield openmp, ["end"] if request.param else []
    finally:
        torch.set_num_threads(before)
        for handle in handles:
            handle.remove()


def test_a_short_step_runs_on_one_thread(hooked: tuple[OpenMP, list[str]]) -> None:
    openmp, end = hooked
    torch.optim.SGD(parameters(1000, 10)).step()
    assert openmp.asked == [*SHORT, *end]


def test_a_long_step_keeps_its_threads(hooked: tuple[OpenMP, list[str]]) -> None:
    openmp, end = hooked
    optimizer = torch.optim.SGD(parameters(10))
    optimizer.step()
    optimizer.add_param_group({"params": parameters(1 << 20)})
    optimizer.step()
    assert openmp.asked == [*SHORT, *end, *end]


def test_new_threads_must_be_worth_their_start(hooked: tuple[OpenMP, list[str]]) -> None:
    openmp, end = hooked
    torch.optim.SGD(parameters(1 << 18)).step()
    assert openmp.asked == ([*SHORT, *end] if end else [])


def test_many_small_tensors_are_a_short_step(hooked: tuple[OpenMP, list[str]]) -> None:
    openmp, end = hooked
    torch.optim.SGD(parameters(*[1 << 13] * 128)).step()
    assert openmp.asked == [*SHORT, *end]


def test_a_closure_keeps_the_threads(hooked: tuple[OpenMP, list[str]]) -> None:
    """It computes the gradients."""
    openmp, end = hooked
    optimizer = torch.optim.SGD(parameters(10))
    optimizer.step(lambda: 0.0)
    optimizer.step(closure=lambda: 0.0)
    assert openmp.asked == [*end, *end]


def test_an_optimizer_that_multiplies_matrices_keeps_the_threads(hooked: tuple[OpenMP, list[str]]) -> None:
    openmp, end = hooked
    matrix = torch.nn.Parameter(torch.eye(8))
    matrix.grad = torch.ones_like(matrix)
    torch.optim.Muon([matrix]).step()
    assert openmp.asked == end


def test_the_step_after_one_that_raised_gives_the_threads_back(hooked: tuple[OpenMP, list[str]]) -> None:
    class Raising(torch.optim.SGD):
        fails = True

        def step(self) -> None:  # type: ignore[override]
            if self.fails:
                torch.set_num_threads(1)  # as the real `omp_set_num_threads(1)` before it
                raise ArithmeticError

    openmp, end = hooked
    optimizer = Raising(parameters(10))
    with pytest.raises(ArithmeticError):
        optimizer.step()
    optimizer.fails = False
    optimizer.step()
    assert openmp.asked == ["threads 1", *SHORT, *end]


def test_each_thread_has_its_own_number(hooked: tuple[OpenMP, list[str]]) -> None:
    openmp, end = hooked

    class Slow(torch.optim.SGD):
        """While it steps, another thread steps."""

        def step(self) -> None:  # type: ignore[override]
            other = threading.Thread(target=torch.optim.SGD(parameters(10)).step)
            other.start()
            other.join()

    Slow(parameters(10)).step()
    assert openmp.asked == ["threads 1", *SHORT, *end, "threads 3", *end]


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
    assert _threads._openmp(maps) is None
    maps.write_text("".join(f"7f00-7f01 r-xp 00000000 08:01 1234    {path}\n" for path in paths))
    assert _threads._openmp(maps) is None


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


def test_work_of_a_linear_layer_is_that_of_its_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    model = infer_shapes(
        ir.from_onnx_text("""<ir_version: 10, opset_import: ["": 21]>
        net (float[1100, 16] x, float[16, 64] w, float[64] b) => (float[1100, 64] y) { y = Gemm(x, w, b) }""")
    )
    ProductPass()(model)
    assert [node.op_type for node in model.graph] == ["Linear_float"]
    assert threads_for(model) == 3  # 1.1 million multiplications of 90,000 numbers


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


def test_a_small_classifier_needs_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(
        _session, "threads_for", lambda model: counts.append(threads_for(model)) or counts[-1]
    )

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 10)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.linear(x), labels)

    ORTModule(Classifier())(torch.randn(4, 8), torch.arange(4)).backward()
    assert counts == [1, 1]
