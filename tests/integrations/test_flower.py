"""Federated learning with Flower: `onnxtrain.integrations.flower`."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

pytest.importorskip("flwr", reason="Flower is not installed")

from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAdam, FedAvg

from integrations.local_grid import LocalGrid
from onnxtrain import generate_artifacts, per_sample_gradients
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.integrations.flower import (
    CheckedStrategy,
    ClientData,
    SamplePrivacy,
    apply_arrays,
    client_app,
    run_federation,
    spent_epsilon,
    trained_arrays,
)
from onnxtrain.integrations.flower._privacy import private_step

CLIENTS = 5


def network() -> onnx.ModelProto:
    """64 pixels, 32 hidden units, 10 classes."""
    random = np.random.default_rng(0)

    def weight(name: str, outputs: int, inputs: int) -> onnx.TensorProto:
        bound = 1 / math.sqrt(inputs)
        return numpy_helper.from_array(random.uniform(-bound, bound, (outputs, inputs)).astype("f"), name)

    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["hidden"], transB=1),
        helper.make_node("Relu", ["hidden"], ["positive"]),
        helper.make_node("Gemm", ["positive", "w2", "b2"], ["logits"], transB=1),
    ]
    biases = [numpy_helper.from_array(np.zeros(n, "f"), name) for name, n in (("b1", 32), ("b2", 10))]
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 10])],
        [weight("w1", 32, 64), weight("w2", 10, 32), *biases],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts")
    generate_artifacts(
        network(),
        loss="cross_entropy",
        optimizer="sgd",
        artifact_directory=folder,
        additional_output_names=["logits"],
    )
    return folder


@pytest.fixture(scope="module")
def digits() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 16).astype("f"), y[order].astype(np.int64)
    return {"train": (x[:1400], y[:1400]), "test": (x[1400:], y[1400:])}


def by_labels(y: np.ndarray, seed: int = 0) -> list[np.ndarray]:
    """Rows of each of five clients, skewed by labels: of each class they have shares drawn from Dirichlet(0.5)."""
    random = np.random.default_rng(seed)
    rows: list[list[int]] = [[] for _ in range(CLIENTS)]
    for label in range(10):
        of_label = np.flatnonzero(y == label)
        shares = random.dirichlet(np.full(CLIENTS, 0.5))
        ends = (np.cumsum(shares) * len(of_label)).round().astype(int)
        for client, part in enumerate(np.split(of_label, ends[:-1])):
            rows[client] += part.tolist()
    return [np.array(sorted(r)) for r in rows]


def accuracy(outputs: Any, targets: Any) -> float:
    return float((outputs[0].argmax(1) == targets[0]).mean())


def loaded(folder: Path) -> tuple[CheckpointState, Module]:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    return state, Module(str(folder / "training_model.onnx"), state, str(folder / "eval_model.onnx"))


def values(state: CheckpointState) -> dict[str, np.ndarray]:
    return {name: parameter.data.copy() for name, parameter in state.parameters}


def full(strategy: type = FedAvg, **options: Any) -> Any:
    """A strategy that asks all clients in each round."""
    return strategy(min_available_nodes=CLIENTS, min_train_nodes=1, min_evaluate_nodes=1, **options)


def test_one_round_is_the_weighted_average_of_what_each_client_trains(artifacts: Path, digits: Any) -> None:
    x, y = digits["train"]
    rows = by_labels(y)
    parts = [(x[r], y[r]) for r in rows]
    app = client_app(
        artifacts,
        lambda context: ClientData(parts[context.node_config["partition-id"]]),
        batch_size=len(x),
        learning_rate=0.5,
    )
    run = run_federation(LocalGrid(app, CLIENTS), artifacts, full(fraction_evaluate=0.0), rounds=1)

    # The same in numpy, in float64: one step of each client with all of its samples, then the average.
    initial = values(loaded(artifacts)[0])
    average = {name: np.zeros(value.shape) for name, value in initial.items()}
    losses = []
    for xs, ys in parts:
        loss, gradients = loss_and_gradients(initial, xs, ys)
        losses.append(loss)
        for name, gradient in gradients.items():
            average[name] += len(xs) / len(x) * (initial[name] - 0.5 * gradient)
    for name, value in values(run.state).items():
        np.testing.assert_allclose(value, average[name], atol=2e-6)
    mean = sum(loss * len(r) for loss, r in zip(losses, rows, strict=True)) / len(x)
    assert run.train[1]["loss"] == pytest.approx(mean, rel=1e-5)


def loss_and_gradients(
    parameters: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray
) -> tuple[float, dict[str, np.ndarray]]:
    """Mean cross entropy and its gradients, written in numpy."""
    p = {name: value.astype(np.float64) for name, value in parameters.items()}
    x = x.astype(np.float64)
    hidden = x @ p["w1"].T + p["b1"]
    positive = np.maximum(hidden, 0)
    logits = positive @ p["w2"].T + p["b2"]
    scores = np.exp(logits - logits.max(1, keepdims=True))
    scores /= scores.sum(1, keepdims=True)
    loss = -np.log(scores[np.arange(len(y)), y]).mean()
    scores[np.arange(len(y)), y] -= 1
    d_logits = scores / len(y)
    d_hidden = (d_logits @ p["w2"]) * (hidden > 0)
    return float(loss), {
        "w1": d_hidden.T @ x,
        "b1": d_hidden.sum(0),
        "w2": d_logits.T @ positive,
        "b2": d_logits.sum(0),
    }


def test_digits_by_label_skew_are_within_two_points_of_pooled_training(
    artifacts: Path, digits: Any, tmp_path: Path
) -> None:
    (x, y), (test_x, test_y) = digits["train"], digits["test"]
    rows = by_labels(y)
    app = client_app(
        artifacts,
        lambda context: ClientData(
            (x[rows[context.node_config["partition-id"]]], y[rows[context.node_config["partition-id"]]]),
            (test_x[:100], test_y[:100]),
        ),
        batch_size=16,
        learning_rate=0.3,
        metrics={"accuracy": accuracy},
    )
    run = run_federation(
        LocalGrid(app, CLIENTS),
        artifacts,
        full(),
        rounds=30,
        output=tmp_path,
        evaluation=(test_x, test_y),
        metrics={"accuracy": accuracy},
    )

    _, module = loaded(artifacts)
    optimizer = Optimizer(str(artifacts / "optimizer_model.onnx"), module)
    optimizer.set_learning_rate(0.3)
    random = np.random.default_rng(0)
    for _ in range(30):
        order = random.permutation(len(x))
        for start in range(0, len(x), 16):
            module.train()
            module(x[order[start : start + 16]], y[order[start : start + 16]])
            optimizer.step()
            module.lazy_reset_grad()
    module.eval()
    pooled = accuracy([module(test_x, test_y)[1]], [test_y])
    assert pooled > 0.95
    assert run.server[30]["accuracy"] > pooled - 0.02
    assert run.server[0]["accuracy"] < 0.3

    # What was written is the averaged model, and evaluates to what was reported.
    base = artifacts / "checkpoint"
    for saved in (
        CheckpointState.load_checkpoint(tmp_path / "checkpoint"),
        CheckpointState.load_checkpoint(base, delta=tmp_path / "checkpoint.delta"),
    ):
        for name, value in values(saved).items():
            np.testing.assert_array_equal(value, values(run.state)[name])
    p = values(run.state)
    loss, _ = loss_and_gradients(p, test_x, test_y)
    logits = np.maximum(test_x @ p["w1"].T + p["b1"], 0) @ p["w2"].T + p["b2"]
    assert run.server[30]["loss"] == pytest.approx(loss, rel=1e-4)
    assert run.server[30]["accuracy"] == (logits.argmax(1) == test_y).mean()
    assert run.clients[30]["accuracy"] == pytest.approx((logits[:100].argmax(1) == test_y[:100]).mean())


def test_a_client_that_dies_changes_nothing_but_the_size_of_the_round(artifacts: Path, digits: Any) -> None:
    x, y = digits["train"]

    def data(context: Any) -> ClientData:
        start = context.node_config["partition-id"] * 100
        return ClientData((x[start : start + 100], y[start : start + 100]))

    def dying(client: int, answer: Message) -> Message:
        if client == 4:
            raise ConnectionError("the battery is empty")
        return answer

    app = client_app(artifacts, data, batch_size=16, learning_rate=0.2)
    grid = LocalGrid(app, CLIENTS, dying)
    died = run_federation(grid, artifacts, full(fraction_evaluate=0.0), rounds=2)
    without = run_federation(LocalGrid(app, 4), artifacts, full_of(4), rounds=2)
    assert grid.errors == ["ConnectionError: the battery is empty"] * 2
    # Flower asks the clients in an order that it draws, and sums in it.
    for number in (1, 2):
        assert died.train[number] == pytest.approx(without.train[number], rel=1e-6)
    for name, value in values(died.state).items():
        np.testing.assert_allclose(value, values(without.state)[name], atol=1e-6)


HOSTILE = {
    "wrong shape": (lambda r: _with_array(r, "w1", np.zeros((64, 32), "f")), r"'w1' has shape \[64, 32\]"),
    "scalar": (lambda r: _with_array(r, "b1", np.zeros((), "f")), r"'b1' has shape \[\]"),
    "NaN": (
        lambda r: _with_array(r, "b2", np.full(10, np.nan, "f")),
        r"'b2' holds NaN or infinity in 10 of 10",
    ),
    "infinity": (lambda r: _with_array(r, "b2", np.full(10, np.inf, "f")), "NaN or infinity"),
    "float64": (lambda r: _with_array(r, "b2", np.zeros(10)), "'b2' is float64, expected float32"),
    "extra": (lambda r: _with_array(r, "w3", np.zeros(2, "f")), r"it has \['w3'\], which are not trained"),
    "no arrays": (lambda r: r.pop("arrays"), "0 records of arrays"),
    "unreadable": (
        lambda r: r["arrays"].__setitem__(
            "w1",
            FlowerArray(np.zeros((32, 64), "f")).__class__("float32", (32, 64), "numpy.ndarray", b"\x00" * 9),
        ),
        "cannot be read",
    ),
    "lacking": (lambda r: r["arrays"].pop("w1"), r"it lacks \['w1'\]"),
    "another model": (
        lambda r: r.__setitem__("config", ConfigRecord({"onnxtrain-fingerprint": "0123"})),
        "another model, with the fingerprint '0123'",
    ),
    "negative weight": (lambda r: r.__setitem__("metrics", MetricRecord({"num-examples": -5})), "is -5"),
    "no weight": (lambda r: r.__setitem__("metrics", MetricRecord({"loss": 1.0})), "is None"),
    "NaN weight": (lambda r: r.__setitem__("metrics", MetricRecord({"num-examples": math.nan})), "is nan"),
    "infinite weight": (
        lambda r: r.__setitem__("metrics", MetricRecord({"num-examples": math.inf})),
        "is inf",
    ),
    "too heavy": (
        lambda r: r.__setitem__("metrics", MetricRecord({"num-examples": 10**9})),
        "expected a whole number from 1 to 1000",
    ),
    "NaN loss": (
        lambda r: r.__setitem__("metrics", MetricRecord({"num-examples": 50, "loss": math.nan})),
        "its metric 'loss' is nan",
    ),
}


def _with_array(record: RecordDict, name: str, array: np.ndarray) -> None:
    record["arrays"][name] = FlowerArray(array)


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_update_is_refused_and_named(artifacts: Path, digits: Any, kind: str) -> None:
    change, reason = HOSTILE[kind]
    x, y = digits["train"]

    def data(context: Any) -> ClientData:
        return ClientData((x[:50], y[:50]))

    def hostile(client: int, answer: Message) -> Message:
        if client == 3:
            change(answer.content)
        return answer

    app = client_app(artifacts, data, batch_size=50, learning_rate=0.2)
    honest = run_federation(LocalGrid(app, 4), artifacts, full_of(4), rounds=1)
    attacked = run_federation(LocalGrid(app, 4, hostile), artifacts, full_of(4), rounds=1, max_examples=1000)
    (refused,) = attacked.refused
    assert (refused.round, refused.node, refused.stage) == (1, 1003, "train")
    assert re.search(reason, refused.reason), refused.reason
    # All honest clients have the same data and one step, so that the average of three is that of four.
    for name, value in values(attacked.state).items():
        np.testing.assert_allclose(value, values(honest.state)[name], atol=1e-6)


def full_of(clients: int) -> FedAvg:
    return FedAvg(min_available_nodes=clients, fraction_evaluate=0.0)


def test_a_round_without_any_answer_keeps_the_model(artifacts: Path, digits: Any) -> None:
    def nobody(client: int, answer: Message) -> Message:
        raise ConnectionError

    x, y = digits["train"]
    app = client_app(artifacts, lambda context: ClientData((x[:50], y[:50])))
    run = run_federation(LocalGrid(app, 2, nobody), artifacts, full_of(2), rounds=2)
    assert run.train == {}
    for name, value in values(loaded(artifacts)[0]).items():
        np.testing.assert_array_equal(value, values(run.state)[name])


def test_the_server_sets_epochs_batch_size_and_rate(artifacts: Path, digits: Any) -> None:
    x, y = digits["train"]
    data = ClientData((x[:64], y[:64]))
    sent = run_federation(
        LocalGrid(client_app(artifacts, lambda context: data), 2),
        artifacts,
        full_of(2),
        rounds=1,
        train_config={"epochs": 3, "batch-size": 16, "learning-rate": 0.1},
    )
    own = client_app(artifacts, lambda context: data, epochs=3, batch_size=16, learning_rate=0.1)
    want = run_federation(LocalGrid(own, 2), artifacts, full_of(2), rounds=1)
    assert sent.train[1] == pytest.approx(want.train[1], rel=1e-6)
    # Three epochs train more than one.
    one = run_federation(
        LocalGrid(client_app(artifacts, lambda context: data, batch_size=16, learning_rate=0.1), 2),
        artifacts,
        full_of(2),
        rounds=1,
    )
    assert sent.train[1]["loss"] < one.train[1]["loss"]


@pytest.mark.parametrize(
    "strategy",
    [
        full(FedAdam, fraction_evaluate=0.0),
        DifferentialPrivacyServerSideFixedClipping(
            full(fraction_evaluate=0.0), noise_multiplier=1e-6, clipping_norm=5.0, num_sampled_clients=CLIENTS
        ),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_other_strategies_learn(artifacts: Path, digits: Any, strategy: Any) -> None:
    x, y = digits["train"]

    def data(context: Any) -> ClientData:
        start = context.node_config["partition-id"] * 280
        return ClientData((x[start : start + 280], y[start : start + 280]))

    app = client_app(artifacts, data, batch_size=16, learning_rate=0.2)
    run = run_federation(
        LocalGrid(app, CLIENTS),
        artifacts,
        strategy,
        rounds=8,
        evaluation=digits["test"],
        metrics={"accuracy": accuracy},
    )
    assert run.server[8]["accuracy"] > 0.8
    assert not run.refused


def test_a_client_without_samples_for_evaluation_is_left_out(artifacts: Path, digits: Any) -> None:
    x, y = digits["train"]

    def data(context: Any) -> ClientData:
        test = (x[:80], y[:80]) if context.node_config["partition-id"] == 0 else ()
        return ClientData((x[:50], y[:50]), test)

    run = run_federation(
        LocalGrid(client_app(artifacts, data), 3), artifacts, FedAvg(min_available_nodes=3), rounds=1
    )
    p = values(run.state)
    loss, _ = loss_and_gradients(p, x[:80], y[:80])
    assert run.clients[1] == {"loss": pytest.approx(loss, rel=1e-5)}
    assert not run.refused


def test_artifacts_of_another_model_are_refused_by_the_client(
    artifacts: Path, digits: Any, tmp_path: Path
) -> None:
    other = network()
    other.graph.initializer[0].name = "renamed"
    other.graph.node[0].input[1] = "renamed"
    generate_artifacts(other, loss="cross_entropy", optimizer="sgd", artifact_directory=tmp_path)
    x, y = digits["train"]
    grid = LocalGrid(client_app(tmp_path, lambda context: ClientData((x[:9], y[:9]))), 2)
    run = run_federation(grid, artifacts, full_of(2), rounds=1)
    assert run.train == {}
    assert all("Install the server's artifacts" in error for error in grid.errors)
    assert len(grid.errors) == 2


def test_artifacts_with_a_prefix_are_found(artifacts: Path, digits: Any, tmp_path: Path) -> None:
    folder = tmp_path / "prefixed"
    generate_artifacts(
        network(), loss="cross_entropy", optimizer="sgd", artifact_directory=folder, prefix="digits_"
    )
    assert not (folder / "manifest.json").exists()
    x, y = digits["train"]

    def train(client: Path, server: Path) -> dict[str, np.ndarray]:
        grid = LocalGrid(client_app(client, lambda context: ClientData((x[:90], y[:90]))), 2)
        run = run_federation(grid, server, full_of(2), rounds=1)
        assert run.train, grid.errors
        return values(run.state)

    expected = train(artifacts, artifacts)
    assert any((expected[name] != value).any() for name, value in values(loaded(artifacts)[0]).items())
    for client, server in ((folder, artifacts), (artifacts, folder), (folder, folder)):
        for name, array in train(client, server).items():
            np.testing.assert_array_equal(array, expected[name], err_msg=name)
    # Two models in one folder: which one is meant nobody can say.
    generate_artifacts(
        network(), loss="cross_entropy", optimizer="sgd", artifact_directory=folder, prefix="other_"
    )
    with pytest.raises(
        CheckpointError, match=r"several runs \(digits_manifest\.json, other_manifest\.json\)"
    ):
        run_federation(LocalGrid(None, 1), folder, full_of(1), rounds=1)


def test_errors_say_what_to_do(artifacts: Path, digits: Any, tmp_path: Path) -> None:
    x, y = digits["train"]
    with pytest.raises(CheckpointError, match="not a directory written by generate_artifacts"):
        run_federation(LocalGrid(None, 1), tmp_path, FedAvg(), rounds=1)
    with pytest.raises(InputError, match="rounds must be a positive integer, received 0"):
        run_federation(LocalGrid(None, 1), artifacts, FedAvg(), rounds=0)
    with pytest.raises(InputError, match="batch_size must be a positive integer, received 0"):
        client_app(artifacts, lambda context: ClientData(()), batch_size=0)
    with pytest.raises(InputError, match=r"expected a strategy of flwr\.serverapp\.strategy"):
        run_federation(LocalGrid(None, 1), artifacts, "fedavg", rounds=1)
    for wrong, message in (
        ((x[:3],), "must hold 2 arrays"),
        ((x[:3], y[:4]), "same number of samples"),
        ((x[:0], y[:0]), "at least one"),
        ((x[:3].astype("f8"), y[:3]), "received dtype float64"),
        ((x[:3], y[:3] + 10), "class labels must be 0 to 9"),
    ):
        grid = LocalGrid(client_app(artifacts, lambda context, wrong=wrong: ClientData(wrong)), 1)
        run_federation(grid, artifacts, FedAvg(1, 0.0, 1, 0, 1), rounds=1)
        assert message in grid.errors[0]


def test_arrays_of_half_precision_travel_as_float32(tmp_path: Path) -> None:
    import ml_dtypes

    w = np.array([1.0, 2.5, -3.0]).astype(ml_dtypes.bfloat16)
    state = CheckpointState.from_arrays({"w": w, "h": np.ones(2, np.float16)}, trainable=["w", "h"])
    record = trained_arrays(state)
    np.testing.assert_array_equal(record["w"].numpy(), np.array([1.0, 2.5, -3.0], "f"))
    apply_arrays(
        state,
        ArrayRecord({"w": FlowerArray(np.array([4.0, 5.0, 6.5], "f")), "h": FlowerArray(np.zeros(2, "f"))}),
    )
    np.testing.assert_array_equal(
        state.parameters["w"].data.view(ml_dtypes.bfloat16).astype("f"), [4.0, 5.0, 6.5]
    )
    assert state.parameters["h"].data.dtype == np.float16


def test_gradients_of_samples_are_clipped_and_noised(artifacts: Path, digits: Any) -> None:
    x, y = digits["train"]
    x, y = x[:12], y[:12]
    state, module = loaded(artifacts)
    module.train()
    privacy = SamplePrivacy(noise_multiplier=0.5, clip_norm=0.7)
    loss, count = private_step(module, state, (x, y), np.arange(12), 12, privacy, np.random.default_rng(3))

    # The same from numpy's gradients of single samples, and the noise of the same generator.
    p = values(state)
    each = [loss_and_gradients(p, x[i : i + 1], y[i : i + 1]) for i in range(12)]
    norms = [math.sqrt(sum((g**2).sum() for g in gradients.values())) for _, gradients in each]
    assert min(norms) > 0.7  # so that all are clipped
    random = np.random.default_rng(3)
    for name, parameter in state.parameters:
        total = sum(0.7 / norm * gradients[name] for norm, (_, gradients) in zip(norms, each, strict=True))
        want = (total + random.normal(0, 0.35, total.shape)) / 12
        np.testing.assert_allclose(parameter.grad, want, atol=1e-6)
    assert (loss, count) == (pytest.approx(np.mean([one for one, _ in each]), rel=1e-5), 12)


def test_gradients_of_samples_are_those_of_per_sample_gradients(artifacts: Path, digits: Any) -> None:
    import onnxruntime

    x, y = digits["train"]
    x, y = x[:5], y[:5]
    training = network()
    training.graph.input.append(helper.make_tensor_value_info("labels", TensorProto.INT64, ["n"]))
    training.graph.node.append(helper.make_node("SoftmaxCrossEntropyLoss", ["logits", "labels"], ["loss"]))
    training.graph.output.append(helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))
    names = ["w1", "w2", "b1", "b2"]
    model = per_sample_gradients(training, "loss", names)
    _, *gradients = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x, "labels": y})
    state, module = loaded(artifacts)
    module.train()
    privacy = SamplePrivacy(noise_multiplier=1e-12, clip_norm=1e6)
    private_step(module, state, (x, y), np.arange(5), 5, privacy, np.random.default_rng(0))
    for name, per_sample in zip(names, gradients, strict=True):
        np.testing.assert_allclose(state.parameters[name].grad, per_sample.mean(0), atol=1e-6)


def test_a_batch_without_samples_is_noise_alone(artifacts: Path, digits: Any) -> None:
    x, y = digits["train"]
    state, module = loaded(artifacts)
    module.train()
    privacy = SamplePrivacy(noise_multiplier=2.0, clip_norm=0.5)
    rows = np.arange(0)
    result = private_step(module, state, (x[:3], y[:3]), rows, 4, privacy, np.random.default_rng(1))
    assert result == (0.0, 0.0)
    noise = np.random.default_rng(1)
    for _, parameter in state.parameters:
        want = noise.normal(0, 1.0, parameter.data.shape) / 4
        np.testing.assert_allclose(parameter.grad, want, atol=1e-7)


def test_private_training_learns_and_reports_what_it_spent(artifacts: Path, digits: Any) -> None:
    x, y = digits["train"]
    privacy = SamplePrivacy(noise_multiplier=0.8, clip_norm=1.0, delta=1e-4)

    def data(context: Any) -> ClientData:
        start = context.node_config["partition-id"] * 280
        return ClientData((x[start : start + 280], y[start : start + 280]))

    app = client_app(artifacts, data, batch_size=28, learning_rate=0.5, privacy=privacy)
    run = run_federation(
        LocalGrid(app, CLIENTS),
        artifacts,
        full(fraction_evaluate=0.0),
        rounds=4,
        evaluation=digits["test"],
        metrics={"accuracy": accuracy},
    )
    assert run.server[4]["accuracy"] > 0.4
    # Ten batches an epoch, each sample in one of ten.
    for number in range(1, 5):
        assert run.train[number] == {"epsilon": pytest.approx(spent_epsilon(10 * number, 0.1, 0.8, 1e-4))}


def test_epsilon_is_that_of_the_renyi_accountant() -> None:
    # Computed by the formula of Mironov et al. 2019 for integer orders, and the conversion of Balle et al. 2020.
    steps, rate, noise, delta = 1000, 0.01, 1.1, 1e-5
    best = math.inf
    for order in range(2, 64):
        terms = [
            math.lgamma(order + 1)
            - math.lgamma(k + 1)
            - math.lgamma(order - k + 1)
            + k * math.log(rate)
            + (order - k) * math.log1p(-rate)
            + (k * k - k) / (2 * noise**2)
            for k in range(order + 1)
        ]
        top = max(terms)
        renyi = steps * (top + math.log(sum(math.exp(t - top) for t in terms))) / (order - 1)
        best = min(best, renyi + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1))
    # The accountant tries orders between the integers, too.
    assert spent_epsilon(steps, rate, noise, delta) == pytest.approx(best, rel=0.02)
    assert spent_epsilon(steps, rate, noise, delta) <= best + 1e-9
    assert spent_epsilon(0, rate, noise, delta) == 0.0


@pytest.mark.parametrize(
    "wrong", [{"noise_multiplier": 0.0}, {"clip_norm": -1.0}, {"delta": 1.0}, {"noise_multiplier": math.nan}]
)
def test_settings_of_privacy_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        SamplePrivacy(**({"noise_multiplier": 1.0, "clip_norm": 1.0} | wrong))


def test_private_training_refuses_batch_norm(tmp_path: Path, digits: Any) -> None:
    model = network()
    model.graph.node[1].output[0] = "active"
    model.graph.node.insert(
        2, helper.make_node("BatchNormalization", ["active", "scale", "shift", "mean", "var"], ["positive"])
    )
    model.graph.initializer.extend(
        numpy_helper.from_array(np.full(32, value, "f"), name)
        for name, value in (("scale", 1), ("shift", 0), ("mean", 0), ("var", 1))
    )
    generate_artifacts(
        model, loss="cross_entropy", optimizer="sgd", artifact_directory=tmp_path, batch_norm="training"
    )
    x, y = digits["train"]
    data = ClientData((x[:20], y[:20]))
    private = client_app(tmp_path, lambda context: data, privacy=SamplePrivacy(1.0, 1.0))
    grid = LocalGrid(private, 1)
    run_federation(grid, tmp_path, FedAvg(1, 0.0, 1, 0, 1), rounds=1)
    assert "BatchNorm" in grid.errors[0]
    # Without privacy its running statistics are averaged as the parameters are.
    run = run_federation(
        LocalGrid(client_app(tmp_path, lambda context: data), 2), tmp_path, full_of(2), rounds=1
    )
    assert not np.array_equal(run.state.statistics["mean"].data, np.zeros(32))


def test_an_adapter_is_all_that_travels(tmp_path: Path, digits: Any) -> None:
    from onnxtrain.lora import LoraConfig

    generate_artifacts(
        network(),
        loss="cross_entropy",
        optimizer="sgd",
        artifact_directory=tmp_path,
        additional_output_names=["logits"],
        lora=LoraConfig(r=2),
    )
    state, _ = loaded(tmp_path)
    record = trained_arrays(state)
    assert sum(array.numpy().size for array in record.values()) == 2 * (64 + 32) + 2 * (32 + 10)
    x, y = digits["train"]
    app = client_app(tmp_path, lambda context: ClientData((x[:200], y[:200])), epochs=3, learning_rate=0.01)
    run = run_federation(LocalGrid(app, 2), tmp_path, full_of(2), rounds=3)
    assert run.train[3]["loss"] < run.train[1]["loss"]


def test_the_client_needs_neither_onnx_nor_torch(artifacts: Path) -> None:
    import subprocess
    import sys

    program = (
        "import sys\n"
        "for name in ('onnx', 'onnx_ir', 'torch'): sys.modules[name] = None\n"
        "from onnxtrain.integrations.flower import ClientData, client_app\n"
        f"client_app({str(artifacts)!r}, lambda context: ClientData(()))\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=300)


def test_the_wrapped_strategy_is_told_the_model(artifacts: Path) -> None:
    _, module = loaded(artifacts)
    strategy = CheckedStrategy(full_of(2), module.manifest)
    config = ConfigRecord()
    strategy.configure_train(1, ArrayRecord(), config, LocalGrid(None, 2))
    assert config["onnxtrain-fingerprint"] == module.manifest.fingerprint


def test_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs/devices/federated.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        exec(compile(block, "docs/devices/federated.md", "exec"), names)
    grid = LocalGrid(names["client"], CLIENTS)
    names["server"](grid, grid.contexts[1000])
    (run,) = names["runs"]
    assert not grid.errors
    assert run.server[10]["accuracy"] > 0.8
    assert run.clients[10]["accuracy"] > 0.8
    saved = CheckpointState.load_checkpoint("federated/checkpoint")
    np.testing.assert_array_equal(saved.parameters["w1"].data, run.state.parameters["w1"].data)
    run_federation(LocalGrid(names["private"], 2), "artifacts", full_of(2), rounds=1)


def test_the_reference_has_every_name() -> None:
    from onnxtrain.integrations import flower

    place = Path(__file__).parents[2] / "docs/hooks/site.py"
    spec = importlib.util.spec_from_file_location("site_hooks", place)
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    assert hooks.public_names("onnxtrain.integrations.flower") == sorted(flower.__all__)


def test_a_loss_that_is_a_sum_is_reported_as_a_sum(tmp_path: Path, digits: Any) -> None:
    from onnxtrain.losses import CrossEntropyLoss

    generate_artifacts(
        network(), loss=CrossEntropyLoss(reduction="sum"), optimizer="sgd", artifact_directory=tmp_path
    )
    x, y = digits["train"]
    data = ClientData((x[:40], y[:40]), (x[:90], y[:90]))
    app = client_app(tmp_path, lambda context: data, batch_size=32, learning_rate=1e-3)
    run = run_federation(LocalGrid(app, 2), tmp_path, FedAvg(min_available_nodes=2), rounds=1)
    loss, _ = loss_and_gradients(values(run.state), x[:90], y[:90])
    assert run.clients[1]["loss"] == pytest.approx(90 * loss, rel=1e-4)
