"""Defines `Trainer`, the class by which Python code trains, evaluates and exports an ONNX model.

The class is the public door: it checks arguments and hands them to the objects that do the work. Its methods are in
`_training` and `_trained_model`. `_state` holds what is trained, `_loop` and `_step` train it, `_run` runs the models,
`_datasets` and `data` read what the user passes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from onnxtrain._words import argument
from onnxtrain.distributed._strategy import Strategy
from onnxtrain.errors import InputError
from onnxtrain.runtime.optimizer import check_learning_rate
from onnxtrain.trainer._checks import check_integer
from onnxtrain.trainer._fit.moving_average import check_decay
from onnxtrain.trainer._fit.schedule import ScheduleSpec, make_schedule
from onnxtrain.trainer._fit.state import TrainingState, scheduler_settings
from onnxtrain.trainer._metrics.metrics import MetricSpec, make_metrics
from onnxtrain.trainer._metrics.whole_set import check_positive
from onnxtrain.trainer._run.build import ModelSettings, build_run, loss_name, name_list, random_ops
from onnxtrain.trainer._run.position import CUSTOM, MOST_THREADS, Position, Settings
from onnxtrain.trainer._run.run import Run
from onnxtrain.trainer._run.workspace import Workspace
from onnxtrain.trainer._trained_model import TrainedModel
from onnxtrain.trainer._training import Training
from onnxtrain.trainer._workers import join_workers

if TYPE_CHECKING:
    from onnxtrain.artifacts import LossSpec, OptimizerSpec
    from onnxtrain.lora import LoraConfig
    from onnxtrain.passes import ModelSource
    from onnxtrain.training.layer_modes import BatchNormMode, DropoutRatios
    from onnxtrain.training.training_graph import Activations, Precision, Profile


class Trainer(Training, TrainedModel):
    """Trains an ONNX model on numpy arrays, with stock ONNX Runtime.

    Args:
        model: path of an `.onnx` file, `ModelProto` or `onnx_ir.Model`; it is not changed.
        loss: a loss of `onnxtrain.losses` or its name ("cross_entropy", "mse", ...), a `LossType`, or an
            onnxblock block; None when the model's first output is the loss.
        optimizer: an optimizer of `onnxtrain.optimizers` or its name ("adamw", "sgd", ...), with PyTorch's defaults:
            "adamw" is `torch.optim.AdamW`, weight decay 0.01 and eps 1e-8.
        learning_rate: learning rate, e.g. 1e-3; with a schedule its highest value.
        requires_grad: names of the parameters to train, or patterns such as "fc.*"; one name may stand without a list.
            None trains all parameters that are not frozen.
        frozen_params: names or patterns of parameters that are not trained. A parameter that patterns of both
            arguments match is frozen; an exact name wins over a pattern.
        metrics: names ("accuracy", "f1", "auroc", "mae", "r2", "top5_accuracy", "perplexity", ...) or functions
            `(prediction, target) -> float` of the arrays of a whole data set; None chooses what suits the loss, `[]`
            means none.
        positive: number of the class that "f1", "precision", "recall" and "auroc" measure, e.g. 0. Default: class 1
            of two classes, the mean over classes if there are more.
        scheduler: a schedule of `onnxtrain.schedules` or its name ("linear" and "cosine" fall to zero at the end of
            a fit; "one_cycle", "step", "polynomial", ...), or a function `(step, total_steps) -> factor` of the
            learning rate.
        warmup_steps: warm up the learning rate linearly over this many optimizer steps, e.g. 100.
        warmup_ratio: warm up the learning rate over this fraction of all steps, e.g. 0.1; use instead of
            `warmup_steps`.
        total_steps: optimizer steps of one schedule over all calls of :meth:`fit`. Default: each call runs the
            schedule from start to end; see also `schedule_epochs` of :meth:`fit`.
        ema_decay: keep exponential moving averages of parameters and BatchNorm statistics with this decay, e.g. 0.999,
            and evaluate, predict with and export the averages; see :meth:`averaged`. Training itself does not change.
        clip_grad_norm: scale all gradients down together if their common L2 norm is larger, e.g. 1.0.
        clip_grad_value: clip each element of the gradients to plus or minus this value.
        batch_norm: "training" trains BatchNormalization and Dropout as such even if the model was exported
            for inference (an error if the exporter left none in the model), "inference" keeps the statistics
            fixed, "as_exported" keeps the modes of the model. For each layer by patterns, of which the first that
            matches decides: `{"backbone.*": "inference", "*": "training"}`.
        dropout: fraction of elements that Dropout drops in training, e.g. 0.1, also where the exporter has removed it,
            or fractions by pattern, e.g. `{"head.*": 0.5, "*": 0.1}`; 0.0 trains without Dropout. None keeps the
            Dropout of the model, and warns of removed Dropout; see :func:`generate_artifacts`.
        straight_through: pass gradients through rounding and quantisation unchanged (straight-through estimator).
        precision: "bf16" computes products and convolutions in bfloat16; see :func:`generate_artifacts`.
        activations: "float" multiplies by quantised weights (MatMulNBits) in floating point, "deployed" rounds
            activations to int8 where the file does; see :func:`generate_artifacts`.
        profile: "portable" trains models that also run, and drop the same elements, in browsers and on phones; see
            :func:`generate_artifacts`.
        recompute: recompute activations in the backward pass to take less memory; see :func:`generate_artifacts`.
        sparse_gradients: embeddings of which a step updates only the rows that its batch reads; see
            :func:`generate_artifacts`.
        loss_input_names: the output that the loss compares with the target, if the model has several outputs.
        lora: adapters to train beside the linear layers, and nothing else but what `requires_grad` names, e.g.
            `LoraConfig(r=8)`; see :mod:`onnxtrain.lora`.
        directory: directory of the run's files; the state is saved there after every epoch. Other files in it stay
            as they are. Default: a temporary directory, which is removed at the end of the process that made it, unless
            an interrupted run was saved there.
        overwrite: replace a run that is in the directory already, once the new models are built. Without a run there,
            files that have the name of a run's file ("checkpoint", "best", ...) are replaced when this run writes its
            own, and none is removed. Without `overwrite` both are errors.
        seed: shuffling, the validation split and Dropout derive from this number.
        device: "cpu", "cuda" or "cuda:<index>".
        threads: number of threads that compute each operation; None is onnxruntime's default, all cores. The last
            digits of results depend on the number, so it is saved with the run.
        strategy: "ddp", or options, to train together with the other processes that `torchrun`, :func:`launch
            <onnxtrain.distributed.launch>` or Ray have started; see :class:`onnxtrain.distributed.DataParallel`.

    Raises:
        OnnxTrainError: the model cannot be trained as asked for; the message says why.

    Example:
        >>> import numpy as np, onnx
        >>> model = onnx.parser.parse_model('''
        ...   <ir_version: 10, opset_import: ["": 21]>
        ...   line (float[n, 1] x) => (float[n, 1] y) <float[1, 1] w = {0.0}, float[1] b = {0.0}>
        ...   { y = Gemm(x, w, b) }''')
        >>> x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(-1, 1)
        >>> trainer = Trainer(model, loss="mse", learning_rate=0.1)
        >>> history = trainer.fit(x, 2 * x + 1, epochs=60, batch_size=16, verbose=False)
        >>> trainer.predict(np.array([[0.5]], np.float32)).round(2)
        array([[2.]], dtype=float32)
    """

    def __init__(
        self,
        model: ModelSource,
        loss: LossSpec,
        optimizer: OptimizerSpec = "adamw",
        learning_rate: float = 1e-3,
        *,
        requires_grad: Sequence[str] | str | None = None,
        frozen_params: Sequence[str] | str | None = None,
        metrics: Sequence[MetricSpec] | None = None,
        positive: int | None = None,
        scheduler: ScheduleSpec | None = None,
        warmup_steps: int = 0,
        warmup_ratio: float = 0.0,
        total_steps: int | None = None,
        ema_decay: float | None = None,
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
        batch_norm: BatchNormMode = "as_exported",
        dropout: DropoutRatios = None,
        straight_through: bool = False,
        precision: Precision = "fp32",
        activations: Activations = "float",
        profile: Profile = "default",
        recompute: bool = False,
        sparse_gradients: Sequence[str] | str | None = None,
        loss_input_names: Sequence[str] | str | None = None,
        lora: LoraConfig | None = None,
        directory: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        seed: int = 0,
        device: str = "cpu",
        threads: int | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        # The arguments that decide how the models are built, by name: an argument of the signature reaches them by
        # being a field of ModelSettings, without further mention here.
        arguments = locals()
        # A fit with sample weights reads the model again, perhaps in another working directory.
        if isinstance(model, str | os.PathLike):
            model = Path(model).absolute()
        model_settings = ModelSettings(
            **{entry.name: arguments[entry.name] for entry in fields(ModelSettings)}
        )
        # Everything that can be wrong is checked before a file is written: a refused Trainer leaves no directory.
        schedule = make_schedule(scheduler, warmup_steps, warmup_ratio)
        metrics = [metrics] if isinstance(metrics, str) else metrics
        make_metrics(metrics or [])
        check_positive(positive)
        seed = check_integer(argument("seed"), seed, 0)
        position = Position(seed=seed, learning_rate=check_learning_rate(learning_rate))
        settings = Settings(
            loss=loss_name(loss),
            metrics=None if metrics is None else [m if isinstance(m, str) else CUSTOM for m in metrics],
            **scheduler_settings(scheduler),
            warmup_steps=int(warmup_steps),
            warmup_ratio=float(warmup_ratio),
            ema_decay=check_decay(ema_decay),
            total_steps=None if total_steps is None else check_integer(argument("total_steps"), total_steps),
            threads=_threads(threads),
            positive=None if positive is None else int(positive),
        )

        def begin() -> tuple[Workspace, Run]:
            workspace = Workspace.for_new_run(directory, overwrite=overwrite)
            with workspace.locked():
                run = build_run(model, workspace.path, device, settings.threads, model_settings)
                # An earlier run is replaced only now: until the new models are built the old run can be resumed.
                workspace.remove_earlier()
                workspace.note()
            return workspace, run

        workers = join_workers(strategy)
        workspace, run = begin() if workers is None else workers.open(begin, device, settings.threads)
        judged = name_list(loss_input_names)
        prediction = judged[0] if judged else next(iter(run.outputs), None)
        settings = replace(
            settings,
            prediction=prediction if prediction in run.outputs else None,
            random=random_ops(run.training_model, run.eval_model),
        )
        self._state = TrainingState(run, workspace, position, settings, schedule, metrics)
        run.optimizer.set_learning_rate(position.learning_rate)

    @classmethod
    def resume(
        cls,
        path: str | os.PathLike[str],
        *,
        metrics: Sequence[MetricSpec] | None = None,
        scheduler: ScheduleSpec | None = None,
        device: str = "cpu",
        threads: int | None = None,
        strategy: Strategy | None = None,
    ) -> Trainer:
        """Opens a run that :meth:`save` or an interrupted fit wrote, in the state it was in.

        The same call of :meth:`fit` then finishes an interrupted fit, bit for bit as if it had not been
        interrupted. If the model draws random numbers when it is evaluated, or in a subgraph by other ops than Dropout,
        these start anew, and a warning says so.

        Args:
            path: directory of the run; the trainer goes on saving there. Artifacts of `generate_artifacts` work
                too, also with a prefix.
            metrics: metrics to go on with; needed if the run had functions as metrics, which are not saved.
            scheduler: needed if the run had a function as schedule.
            device: "cpu", "cuda" or "cuda:<index>".
            threads: number of threads per operation; None for the number that the run was begun with.
            strategy: "ddp", or options, to go on with several processes, as many as you like; see :class:`Trainer`.

        Raises:
            CheckpointError: the directory does not hold a training run, or the run is damaged.
            InputError: functions that the run needs are missing, or other metrics are given in the middle of an
                epoch.
        """
        # `__init__` builds new models; a resumed run opens those of its directory.
        trainer = cls.__new__(cls)
        workers = join_workers(strategy)
        trainer._state = TrainingState.load(
            Path(path), metrics, scheduler, device, _threads(threads), workers
        )
        return trainer


def _threads(threads: int | None) -> int | None:
    """Checks a number of threads; None is onnxruntime's default."""
    if threads is not None and check_integer(argument("threads"), threads) > MOST_THREADS:
        raise InputError(f"{argument('threads')} must be {MOST_THREADS} at most, received {threads!r}.")
    return None if threads is None else int(threads)
