"""Threads that share a Module: results are numpy's, or an error; ONNXTRAIN_THREAD_CALLS calls."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fresh_process import SOURCE, TESTS, python
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.errors import InputError, TrainingStateError
from runtime import handmade

CALLS = int(os.environ.get("ONNXTRAIN_THREAD_CALLS", "400"))
THREADS = 8


def at_once(work: Callable[[int], None]) -> None:
    """Calls `work` in eight threads that begin together, with their numbers; raises the first of their errors."""
    barrier = threading.Barrier(THREADS)

    def begin(number: int) -> None:
        barrier.wait()
        work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(begin, number) for number in range(THREADS)]:
            future.result()


def batches(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 9, count)
    return [(rng.standard_normal((n, 4)).astype(np.float32), rng.integers(0, 3, n)) for n in sizes]


def opened(run: handmade.Artifacts) -> tuple[CheckpointState, Module, Optimizer]:
    state = run.state()
    module = Module(run.training.SerializeToString(), state, run.evaluation.SerializeToString())
    return state, module, Optimizer(run.optimizer.SerializeToString(), module)


@pytest.fixture
def elsewhere() -> Iterator[Callable[..., Any]]:
    """Calls a function in another thread, always the same one, and returns the result."""
    with ThreadPoolExecutor(1, "elsewhere") as pool:
        yield lambda work, *arguments: pool.submit(work, *arguments).result()


def test_evaluations_of_threads_are_those_of_numpy() -> None:
    run, data = handmade.mlp(), batches(40)
    _, module, _ = opened(run)
    module.eval()
    expected = [handmade.reference_mlp(run.parameters, *batch)[:2] for batch in data]
    kept: list[tuple[int, Any]] = []  # so that a result that a later call writes to is seen

    def work(number: int) -> None:
        for call in range(CALLS // THREADS):
            index = (number + call * 3) % len(data)
            kept.append((index, module(*data[index])))

    at_once(work)
    assert len(kept) == CALLS // THREADS * THREADS
    for index, (loss, logits) in kept:
        np.testing.assert_allclose(loss, expected[index][0], rtol=1e-5)
        np.testing.assert_allclose(logits, expected[index][1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("locked", [True, False])
def test_training_steps_of_threads_are_one_after_the_other(locked: bool) -> None:
    """Without the lock a thread that comes between another's calls gets an error, and tries again."""
    run, data = handmade.mlp(), batches(40)
    state, module, optimizer = opened(run)
    optimizer.set_learning_rate(1e-2)
    order: list[int] = []
    refused: list[str] = []

    def step(index: int) -> None:
        module(*data[index])
        order.append(index)
        optimizer.step()
        module.lazy_reset_grad()

    def work(number: int) -> None:
        for call in range(CALLS // 4 // THREADS):
            index = (number + call * 3) % len(data)
            if locked:
                with module.lock:
                    step(index)
                continue
            try:
                step(index)
            except TrainingStateError as error:
                refused.append(str(error))

    at_once(work)
    assert optimizer.step_count == len(order) > 0
    assert len(order) + len(refused) == CALLS // 4 // THREADS * THREADS
    assert not (locked and refused)
    parameters = {name: value.astype(np.float64) for name, value in run.parameters.items()}
    moments: dict[str, Any] = {}
    for number, index in enumerate(order, start=1):
        gradients = handmade.reference_mlp(parameters, *data[index])[2]
        trained = {name: gradients[name] for name in gradients if name != "fc1.bias"}
        handmade.reference_adamw(parameters, trained, moments, number, 1e-2)
    for name, parameter in state.parameters:
        np.testing.assert_allclose(parameter.data, parameters[name], rtol=1e-3, atol=2e-4)


def test_threads_that_hold_the_lock_add_up_their_gradients() -> None:
    run, data = handmade.mlp(), batches(CALLS // 4)
    state, module, _ = opened(run)

    def work(number: int) -> None:
        for batch in data[number::THREADS]:
            with module.lock:
                module(*batch)

    with module.lock:  # begins the sum under the lock, as all others go on with it
        module(*data[0])
        module.lazy_reset_grad()
    at_once(work)
    expected = sum(handmade.reference_mlp(run.parameters, *batch)[2]["fc2.weight"] for batch in data)
    np.testing.assert_allclose(state.parameters["fc2.weight"].grad, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("call", ["add", "step", "reset"])
def test_gradients_of_another_thread_are_left_alone(call: str, elsewhere: Callable[..., Any], batch) -> None:
    state, module, optimizer = opened(handmade.mlp())
    module(*batch)
    before = state.parameters["fc1.weight"].grad.copy()
    calls = {"add": lambda: module(*batch), "step": optimizer.step, "reset": module.lazy_reset_grad}
    with pytest.raises(TrainingStateError, match=r"in thread 'elsewhere_0'.*belong to thread 'MainThread'"):
        elsewhere(calls[call])
    np.testing.assert_array_equal(state.parameters["fc1.weight"].grad, before)
    optimizer.step()  # the owner continues
    module.lazy_reset_grad()
    elsewhere(module, *batch)
    with pytest.raises(TrainingStateError, match=r"module\.lock"):
        optimizer.step()


def test_gradients_that_have_been_used_can_be_replaced(elsewhere: Callable[..., Any], batch) -> None:
    run = handmade.mlp()
    state, module, optimizer = opened(run)
    for turn in (lambda work, *arguments: work(*arguments), elsewhere):  # as Trainer does: reset, call, step
        for work, arguments in ((module.lazy_reset_grad, ()), (module, batch)):
            turn(work, *arguments)
        expected = handmade.reference_mlp({n: p.data for n, p in state.parameters}, *batch)[2]["fc2.bias"]
        np.testing.assert_allclose(state.parameters["fc2.bias"].grad, expected, rtol=1e-4, atol=1e-6)
        turn(optimizer.step)


def test_a_thread_that_has_ended_leaves_its_gradients_to_be_used(batch) -> None:
    _, module, optimizer = opened(handmade.mlp())
    thread = threading.Thread(target=module, args=batch)
    thread.start()
    thread.join()
    with pytest.raises(TrainingStateError, match="A training step in thread 'MainThread'"):
        module(*batch)  # whether these were to be added up is not known
    optimizer.step()
    assert optimizer.step_count == 1


def test_two_modules_of_a_state_share_its_gradients(elsewhere: Callable[..., Any], batch) -> None:
    run = handmade.mlp()
    state, module, _ = opened(run)
    other = Module(run.training.SerializeToString(), state)
    module(*batch)
    with pytest.raises(TrainingStateError, match="the gradients belong to thread"):
        elsewhere(other, *batch)


def test_a_mode_that_another_thread_has_set_is_an_error(elsewhere: Callable[..., Any], batch) -> None:
    run = handmade.mlp()
    _, module, _ = opened(run)
    module.eval()
    expected = handmade.reference_mlp(run.parameters, *batch)[0]
    np.testing.assert_allclose(elsewhere(module, *batch)[0], expected, rtol=1e-6)
    module.train()
    with pytest.raises(TrainingStateError, match=r"'MainThread' has switched this Module to training mode"):
        elsewhere(module, *batch)
    elsewhere(module.eval)
    np.testing.assert_allclose(elsewhere(module, *batch)[0], expected, rtol=1e-6)
    module.training = False
    module(*batch)


def test_an_error_leaves_the_lock_and_the_gradients_free(elsewhere: Callable[..., Any], batch) -> None:
    _, module, optimizer = opened(handmade.mlp())
    x, labels = batch
    with pytest.raises(InputError):
        module(x[:, :3], labels)
    with pytest.raises(ZeroDivisionError), module.lock:
        raise ZeroDivisionError
    for work, arguments in ((module, batch), (optimizer.step, ())):
        elsewhere(work, *arguments)
    assert optimizer.step_count == 1


def test_what_is_saved_while_others_train_is_a_whole_state(tmp_path: Path) -> None:
    run, data = handmade.mlp(), batches(40)
    state, module, optimizer = opened(run)
    seen: dict[int, dict[str, np.ndarray]] = {}

    def work(number: int) -> None:
        for call in range(max(2, CALLS // 100)):
            if number < 4:
                with module.lock:
                    module(*data[(number + call) % len(data)])
                    optimizer.step()
                    module.lazy_reset_grad()
                    state.properties[f"of {number}, {call}"] = call
                    seen[optimizer.step_count] = {n: p.data.copy() for n, p in state.parameters}
            else:
                path = tmp_path / f"{number}-{call}"
                CheckpointState.save_checkpoint(state, path, include_optimizer_state=True)

    with module.lock:
        seen[0] = {n: p.data.copy() for n, p in state.parameters}
    at_once(work)
    for path in tmp_path.iterdir():
        loaded = CheckpointState.load_checkpoint(path)
        progress = loaded._store.optimizer
        count = 0 if progress is None else progress.step
        assert count == len(loaded.properties)
        for name, parameter in loaded.parameters:
            np.testing.assert_array_equal(parameter.data, seen[count][name])


FORKS_AND_SIGNALS = """
import os, signal, sys, threading
import numpy as np
from onnxtrain.errors import TrainingStateError
from runtime import handmade
from runtime.test_threads import batches, opened

run, (batch, *_) = handmade.mlp(), batches(2)
state, module, optimizer = opened(run)
module.eval()
module(*batch)

def forked(work):
    process = os.fork()
    if not process:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

def compute():
    np.testing.assert_allclose(module(*batch)[0], handmade.reference_mlp(run.parameters, *batch)[0], rtol=1e-5)
    module.train()(*batch)
    optimizer.step()

def is_refused():
    try:
        module(*batch)
    except TrainingStateError as error:
        assert "forked while another thread" in str(error)
    else:
        raise AssertionError

assert forked(compute) == 0
with module.lock:
    assert forked(compute) == 0  # the thread that holds the lock is there

held, done = threading.Event(), threading.Event()
def hold():
    with module.lock:
        held.set()
        done.wait()
holder = threading.Thread(target=hold)
holder.start()
held.wait()
assert forked(is_refused) == 0

interrupted = threading.Event()
def raise_once(*_):
    if not interrupted.is_set():
        interrupted.set()
        raise KeyboardInterrupt
signal.signal(signal.SIGINT, raise_once)
def interrupt():
    while not module.lock._next.locked():
        pass
    # Again and again: Python notices no signal that comes just before the thread begins to wait.
    while not interrupted.wait(0.01):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    module(*batch)
except KeyboardInterrupt:
    done.set()
else:
    raise AssertionError
holder.join()
compute()
print("all is well")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_forks_and_ctrl_c_leave_the_lock_usable() -> None:
    done = python("-c", FORKS_AND_SIGNALS, path=(SOURCE, TESTS), code=None)
    assert done.stdout == "all is well\n", done.stderr


def test_a_thread_that_comes_back_at_once_waits_for_its_turn() -> None:
    """The thread that waits is served next, however often the other one takes the lock again."""
    _, module, _ = opened(handmade.mlp())
    waiting, served = threading.Event(), threading.Event()

    def wait() -> None:
        waiting.set()
        with module.lock:
            served.set()

    with module.lock:
        thread = threading.Thread(target=wait)
        thread.start()
        waiting.wait()
        while not module.lock._next.locked():
            pass
    with module.lock:
        assert served.is_set()
    thread.join()
