"""`generate_artifacts` of unusual models and options."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import models
from fresh_process import python
from models import make_model, parse_nodes
from onnxtrain import losses, onnxblock
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.artifacts import LossType, OptimType, generate_artifacts
from onnxtrain.errors import (
    GraphBuildError,
    InputError,
    ModelError,
    ModelLoadError,
    NothingToTrain,
)
from onnxtrain.optimizers import SGD, AdamW, ParameterGroup
from training_run import Run

node = helper.make_node
LABELS = np.array([0, 1, 2, 1, 0])


def weights(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(0, 0.5, shape).astype(dtype)


def linear(
    extra: Sequence[onnx.NodeProto] = (), dtype: Any = np.float32, **initializers: np.ndarray
) -> onnx.ModelProto:
    """x [b, 4] -> x @ w = logits [b, 3]; `extra` nodes before or after are up to the caller."""
    own = {} if any("logits" in n.output for n in extra) else {"w": weights(4, 3, dtype=dtype)}
    nodes = list(extra) if not own else [node("MatMul", ["x", "w"], ["logits"]), *extra]
    onnx_dtype = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return make_model(nodes, {"x": ["b", 4]}, {"logits": ["b", 3]}, {**own, **initializers}, dtype=onnx_dtype)


def declare(
    model: onnx.ModelProto, kind: str, name: str, dtype: int, dims: list[int | str]
) -> onnx.ModelProto:
    getattr(model.graph, kind).append(helper.make_tensor_value_info(name, dtype, dims))
    return model


def unreached() -> onnx.ModelProto:
    model = linear([node("MatMul", ["x", "u"], ["other"])], u=weights(4, 2))
    return declare(model, "output", "other", TensorProto.FLOAT, ["b", 2])


def parameter_as_output() -> onnx.ModelProto:
    return declare(linear(), "output", "w", TensorProto.FLOAT, [4, 3])


def input_as_output() -> onnx.ModelProto:
    return declare(linear(), "output", "x", TensorProto.FLOAT, ["b", 4])


def read_by_shape_only() -> onnx.ModelProto:
    nodes = parse_nodes("t = Shape(s)  m = MatMul(x, w)  logits = Reshape(m, t)")
    return linear(nodes, w=weights(4, 3), s=weights(5, 3))


def branch() -> onnx.ModelProto:
    def body(op: str, inputs: list[str], name: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", 4])
        return helper.make_graph([node(op, inputs, [name])], name, [], [out])

    nodes = [
        node("ReduceSum", ["x"], ["s"], keepdims=0),
        node("Greater", ["s", "zero"], ["positive"]),
        node(
            "If",
            ["positive"],
            ["chosen"],
            then_branch=body("Mul", ["x", "two"], "doubled"),
            else_branch=body("Neg", ["x"], "negated"),
        ),
        node("MatMul", ["chosen", "w"], ["logits"]),
    ]
    return linear(nodes, w=weights(4, 3), two=np.float32(2), zero=np.float32(0))


def function() -> onnx.ModelProto:
    model = linear([node("Project", ["x", "w"], ["logits"], domain="my")], w=weights(4, 3))
    imports = [helper.make_opsetid("", 21)]
    model.functions.append(
        helper.make_function("my", "Project", ["a", "b"], ["c"], [node("MatMul", ["a", "b"], ["c"])], imports)
    )
    model.opset_import.append(helper.make_opsetid("my", 1))
    return model


def other_domains() -> onnx.ModelProto:
    model = models.mlp()
    for domain in ("com.microsoft", "ai.onnx.ml", "nobody.knows"):
        model.opset_import.append(helper.make_opsetid(domain, 1))
    return model


def parameters_among_inputs() -> onnx.ModelProto:
    model = models.mlp()
    for tensor in model.graph.initializer:
        declare(model, "input", tensor.name, tensor.data_type, list(tensor.dims))
    return model


def clipped() -> onnx.ModelProto:
    nodes = [node("MatMul", ["x", "w"], ["m"]), node("Clip", ["m", "low", "high"], ["logits"])]
    return linear(nodes, w=weights(4, 3), low=np.float32(0), high=np.float32(0.2))


def named(name: str) -> Callable[[], onnx.ModelProto]:
    return lambda: linear([node("MatMul", ["x", name], ["logits"])], **{name: weights(4, 3)})


def intermediate_named(name: str) -> Callable[[], onnx.ModelProto]:
    nodes = [node("MatMul", ["x", "w"], [name]), node("Add", [name, "bias"], ["logits"])]
    return lambda: linear(nodes, w=weights(4, 3), bias=weights(3))


def tied() -> onnx.ModelProto:
    nodes = parse_nodes("m = MatMul(x, w)  n = Gemm <transB = 1> (m, w)  logits = MatMul(n, w)")
    return linear(nodes, w=weights(4, 3))


def two_fresh_batch_norms() -> onnx.ModelProto:
    """Their statistics are equal, as those of every freshly initialised net."""
    zeros, ones = np.zeros(3, np.float32), np.ones(3, np.float32)
    nodes, values = [node("MatMul", ["x", "w"], ["h0"])], {"w": weights(4, 3)}
    for i, output in enumerate(["h1", "logits"]):
        names = [f"{key}{i}" for key in ("scale", "bias", "mean", "var")]
        values.update(zip(names, (ones, zeros, zeros, ones), strict=True))
        nodes.append(
            node("BatchNormalization", [f"h{i}", *names], [output, f"a{i}", f"b{i}"], training_mode=1)
        )
    return linear(nodes, **values)


def cut_out() -> onnx.ModelProto:
    """Boxes whose result is read as the logits of the samples."""
    values = {
        "w": weights(4, 3),
        "shape": np.array([1, 3, -1, 1], np.int64),
        "boxes": np.array([[0.0, 0.0, 1.0, 5.0]], np.float32),
        "images": np.array([0], np.int64),
        "table": np.array([-1, 3], np.int64),
    }
    nodes = parse_nodes("""
        h = MatMul(x, w)  t = Transpose <perm = [1, 0]> (h)  image = Reshape(t, shape)
        cut = RoiAlign <output_height = 5, output_width = 1> (image, boxes, images)
        last = Transpose <perm = [0, 2, 3, 1]> (cut)  logits = Reshape(last, table)""")
    return linear(nodes, **values)


# model, options, trainable parameters, all outputs
TRAINABLE: dict[str, tuple[Callable[[], onnx.ModelProto], dict[str, Any], list[str], list[str]]] = {
    "parameter is an output": (parameter_as_output, {"loss_input_names": ["logits"]}, ["w"], ["loss"]),
    "parameter is returned": (
        linear, {"additional_output_names": ["w", "logits"]}, ["w"], ["loss", "w", "logits"],
    ),
    "input is returned": (
        input_as_output, {"loss_input_names": ["logits"], "additional_output_names": ["x"]}, ["w"],
        ["loss", "x"],
    ),
    "parameter that the loss does not reach": (
        unreached, {"loss_input_names": ["logits"]}, ["w"], ["loss"],
    ),
    "parameter that only another output reaches": (
        unreached, {"loss_input_names": ["logits"], "additional_output_names": ["other"]}, ["w"],
        ["loss", "other"],
    ),
    "parameter that nothing reads": (
        lambda: linear(u=weights(2)), {"requires_grad": ["u", "w"]}, ["w"], ["loss"],
    ),
    "parameter of which only the shape is read": (read_by_shape_only, {}, ["w"], ["loss"]),
    "one parameter in three places": (tied, {}, ["w"], ["loss"]),
    "parameters listed among the inputs": (parameters_among_inputs, {}, ["w1", "b1", "w2", "b2"], ["loss"]),
    "bounds of Clip are no parameters": (clipped, {}, ["w"], ["loss"]),
    "boxes of RoiAlign are no parameters": (cut_out, {}, ["w"], ["loss"]),
    "bounds of Clip by name": (clipped, {"requires_grad": ["high"]}, ["high"], ["loss"]),
    "parameter in a branch": (branch, {}, ["w", "two"], ["loss"]),
    "branches without parameters": (branch, {"requires_grad": ["w"]}, ["w"], ["loss"]),
    "frozen parameter in a branch": (
        branch, {"requires_grad": ["w"], "frozen_params": ["two"]}, ["w"], ["loss"],
    ),
    "local function": (function, {}, ["w"], ["loss"]),
    "unused imports of other domains": (other_domains, {}, ["w1", "b1", "w2", "b2"], ["loss"]),
    "intermediate value named as a gradient": (intermediate_named("w_grad"), {}, ["w", "bias"], ["loss"]),
    "intermediate value named as an update": (intermediate_named("w_updated"), {}, ["w", "bias"], ["loss"]),
    "intermediate value named loss": (intermediate_named("loss"), {}, ["w", "bias"], ["loss_1"]),
    "name with slash": (named("block/w"), {}, ["block/w"], ["loss"]),
    "name with space": (named("my w"), {}, ["my w"], ["loss"]),
    "name in unicode": (named("gewicht.ü√重み"), {}, ["gewicht.ü√重み"], ["loss"]),
    "name with quotes and newline": (named("a'b\"c\n"), {}, ["a'b\"c\n"], ["loss"]),
    "very long name": (named("w" * 3000), {}, ["w" * 3000], ["loss"]),
    "parameter named as the target": (named("labels"), {}, ["labels"], ["loss"]),
    "parameter named as the loss": (named("loss"), {}, ["loss"], ["loss_1"]),
    "parameter named as a moment": (named("momentum0"), {}, ["momentum0"], ["loss"]),
    "equal BatchNorm statistics": (
        two_fresh_batch_norms, {"requires_grad": ["w", "bias0"], "frozen_params": ["scale0"]}, ["w", "bias0"],
        ["loss"],
    ),
}  # fmt: skip


def batch(model: onnx.ModelProto) -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(1).normal(0, 1, (5, 4)).astype(np.float32), LABELS


@pytest.mark.parametrize("case", TRAINABLE)
def test_model_is_trained_saved_resumed_and_exported(tmp_path: Path, case: str) -> None:
    make, options, trainable, outputs = TRAINABLE[case]
    model = make()
    run = Run.generate(tmp_path, model, loss="cross_entropy", optimizer="adamw", **options)
    assert [p.name for p in run.module.manifest.trainable] == trainable
    assert run.module.output_names() == outputs
    run.optimizer.set_learning_rate(0.01)
    before = {name: p.data.copy() for name, p in run.state.parameters}
    losses_ = [run.step(*batch(model)) for _ in range(5)]
    assert losses_[-1] < losses_[0]
    for spec in run.module.manifest.parameters:
        parameter = run.state.parameters[spec.name]
        moved = spec.trainable and np.any(parameter.grad != 0)
        assert np.any(parameter.data != before[spec.name]) == moved, spec.name
    CheckpointState.save_checkpoint(run.state, tmp_path / "half", include_optimizer_state=True)
    resumed = Run.open(tmp_path, tmp_path / "half")
    assert resumed.step(*batch(model)) == run.step(*batch(model))
    run.module.export_model_for_inferencing(tmp_path / "trained.onnx", ["logits"])
    session = ort.InferenceSession(tmp_path / "trained.onnx")
    assert session.run(["logits"], {"x": batch(model)[0]})[0].shape == (5, 3)


def behind(op: str, **attributes: Any) -> onnx.ModelProto:
    """logits = x @ w + op(u)."""
    return linear(
        [
            node("MatMul", ["x", "w"], ["m"]),
            node(op, ["u"], ["r"], **attributes),
            *parse_nodes("f = Cast <to = 1> (r)  logits = Add(m, f)"),
        ],
        w=weights(4, 3),
        u=weights(1, 3),
    )


UNREACHED: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "another head": (unreached, "u"),
    "read for its shape": (read_by_shape_only, "s"),
    "compared": (lambda: behind("IsNaN"), "u"),
    "chosen by index": (lambda: behind("ArgMax", keepdims=1, axis=0), "u"),
    "cast to integers": (lambda: behind("Cast", to=TensorProto.INT64), "u"),
}
"""Parameters without a gradient in PyTorch: `grad` is None."""


@pytest.mark.parametrize("case", UNREACHED)
def test_a_parameter_that_the_loss_does_not_depend_on_is_not_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    make, name = UNREACHED[case]
    # PyTorch takes groups of parameters without a gradient, too.
    optimizer = AdamW(groups=[ParameterGroup([name, "w*"], learning_rate_scale=0.5), ParameterGroup(name)])
    run = Run.generate(
        tmp_path, make(), loss="cross_entropy", optimizer=optimizer, loss_input_names=["logits"]
    )
    warned = [r.getMessage() for r in caplog.records if "does not depend on" in r.getMessage()]
    assert len(warned) == 1
    assert f"does not depend on 1 of the 2 parameters to train: {name}." in warned[0]
    before = run.state.parameters[name].data.copy()
    run.step(*batch(make()))
    parameter = run.state.parameters[name]
    assert (parameter.requires_grad, parameter.grad) == (False, None)
    assert np.array_equal(parameter.data, before)
    session = ort.InferenceSession(tmp_path / "optimizer_model.onnx")
    assert {name, f"{name}_grad", f"{name}_momentum0"}.isdisjoint(v.name for v in session.get_inputs())
    # A delta holds what was trained, and resumes exactly.
    CheckpointState.save_checkpoint(
        run.state, tmp_path / "delta", include_optimizer_state=True, trainable_only=True
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint", delta=tmp_path / "delta")
    module = Module(tmp_path / "training_model.onnx", state)
    resumed = Run(tmp_path, state, module, Optimizer(tmp_path / "optimizer_model.onnx", module))
    assert resumed.step(*batch(make())) == run.step(*batch(make()))
    assert np.array_equal(
        module.get_contiguous_parameters(trainable_only=True).numpy(), run.state.parameters["w"].data.ravel()
    )


@pytest.mark.parametrize("op", ["Round", "Floor", "Ceil", "Sign"])
def test_a_gradient_of_zeros_is_a_gradient(tmp_path: Path, op: str) -> None:
    run = Run.generate(tmp_path, behind(op), loss="cross_entropy", optimizer="adamw")
    before = run.state.parameters["u"].data.copy()
    run.optimizer.set_learning_rate(0.5)
    run.step(*batch(behind(op)))
    # As in PyTorch: the gradient of torch.round is zeros, and AdamW decays the parameter.
    twin = torch.nn.Parameter(torch.tensor(before))
    getattr(torch, op.lower())(twin).sum().backward()
    assert np.array_equal(run.state.parameters["u"].grad, twin.grad.numpy())
    torch.optim.AdamW([twin], lr=0.5).step()
    np.testing.assert_allclose(run.state.parameters["u"].data, twin.detach().numpy(), rtol=1e-6)


def half_or_double(dtype: Any) -> onnx.ModelProto:
    nodes = parse_nodes("m = MatMul(x, w)  t = Tanh(m)  logits = MatMul(t, v)")
    return linear(nodes, dtype, w=weights(4, 6, dtype=dtype), v=weights(6, 3, dtype=dtype))


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_float_dtypes(tmp_path: Path, dtype: Any) -> None:
    run = Run.generate(tmp_path, half_or_double(dtype), loss="cross_entropy", optimizer="adamw")
    x, labels = batch(half_or_double(dtype))
    run.optimizer.set_learning_rate(0.01)
    losses_ = [run.step(x.astype(dtype), labels) for _ in range(5)]
    assert losses_[-1] < losses_[0]
    assert {p.data.dtype for _, p in run.state.parameters} == {np.dtype(dtype)}


def test_dtype_without_kernels_is_an_error_when_the_module_is_made(tmp_path: Path) -> None:
    model = models.conv_bn()
    for tensor in model.graph.initializer:
        tensor.CopyFrom(
            numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name)
        )
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.elem_type = TensorProto.DOUBLE
    with pytest.raises(
        ModelLoadError, match="lacks a kernel for these dtypes on device 'cpu'; use a float32 model"
    ):
        Run.generate(tmp_path, model, loss="cross_entropy")


def run_with_target(tmp_path: Path, loss: Any, nodes: list[onnx.NodeProto], target: str, dtype: int) -> Run:
    model = declare(linear(nodes), "input", "y", dtype, ["b"])
    if target != "y":
        declare(model, "output", target, TensorProto.INT64, ["b"])
    return Run.generate(tmp_path, model, loss=loss, optimizer="sgd", loss_input_names=["logits", target])


TARGETS = {
    "input": ([], "y", TensorProto.INT64),
    "int32 input": ([], "y", TensorProto.INT32),
    "behind Identity": ([node("Identity", ["y"], ["t"])], "t", TensorProto.INT64),
    "behind Cast": ([node("Cast", ["y"], ["t"], to=TensorProto.INT64)], "t", TensorProto.INT32),
    "read by the model too": ([node("Neg", ["y"], ["unused"])], "y", TensorProto.INT64),
}


@pytest.mark.parametrize(
    "loss", [LossType.CrossEntropyLoss, onnxblock.loss.CrossEntropyLoss()], ids=["loss", "block"]
)
@pytest.mark.parametrize("case", TARGETS)
def test_labels_of_an_existing_input_are_checked(tmp_path: Path, loss: Any, case: str) -> None:
    nodes, target, dtype = TARGETS[case]
    run = run_with_target(tmp_path, loss, nodes, target, dtype)
    x, labels = batch(linear())
    labels = labels.astype(helper.tensor_dtype_to_np_dtype(dtype))
    assert run.module.input_names() == ["x", "y"]
    is_target = [spec.name for spec in run.module.manifest.targets] == ["y"]
    assert is_target == (case != "read by the model too")
    first, *_, last = [run.step(x, labels) for _ in range(5)]
    assert last < first
    for wrong in (3, -1):  # -1 would wrap around
        with pytest.raises(InputError, match=rf"'y': class labels must be 0 to 2.*received {wrong}"):
            run.module(x, np.where(labels == 2, wrong, labels).astype(labels.dtype))


IN_THE_MODEL = {
    "cross-entropy": ("SoftmaxCrossEntropyLoss", {}, None),
    "log-likelihood": ("NegativeLogLikelihoodLoss", {"reduction": "sum"}, None),
    "ignore_index": ("SoftmaxCrossEntropyLoss", {"ignore_index": -1}, -1),
}


@pytest.mark.parametrize("case", IN_THE_MODEL)
def test_labels_of_a_loss_in_the_model_are_checked(tmp_path: Path, case: str) -> None:
    op, attributes, ignored = IN_THE_MODEL[case]
    nodes = [node("Flatten", ["y"], ["t"], axis=0), node("Squeeze", ["t", "axes"], ["labels"])]
    nodes.append(node(op, ["logits", "labels"], ["loss"], **attributes))
    model = declare(linear(nodes, axes=np.array([0])), "input", "y", TensorProto.INT64, ["b"])
    run = Run.generate(tmp_path, model, optimizer="sgd", loss_input_names=["loss"])
    assert [spec.name for spec in run.module.manifest.inputs] == ["x", "y"]
    x, labels = batch(linear())
    logits = x.astype(np.float64) @ weights(4, 3)
    counts = labels if ignored is None else np.where(labels == 2, ignored, labels)
    kept = counts != ignored
    terms = -logits[np.arange(5), labels]
    if op.startswith("Softmax"):
        terms = terms + np.log(np.exp(logits).sum(1))
    expected = terms.sum() if "reduction" in attributes else terms[kept].mean()
    assert run.module(x, counts) == pytest.approx(expected, rel=1e-5)
    for wrong in {3, -1, -100} - {ignored}:
        with pytest.raises(InputError, match=rf"'y': class labels must be 0 to 2.*received {wrong} at"):
            run.module(x, np.where(labels == 2, wrong, labels))


def test_an_input_may_be_its_own_target(tmp_path: Path) -> None:
    model = make_model(
        [node("MatMul", ["x", "w"], ["y"])], {"x": ["b", 4]}, {"y": ["b", 4]}, {"w": weights(4, 4)}
    )
    run = Run.generate(tmp_path, model, loss="mse", optimizer="sgd", loss_input_names=["y", "x"])
    assert [spec.name for spec in run.module.manifest.inputs] == ["x"]
    x = batch(model)[0]
    assert run.step(x) == pytest.approx(np.mean((x @ weights(4, 4) - x) ** 2), rel=1e-6)


def test_without_a_loss_a_scalar_output_is_minimised(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "w"], ["m"]), node("ReduceL2", ["m"], ["out"], keepdims=0)]
    model = make_model(nodes, {"x": ["b", 4]}, {"out": [], "m": ["b", 3]}, {"w": weights(4, 3)})
    run = Run.generate(tmp_path, model, optimizer=OptimType.SGD)
    x = batch(model)[0]
    assert run.module.output_names() == ["out"]
    assert run.step(x) == pytest.approx(np.linalg.norm(x @ weights(4, 3)), rel=1e-6)


class Nothing(onnxblock.Block):
    def build(self, *names: str) -> None:
        return None


# options for models.mlp(), exception, message
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "output twice": (
        {"additional_output_names": ["logits", "logits"]}, GraphBuildError, "logits would be returned more than once",
    ),
    "loss as additional output": (
        {"additional_output_names": ["loss"]}, GraphBuildError, "loss would be returned more than once",
    ),
    "no loss": ({"loss": None}, GraphBuildError, "'logits' is FLOAT of shape .*not a scalar"),
    "two losses of the model": (
        {"loss": None, "loss_input_names": ["h", "m"]}, GraphBuildError,
        r"loss_input_names gives 2 \(h, m\); name one",
    ),
    "two outputs": ({"model": parameter_as_output()}, GraphBuildError, "logits, w; name them in loss_input"),
    "loss of an input": (
        {"loss": "mse", "loss_input_names": ["x"]}, NothingToTrain,
        r"no gradient flows from the loss 'loss' to any of the parameters to train \(w1, b1, w2, b2\)",
    ),
    "loss behind a sign": (
        {
            "loss": "mse",
            "model": linear(
                [node("MatMul", ["x", "w"], ["m"]), node("Sign", ["m"], ["logits"])], w=weights(4, 3)
            ),
        },
        NothingToTrain,
        "or only through ops that have no gradient",
    ),
    "unreduced loss": ({"loss": losses.MSELoss(reduction="none")}, GraphBuildError, "not a scalar"),
    "parameter named step": (
        {"model": named("step")()}, GraphBuildError, "optimizer model: two inputs or outputs would be named 'step'",
    ),
    "parameters w and w_grad": (
        {"model": linear([node("Gemm", ["x", "w", "w_grad"], ["logits"])], w=weights(4, 3), w_grad=weights(3))},
        GraphBuildError, "optimizer model: two inputs or outputs would be named 'w_grad'",
    ),
    "block without result": (
        {"loss": Nothing()}, GraphBuildError, "block Nothing: .*returned None; return the name",
    ),
    "statistic to be trained": (
        {"model": models.conv_bn(), "requires_grad": ["bn.mean"]}, GraphBuildError,
        "'bn.mean' is a running statistic",
    ),
    "optimizer block without an optimizer": (
        {"optimizer": Nothing()}, GraphBuildError,
        "block Nothing: it was passed as the optimizer, but built no optimizer model",
    ),
    "library of custom ops": (
        {"custom_op_library": "/nowhere/ops.so"}, ModelError, "there is no custom_op_library",
    ),
    "batch_norm": ({"batch_norm": "train"}, ValueError, "batch_norm='train': choose one of"),
    "settings only": (
        {
            "model": linear(
                [node("Clip", ["x", "low", ""], ["c"]), node("Slice", ["c", "i", "n", "j"], ["logits"])],
                low=np.float32(0),
                i=np.array([0]),
                n=np.array([3]),
                j=np.array([1]),
            )
        },
        NothingToTrain,
        "no parameter is left to train",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_is_refused(tmp_path: Path, case: str) -> None:
    options, error, message = REFUSED[case]
    options = {"model": models.mlp(), "loss": "cross_entropy", "optimizer": "adamw"} | options
    with pytest.raises(error, match=message):
        generate_artifacts(artifact_directory=tmp_path / "artifacts", **options)
    assert not (tmp_path / "artifacts").exists()


@pytest.mark.parametrize(
    "option", ["requires_grad", "frozen_params", "additional_output_names", "loss_input_names"]
)
@pytest.mark.parametrize("names", [b"w1", {"w1": 1}, 3, [1], [None]], ids=repr)
def test_lists_of_names_must_be_that(option: str, names: Any) -> None:
    with pytest.raises(TypeError, match=f"{option} (is|contains) .*pass a list of strings"):
        generate_artifacts(models.mlp(), **{option: names})


def test_prefix_and_nominal_checkpoint(tmp_path: Path) -> None:
    generate_artifacts(
        models.mlp(),
        loss="cross_entropy",
        optimizer="sgd",
        artifact_directory=str(tmp_path).encode(),
        prefix="net.",
        nominal_checkpoint=True,
    )
    files = json.loads((tmp_path / "net.manifest.json").read_text())["files"]
    assert sorted(files) == [
        "checkpoint",
        "eval_model",
        "inference_model",
        "nominal_checkpoint",
        "optimizer_model",
        "training_model",
    ]
    assert {p.name for p in tmp_path.iterdir()} == {*files.values(), "net.manifest.json"}
    full, nominal = (
        CheckpointState.load_checkpoint(tmp_path / files[n]) for n in ("checkpoint", "nominal_checkpoint")
    )
    modules = [Module(tmp_path / files["training_model"], state) for state in (full, nominal)]
    modules[1].copy_buffer_to_parameters(modules[0].get_contiguous_parameters(), trainable_only=False)
    x, labels = batch(models.mlp())
    assert modules[0](x, labels) == modules[1](x, labels)


def test_manifest_file_and_the_models_say_the_same(tmp_path: Path) -> None:
    generate_artifacts(models.conv_bn(), loss="cross_entropy", optimizer="adamw", artifact_directory=tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [p["gradient"] for p in manifest["parameters"]] == [
        f"{p['name']}_grad" for p in manifest["parameters"]
    ]
    assert [s["output"] for s in manifest["statistics"]] == ["bn.mean_updated", "bn.var_updated"]
    for name in ("training_model", "eval_model", "optimizer_model"):
        model = onnx.load(tmp_path / manifest["files"][name])
        onnx.checker.check_model(model, full_check=True)
        metadata = {entry.key: entry.value for entry in model.metadata_props}
        assert json.loads(metadata["onnxtrain.manifest"]) == manifest


class WrappedAdamW(onnxblock.ForwardBlock):
    expected = AdamW(weight_decay=0.1, eps=1e-6, adam_mode=1)  # the block is onnxruntime-training's

    def __init__(self) -> None:
        super().__init__()
        self.adamw = onnxblock.optim.AdamW(weight_decay=0.1)

    def build(self, parameters: Any) -> Any:
        return self.adamw(parameters)


class AdamWWithOtherRate(onnxblock.optim.AdamW):
    """Overrides `build`, which has to be what is called."""

    expected = AdamW(weight_decay=0.1)

    def build(self, parameters: Any) -> Any:
        self.optimizer = AdamW(weight_decay=0.1)
        return super().build(parameters)


@pytest.mark.parametrize("block", [WrappedAdamW, AdamWWithOtherRate])
def test_optimizer_may_be_a_block_of_ones_own(tmp_path: Path, block: Any) -> None:
    own = Run.generate(tmp_path / "own", models.conv_bn(), loss="cross_entropy", optimizer=block())
    plain = Run.generate(tmp_path / "plain", models.conv_bn(), loss="cross_entropy", optimizer=block.expected)
    x = np.random.default_rng(1).normal(0, 1, (5, 2, 6, 6)).astype(np.float32)
    for run in (own, plain):
        losses_ = [run.step(x, LABELS) for _ in range(3)]
        assert losses_[2] < losses_[0]
    for name, parameter in own.state.parameters:
        np.testing.assert_array_equal(parameter.data, plain.state.parameters[name].data)


def test_loss_of_one_element_becomes_a_scalar(tmp_path: Path) -> None:
    class Scaled(onnxblock.Block):
        def __init__(self) -> None:
            super().__init__()
            self.loss, self.mul = onnxblock.loss.CrossEntropyLoss(), onnxblock.blocks.Mul()
            self.weight = onnxblock.blocks.Constant(0.25)  # of shape [1]

        def build(self, logits: str) -> str:
            return self.mul(self.loss(logits), self.weight())

    run = Run.generate(tmp_path, models.mlp(), loss=Scaled(), optimizer="sgd")
    plain = Run.generate(tmp_path / "plain", models.mlp(), loss="cross_entropy", optimizer="sgd")
    x, labels = batch(models.mlp())
    expected = plain.module(x, labels) / 4
    for mode in (True, False):
        loss = run.module.train(mode)(x, labels)
        assert loss.shape == ()
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(
        run.state.parameters["w1"].grad, plain.state.parameters["w1"].grad / 4, rtol=1e-5, atol=1e-7
    )


def test_conversion_to_ort_format_is_silent(tmp_path: Path) -> None:
    """In a process of its own: the converter sets up logging where nobody has."""
    onnx.save(models.mlp(), tmp_path / "model.onnx")
    code = (
        "from onnxtrain import generate_artifacts\n"
        f"generate_artifacts({str(tmp_path / 'model.onnx')!r}, loss='cross_entropy', optimizer='sgd',\n"
        f"    artifact_directory={str(tmp_path)!r}, ort_format=True)\n"
        "import logging\n"
        "assert not logging.getLogger().handlers\n"
    )
    done = python("-W", "ignore", "-c", code, path=filter(None, sys.path))
    assert (done.stdout, done.stderr) == ("", "")
    assert (tmp_path / "training_model.ort").exists()


# onnxruntime's converter leaves files open.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_models_in_ort_format_train_and_say_that_they_cannot_be_exported(tmp_path: Path) -> None:
    generate_artifacts(
        models.mlp(), loss="cross_entropy", optimizer="adamw", artifact_directory=tmp_path, ort_format=True
    )
    steps = {}
    for suffix in ("onnx", "ort"):
        state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
        module = Module(tmp_path / f"training_model.{suffix}", state, tmp_path / f"eval_model.{suffix}")
        optimizer = Optimizer(tmp_path / f"optimizer_model.{suffix}", module)
        x, labels = batch(models.mlp())
        module(x, labels)
        optimizer.step()
        module.eval()
        steps[suffix] = module(x, labels)
    np.testing.assert_allclose(steps["ort"], steps["onnx"], rtol=1e-6)
    with pytest.raises(ModelLoadError, match=r"ORT format; create the Module with the \.onnx file"):
        module.export_model_for_inferencing(tmp_path / "trained.onnx", ["logits"])


def dropout(training: bool | None) -> onnx.ModelProto:
    inputs = ["h", "ratio"] + ([] if training is None else ["mode"])
    nodes = [
        node("MatMul", ["x", "v"], ["h"]),
        node("Dropout", inputs, ["d"]),
        node("MatMul", ["d", "w"], ["logits"]),
    ]
    values = {"v": weights(4, 64), "w": weights(64, 3), "ratio": np.float32(0.5)}
    return linear(nodes, **values, **({} if training is None else {"mode": np.array(training)}))


@pytest.mark.parametrize("training", [None, False, True])
@pytest.mark.parametrize("mode", ["as_exported", "training", "inference"])
def test_dropout_is_as_wanted_in_training_and_off_in_evaluation(
    tmp_path: Path, training: bool | None, mode: Any
) -> None:
    run = Run.generate(tmp_path, dropout(training), loss="cross_entropy", optimizer="sgd", batch_norm=mode)
    assert [p.name for p in run.module.manifest.trainable] == ["v", "w"]
    x, labels = batch(linear())
    random = mode == "training" or (mode == "as_exported" and training is True)
    assert (float(run.module(x, labels)) != float(run.module(x, labels))) == random
    run.module.eval()
    assert float(run.module(x, labels)) == float(run.module(x, labels))


@pytest.mark.parametrize("exported", [True, False])
@pytest.mark.parametrize("mode", ["as_exported", "training", "inference"])
def test_batch_norm_is_as_wanted(tmp_path: Path, exported: bool, mode: Any) -> None:
    run = Run.generate(
        tmp_path, models.conv_bn(exported), loss="cross_entropy", optimizer=SGD(), batch_norm=mode
    )
    in_training = mode == "training" or (mode == "as_exported" and exported)
    assert [s.name for s in run.module.manifest.statistics] == (["bn.mean", "bn.var"] if in_training else [])
    assert "bn.mean" not in [name for name, _ in run.state.parameters]
    x = np.random.default_rng(0).normal(0, 1, (5, 2, 6, 6)).astype(np.float32)
    trained = float(run.module(x, LABELS))
    run.module.eval()
    assert (abs(trained - float(run.module(x, LABELS))) <= 1e-6) == (not in_training)


@pytest.mark.parametrize(
    "model", [models.conv_bn(False), dropout(None)], ids=["BatchNormalization", "Dropout"]
)
def test_inference_mode_is_warned_of_unless_confirmed(
    tmp_path: Path, model: onnx.ModelProto, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        generate_artifacts(model, loss="cross_entropy", artifact_directory=tmp_path, batch_norm="inference")
        assert not caplog.records
        generate_artifacts(model, loss="cross_entropy", artifact_directory=tmp_path)
    assert [r.getMessage().count("exported in inference mode") for r in caplog.records] == [1]


def test_frozen_statistics_are_frozen_in_inference_mode(tmp_path: Path) -> None:
    names = ["bn.mean", "bn.var"]
    run = Run.generate(
        tmp_path,
        models.conv_bn(False),
        loss="cross_entropy",
        optimizer="sgd",
        frozen_params=names,
        batch_norm="inference",
    )
    assert all(not run.state.parameters[name].requires_grad for name in names)


def test_threads_that_generate_at_once_get_what_one_gets(tmp_path: Path) -> None:
    def made(number: int) -> dict[str, bytes]:
        folder = tmp_path / str(number)
        model = (models.mlp, models.conv_bn)[number % 2]()
        generate_artifacts(model, loss="cross_entropy", optimizer="adamw", artifact_directory=folder)
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    alone = [made(0), made(1)]
    with ThreadPoolExecutor(4) as pool:
        for number, files in enumerate(pool.map(made, range(2, 10))):
            assert files == alone[number % 2]
