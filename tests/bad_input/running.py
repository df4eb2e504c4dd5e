"""Wrong calls of the on-device API."""

from __future__ import annotations

import threading

import numpy as np
import onnxruntime as ort

from bad_input.bench import Bench, X, Y, case, cases
from onnxtrain.api import CheckpointState, LinearLRScheduler, Module

cases(
    {
        "too few inputs": lambda b: b.module()(X),
        "too many inputs": lambda b: b.module()(X, Y, Y),
        "inputs by keyword": lambda b: b.module()(x=X, labels=Y),
        "input is not an array": lambda b: b.module()(X.tolist(), Y),
        "input has the wrong dtype": lambda b: b.module()(X.astype(np.float64), Y),
        "target has the wrong dtype": lambda b: b.module()(X, Y.astype(np.int32)),
        "OrtValue has the wrong dtype": lambda b: b.module()(
            ort.OrtValue.ortvalue_from_numpy(X.astype(np.float64)), Y
        ),
        "input has the wrong rank": lambda b: b.module()(X[0], Y),
        "input has the wrong size": lambda b: b.module()(X[:, :3], Y),
        "inputs disagree on a symbolic size": lambda b: b.module()(X, Y[:3]),
        "class label is too large": lambda b: b.module()(X, np.where(Y == 2, 3, Y)),
        "class label is negative": lambda b: b.module()(X, np.where(Y == 2, -1, Y)),
        "input contains NaN": lambda b: b.module()(np.full_like(X, np.nan), Y),
        "batch has no samples": lambda b: b.module()(X[:0], Y[:0]),
        "all labels of a batch are ignored": lambda b: b.module()(X, np.full_like(Y, -100)),
        # tanh(inf) = 1, and the gradient of w1 is inf times 0.
        "an infinite input makes a gradient NaN, though the loss is finite": lambda b: b.module()(
            np.where(np.arange(4) == 0, np.float32(np.inf), X), Y
        ),
        "evaluation without an eval model": lambda b: b.module(evaluation=False).eval()(X, Y),
        "export without an eval model": lambda b: b.module(evaluation=False).export_model_for_inferencing(
            b.directory / "m.onnx", ["logits"]
        ),
        "export of an unknown value": lambda b: b.module().export_model_for_inferencing(
            b.directory / "m.onnx", ["probabilities"]
        ),
        "exported model cannot be written": lambda b: b.module().export_model_for_inferencing(
            b.directory / "nowhere" / "m.onnx", ["logits"]
        ),
        "`step()` before any gradient": lambda b: b.optimizer().step(),
        "learning rate is NaN": lambda b: b.optimizer().set_learning_rate(float("nan")),
        "learning rate is negative": lambda b: b.optimizer().set_learning_rate(-1e-3),
        "initial learning rate of a schedule is NaN": lambda b: LinearLRScheduler(
            b.optimizer(), 0, 10, float("nan")
        ),
        "schedule warms up longer than it lasts": lambda b: LinearLRScheduler(b.optimizer(), 20, 10, 1e-3),
        "name of a parameter is unknown": lambda b: b.state.parameters["w3"],
        "name of a property is unknown": lambda b: b.state.properties["epoch"],
    }
)


@case("property is neither int, float nor str")
def _(bench: Bench) -> None:
    bench.state.properties["history"] = [1, 2]


@case("parameter is set to the wrong shape")
def _(bench: Bench) -> None:
    bench.state.parameters["w1"].data = np.zeros((8, 4), np.float32)


@case("parameter is set to the wrong dtype")
def _(bench: Bench) -> None:
    bench.state.parameters["w1"].data = np.zeros((4, 8))


@case("buffer has the wrong size")
def _(bench: Bench) -> None:
    module = bench.module()
    module.copy_buffer_to_parameters(np.zeros(7, np.float32))


@case("parameters of a nominal checkpoint have no data")
def _(bench: Bench) -> None:
    CheckpointState.save_checkpoint(bench.state, bench.run / "nominal", nominal=True)
    state = CheckpointState.load_checkpoint(bench.run / "nominal")
    Module(bench.run / "training_model.onnx", state)(X, Y)


@case("optimizer step with the gradients of another thread")
def _(bench: Bench) -> None:
    module = bench.module()
    optimizer = bench.optimizer(module)
    done, ended = threading.Event(), threading.Event()

    def train() -> None:
        module(X, Y)
        done.set()
        ended.wait()

    thread = threading.Thread(target=train, name="other")
    thread.start()
    done.wait()
    try:
        optimizer.step()
    finally:
        ended.set()
        thread.join()


@case("another thread has changed the mode")
def _(bench: Bench) -> None:
    module = bench.module()
    module.eval()(X, Y)
    thread = threading.Thread(target=module.train, name="other")
    thread.start()
    thread.join()
    module(X, Y)
