"""Options of `onnxtrain train` beside the arguments of Python that they set."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pandas as pd
import pytest
import typer.main

import models
from cli.files import arrays_in
from cli.test_resuming import tensors
from onnxtrain import EarlyStopping, Trainer
from onnxtrain.cli import _train
from onnxtrain.cli._app import app
from onnxtrain.cli._command_options import ArtifactsOptions, PlanOptions
from onnxtrain.cli._declared import options_of
from onnxtrain.cli._help import full_help
from onnxtrain.cli._train_options import TrainOptions, WorkerOptions
from onnxtrain.cli._workers import chosen_strategy
from onnxtrain.distributed import DataParallel
from onnxtrain.errors import InputError
from onnxtrain.losses import LOSSES, BCEWithLogitsLoss, CrossEntropyLoss, HuberLoss, ModelLoss
from onnxtrain.optimizers import OPTIMIZERS
from onnxtrain.recipe import Recipe, ShellOption
from onnxtrain.trainer import SWA, CutMix, MixUp, TimeLimit, Unfreeze

# Arguments of `Trainer` and `fit` that the command passes on under another name, or not at all.
NOT_PASSED = {
    "model": "MODEL",
    "total_steps": "--schedule-epochs, which counts epochs as --epochs does",
    "validation_transform": "a function of Python",
    "max_length": "--max-length sets it in the tokenizer",
    "verbose": "progress goes to standard error, which a shell can send elsewhere",
}


def test_every_argument_of_the_trainer_is_passed_on() -> None:
    """Fields of a recipe have their options by themselves; the command passes the other arguments by name."""
    tree = ast.parse(inspect.getsource(_train))
    passed = {
        key
        for node in ast.walk(tree)
        for key in (
            [keyword.arg for keyword in node.keywords]
            if isinstance(node, ast.Call)
            else [key.value for key in node.keys if isinstance(key, ast.Constant)]
            if isinstance(node, ast.Dict)
            else []
        )
    }
    arguments = {*inspect.signature(Trainer).parameters, *inspect.signature(Trainer.fit).parameters}
    arguments -= {"self", "inputs", "targets", *(entry.name for entry in fields(Recipe))}
    assert arguments - passed == set(NOT_PASSED)


@pytest.mark.parametrize("kind", [TrainOptions, ArtifactsOptions, PlanOptions])
def test_fields_of_a_recipe_have_options(kind: type) -> None:
    options = options_of(kind)
    for entry in fields(Recipe):
        shell = entry.metadata["shell"]
        if isinstance(shell, ShellOption):
            assert (shell.name or entry.name) in options or (kind, shell.group) == (PlanOptions, "memory")
            continue
        # Options that set the field together, or the reason why none does.
        spellings = {word.strip(",") for word in shell.split() if word.startswith("--")}
        declared = {f"--{option.key}" for option in options.values()}
        assert spellings <= declared or (kind, entry.name) == (PlanOptions, "lora")


def test_a_file_is_a_loss(shell: Shell, tmp_path: Path, run: Any) -> None:
    """--loss my_loss.onnx: the output of the model and the labels, in the order of the inputs."""
    loss = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        loss (float[n, 3] scores, int64[n] labels) => (float[n] each) {
            log_p = LogSoftmax<axis=1>(scores)
            each = NegativeLogLikelihoodLoss<reduction="none">(log_p, labels)
        }"""
    )
    path = tmp_path / "my_loss.onnx"
    onnx.save(loss, path)
    shell.trains_as(["--loss", path], path)
    shell.trains_as(["--loss", path, "--loss-option", "reduction=sum"], ModelLoss(path, reduction="sum"))
    command = ("train", shell.model, "--data", shell.data, "--overwrite", "-o", shell.directory)
    result = run(*command, "--loss", tmp_path / "none.onnx")
    assert result.code == 1
    assert "none.onnx" in result.err
    assert "Traceback" not in result.err


def test_layers_have_their_own_learning_rates(shell: Shell, run: Any) -> None:
    options = ["--layer-decay", 0.5, "--learning-rate-scale", "b2=4", "--learning-rate-scale", "b*=0.5"]
    scale = {"b2": 4.0, "b*": 0.5}
    shell.trains_as([*CROSS_ENTROPY, *options], "cross_entropy", layer_decay=0.5, learning_rate_scale=scale)
    described = run("inspect", shell.directory, "--json").json()["run"]
    assert described["learning_rate_scales"] == {"w1": 0.5, "b1": 0.25, "w2": 1.0, "b2": 4.0}
    shown = run("inspect", shell.directory).out
    rows = [line.split() for line in shown.splitlines()]
    assert ["0.0025", "0.25", "1", "b1"] in rows
    assert ["0.04", "4", "1", "b2"] in rows
    assert "ParameterGroup" not in shown


def test_layers_are_unfrozen_after_some_epochs(shell: Shell) -> None:
    options = ["--unfreeze-after", "2=w1", "--unfreeze-after", 1]
    fit = {"callbacks": [Unfreeze(2, "w1"), Unfreeze(1)]}
    trainer = shell.trains_as([*CROSS_ENTROPY, *options], "cross_entropy", fit)
    steps = trainer.global_step // 3
    assert trainer._state.position.skipped == {"w1": 2 * steps, "b1": steps}


@pytest.mark.parametrize("text", ["0", "x", "=w1", "1=", "-1", "1=tail", "1=*"])
def test_a_wrong_unfreezing_is_refused(shell: Shell, text: str) -> None:
    shown = shell.run(*shell.command, "--unfreeze-after", text)
    assert shown.code in (1, 2)
    assert {"1=tail": "matches 'tail'", "1=*": "all parameters are frozen"}.get(
        text, "--unfreeze-after"
    ) in shown.err
    assert not shell.directory.exists()


@pytest.mark.parametrize("text", ["10", "w1=x", "=3", "w1=-1"])
def test_a_wrong_learning_rate_scale_is_refused(shell: Shell, text: str) -> None:
    shown = shell.run(*shell.command, "--learning-rate-scale", text)
    assert shown.code == 1
    assert "--learning-rate-scale" in shown.err
    assert not shell.directory.exists()


@pytest.mark.parametrize(
    ("option", "kinds", "others"),
    [
        ("--loss-option", LOSSES, set()),
        ("--optimizer-option", OPTIMIZERS, {"clip_grad", "groups", "weight_decay"}),
    ],
)
def test_help_lists_the_settings_of_each_class(
    option: str, kinds: dict[str, Any], others: set[str], run: Any
) -> None:
    (parameter,) = (p for p in typer.main.get_command(app).commands["train"].params if option in p.opts)  # type: ignore[attr-defined]
    text = full_help(parameter)
    for name, kind in kinds.items():
        for field in fields(kind):
            assert field.name in others or re.search(rf"\b{field.name}\b", text), (name, field.name)
    assert re.search(r"huber: delta; smooth_l1: beta;|sgd: momentum, dampening, nesterov;", text)
    # As it is printed: rich breaks lines.
    assert "Settings:" in run("train", "--help-all").out


@pytest.fixture
def regression(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 4)).astype(np.float32)
    np.savez(tmp_path / "numbers.npz", x=x, y=(3 * x[:, :3]).astype(np.float32))
    return tmp_path / "numbers.npz"


class Shell:
    """Trains in the shell and in Python, and compares epochs and parameters."""

    def __init__(self, run: Any, model: Path, data: Path) -> None:
        self.run, self.model, self.data = run, model, data
        self.directory = data.parent / "run"
        self.command = ("train", model, "--data", data, *CROSS_ENTROPY, "-o", self.directory)

    def trains_as(
        self,
        options: list[object],
        loss: Any,
        fit: dict[str, Any] | None = None,
        y: Any = None,
        **settings: Any,
    ) -> Trainer:
        command = (
            "train",
            self.model,
            "--data",
            self.data,
            "--lr",
            0.01,
            "--overwrite",
            "-o",
            self.directory,
        )
        shown = self.run(*command, "--json", "--epochs", 3, *options)
        assert shown.code == 0, shown.err
        arrays = arrays_in(self.data)
        # Every field of a recipe works here, also one that is not an argument of `Trainer`.
        recipe = {entry.name: settings.pop(entry.name) for entry in fields(Recipe) if entry.name in settings}
        trainer = Trainer(self.model, recipe=Recipe(loss=loss, **recipe), learning_rate=0.01, **settings)
        target = arrays["y"] if y is None else y
        trainer.fit(arrays["x"], target, **{"epochs": 3, "verbose": False} | (fit or {}))
        assert shown.json()["epochs"] == trainer.history.epochs
        for name, parameter in trainer.parameters:
            assert parameter.data.tobytes() == tensors(self.directory)[name], name
        return trainer


@pytest.fixture
def shell(run: Any, mlp: Path, data: Path) -> Shell:
    return Shell(run, mlp, data)


CROSS_ENTROPY = ["--loss", "cross_entropy"]


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (["label_smoothing=0.1"], {"label_smoothing": 0.1}),
        (["weight=1,5,2"], {"weight": [1.0, 5.0, 2.0]}),
        (["ignore_index=2"], {"ignore_index": 2}),
        (["ignore_index=none", "axis=1"], {"ignore_index": None, "axis": 1}),
        (["reduction=sum"], {"reduction": "sum"}),
    ],
)
def test_loss_options_are_those_of_the_loss(
    shell: Shell, options: list[str], settings: dict[str, Any]
) -> None:
    given = [part for option in options for part in ("--loss-option", option)]
    shell.trains_as([*CROSS_ENTROPY, *given], CrossEntropyLoss(**settings))


def test_teacher_distill_weight_and_temperature_are_those_of_the_trainer(shell: Shell, run: Any) -> None:
    teacher = shell.data.parent / "teacher.onnx"
    onnx.save(models.mlp(hidden=16, seed=2), teacher)
    options = [*CROSS_ENTROPY, "--teacher", teacher, "--distill-weight", 0.8, "--temperature", 4]
    shell.trains_as(
        [*options, "--teacher-output", "logits"],
        "cross_entropy",
        teacher=teacher,
        distill_weight=0.8,
        temperature=4.0,
        teacher_output="logits",
    )
    # The run contains the teacher: it is trained further without the file.
    teacher.unlink()
    assert run("train", shell.directory, "--data", shell.data, "--epochs", 4).code == 0
    missing = run("train", shell.model, "--data", shell.data, *options, "-o", shell.data.parent / "other")
    assert missing.code == 1
    assert "no such file" in missing.err
    lonely = run("train", shell.model, "--data", shell.data, *CROSS_ENTROPY, "--temperature", 4)
    assert "--temperature 4.0 has no effect without a teacher; pass --teacher teacher.onnx" in lonely.err


def test_losses_of_numbers_take_options(run: Any, mlp: Path, regression: Path) -> None:
    shell = Shell(run, mlp, regression)
    shell.trains_as(["--loss", "huber", "--loss-option", "delta=0.3"], HuberLoss(delta=0.3))
    arrays = arrays_in(regression)
    np.savez(regression, x=arrays["x"], y=(arrays["y"] > 0).astype(np.float32))
    options = ["--loss", "bce_with_logits", "--loss-option", "pos_weight=2,1,3"]
    shell.trains_as(options, BCEWithLogitsLoss(pos_weight=[2.0, 1.0, 3.0]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--loss-option", "gamma=2"], "--loss-option 'gamma=2': cross_entropy has no setting 'gamma'. Its settings "
         "and their defaults: reduction=mean, weight=none, ignore_index=-100, axis=none, label_smoothing=0.0, "
         "probabilities=false."),
        (["--loss-option", "label_smoothing"], "--loss-option 'label_smoothing' should be NAME=VALUE"),
        (["--loss-option", "label_smoothing=much"], "should be a number, such as 0.0."),
        (["--loss-option", "label_smoothing=2"], "label_smoothing"),
        (["--loss-option", "weight=a,b"], "should be a number, such as 1,5,1."),
        (["--loss-option", "ignore_index=1.5"], "should be a whole number, such as -100."),
        (["--monitor", "loss"], "--monitor needs --patience or --save-best, which compare epochs."),
        (["--save-best", "--monitor", "val_loss"], "'val_loss' will not be recorded in this fit, which records"),
        (["--swa-lr", 0.1], "--swa-lr is given without --swa-start."),
        (["--swa-start", "late"], "--swa-start is 'late'; give an epoch such as 16"),
        (["--swa-start", 1, "--patience", 2], "--swa-start exports an average of the last epochs"),
        (["--mixup", 0.2, "--cutmix", 1], "--mixup and --cutmix are alternative ways"),
        (["--mixup", 0], "MixUp: alpha must be a positive number"),
        (["--clip-value", -1], "ClipGradValue: value is -1.0; it must be a positive number"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_leave_nothing(
    run: Any, mlp: Path, data: Path, tmp_path: Path, options: list[Any], message: str
) -> None:
    result = run("train", mlp, "--data", data, *CROSS_ENTROPY, *options, "-o", tmp_path / "run")
    assert result.code == 1
    assert message in " ".join(result.err.split())
    assert not (tmp_path / "run" / "trained.onnx").exists()


def test_settings_of_the_fit_are_those_of_python(shell: Shell) -> None:
    options = [
        "--clip-value",
        0.01,
        "--no-shuffle",
        "--drop-last",
        "--batch-size",
        48,
        "--steps-per-epoch",
        3,
    ]
    fit = {"shuffle": False, "drop_last": True, "batch_size": 48, "steps_per_epoch": 3}
    trainer = shell.trains_as([*CROSS_ENTROPY, *options], "cross_entropy", fit, clip_grad_value=0.01)
    other = Trainer(shell.model, "cross_entropy", learning_rate=0.01)
    other.fit(*arrays_in(shell.data).values(), epochs=3, verbose=False)
    assert other.history.epochs != trainer.history.epochs


def test_only_the_rows_of_a_batch_are_updated(run: Any, tmp_path: Path) -> None:
    """A moment of SparseAdam does not move rows that a batch does not read; Adam's does."""
    text = """<ir_version: 10, opset_import: ["": 21]> net (int64[n] x) => (float[n, 3] y)
      { y = Gather(table, x) }"""
    model = onnx.parser.parse_model(text)
    table = np.random.default_rng(0).standard_normal((9, 3)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    onnx.save(model, tmp_path / "net.onnx")
    x = np.random.default_rng(1).integers(0, 9, 40)
    np.savez(tmp_path / "d.npz", x=x, y=np.zeros((40, 3), np.float32))
    shell = Shell(run, tmp_path / "net.onnx", tmp_path / "d.npz")
    options = ["--loss", "mse", "--batch-size", 4]
    fit = {"batch_size": 4}
    sparse = shell.trains_as(
        [*options, "--optimizer", "sparse_adam", "--sparse-gradients", "tab*"],
        "mse",
        fit,
        optimizer="sparse_adam",
        sparse_gradients=["tab*"],
    )
    dense = shell.trains_as([*options, "--optimizer", "adam"], "mse", fit, optimizer="adam")
    assert sparse.history.epochs != dense.history.epochs


def test_the_device_of_the_shell_is_that_of_python(run: Any, shell: Shell) -> None:
    shell.trains_as([*CROSS_ENTROPY, "--device", "cpu"], "cross_entropy", device="cpu")
    with pytest.raises(InputError) as expected:
        Trainer(shell.model, "cross_entropy", device="tpu")
    command = ("train", shell.model, "--data", shell.data, *CROSS_ENTROPY, "--device", "tpu", "--overwrite")
    result = run(*command, "-o", shell.directory)
    assert result.code == 1
    assert "tpu" in result.err
    assert "cuda" in result.err
    assert "cuda" in str(expected.value)


def test_options_of_workers_reach_their_strategy(
    run: Any, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--shard-optimizer", "--compress", "bf16", "--save-steps", 3]
    alone = run(*shell.command, *options)
    assert alone.code == 1
    assert "--shard-optimizer, --compress, --save-steps given without --workers" in alone.err
    # In a worker, whose place is in its environment.
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    strategy = chosen_strategy(WorkerOptions(2, shard_optimizer=True, compress="bf16", save_steps=3))
    assert strategy == DataParallel(shard_optimizer=True, compression="bf16", save_steps=3)


def test_the_best_epoch_is_that_of_the_monitor(shell: Shell) -> None:
    options = ["--save-best", "--monitor", "val_accuracy", "--min-delta", 0.01, "--validation", 0.2]
    command = (
        "train",
        shell.model,
        "--data",
        shell.data,
        *CROSS_ENTROPY,
        "--lr",
        0.3,
        "--epochs",
        8,
        *options,
    )
    shown = shell.run(*command, "-o", shell.directory, "--json").json()
    values = [epoch["val_accuracy"] for epoch in shown["epochs"]]
    assert len(values) == 8  # --save-best alone does not stop
    best = 0
    for index, value in enumerate(values):
        best = index if value > values[best] + 0.01 else best
    assert shown["exported"]["epoch"] == best + 1
    assert shown["exported"]["val_accuracy"] == values[best]
    arrays = arrays_in(shell.data)
    trainer = Trainer(shell.model, "cross_entropy", learning_rate=0.3)
    early = EarlyStopping("val_accuracy", 8, 0.01, restore_best=True)
    trainer.fit(arrays["x"], arrays["y"], epochs=8, validation=0.2, callbacks=[early], verbose=False)
    for name, parameter in trainer.parameters:
        assert parameter.data.tobytes() == tensors(shell.directory)[name]


def test_time_limit_of_the_shell_is_that_of_python(shell: Shell) -> None:
    options = [*CROSS_ENTROPY, "--time-limit", 1e-9]
    trainer = shell.trains_as(options, "cross_entropy", {"callbacks": [TimeLimit(6e-8)]})
    assert len(trainer.history) == 1
    # One epoch of this data takes far less than half an hour.
    shell.trains_as([*CROSS_ENTROPY, "--time-limit", 60], "cross_entropy")


def test_swa_of_the_shell_is_that_of_python(shell: Shell) -> None:
    fit = {"callbacks": [SWA(2, 0.005)], "validation": 0.2}
    options = ["--swa-start", 2, "--swa-lr", 0.005, "--validation", 0.2]
    trainer = shell.trains_as([*CROSS_ENTROPY, *options], "cross_entropy", fit)
    # The numbers of the exported weights, not those that were recorded before they were averaged.
    shown = shell.run("inspect", shell.directory, "--json").json()
    assert shown["epochs"] == 3
    arrays = arrays_in(shell.data)
    session = ort.InferenceSession(shell.directory / "trained.onnx")
    np.testing.assert_allclose(
        session.run(None, {"x": arrays["x"]})[0], trainer.predict(arrays["x"]), rtol=1e-5, atol=1e-6
    )


def test_swa_shows_the_values_of_the_average(shell: Shell) -> None:
    arrays = arrays_in(shell.data)
    np.savez(shell.data.parent / "other.npz", x=arrays["x"][:50], y=arrays["y"][:50])
    command = ("train", shell.model, "--data", shell.data, *CROSS_ENTROPY, "--lr", 0.1, "--swa-start", "0.5")
    command = (
        *command,
        "--validation",
        shell.data.parent / "other.npz",
        "-o",
        shell.directory,
        "--epochs",
        4,
    )
    shown = shell.run(*command, "--json").json()
    evaluated = shell.run(
        "evaluate", shell.directory, "--data", shell.data.parent / "other.npz", "--json"
    ).json()
    assert shown["exported"]["val_loss"] == pytest.approx(evaluated["loss"], rel=1e-6)
    assert shown["exported"]["val_loss"] != pytest.approx(shown["epochs"][-1]["val_loss"], rel=1e-3)
    printed = shell.run(*command, "--overwrite")
    assert "Exported weights: the average of the epochs from --swa-start to 4" in printed.out


def test_mixup_of_the_shell_is_that_of_python(shell: Shell) -> None:
    """The labels of the file become class probabilities; validation is split off and stays unmixed."""
    one_hot = np.eye(3, dtype=np.float32)[arrays_in(shell.data)["y"]]
    fit = {"transform": MixUp(0.4), "validation": 0.2}
    options = [*CROSS_ENTROPY, "--loss-option", "label_smoothing=0.1", "--mixup", 0.4, "--validation", 0.2]
    loss = CrossEntropyLoss(label_smoothing=0.1, probabilities=True)
    shell.trains_as(options, loss, fit, one_hot)
    evaluated = shell.run("evaluate", shell.directory, "--data", shell.data, "--json").json()
    assert len(evaluated["classes"]) == 3
    # Once more, from the labels of the same file, and to the end.
    more = shell.run("train", shell.directory, "--data", shell.data, "--json")
    assert more.code == 0, more.err
    assert len(more.json()["epochs"]) == 6


def test_cutmix_of_the_shell_is_that_of_python(run: Any, tmp_path: Path) -> None:
    onnx.save(models.conv_bn(), tmp_path / "images.onnx")
    shape = [d.dim_value or 8 for d in models.conv_bn().graph.input[0].type.tensor_type.shape.dim]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, *shape[1:])).astype(np.float32)
    scores = ort.InferenceSession(tmp_path / "images.onnx").run(None, {"x": x[: shape[0]]})[0]
    y = rng.integers(0, scores.shape[1], 40)
    np.savez(tmp_path / "images.npz", x=x, y=y)
    one_hot = np.eye(scores.shape[1], dtype=np.float32)[y]
    shell = Shell(run, tmp_path / "images.onnx", tmp_path / "images.npz")
    loss = CrossEntropyLoss(probabilities=True)
    shell.trains_as([*CROSS_ENTROPY, "--cutmix", 1.0], loss, {"transform": CutMix(1.0)}, one_hot)


def test_mixup_of_quantities_and_of_a_table(run: Any, mlp: Path, regression: Path, tmp_path: Path) -> None:
    Shell(run, mlp, regression).trains_as(["--loss", "mse", "--mixup", 0.2], "mse", {"transform": MixUp(0.2)})
    refused = run("train", mlp, "--data", regression, "--loss", "nll", "--mixup", 0.2, "-o", tmp_path / "no")
    assert "nll compares class indices. Choose cross_entropy." in " ".join(refused.err.split())
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(80, 4)).round(3), columns=list("abcd"))
    frame["y"] = np.where(frame["a"] > 0, "yes", np.where(frame["b"] > 0, "no", "NA"))
    frame.to_csv(tmp_path / "t.csv", index=False)
    command = ("train", mlp, "--data", tmp_path / "t.csv", "--target", "y", *CROSS_ENTROPY, "--lr", 0.05)
    shown = run(
        *command, "--mixup", 0.1, "--epochs", 30, "--metric", "f1", "-o", tmp_path / "table", "--json"
    )
    assert shown.code == 0, shown.err
    assert "Classes of 'y', in the order of the model's outputs: NA " in shown.err
    for source in ("table", "table/trained.onnx"):
        out = tmp_path / "p.csv"
        assert run("predict", tmp_path / source, "--data", tmp_path / "t.csv", "-o", out).code == 0
        predicted = pd.read_csv(out, keep_default_na=False)
        assert (predicted["class"] == frame["y"]).mean() > 0.9
        assert {"probability_NA", "probability_no", "probability_yes"} <= set(predicted)
    document = run("evaluate", tmp_path / "table", "--data", tmp_path / "t.csv", "--json").json()
    assert [row["class"] for row in document["classes"]] == ["NA", "no", "yes"]
    assert document["f1_macro"] > 0.8


def test_tensorboard_files_are_written(shell: Shell, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = [*CROSS_ENTROPY, "--tensorboard", tmp_path / "logs"]
    trainer = shell.trains_as(options, "cross_entropy")
    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    losses = [event.value for event in events.Scalars("epoch/loss")]
    assert losses == pytest.approx(trainer.history["loss"])


def test_graph_options_reach_the_model(run: Any, tmp_path: Path) -> None:
    """The second output is compared with the target, and rounding passes gradients."""
    text = """<ir_version: 10, opset_import: ["": 21]>
      two (float[n, 2] x) => (float[n, 2] first, float[n, 2] second) <float[2, 2] w = {0.4, 0.2, 0.1, 0.3}>
      { first = Identity(x)  h = MatMul(x, w)  r = Round(h)  second = Add(h, r) }"""
    model = onnx.parser.parse_model(text)
    onnx.save(model, tmp_path / "two.onnx")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 2)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x, y=x[:, ::-1])
    shell = Shell(run, tmp_path / "two.onnx", tmp_path / "d.npz")
    # SGD: the steps of AdamW are the same for twice the gradient.
    options = ["--loss", "mse", "--loss-input", "second", "--optimizer", "sgd"]
    settings: dict[str, Any] = {"optimizer": "sgd", "loss_input_names": ["second"]}
    plain = shell.trains_as(options, "mse", **settings)
    through = shell.trains_as([*options, "--straight-through"], "mse", **settings, straight_through=True)
    assert plain.history.epochs != through.history.epochs


def test_a_learning_rate_is_found_and_nothing_is_trained(shell: Shell, run: Any) -> None:
    command = ("train", shell.model, "--data", shell.data, *CROSS_ENTROPY, "--find-lr", "-o", shell.directory)
    before = set(shell.data.parent.iterdir())
    found = run(*command, "--batch-size", 8, "--optimizer", "sgd", "--json").json()
    assert set(shell.data.parent.iterdir()) == before
    arrays = arrays_in(shell.data)
    expected = Trainer(shell.model, "cross_entropy", "sgd").find_learning_rate(
        arrays["x"], arrays["y"], batch_size=8
    )
    assert found == {"suggestion": expected.suggestion, "rates": expected.rates, "losses": expected.losses}
    assert expected.suggestion is not None
    shown = run(*command, "--batch-size", 8, "--optimizer", "sgd").out.splitlines()
    assert shown[0] == f"Suggested learning rate: --lr {expected.suggestion:.1e}"
    (mark,) = (line for line in shown if "▲" in line)
    # 60 columns for all steps.
    columns = 60 / len(expected.rates)
    assert abs(mark.index("▲") - 2 - columns * expected.rates.index(expected.suggestion)) <= 1
    (line,) = (line for line in shown if "█" in line)
    assert len(line.strip()) == 60 < len(expected.rates)
    assert abs(line.index("█") - 2 - columns * int(np.argmax(expected.losses))) <= 1
    assert line.index("▁") - 3 <= columns * int(np.argmin(expected.losses)) <= line.rindex("▁")


def test_finding_a_learning_rate_leaves_a_run_as_it_was(shell: Shell, run: Any) -> None:
    # With weights, and a frozen layer.
    assert (
        run(*shell.command, "--epochs", 1, "--class-weight", "balanced", "--unfreeze-after", "2=w1").code == 0
    )
    before = {path: path.read_bytes() for path in shell.directory.rglob("*") if path.is_file()}
    shown = run("train", shell.directory, "--find-lr")
    assert shown.code == 0, shown.err
    assert "learning rate" in shown.out
    assert {path: path.read_bytes() for path in shell.directory.rglob("*") if path.is_file()} == before


def test_finding_a_learning_rate_takes_no_accumulation(shell: Shell) -> None:
    shown = shell.run(*shell.command, "--find-lr", "--accumulate", 2)
    assert shown.code == 1
    assert "--find-lr takes one batch per step" in shown.err


def test_a_trial_run_limits_batches_and_checks_the_export(shell: Shell) -> None:
    fit = {"limit_batches": 1, "validation": 0.5, "batch_size": 8}
    options = [*CROSS_ENTROPY, "--limit-batches", 1, "--validation", 0.5, "--batch-size", 8]
    trainer = shell.trains_as(options, "cross_entropy", fit)
    assert trainer.global_step == 3
    command = ("train", shell.model, "--data", shell.data, *options, "--overwrite", "-o", shell.directory)
    result = shell.run(*command, "--json")
    assert result.json()["differences"]["logits"] < 1e-6
    # The figures are those of the batches, not of all data.
    exported = result.json()["exported"]
    assert exported["val_loss"] == result.json()["epochs"][-1]["val_loss"]
    shown = shell.run(*command).out
    assert "This was a trial: each epoch had --limit-batches 1" in shown
    assert (
        "Checked: the outputs of trained.onnx on a batch are those in training, with a largest difference of"
        in shown
    )


def test_verify_checks_the_export_of_a_whole_run(shell: Shell) -> None:
    shown = shell.run(*shell.command, "--epochs", 1, "--verify")
    assert shown.code == 0, shown.err
    assert "Checked: the outputs of trained.onnx" in shown.out
    assert "trial" not in shown.out


@pytest.mark.parametrize("given", [["0"], ["x"], ["1.5"], ["2", "--steps-per-epoch", "3"]])
def test_a_wrong_limit_of_batches_is_refused(shell: Shell, given: list[str]) -> None:
    shown = shell.run(*shell.command, "--limit-batches", *given)
    assert shown.code == 1
    assert "--limit-batches" in shown.err
    assert not shell.directory.exists()
