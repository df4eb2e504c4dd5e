"""Module and Optimizer against numpy."""

from __future__ import annotations

import copy
import pickle
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest

from onnxtrain.api import CheckpointState, LinearLRScheduler, Module, Optimizer
from onnxtrain.errors import InputError
from onnxtrain.runtime import session
from runtime import handmade

TASKS = Path("/proc/self/task")


def build(run, **options):
    state = run.state()
    module = Module(run.training.SerializeToString(), state, run.evaluation.SerializeToString(), **options)
    return state, module


def with_optimizer(run):
    state, module = build(run)
    return state, module, Optimizer(run.optimizer.SerializeToString(), module)


def test_loss_outputs_and_gradients_match_numpy(batch):
    run = handmade.mlp()
    state, module = build(run)
    loss, logits = module(*batch)
    expected_loss, expected_logits, gradients = handmade.reference_mlp(run.parameters, *batch)
    assert loss.shape == ()
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    np.testing.assert_allclose(logits, expected_logits, rtol=1e-5, atol=1e-6)
    for name, parameter in state.parameters:
        if name == "fc1.bias":
            assert parameter.grad is None
        else:
            np.testing.assert_allclose(parameter.grad, gradients[name], rtol=1e-5, atol=1e-6)


def test_gradients_sum_until_the_lazy_reset_takes_effect(batch):
    run = handmade.mlp()
    state, module = build(run)
    x, labels = batch
    _, _, first = handmade.reference_mlp(run.parameters, x, labels)
    _, _, second = handmade.reference_mlp(run.parameters, x[::-1] * 2, labels)
    view = state.parameters["fc1.weight"].grad
    np.testing.assert_array_equal(view, 0)
    module(x, labels)
    module(np.ascontiguousarray(x[::-1] * 2), labels)
    summed = view.copy()
    np.testing.assert_allclose(summed, first["fc1.weight"] + second["fc1.weight"], rtol=1e-5, atol=1e-6)
    module.lazy_reset_grad()
    np.testing.assert_array_equal(view, summed)
    module(x, labels)
    np.testing.assert_allclose(view, first["fc1.weight"], rtol=1e-5, atol=1e-6)


def test_twenty_steps_of_adamw_match_numpy():
    run = handmade.mlp(frozen=())
    state, module, optimizer = with_optimizer(run)
    assert optimizer.get_learning_rate() == 1e-3
    optimizer.set_learning_rate(0.02)
    expected = {n: a.astype(np.float64) for n, a in run.parameters.items()}
    moments: dict = {}
    rng = np.random.default_rng(5)
    for step in range(1, 21):
        x, labels = rng.standard_normal((16, 4)).astype(np.float32), rng.integers(0, 3, 16)
        module(x, labels)
        optimizer.step()
        module.lazy_reset_grad()
        _, _, gradients = handmade.reference_mlp(expected, x, labels)
        handmade.reference_adamw(expected, gradients, moments, step, 0.02)
    for name, parameter in state.parameters:
        np.testing.assert_allclose(parameter.data, expected[name], rtol=0, atol=3e-6)
        assert np.abs(parameter.data - run.parameters[name]).max() > 0.05


def test_sgd_and_repeated_steps_use_the_gradients_that_are_there(batch):
    run = handmade.mlp(optimizer=handmade.SGD)
    state, module, optimizer = with_optimizer(run)
    optimizer.set_learning_rate(0.5)
    module(*batch)
    _, _, gradients = handmade.reference_mlp(run.parameters, *batch)
    optimizer.step()
    optimizer.step()
    for name in ("fc1.weight", "fc2.weight", "fc2.bias"):
        expected = run.parameters[name] - gradients[name]
        np.testing.assert_allclose(state.parameters[name].data, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(state.parameters["fc1.bias"].data, run.parameters["fc1.bias"])
    assert optimizer.step_count == 2


def test_batch_norm_statistics_follow_the_onnx_formula():
    run = handmade.batchnorm(momentum=0.9)
    state, module, optimizer = with_optimizer(run)
    mean, var = (run.statistics[n].astype(np.float64) for n in ("bn.mean", "bn.var"))
    rng = np.random.default_rng(2)
    for _ in range(5):
        x = rng.standard_normal((7, 3, 2)).astype(np.float32) * 2 + 1
        module(x, np.zeros_like(x))
        optimizer.step()
        mean = 0.9 * mean + 0.1 * x.mean((0, 2))
        var = 0.9 * var + 0.1 * x.var((0, 2))
        np.testing.assert_allclose(state.statistics["bn.mean"].data, mean, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(state.statistics["bn.var"].data, var, rtol=1e-6, atol=1e-6)
    scale = state.parameters["bn.weight"].data / np.sqrt(var + 1e-5)
    normalised = (x - mean[None, :, None]) * scale[None, :, None] + state.parameters["bn.bias"].data[
        None, :, None
    ]
    loss = module.eval()(x, np.zeros_like(x))
    np.testing.assert_allclose(loss, np.mean((normalised * state.parameters["a"].data) ** 2), rtol=1e-5)
    np.testing.assert_allclose(state.statistics["bn.mean"].data, mean, rtol=1e-6, atol=1e-6)


def test_statistics_are_found_among_the_parameters_by_name():
    """onnxruntime-training held those named in frozen_params there."""
    run = handmade.batchnorm()
    state, module, _ = with_optimizer(run)
    x = np.ones((7, 3, 2), np.float32)
    module(x, x)
    assert "bn.mean" in state.parameters
    mean = state.parameters["bn.mean"]
    assert not mean.requires_grad
    assert mean.grad is None
    np.testing.assert_array_equal(mean.data, state.statistics["bn.mean"].data)
    assert not np.array_equal(mean.data, run.statistics["bn.mean"])
    state.parameters["bn.mean"] = run.statistics["bn.mean"]
    np.testing.assert_array_equal(state.statistics["bn.mean"].data, run.statistics["bn.mean"])
    assert [name for name, _ in state.parameters] == list(run.parameters)
    assert len(state.parameters) == len(run.parameters)


def test_evaluation_changes_nothing_and_equals_the_training_loss_here(batch):
    run = handmade.mlp()
    state, module = build(run)
    assert module.train() is module
    trained = module(*batch)
    gradient = state.parameters["fc2.bias"].grad.copy()
    assert module.eval() is module
    assert not module.training
    evaluated = module(*batch)
    np.testing.assert_allclose(evaluated[0], trained[0], rtol=1e-6)
    np.testing.assert_array_equal(state.parameters["fc2.bias"].grad, gradient)


def test_parameter_data_is_live_in_both_directions(batch):
    run = handmade.mlp()
    state, module, optimizer = with_optimizer(run)
    view = state.parameters["fc2.bias"].data
    before = view.copy()
    module(*batch)
    optimizer.step()
    assert not np.array_equal(view, before)
    view[...] = 0
    state.parameters["fc2.weight"] = np.zeros((3, 8), np.float32)
    np.testing.assert_allclose(module(*batch)[0], np.log(3), rtol=1e-6)
    np.testing.assert_allclose(module.eval()(*batch)[0], np.log(3), rtol=1e-6)


def test_results_of_a_call_survive_the_next_call(batch):
    x, labels = batch
    _, module = build(handmade.mlp())
    _, logits = module(x, labels)
    kept = logits.copy()
    module(x * 3, labels)
    module.eval()(x[:2], labels[:2])
    np.testing.assert_array_equal(logits, kept)


def test_ort_values_in_give_ort_values_out(batch):
    _, module = build(handmade.mlp())
    arrays = module(*batch)
    values = module(*(ort.OrtValue.ortvalue_from_numpy(a) for a in batch))
    assert all(isinstance(v, ort.OrtValue) for v in values)
    np.testing.assert_array_equal(values[1].numpy(), arrays[1])
    single = build(handmade.mlp(extra_output=False))[1]
    assert isinstance(single(*batch), np.ndarray)
    assert isinstance(single(*(ort.OrtValue.ortvalue_from_numpy(a) for a in batch)), ort.OrtValue)


def test_inputs_need_be_neither_contiguous_nor_writable_nor_native(batch):
    x, labels = batch
    run = handmade.mlp()
    expected = build(run)[1](x, labels)[1]
    transposed = np.asfortranarray(x)
    read_only = labels.copy()
    read_only.flags.writeable = False
    np.testing.assert_array_equal(build(run)[1](transposed, read_only)[1], expected)
    np.testing.assert_array_equal(build(run)[1](x.astype(">f4"), labels.astype(">i8"))[1], expected)


def test_names_and_sizes():
    _, module = build(handmade.mlp())
    assert module.input_names() == ["x", "labels"]
    assert module.output_names() == ["loss", "logits"]
    assert module.get_parameters_size() == 32 + 24 + 3
    assert module.get_parameters_size(trainable_only=False) == 32 + 8 + 24 + 3


@pytest.mark.parametrize("trainable_only", [True, False])
def test_contiguous_buffer_round_trip_in_graph_order(trainable_only):
    run = handmade.mlp()
    state, module = build(run)
    buffer = module.get_contiguous_parameters(trainable_only)
    assert isinstance(buffer, ort.OrtValue)
    names = [n for n in run.parameters if not (trainable_only and n == "fc1.bias")]
    flat = np.concatenate([run.parameters[n].reshape(-1) for n in names])
    np.testing.assert_array_equal(buffer.numpy(), flat)
    module.copy_buffer_to_parameters(ort.OrtValue.ortvalue_from_numpy(flat * 2), trainable_only)
    for name, parameter in state.parameters:
        np.testing.assert_array_equal(parameter.data, run.parameters[name] * (2 if name in names else 1))
    module.copy_buffer_to_parameters(buffer, trainable_only)
    np.testing.assert_array_equal(state.parameters["fc1.weight"].data, run.parameters["fc1.weight"])


def test_contiguous_buffer_outlives_its_ort_value():
    run = handmade.mlp()
    flat = np.concatenate([array.reshape(-1) for array in run.parameters.values()])
    view = build(run)[1].get_contiguous_parameters().numpy()
    _reused = [np.full_like(flat, 7) for _ in range(50)]
    np.testing.assert_array_equal(view, flat)


@pytest.mark.parametrize(
    "dtype", [np.float16, np.float64, ml_dtypes.bfloat16], ids=["float16", "float64", "bfloat16"]
)
def test_other_parameter_dtypes(dtype, tmp_path):
    run = handmade.scaled(dtype)
    state, module = build(run)
    bits = run.parameters["w"].view(np.uint16) if dtype is ml_dtypes.bfloat16 else run.parameters["w"]
    np.testing.assert_array_equal(state.parameters["w"].data, bits)
    x = np.arange(8, dtype=np.float32).reshape(2, 4) / 4
    target = np.ones_like(x)
    w = run.parameters["w"].astype(np.float32)
    np.testing.assert_allclose(module(x, target), np.mean((x * w - 1) ** 2), rtol=1e-6)
    gradient = (2 / 8 * (x * w - 1) * x).sum(0).astype(dtype)
    module(x, target)  # added to the first
    grad = state.parameters["w"].grad
    np.testing.assert_array_equal(grad.view(dtype).astype(np.float64), 2 * gradient.astype(np.float64))
    CheckpointState.save_checkpoint(state, tmp_path / "c")
    again = CheckpointState.load_checkpoint(tmp_path / "c")
    np.testing.assert_array_equal(again.parameters["w"].data, bits)
    assert repr(again.parameters) == f"Parameters({{'w': {np.dtype(dtype).name}[4]}})"
    assert module.get_contiguous_parameters().numpy().nbytes == bits.nbytes
    state.parameters["w"] = np.zeros(4, dtype)
    np.testing.assert_allclose(module.eval()(x, target), 1.0)


def test_bfloat16_addition_rounds_like_ml_dtypes():
    from onnxtrain.runtime import dtypes

    rng = np.random.default_rng(0)
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 3.3e38, 1e-40]
    a, b = (
        np.concatenate([rng.standard_normal(1000) * 10 ** rng.uniform(-3, 3, 1000), s])
        for s in (special, special[::-1])
    )
    a, b = a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16)
    with np.errstate(all="ignore"):
        expected = a + b
        total = a.view(np.uint16).copy()
        dtypes.add_inplace(total, b.view(np.uint16), dtypes.BY_NAME["bfloat16"])
    np.testing.assert_array_equal(
        total.view(ml_dtypes.bfloat16).astype(np.float32), expected.astype(np.float32)
    )


def test_linear_schedule_is_the_documented_one(batch):
    _, module, optimizer = with_optimizer(handmade.mlp())
    scheduler = LinearLRScheduler(optimizer, warmup_step_count=3, total_step_count=10, initial_lr=1e-3)
    rates = [optimizer.get_learning_rate()]
    for _ in range(11):
        module(*batch)
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.get_learning_rate())
    documented = [0, 3.33e-4, 6.67e-4, 1e-3, 8.57e-4, 7.14e-4, 5.71e-4, 4.29e-4, 2.86e-4, 1.43e-4, 0, 0]
    np.testing.assert_allclose(rates, documented, atol=5e-7)


def test_schedule_without_warm_up_or_decay(batch):
    _, _, optimizer = with_optimizer(handmade.mlp())
    LinearLRScheduler(optimizer, 0, 4, 0.5)
    assert optimizer.get_learning_rate() == 0.5
    LinearLRScheduler(optimizer, 4, 4, 0.5)
    assert optimizer.get_learning_rate() == 0.0


def test_moments_start_from_their_initial_values(batch):
    run = handmade.mlp(optimizer={**handmade.ADAMW, "initial_values": [0.0, 4.0]})
    state, module, optimizer = with_optimizer(run)
    module(*batch)
    optimizer.step()
    _, _, gradients = handmade.reference_mlp(run.parameters, *batch)
    expected = {n: run.parameters[n].astype(np.float64) for n in ("fc1.weight", "fc2.weight", "fc2.bias")}
    used = {n: gradients[n] for n in expected}
    handmade.reference_adamw(expected, used, {n: [0 * g, 0 * g + 4] for n, g in used.items()}, 1, 1e-3)
    for name, value in expected.items():
        np.testing.assert_allclose(state.parameters[name].data, value, rtol=2e-7, atol=1e-7)
        assert np.abs(value - run.parameters[name]).max() < 1e-4  # a moment of zero moves them by 1e-3


def test_modules_on_one_state_share_parameters_and_gradients(batch):
    run = handmade.mlp()
    state, first = build(run)
    second = Module(run.training.SerializeToString(), state)
    first(*batch)
    gradient = state.parameters["fc2.bias"].grad.copy()
    second(*batch)  # its first call replaces
    np.testing.assert_array_equal(state.parameters["fc2.bias"].grad, gradient)
    state.parameters["fc2.bias"].data[...] += 1
    np.testing.assert_array_equal(first(*batch)[1], second(*batch)[1])


@pytest.mark.parametrize("own", [None, "0"])
def test_threads_rest_between_runs_unless_the_options_say_otherwise(own):
    key = "session.force_spinning_stop"
    run = handmade.mlp()
    options = ort.SessionOptions()
    if own is not None:
        options.add_session_config_entry(key, own)
    module = Module(run.training.SerializeToString(), run.state(), session_options=options)
    used = module._session.get_session_options()
    assert used.get_session_config_entry(key) == (own or "1")
    assert not used.enable_mem_pattern


def _processor_time(threads):
    """Returns the nanoseconds that threads of this process have computed, once all of them are asleep.

    However busy the machine is: a thread that looks for work is not asleep while it waits for a processor.
    """
    asleep, times = 0, []
    while asleep < 20:
        states = [(TASKS / thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in threads]
        now = [int((TASKS / thread / "schedstat").read_text().split()[0]) for thread in threads]
        asleep = asleep + 1 if set(states) <= {"S"} and now == times else 0
        times = now
        time.sleep(0.001)
    return sum(times)


@pytest.mark.skipif(not TASKS.exists(), reason="looks at the threads in /proc")
def test_threads_of_a_new_session_rest():
    """They start by looking for work, which takes a core for some 35 ms each."""
    training = handmade.mlp().training.SerializeToString()

    def spent(rest):
        """Processor time of the threads of a new session, until they are asleep."""
        before = {path.name for path in TASKS.iterdir()}
        options = ort.SessionOptions()
        options.intra_op_num_threads = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "1")
        options.add_session_config_entry("session.force_spinning_stop", "1")
        opened = ort.InferenceSession(training, options)
        rest(opened)
        return _processor_time({path.name for path in TASKS.iterdir()} - before)

    looking = max(spent(lambda opened: None) for _ in range(3))
    assert min(spent(session.rest_threads) for _ in range(3)) < looking / 2


def test_training_and_evaluation_begin_with_threads_at_rest(monkeypatch):
    rested = []
    monkeypatch.setattr(session, "rest_threads", rested.append)
    _, module = build(handmade.mlp())
    assert rested == [module._session, module._eval_session]


def test_session_options_are_used(batch, tmp_path):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    run = handmade.mlp()
    module = Module(run.training.SerializeToString(), run.state(), session_options=options)
    assert np.isfinite(module(*batch)[0])
    assert (tmp_path / "optimized.onnx").exists()


def test_masked_values_are_refused(batch):
    run = handmade.mlp()
    state, module = build(run)
    x, labels = batch
    plain = module(np.ma.array(x), labels)
    np.testing.assert_array_equal(plain[0], module(x, labels)[0])
    with pytest.raises(
        InputError, match=r"Input '.*': values are missing: 1 of .* are masked, the first at index"
    ):
        module(np.ma.masked_equal(x, x[1, 0]), labels)
    module.eval()
    with pytest.raises(InputError, match="values are missing"):
        module(x, np.ma.array(labels, mask=np.arange(len(labels)) == 1))
    name, parameter = next(iter(state.parameters))
    with pytest.raises(InputError, match=f"Setting parameter '{name}': values are missing"):
        parameter.data = np.ma.array(parameter.data, mask=True)
    with pytest.raises(InputError, match="Tensor 'w': values are missing"):
        CheckpointState.from_arrays({"w": np.ma.array(np.ones(2, np.float32), mask=[0, 1])}, ["w"])


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_trains_is_neither_copied_nor_pickled(how):
    state, module, optimizer = with_optimizer(handmade.mlp())
    for original in (state, module, optimizer, LinearLRScheduler(optimizer, 0, 10, 0.1)):
        with pytest.raises(
            TypeError, match=f"A {type(original).__name__} can be neither copied nor pickled.*load_check"
        ):
            how(original)
    # A parameter is a view, like that of an array; what has tensors of its own would need all of the state.
    _, parameter = next(iter(state.parameters))
    if how is copy.copy:
        assert how(parameter).data is parameter.data
    else:
        with pytest.raises(TypeError, match="A CheckpointState can be neither copied nor pickled"):
            how(parameter)
