"""Every wrong use gives an error that names what was wrong; none crashes the process."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from models import make_model, parse_nodes
from onnxtrain import generate_artifacts
from onnxtrain.api import CheckpointState, LinearLRScheduler, Module, Optimizer
from onnxtrain.errors import CheckpointError, DivergenceError, InputError, ModelLoadError, TrainingStateError
from onnxtrain.optimizers import AdamW, ParameterGroup, SparseAdam
from runtime import handmade

X = np.zeros((5, 4), np.float32)
Y = np.array([0, 1, 2, 1, 0])


@pytest.fixture
def run():
    return handmade.mlp()


@pytest.fixture
def module(run):
    return Module(run.training.SerializeToString(), run.state(), run.evaluation.SerializeToString())


def labels(*values):
    return np.array([*values, *Y[len(values) :]])


def test_a_model_that_does_not_load_leaves_stdout_alone(run, capsys):
    """onnxruntime before 1.23 would say there that it tries again with other execution providers."""
    with pytest.raises(ModelLoadError, match="training model"):
        Module(b"no model", run.state())
    assert capsys.readouterr().out == ""


BAD_INPUTS = {
    "too few inputs": (
        (X,),
        r"expects 2 inputs \(x: float32 \[batch, 4\]; labels: int64 \[batch\]\), received 1",
    ),
    "too many inputs": ((X, Y, Y), "expects 2 inputs .*received 3"),
    "wrong dtype": (
        (X.astype(np.float64), Y),
        r"'x': expected .*float32.*received dtype float64.*astype\('float32'\)",
    ),
    "wrong label dtype": ((X, Y.astype(np.int32)), "'labels': expected .*int64.*received dtype int32"),
    "swapped": ((Y, X), "'x': expected .*float32.*received dtype int64"),
    "wrong width": ((X[:, :3], Y), r"'x': expected .*received shape \[5, 3\]; axis 1 must be 4"),
    "wrong rank": ((X[0], Y), r"'x': .*received shape \[4\], which has rank 1 instead of 2"),
    "batches differ": ((X, Y[:3]), "'labels': .*'batch' is 5 in input 'x' and must be the same here"),
    "label too large": (
        (X, labels(0, 3)),
        r"'labels': class labels must be 0 to 2, or -100.*received 3 at index \[1\]",
    ),
    "label negative": ((X, labels(-1)), r"received -1 at index \[0\] \(1 such labels\)"),
    "list": (([[0.0] * 4] * 5, Y), "'x': expected a numpy array or an OrtValue.*received list"),
    "scalar": ((X, 3), "'labels': expected a numpy array or an OrtValue.*received int"),
    "None": ((None, Y), "'x': .*received NoneType"),
    "strings": ((np.array([["a"] * 4] * 5), Y), "'x': .*received dtype <U1"),
    "OrtValue dtype": (
        (ort.OrtValue.ortvalue_from_numpy(X.astype(np.float64)), Y),
        r"'x': .*received an OrtValue of tensor\(double\)",
    ),
    "OrtValue label": ((X, ort.OrtValue.ortvalue_from_numpy(labels(9))), "received 9"),
}


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input_is_an_error_that_leaves_the_module_usable(module, case, mode):
    arguments, message = BAD_INPUTS[case]
    module.train(mode)
    with pytest.raises(InputError, match=message) as caught:
        module(*arguments)
    assert isinstance(caught.value, RuntimeError)
    assert np.isfinite(module(X, Y)[0])


def test_ignored_labels_are_allowed(module):
    assert np.isfinite(module(X, labels(handmade.IGNORE))[0])


def test_unknown_number_of_classes_rejects_negative_labels_only(run):
    manifest = {
        **run.manifest,
        "targets": [{**run.manifest["targets"][0], "class_labels": {"count": None, "ignore_index": None}}],
    }
    onnx.helper.set_model_props(run.training, {"onnxtrain.manifest": json.dumps(manifest)})
    module = Module(run.training.SerializeToString(), run.state())
    with pytest.raises(InputError, match=r"class labels must be 0 or more; received -100"):
        module(X, labels(-100))


def test_an_error_inside_the_graph_is_an_input_error_and_leaves_no_gradient():
    run = handmade.lookup()
    state = run.state()
    module = Module(run.training.SerializeToString(), state)
    optimizer = Optimizer(run.optimizer.SerializeToString(), module)
    good, bad = np.array([1, 1, 4]), np.array([1, 6])
    module(good)
    with pytest.raises(InputError, match=r"The training step failed in onnxruntime .*out of data bounds"):
        module(bad)
    np.testing.assert_allclose(state.parameters["table"].grad, [0, 2 / 3, 0, 0, 1 / 3, 0], rtol=1e-6)
    optimizer.step()  # the failed call added nothing to the gradients of the first
    module.lazy_reset_grad()
    with pytest.raises(InputError):
        module(bad)
    with pytest.raises(TrainingStateError, match=r"no gradients yet"):
        optimizer.step()
    np.testing.assert_allclose(
        module(good), (2 * state.parameters["table"].data[1] + state.parameters["table"].data[4]) / 3
    )
    optimizer.step()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda x, y: (x * np.nan, y),
            InputError,
            r"'x': .*NaN is not allowed in a training step; received nan at index \[0, 0\] \(20 such",
        ),
        (lambda x, y: (x + np.inf, y), DivergenceError, r"the loss is nan, so the step is not counted"),
        (lambda x, y: (x[:0], y[:0]), InputError, r"'x': received shape \[0, 4\], a batch without samples"),
        (lambda x, y: (x, y * 0 - 100), DivergenceError, r"the loss is nan, so the step is not counted"),
        (lambda x, y: (x + np.float32(3e38), y), DivergenceError, r"the loss is .*Lower the learning rate"),
    ],
    ids=["NaN", "infinity", "no samples", "all labels ignored", "overflow"],
)
@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("as_values", [False, True])
def test_a_step_with_nan_or_without_samples_changes_nothing(change, error, message, accumulated, as_values):
    run = handmade.mlp()
    state = run.state()
    module = Module(run.training.SerializeToString(), state, run.evaluation.SerializeToString())
    optimizer = Optimizer(run.optimizer.SerializeToString(), module)
    x = np.random.default_rng(0).normal(size=X.shape).astype(np.float32)
    module(x, Y)
    optimizer.step()
    before = {name: p.data.copy() for name, p in state.parameters} | {
        n: s.data.copy() for n, s in state.statistics
    }
    gradients = {name: np.array(p.grad) for name, p in state.parameters if p.grad is not None}
    if not accumulated:
        module.lazy_reset_grad()
    bad = change(x, Y)
    arguments = tuple(map(ort.OrtValue.ortvalue_from_numpy, bad)) if as_values else bad
    with np.errstate(all="ignore"), pytest.raises(error, match=message):
        module(*arguments)
    after = {name: p.data for name, p in state.parameters} | {n: s.data for n, s in state.statistics}
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    # An input that is refused never reaches the model, which would overwrite the gradients.
    if accumulated or error is InputError:
        assert gradients
        for name, value in gradients.items():
            np.testing.assert_array_equal(state.parameters[name].grad, value, err_msg=name)
    else:
        with pytest.raises(TrainingStateError, match="no gradients yet"):
            optimizer.step()
    assert optimizer.step_count == 1
    module(x, Y)
    optimizer.step()


def test_a_caller_who_checks_the_loss_gets_nan():
    run = handmade.mlp()
    module = Module(run.training.SerializeToString(), run.state(), error_if_nonfinite=False)
    assert np.isnan(module(np.full_like(X, np.nan), Y)[0])


def test_evaluation_computes_with_nan(module):
    assert np.isnan(module.eval()(np.full_like(X, np.nan), Y)[0])


@pytest.mark.parametrize("samples", [5, 10_000])
def test_finite_numbers_whose_sum_overflows_are_trained_on(samples):
    run = handmade.mlp()
    state = run.state()
    state.parameters["fc1.weight"] = np.zeros((8, 4), np.float32)
    module = Module(run.training.SerializeToString(), state)
    x, y = np.full((samples, 4), 3e38, np.float32), np.zeros(samples, np.int64)
    assert np.isfinite(module(x, y)[0])
    x[-1, -1] = np.nan
    with pytest.raises(InputError, match=rf"received nan at index \[{samples - 1}, 3\] \(1 such numbers\)"):
        module(x, y)


def masked_module(folder):
    model = make_model(
        parse_nodes("s = MatMul(x, scale)  m = Add(s, mask)  p = Softmax(m)  y = Gemm(p, w)"),
        {"x": ["batch", 5, 3], "mask": ["batch", 5]},
        {"y": ["batch", 2]},
        {"scale": np.ones(3, np.float32), "w": np.eye(5, 2, dtype=np.float32)},
    )
    generate_artifacts(model, loss="mse", optimizer="adamw", artifact_directory=folder)
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    return Module(folder / "training_model.onnx", state), state


@pytest.mark.parametrize("samples", [4, 10_000])
def test_masks_of_minus_infinity_are_trained_on(samples, tmp_path):
    """With the loss and gradients of torch in float64; below and above the size from which a sum is taken."""
    torch = pytest.importorskip("torch")
    module, state = masked_module(tmp_path)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(samples, 5, 3)), rng.normal(size=(samples, 2))
    mask = np.where(np.arange(5) > rng.integers(0, 5, (samples, 1)), -np.inf, 0)
    assert np.isneginf(mask).any()
    loss = module(*(a.astype(np.float32) for a in (x, mask, y)))
    scale, w = (
        torch.tensor(np.asarray(a, np.float64), requires_grad=True) for a in (np.ones(3), np.eye(5, 2))
    )
    scores = torch.tensor(x) @ scale + torch.tensor(mask)
    expected = torch.nn.functional.mse_loss(torch.softmax(scores, -1) @ w, torch.tensor(y))
    expected.backward()
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    for name, value in (("scale", scale), ("w", w)):
        np.testing.assert_allclose(state.parameters[name].grad, value.grad.numpy(), atol=1e-5, err_msg=name)


@pytest.mark.parametrize("accumulated", [False, True])
def test_infinity_that_makes_only_a_gradient_nan_is_refused(accumulated, tmp_path):
    """A position with the score -inf gets no attention: the loss is finite, and its gradient is inf * 0."""
    module, state = masked_module(tmp_path)
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4, 5, 3)).astype(np.float32), rng.normal(size=(4, 2)).astype(np.float32)
    mask = np.zeros((4, 5), np.float32)
    module(x, mask, y)
    before = {name: np.array(p.grad) for name, p in state.parameters}
    if not accumulated:
        module.lazy_reset_grad()
    spoilt = x.copy()
    spoilt[:, -1] = -np.inf
    with pytest.raises(
        DivergenceError, match=r"an input contains infinity, and makes the gradient of 'scale' NaN"
    ):
        module(spoilt, mask, y)
    if accumulated:
        for name, value in before.items():
            np.testing.assert_array_equal(state.parameters[name].grad, value, err_msg=name)
    else:
        with pytest.raises(TrainingStateError, match="no gradients yet"):
            optimizer.step()
        module(x, mask, y)
    optimizer.step()
    assert all(np.isfinite(p.data).all() for _, p in state.parameters)


def test_infinity_that_makes_only_rows_of_a_sparse_gradient_nan_is_refused(tmp_path):
    """tanh(inf * e) is 1, so that the loss is finite; its slope 0 times infinity is NaN."""
    model = make_model(
        parse_nodes("e = Gather(table, i)  s = Mul(e, x)  y = Tanh(s)"),
        {"x": ["batch", 2]},
        {"y": ["batch", 2]},
        {"table": np.ones((6, 2), np.float32)},
    )
    model.graph.input.append(helper.make_tensor_value_info("i", TensorProto.INT64, ["batch"]))
    optimizer = AdamW(groups=[ParameterGroup("table", optimizer=SparseAdam())])
    generate_artifacts(
        model, loss="mse", optimizer=optimizer, sparse_gradients=["table"], artifact_directory=tmp_path
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    x, i, y = np.ones((3, 2), np.float32), np.array([0, 4, 4]), np.zeros((3, 2), np.float32)
    np.testing.assert_allclose(module(x, i, y), np.tanh(1) ** 2, rtol=1e-6)
    before = np.array(state.parameters["table"].grad)
    with pytest.raises(
        DivergenceError, match=r"an input contains infinity, and makes the gradient of 'table' NaN"
    ):
        module(np.full_like(x, np.inf), i, y)
    np.testing.assert_array_equal(state.parameters["table"].grad, before)


def test_parameter_and_property_errors(run):
    state = run.state()
    with pytest.raises(KeyError, match=r"Parameter nope not found\."):
        state.parameters["nope"]
    with pytest.raises(KeyError, match=r"Parameter nope not found\."):
        state.parameters["nope"] = X
    with pytest.raises(KeyError, match=r"Property zz not found\."):
        state.properties["zz"]
    with pytest.raises(
        InputError,
        match=r"'fc1.weight': expected float32 of shape \[8, 4\], received float32 of shape \[2, 2\]",
    ):
        state.parameters["fc1.weight"] = np.zeros((2, 2), np.float32)
    with pytest.raises(InputError, match=r"expected float32 .*received float64"):
        state.parameters["fc1.weight"].data = np.zeros((8, 4))
    with pytest.raises(InputError, match=r"expected a numpy array, received list"):
        state.parameters["fc1.weight"].data = [1.0]
    with pytest.raises(InputError, match=r"dtype complex64 is not supported"):
        CheckpointState.from_arrays({"w": np.zeros(2, np.complex64)}, [])
    with pytest.raises(InputError, match=r"trainable names without a parameter: \['v'\]"):
        CheckpointState.from_arrays({"w": X}, ["v"])
    assert "nope" not in state.parameters
    assert repr(state.parameters["fc1.bias"]) == "Parameter(name=fc1.bias, requires_grad=False)"
    assert repr(state.parameters).startswith("Parameters({'fc1.weight': float32[8, 4],")


def test_parameters_can_be_set_before_there_is_a_module(run):
    state = run.state()
    assert state.parameters["fc1.weight"].grad is None
    state.parameters["fc1.weight"] = np.ones((8, 4), np.float32)
    state.parameters["fc1.bias"].data = np.ones(8, np.float32)
    module = Module(run.training.SerializeToString(), state)
    expected, _, _ = handmade.reference_mlp({n: p.data for n, p in state.parameters}, X, Y)
    np.testing.assert_allclose(module(X, Y)[0], expected, rtol=1e-6)


def test_eval_and_export_without_an_eval_model(run, tmp_path):
    module = Module(run.training.SerializeToString(), run.state())
    with pytest.raises(TrainingStateError, match=r"no eval model.*eval_model_uri"):
        module.eval()(X, Y)
    with pytest.raises(TrainingStateError, match=r"needs the eval model"):
        module.export_model_for_inferencing(tmp_path / "m.onnx", ["logits"])


def test_step_before_any_gradient(run, module):
    optimizer = Optimizer(run.optimizer.SerializeToString(), module)
    with pytest.raises(TrainingStateError, match=r"no gradients yet. Call the module in training mode"):
        optimizer.step()
    module.eval()(X, Y)
    with pytest.raises(TrainingStateError):
        optimizer.step()
    module.train()(X, Y)
    optimizer.step()
    assert optimizer.step_count == 1


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -0.1, "0.1", None, np.float32("nan")])
def test_a_learning_rate_that_is_no_finite_number_is_an_error(run, module, rate):
    optimizer = Optimizer(run.optimizer.SerializeToString(), module)
    with pytest.raises(InputError, match=r"learning rate must be a number from 0 to 3.403e\+38, received"):
        optimizer.set_learning_rate(rate)
    assert optimizer.get_learning_rate() == 1e-3


@pytest.mark.parametrize(("warmup", "total"), [(-1, 5), (6, 5), (0, 0), (1.5, 5), (True, 5), (2, None)])
def test_a_schedule_with_impossible_steps_is_an_error(run, module, warmup, total):
    optimizer = Optimizer(run.optimizer.SerializeToString(), module)
    with pytest.raises(InputError, match=r"0 <= warmup_step_count <= total_step_count"):
        LinearLRScheduler(optimizer, warmup, total, 1e-3)
    with pytest.raises(InputError, match=r"learning rate"):
        LinearLRScheduler(optimizer, 0, 5, float("nan"))


def test_checkpoint_of_another_model(run):
    other = handmade.mlp(hidden=5).state()
    with pytest.raises(
        CheckpointError,
        match=r"does not belong to .*'fc1.weight' is float32\[8, 4\] in the model and float32\[5, 4\]",
    ):
        Module(run.training.SerializeToString(), other)
    assert other.parameters["fc1.weight"].data.shape == (5, 4)
    missing = CheckpointState.from_arrays(
        {"fc1.weight": np.zeros((8, 4), np.float32), "q": X}, ["fc1.weight"]
    )
    with pytest.raises(
        CheckpointError, match=r"parameter 'fc1.bias' is missing from the checkpoint.*'q' is not in the model"
    ):
        Module(run.training.SerializeToString(), missing)
    with pytest.raises(CheckpointError, match=r"statistic 'bn.mean' is missing"):
        Module(handmade.batchnorm().training.SerializeToString(), handmade.scaled(np.float32).state())


def test_models_of_different_runs(run, module):
    other = handmade.mlp(hidden=5)
    with pytest.raises(ModelLoadError, match=r"eval model.*does not belong to the training model"):
        Module(run.training.SerializeToString(), run.state(), other.evaluation.SerializeToString())
    with pytest.raises(ModelLoadError, match=r"optimizer model.*does not belong"):
        Optimizer(other.optimizer.SerializeToString(), module)
    unfrozen = handmade.mlp(frozen=())
    with pytest.raises(ModelLoadError, match=r"trained or sparse in only one of the two.*: fc1\.bias\."):
        Optimizer(unfrozen.optimizer.SerializeToString(), module)


def test_models_in_the_wrong_place(run, module):
    with pytest.raises(ModelLoadError, match=r"Check that it is not another model of the run"):
        Module(run.optimizer.SerializeToString(), run.state())
    with pytest.raises(ModelLoadError, match=r"missing: .*fc1.weight_grad"):
        Module(run.evaluation.SerializeToString(), run.state())
    with pytest.raises(ModelLoadError, match=r"Check that it is not another model of the run"):
        Optimizer(run.training.SerializeToString(), module)
    without = handmade.mlp(optimizer=None)
    with pytest.raises(ModelLoadError, match=r"describes no optimizer"):
        Optimizer(without.training.SerializeToString(), module)


def test_optimizer_state_of_another_optimizer(run, module):
    optimizer = Optimizer(run.optimizer.SerializeToString(), module)
    module(X, Y)
    optimizer.step()
    sgd = handmade.mlp(optimizer=handmade.SGD)
    with pytest.raises(CheckpointError, match=r"does not fit.*\(SGD\) needs.*without optimizer state"):
        Optimizer(sgd.optimizer.SerializeToString(), module)


def test_missing_and_damaged_model_files_are_errors(run, tmp_path):
    state = run.state()
    content = run.training.SerializeToString()
    with pytest.raises(ModelLoadError, match=r"nothing.onnx'.*there is no such file"):
        Module(tmp_path / "nothing.onnx", state)
    for name, damaged in {
        "truncated": content[: len(content) // 2],
        "empty": b"",
        "garbage": b"garbage" * 9,
    }.items():
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(ModelLoadError, match=rf"Loading training model '.*{name}'"):
            Module(tmp_path / name, state)
    plain = onnx.load_from_string(content)
    del plain.metadata_props[:]
    with pytest.raises(ModelLoadError, match=r"has no metadata property 'onnxtrain.manifest'"):
        Module(plain.SerializeToString(), state)


@pytest.mark.parametrize(("kind", "opset", "ir_version"), [("opset", 99, 10), ("IR version", 21, 99)])
def test_model_newer_than_the_runtime(run, kind, opset, ir_version):
    run.training.ir_version = ir_version
    run.training.opset_import[0].version = opset
    with pytest.raises(
        ModelLoadError, match=rf"has {kind} 99, but this onnxruntime supports at most \d+\. Install"
    ):
        Module(run.training.SerializeToString(), run.state())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "manifest has version 3, but this onnxtrain reads versions up to 2"),
        ({"format": "other"}, "not a usable manifest"),
        (
            {"optimizer": {**handmade.ADAMW, "initial_values": [1.0]}},
            r"1 initial values for 2 moments",
        ),
        ({"parameters": None}, "not a usable manifest"),
        ({"inputs": [{"name": "x", "dtype": "complex64", "shape": []}]}, "dtype 'complex64' is not one of"),
    ],
)
def test_an_unusable_manifest_is_an_error(run, change, message):
    onnx.helper.set_model_props(run.training, {"onnxtrain.manifest": json.dumps({**run.manifest, **change})})
    with pytest.raises(ModelLoadError, match=message):
        Module(run.training.SerializeToString(), run.state())


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cpu:1", ""])
def test_an_unknown_device_is_an_error(run, device):
    with pytest.raises(InputError, match=f"Unknown device '{device}': expected 'cpu', 'cuda'"):
        Module("does not matter", run.state(), device=device)


@pytest.mark.skipif(
    "CUDAExecutionProvider" in ort.get_available_providers(), reason="this onnxruntime has CUDA"
)
def test_device_without_its_provider(run):
    with pytest.raises(
        InputError, match=r"'cuda:0' needs CUDAExecutionProvider.*has only.*Install onnxruntime-gpu"
    ):
        Module("does not matter", run.state(), device="cuda:0")


def test_buffers_of_the_wrong_kind(run, module):
    for bad in (np.zeros(58, np.float32), np.zeros((59, 1), np.float32), np.zeros(59), [0.0] * 59):
        with pytest.raises(InputError, match=r"expected float32\[59\] .*Is trainable_only=True meant"):
            module.copy_buffer_to_parameters(bad)


def test_buffers_of_mixed_dtypes():
    run = handmade.scaled(np.float32, half=np.zeros(2, np.float16))
    module = Module(run.training.SerializeToString(), run.state())
    assert module.get_contiguous_parameters(trainable_only=True).shape() == [4]
    for act in (
        module.get_contiguous_parameters,
        lambda: module.copy_buffer_to_parameters(X[0], trainable_only=False),
    ):
        with pytest.raises(InputError, match=r"parameters of one dtype; this selection has float16, float32"):
            act()


def test_wrong_kind_of_state(run):
    with pytest.raises(TypeError, match=r"state must be a CheckpointState, received str"):
        Module(run.training.SerializeToString(), "checkpoint")
    with pytest.raises(TypeError, match=r"load_checkpoint"):
        CheckpointState("checkpoint")
