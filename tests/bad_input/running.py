"""Wrong calls of the on-device API."""

from __future__ import annotations

import threading

import numpy as np
import onnxruntime as ort

from bad_input.bench import Bench, X, Y, case
from onnxtrain.api import CheckpointState, LinearLRScheduler, Module


@case("too few inputs")
def _(bench: Bench) -> None:
    bench.module()(X)


@case("too many inputs")
def _(bench: Bench) -> None:
    bench.module()(X, Y, Y)


@case("inputs by keyword")
def _(bench: Bench) -> None:
    bench.module()(x=X, labels=Y)


@case("input is no array")
def _(bench: Bench) -> None:
    bench.module()(X.tolist(), Y)


@case("input has the wrong dtype")
def _(bench: Bench) -> None:
    bench.module()(X.astype(np.float64), Y)


@case("target has the wrong dtype")
def _(bench: Bench) -> None:
    bench.module()(X, Y.astype(np.int32))


@case("OrtValue has the wrong dtype")
def _(bench: Bench) -> None:
    bench.module()(ort.OrtValue.ortvalue_from_numpy(X.astype(np.float64)), Y)


@case("input has the wrong rank")
def _(bench: Bench) -> None:
    bench.module()(X[0], Y)


@case("input has the wrong size")
def _(bench: Bench) -> None:
    bench.module()(X[:, :3], Y)


@case("inputs disagree on a symbolic size")
def _(bench: Bench) -> None:
    bench.module()(X, Y[:3])


@case("class label is too large")
def _(bench: Bench) -> None:
    bench.module()(X, np.where(Y == 2, 3, Y))


@case("class label is negative")
def _(bench: Bench) -> None:
    bench.module()(X, np.where(Y == 2, -1, Y))


@case("evaluation without an eval model")
def _(bench: Bench) -> None:
    bench.module(evaluation=False).eval()(X, Y)


@case("export without an eval model")
def _(bench: Bench) -> None:
    bench.module(evaluation=False).export_model_for_inferencing(bench.directory / "m.onnx", ["logits"])


@case("export of a value that is not there")
def _(bench: Bench) -> None:
    bench.module().export_model_for_inferencing(bench.directory / "m.onnx", ["probabilities"])


@case("exported model cannot be written")
def _(bench: Bench) -> None:
    bench.module().export_model_for_inferencing(bench.directory / "nowhere" / "m.onnx", ["logits"])


@case("`step()` before any gradient")
def _(bench: Bench) -> None:
    bench.optimizer().step()


@case("learning rate is NaN")
def _(bench: Bench) -> None:
    bench.optimizer().set_learning_rate(float("nan"))


@case("learning rate is negative")
def _(bench: Bench) -> None:
    bench.optimizer().set_learning_rate(-1e-3)


@case("initial learning rate of a schedule is NaN")
def _(bench: Bench) -> None:
    LinearLRScheduler(bench.optimizer(), 0, 10, float("nan"))


@case("schedule warms up longer than it lasts")
def _(bench: Bench) -> None:
    LinearLRScheduler(bench.optimizer(), 20, 10, 1e-3)


@case("name of a parameter is unknown")
def _(bench: Bench) -> None:
    bench.state.parameters["w3"]


@case("name of a property is unknown")
def _(bench: Bench) -> None:
    bench.state.properties["epoch"]


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


@case("optimizer step on the gradients of another thread")
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
