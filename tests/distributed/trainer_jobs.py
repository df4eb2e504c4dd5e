"""Trainings that one process and several workers run alike, to be compared."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

import models
from onnxtrain import Callback, Trainer
from onnxtrain.distributed import DataParallel
from onnxtrain.errors import DivergenceError, InputError, OnnxTrainError
from onnxtrain.losses import CrossEntropyLoss, MSELoss
from onnxtrain.optimizers import AdamW, ParameterGroup, SparseAdam
from onnxtrain.trainer import SAM, EarlyStopping, ReduceLROnPlateau, StepGradients
from trainer.problems import AtEachStep, classes, images, line
from trainer.test_resume import InterruptAt, dropout_model

Result = dict[str, Any]
Job = Callable[[Any], Result]


def parameters(trainer: Trainer) -> dict[str, np.ndarray[Any, Any]]:
    """Copies parameters and statistics by name."""
    groups = (*trainer.parameters, *trainer.state.statistics)
    return {name: parameter.data.copy() for name, parameter in groups}


def fitted(trainer: Trainer, x: Any, y: Any = None, **options: Any) -> Result:
    """Trains, and returns losses of the steps, the records of the epochs, and the parameters."""
    steps = AtEachStep(lambda trainer, loss: loss)
    callbacks = [steps, *options.pop("callbacks", ())]
    history = trainer.fit(x, y, verbose=False, callbacks=callbacks, **options)
    return {"losses": steps.seen, "epochs": history.epochs, "parameters": parameters(trainer)}


def labels(strategy: Any) -> Result:
    """60 samples in batches of 16, so that the last one has 12; a metric of all predictions; a validation set."""
    problem = classes()
    metrics = ["accuracy", "f1"]
    trainer = Trainer(problem.model, "cross_entropy", learning_rate=0.01, metrics=metrics, strategy=strategy)
    held_out = (problem.x[:21], problem.y[:21])
    result = fitted(trainer, problem.x, problem.y, epochs=5, batch_size=16, validation=held_out)
    return result | {"evaluation": trainer.evaluate(problem.x[:45], problem.y[:45], batch_size=4)}


def ignored_labels(strategy: Any) -> Result:
    """Labels that do not count, unequal numbers of them per worker, and weights of the classes in the loss."""
    problem = classes()
    y = problem.y.copy()
    # The first half of some batches of 8: of two workers the first has no label then.
    y[np.arange(60) % 8 < 4] = -100
    y[32:] = np.where(np.random.default_rng(0).random(28) < 0.4, -100, problem.y[32:])
    loss = CrossEntropyLoss(ignore_index=-100, weight=[0.2, 1.0, 3.0])
    trainer = Trainer(
        problem.model,
        loss,
        learning_rate=0.02,
        ema_decay=0.9,
        clip_grad_norm=0.05,
        scheduler="linear",
        warmup_steps=3,
        strategy=strategy,
    )
    result = fitted(trainer, problem.x, y, epochs=5, batch_size=8, accumulate=2, shuffle=False)
    return result | {"evaluation": trainer.evaluate(problem.x, y)}


def sample_weights(strategy: Any) -> Result:
    """Weights of the samples, for which the models are built again, and weights of the classes."""
    problem = classes()
    weights = np.random.default_rng(0).uniform(0, 3, 60)
    trainer = Trainer(problem.model, "cross_entropy", "sgd", learning_rate=0.2, strategy=strategy)
    fit = {"epochs": 5, "batch_size": 16, "sample_weight": weights, "class_weight": "balanced"}
    return fitted(trainer, problem.x, problem.y, validation=0.2, **fit)


def _places() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Marks samples that do not count, in batches of 8: those of the first half of a batch, and of whole batches."""
    batch, place = np.divmod(np.arange(60), 8)
    # Steps are batches 0 and 1, 2 and 3, ...: the first worker has samples that count in one batch of the step, in none
    # while others have some, in none as all others, and in the second batch.
    return (place < 4) & np.isin(batch, (1, 3, 6)), np.isin(batch, (2, 4, 5))


def seen_samples(prediction: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> float:
    """Counts the samples of an epoch."""
    return float(len(target))


def uncounted_labels(strategy: Any) -> Result:
    """Workers without a label that counts, beside workers that have some; a metric that gets all samples."""
    problem = classes()
    y = np.where(np.logical_or(*_places()), -100, problem.y)
    metrics: list[Any] = ["accuracy", seen_samples]
    loss = CrossEntropyLoss(ignore_index=-100)
    trainer = Trainer(problem.model, loss, "sgd", learning_rate=0.2, metrics=metrics, strategy=strategy)
    fit = {"epochs": 5, "batch_size": 8, "accumulate": 2, "shuffle": False}
    return fitted(trainer, problem.x, y, **fit) | {"evaluation": trainer.evaluate(problem.x, y, batch_size=8)}


def uncounted_samples(strategy: Any) -> Result:
    """Workers whose samples have the weight zero; metrics get these samples, too."""
    problem = classes()
    weights = np.random.default_rng(0).uniform(0.5, 3, 60) * ~np.logical_or(*_places())
    metrics = ["accuracy", "f1"]
    trainer = Trainer(
        problem.model, "cross_entropy", "sgd", learning_rate=0.2, metrics=metrics, strategy=strategy
    )
    fit = {"epochs": 5, "batch_size": 8, "accumulate": 2, "shuffle": False, "sample_weight": weights}
    return fitted(trainer, problem.x, problem.y, **fit)


def uncounted_class(strategy: Any) -> Result:
    """Classes in their order, the first of which has the weight zero; an embedding with sparse gradients."""
    model, ids, y = _bag()
    order = np.argsort(y, kind="stable")
    loss = CrossEntropyLoss(weight=[0.0, 1.0, 2.0])
    trainer = Trainer(
        model,
        loss,
        _sparse_optimizer(),
        0.05,
        metrics=["accuracy"],
        sparse_gradients=["table"],
        strategy=strategy,
    )
    fit = {"epochs": 10, "batch_size": 8, "accumulate": 2, "shuffle": False}
    return fitted(trainer, ids[order], y[order], **fit)


def nothing_counted(strategy: Any) -> Result:
    """No label counts, on any worker."""
    problem = classes()
    trainer = Trainer(problem.model, CrossEntropyLoss(ignore_index=-100), "sgd", strategy=strategy)
    before = parameters(trainer)
    result: Result = {"losses": [], "before": before}
    try:
        result |= fitted(trainer, problem.x, np.full(60, -100), batch_size=16)
    except InputError as error:
        result["error"] = str(error)
    # The fit has ended in all workers: the next one has the same arguments everywhere.
    return result | {
        "after": parameters(trainer),
        "next": fitted(trainer, problem.x, problem.y, batch_size=16),
    }


def loss_of_the_model(strategy: Any) -> Result:
    """A loss in the model, with weights of the classes, and workers without a label that counts."""
    problem = classes()
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        g (float[n, 4] x, int64[n, 1] kind) => (float loss)
        <float[4, 3] w = {1., 0., 0., 0., 1., 0., 0., 0., 1., 1., 1., 1.}, int64[1] axis = {1},
         float[3] weight = {0.2, 1., 3.}>
        { y = MatMul(x, w)  wanted = Squeeze(kind, axis)
          loss = SoftmaxCrossEntropyLoss<ignore_index = -100>(y, wanted, weight) }"""
    )
    y = np.where(np.logical_or(*_places()), -100, problem.y)
    data = {"x": problem.x, "kind": y[:, None]}
    trainer = Trainer(model, None, "sgd", learning_rate=0.2, frozen_params="weight", strategy=strategy)
    result = fitted(trainer, data, epochs=5, batch_size=8, accumulate=2, shuffle=False)
    return result | {"evaluation": trainer.evaluate(data, batch_size=8)}


def summed_loss(strategy: Any) -> Result:
    """A loss that is a sum over the samples."""
    problem = line()
    trainer = Trainer(problem.model, MSELoss(reduction="sum"), "sgd", learning_rate=0.005, strategy=strategy)
    result = fitted(trainer, problem.x, problem.y, epochs=5, batch_size=10)
    return result | {"evaluation": trainer.evaluate(problem.x, problem.y, batch_size=7)}


def one_sample_left(strategy: Any) -> Result:
    """The last batch has one sample, so that only one worker has any."""
    problem = line(33)
    trainer = Trainer(problem.model, "mse", "adam", learning_rate=0.05, strategy=strategy)
    return fitted(trainer, problem.x, problem.y, epochs=7, batch_size=16)


def _sparse_optimizer() -> AdamW:
    return AdamW(groups=[ParameterGroup("table", optimizer=SparseAdam())])


def _bag() -> tuple[onnx.ModelProto, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A classifier of bags of ids by the mean of their rows in a table, with 33 samples."""
    rng = np.random.default_rng(0)
    nodes = models.parse_nodes(
        "rows = Gather(table, ids)  mean = ReduceMean <axes=[1], keepdims=0> (rows)  logits = MatMul(mean, w)"
    )
    tensors = {"table": rng.normal(size=(9, 4)), "w": rng.normal(size=(4, 3))}
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes,
        "bag",
        [info("ids", onnx.TensorProto.INT64, ["n", 5])],
        [info("logits", onnx.TensorProto.FLOAT, ["n", 3])],
        [onnx.numpy_helper.from_array(value.astype(np.float32), name) for name, value in tensors.items()],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    return model, rng.integers(0, 9, (33, 5)), rng.integers(0, 3, 33)


def sparse(strategy: Any) -> Result:
    """An embedding of which a step updates only the rows that it reads."""
    model, ids, y = _bag()
    trainer = Trainer(
        model, "cross_entropy", _sparse_optimizer(), 0.05, sparse_gradients=["table"], strategy=strategy
    )
    return fitted(trainer, ids, y, epochs=7, batch_size=16)


def stream(strategy: Any) -> Result:
    """Batches of a generator, shuffled by the numbers that the trainer seeds, of 13, 13, 13, 13 and 8 samples."""
    problem = classes()

    def batches() -> Iterator[Any]:
        order = np.random.permutation(60)
        for start in range(0, 60, 13):
            part = order[start : start + 13]
            yield problem.x[part], problem.y[part]

    trainer = Trainer(problem.model, "cross_entropy", learning_rate=0.01, strategy=strategy)
    # Steps that do not end with a pass.
    return fitted(trainer, batches, epochs=3, steps_per_epoch=7, validation=batches)


class Samples(torch.utils.data.IterableDataset[Any]):
    """Gives one sample after the other, and remembers nothing."""

    def __iter__(self) -> Iterator[Any]:
        problem = classes()
        yield from zip(problem.x, problem.y, strict=True)


def iterable_dataset(strategy: Any) -> Result:
    """A data set of PyTorch without numbers of samples."""
    trainer = Trainer(classes().model, "cross_entropy", learning_rate=0.01, strategy=strategy)
    return fitted(trainer, Samples(), epochs=5, batch_size=16)


class Stacked(torch.utils.data.Dataset[Any]):
    """Gives samples by number, and counts how often each was asked for."""

    def __init__(self) -> None:
        self.problem, self.counts = classes(), np.zeros(60, int)

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        self.counts[index] += 1
        return self.problem.x[index], self.problem.y[index]


def counted(strategy: Any) -> Result:
    """Each worker reads its own samples of a data set with numbers; `counts` tells how often it read each."""
    data = Stacked()
    trainer = Trainer(classes().model, "cross_entropy", learning_rate=0.01, metrics=[], strategy=strategy)
    # Opening reads the first sample.
    data.counts[0] -= 1
    return fitted(trainer, data, epochs=4, batch_size=13) | {"counts": data.counts}


def callbacks(strategy: Any) -> Result:
    """SAM computes gradients twice, a callback lowers the rate, and another one stops and puts the best back."""
    problem = classes()
    trainer = Trainer(problem.model, "cross_entropy", "sgd", learning_rate=1.0, strategy=strategy)
    chosen = [
        SAM(0.1),
        ReduceLROnPlateau("val_loss", patience=1),
        EarlyStopping("val_loss", 3, restore_best=True),
    ]
    # The labels of the validation data are wrong, so that its loss rises.
    result = fitted(
        trainer,
        problem.x,
        problem.y,
        epochs=20,
        batch_size=16,
        validation=(problem.x[:20], (problem.y[:20] + 1) % 3),
        callbacks=chosen,
    )
    return result | {"stopped": trainer.history.stopped, "rate": trainer.learning_rate}


def dropout(strategy: Any) -> Result:
    """The same training twice; the model drops elements at random."""
    problem = classes()
    results = []
    for _ in range(2):
        trainer = Trainer(dropout_model(), "cross_entropy", learning_rate=0.01, strategy=strategy)
        results.append(fitted(trainer, problem.x, problem.y, epochs=2, batch_size=30))
    return {"first": results[0], "second": results[1]}


def diverging(strategy: Any) -> Result:
    """One sample makes the loss of the worker that has it infinite."""
    problem = line()
    x = problem.x.copy()
    x[-1] = 1e30
    trainer = Trainer(problem.model, "mse", "sgd", learning_rate=0.01, strategy=strategy)
    return _message_of(trainer, x, problem.y, batch_size=40)


def uncounted_beside_a_penalty(strategy: Any) -> Result:
    """A mean over labels and one over samples, in the model, and a worker without a label that counts."""
    problem = classes()
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        g (float[n, 4] x, int64[n] kind) => (float loss)
        <float[4, 3] w = {1., 0., 0., 0., 1., 0., 0., 0., 1., 1., 1., 1.}>
        { y = MatMul(x, w)  of_labels = SoftmaxCrossEntropyLoss<ignore_index = -100>(y, kind)
          squares = Mul(y, y)  size = ReduceMean<keepdims = 0>(squares)  loss = Add(of_labels, size) }"""
    )
    data = {"x": problem.x, "kind": np.where(np.arange(60) < 30, problem.y, -100)}
    return _message_of(Trainer(model, None, strategy=strategy), data, batch_size=60)


def _message_of(trainer: Trainer, *data: Any, batch_size: int) -> Result:
    """Trains until the training diverges; returns the message, and the parameters before and after."""
    before = parameters(trainer)
    try:
        trainer.fit(*data, batch_size=batch_size, shuffle=False, verbose=False)
        message = "no error"
    except DivergenceError as error:
        message = str(error)
    return {"before": before, "parameters": parameters(trainer), "message": message}


def failing(strategy: Any) -> Result:
    """A model that cannot be trained, and one for a fixed number of samples."""
    messages = []
    fixed = line(batch=8)
    for make in (
        lambda: Trainer(classes().model, "cross_entropy", requires_grad="body.*", strategy=strategy),
        lambda: Trainer(fixed.model, "mse", strategy=strategy).fit(fixed.x, fixed.y, verbose=False),
    ):
        try:
            make()
            messages.append("no error")
        except OnnxTrainError as error:
            messages.append(f"{type(error).__name__}: {error}")
    return {"messages": messages}


def batch_norm(strategy: Any) -> Result:
    """Batch statistics are those of a worker's share, running statistics those of worker 0, as in PyTorch's DDP."""
    return _batch_norm(strategy, None)


def batch_norm_uncounted(strategy: Any) -> Result:
    """Of every second batch the first worker has samples of the weight zero only."""
    return _batch_norm(strategy, _image_weights())


def _image_weights() -> np.ndarray[Any, Any]:
    batch, place = np.divmod(np.arange(32), 8)
    return np.where((batch % 2 == 0) & (place < 4), 0.0, 1.0 + np.arange(32) % 3)


def _batch_norm(strategy: Any, weights: np.ndarray[Any, Any] | None) -> Result:
    problem = images(32)
    trainer = Trainer(problem.model, "cross_entropy", "sgd", learning_rate=0.1, strategy=strategy)
    fit = {"epochs": 5, "batch_size": 8, "shuffle": False, "sample_weight": weights}
    return fitted(trainer, problem.x, problem.y, **fit)


def batch_norm_of_torch(strategy: Any) -> Result:
    """The training of `batch_norm` by PyTorch, in DistributedDataParallel if there are several workers."""
    return _batch_norm_of_torch(strategy, np.ones(32))


def batch_norm_uncounted_of_torch(strategy: Any) -> Result:
    """The training of `batch_norm_uncounted` by PyTorch."""
    return _batch_norm_of_torch(strategy, _image_weights())


def _batch_norm_of_torch(strategy: Any, weights: np.ndarray[Any, Any]) -> Result:
    problem = images(32)
    values = {
        t.name: torch.from_numpy(onnx.numpy_helper.to_array(t).copy())
        for t in problem.model.graph.initializer
    }
    norm = torch.nn.BatchNorm2d(4, momentum=0.2)
    conv, linear = torch.nn.Conv2d(2, 4, 3, padding=1, bias=False), torch.nn.Linear(4, 3)
    names = {
        "conv.weight": conv.weight,
        "bn.scale": norm.weight,
        "bn.bias": norm.bias,
        "bn.mean": norm.running_mean,
        "bn.var": norm.running_var,
        "fc.weight": linear.weight,
        "fc.bias": linear.bias,
    }
    with torch.no_grad():
        for name, tensor in names.items():
            tensor.copy_(values[name].T if name == "fc.weight" else values[name])
    pool = torch.nn.AdaptiveAvgPool2d(1)
    net: Any = torch.nn.Sequential(conv, norm, torch.nn.ReLU(), pool, torch.nn.Flatten(), linear)
    rank, size = 0, 1
    if strategy is not None:
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        net = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = torch.from_numpy(problem.x), torch.from_numpy(problem.y)
    w = torch.from_numpy(weights).float()
    share = 8 // size
    for _ in range(5):
        for start in range(0, 32, 8):
            own = slice(start + rank * share, start + (rank + 1) * share)
            optimizer.zero_grad()
            losses = torch.nn.functional.cross_entropy(net(x[own]), y[own], reduction="none")
            # DDP averages the gradients of the workers.
            (losses @ w[own] * size / w[start : start + 8].sum()).backward()
            optimizer.step()
    if strategy is not None:
        # DDP copies the statistics of worker 0 before the next forward pass.
        for buffer in (norm.running_mean, norm.running_var):
            torch.distributed.broadcast(buffer, 0)
    result = {name: tensor.detach().numpy().copy() for name, tensor in names.items()}
    return {"parameters": result | {"fc.weight": result["fc.weight"].T}}


def compressed(strategy: Any) -> Result:
    """Gradients are rounded to bfloat16 on their way."""
    problem = classes()
    if strategy is not None:
        strategy = DataParallel(compression="bf16")
    trainer = Trainer(problem.model, "cross_entropy", "sgd", learning_rate=0.1, strategy=strategy)
    return fitted(trainer, problem.x, problem.y, epochs=5, batch_size=16)


STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    # Buckets of 40 bytes, so that each net has several.
    "sharded": DataParallel(shard_optimizer=True, bucket_mb=40 / 2**20),
}

EQUAL: list[Job] = [
    labels,
    ignored_labels,
    sample_weights,
    uncounted_labels,
    uncounted_samples,
    uncounted_class,
    loss_of_the_model,
    summed_loss,
    one_sample_left,
    sparse,
    stream,
    iterable_dataset,
    counted,
    callbacks,
]
"""Trainings whose result does not depend on the number of workers."""

OTHER: list[Job] = [
    nothing_counted,
    compressed,
    dropout,
    diverging,
    uncounted_beside_a_penalty,
    failing,
    batch_norm,
    batch_norm_of_torch,
    batch_norm_uncounted,
    batch_norm_uncounted_of_torch,
]


SHARE: dict[str, Any] = {"epochs": 5, "batch_size": 16, "validation": 0.2, "verbose": False}
"""Arguments of the fit that is interrupted and resumed with other numbers of workers: 15 steps."""


def begin(directory: Path, step: int | None, strategy: Any = None) -> Trainer:
    """Begins a run with Dropout-free labels, and interrupts it in a step if there is one."""
    problem = classes()
    trainer = Trainer(
        problem.model,
        "cross_entropy",
        learning_rate=0.01,
        metrics=["accuracy", "f1"],
        scheduler="cosine",
        ema_decay=0.9,
        directory=directory,
        strategy=strategy,
    )
    trainer.fit(problem.x, problem.y, callbacks=[] if step is None else [InterruptAt(step)], **SHARE)
    return trainer


def resume_run(directory: Path, copy: Path, step: int | None, strategy: Any = None) -> Result:
    """Resumes a run, saves it unchanged to `copy`, and trains until a step, counted from here, or until its end."""
    problem = classes()
    trainer = Trainer.resume(directory, strategy=strategy)
    loaded = parameters(trainer)
    trainer.save(copy)
    history = trainer.fit(
        problem.x, problem.y, callbacks=[] if step is None else [InterruptAt(step)], **SHARE
    )
    store = trainer.state._store
    kept = {moment: len(group) for moment, group in store.moments.items()}
    return {
        "loaded": loaded,
        "stopped": history.stopped,
        "epochs": history.epochs,
        "parameters": parameters(trainer),
        "moments": kept,
        "step": trainer.global_step,
    }


class KillSelf(Callback):
    """Kills workers at their steps, each once: `deaths` are pairs of worker and step."""

    def __init__(self, directory: Path, deaths: Sequence[tuple[int, int]]) -> None:
        self.directory, self.deaths = directory, deaths

    def on_gradients(self, trainer: Trainer, gradients: StepGradients) -> None:
        """Called in all workers."""
        rank = int(os.environ.get("RANK", "0"))
        for death in self.deaths:
            mark = self.directory / "-".join(map(str, death))
            if death == (rank, trainer.global_step + 1) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)


def different_samples(prediction: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> float:
    """Counts the samples of an epoch that differ."""
    return float(len(np.unique(target)))


def killed(directory: Path, deaths: Sequence[tuple[int, int]], strategy: Any = None) -> Result:
    """Trains in a directory, from the last save if there is one; metrics count the samples of each epoch."""
    problem = line(50)
    metrics: list[Any] = ["mae", seen_samples, different_samples]
    if (directory / "run" / "checkpoint").exists():
        trainer = Trainer.resume(directory / "run", metrics=metrics, strategy=strategy)
    else:
        trainer = Trainer(
            problem.model,
            "mse",
            learning_rate=0.02,
            metrics=metrics,
            directory=directory / "run",
            strategy=strategy,
        )
    resumed_at = trainer.global_step
    kill = KillSelf(directory, deaths)
    trainer.fit(problem.x, problem.y, epochs=4, batch_size=8, callbacks=[kill], verbose=False)
    return {
        "resumed at": resumed_at,
        "epochs": trainer.history.epochs,
        "parameters": parameters(trainer),
        "step": trainer.global_step,
    }


def run(strategy: Any = None, jobs: Sequence[str] | None = None) -> dict[str, Result]:
    """Runs all trainings, or those of some names, one after the other."""
    return {job.__name__: job(strategy) for job in (*EQUAL, *OTHER) if jobs is None or job.__name__ in jobs}


def run_and_resume(strategy: Any, directory: Path, copy: Path, step: int | None) -> dict[str, Result]:
    """Runs all trainings, and resumes an interrupted run."""
    return run(strategy) | {"resumed": resume_run(directory, copy, step, strategy)}
