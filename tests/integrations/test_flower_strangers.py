"""Hostile clients of a Flower server, and hostile servers of a client."""

from __future__ import annotations

import io
import json
import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

from flwr.app import Array as FlowerArray
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg, FedAvgM

from integrations.local_grid import LocalGrid
from integrations.test_flower import full_of, loaded, network, values
from onnxtrain import generate_artifacts
from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.integrations.flower import (
    CheckedStrategy,
    ClientData,
    Limits,
    SamplePrivacy,
    client_app,
    run_federation,
    trained_arrays,
)

ROWS = 50


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts")
    generate_artifacts(network(), loss="cross_entropy", optimizer="sgd", artifact_directory=folder)
    return folder


@pytest.fixture(scope="module")
def data() -> ClientData:
    random = np.random.default_rng(0)
    samples = (random.random((ROWS, 64)).astype("f"), random.integers(0, 10, ROWS))
    return ClientData(samples, samples)


@pytest.fixture(scope="module")
def trained(artifacts: Path, data: ClientData) -> dict[str, np.ndarray]:
    """The model after one round of honest clients, which all have the same data: what one of them trains alone."""
    app = client_app(artifacts, lambda context: data, batch_size=ROWS, learning_rate=0.2)
    return values(run_federation(LocalGrid(app, 1), artifacts, FedAvg(1, 0.0, 1, 0, 1), rounds=1).state)


def attacked(
    artifacts: Path,
    data: ClientData,
    change: Callable[[RecordDict], Any],
    *,
    clients: int = 4,
    **options: Any,
) -> Any:
    """Runs one round in which the last client changes its answer to training."""

    def hostile(client: int, answer: Message) -> Message:
        if client == clients - 1:
            change(answer.content)
        return answer

    app = client_app(artifacts, lambda context: data, batch_size=ROWS, learning_rate=0.2)
    return run_federation(LocalGrid(app, clients, hostile), artifacts, full_of(clients), rounds=1, **options)


def metrics(**numbers: Any) -> Callable[[RecordDict], None]:
    record = {name.replace("_", "-"): value for name, value in numbers.items()}
    return lambda content: content.__setitem__("metrics", MetricRecord(record))


def array(name: str, sent: FlowerArray) -> Callable[[RecordDict], None]:
    return lambda content: content["arrays"].__setitem__(name, sent)


def saved(shape: tuple[int, ...], descr: str = "<f4", size: int = 40) -> FlowerArray:
    """An array whose header says this shape and dtype, with `size` bytes behind it."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": descr, "fortran_order": False, "shape": shape})
    return FlowerArray("float32", (10,), "numpy.ndarray", stream.getvalue() + bytes(size))


def rename(old: str, new: str) -> Callable[[RecordDict], None]:
    return lambda content: content.__setitem__(new, content.pop(old))


OTHER = "not those of most clients"
REFUSED: dict[str, tuple[Callable[[RecordDict], Any], str]] = {
    "one more metric": (metrics(num_examples=ROWS, loss=1.0, more=1.0), OTHER),
    "no loss": (metrics(num_examples=ROWS), OTHER),
    "metrics for a list": (metrics(num_examples=ROWS, loss=[1.0, 2.0]), OTHER),
    "record of metrics renamed": (rename("metrics", "numbers"), OTHER),
    "record of arrays renamed": (rename("arrays", "weights"), OTHER),
    "fraction": (metrics(num_examples=ROWS + 0.5, loss=1.0), "whole number"),
    "list of weights": (metrics(num_examples=[ROWS], loss=1.0), "whole number"),
    "list with NaN": (metrics(num_examples=ROWS, loss=[math.nan]), "'loss' is"),
    "nothing": (lambda content: [content.pop(name) for name in list(content)], "0 records of arrays"),
    "two records of metrics": (lambda content: content.__setitem__("m", MetricRecord({"a": 1})), "2 records"),
    "fingerprint of bytes": (
        lambda content: content.__setitem__("config", ConfigRecord({"onnxtrain-fingerprint": b"\x1b[2J"})),
        "another model",
    ),
    "fingerprint of a megabyte": (
        lambda content: content.__setitem__("config", ConfigRecord({"onnxtrain-fingerprint": "x" * 2**20})),
        "another model",
    ),
    "name with an escape": (array("\x1b[2J\u202e\x9b", FlowerArray(np.zeros(2, "f"))), r"\x1b[2J\u202e\x9b"),
    "header of 16 TiB": (array("b2", saved((2**42,))), "has shape [4398046511104]"),
    "header of objects": (array("b2", saved((10,), "|O")), "'b2' is object"),
    "header without data": (array("b2", saved((10,), size=3)), "cannot be read"),
    "header too long": (
        array("b2", FlowerArray("float32", (10,), "numpy.ndarray", b"\x93NUMPY\x02\x00\xff\xff\xff\x7f")),
        "cannot be read",
    ),
    "no array": (array("b2", FlowerArray("float32", (10,), "numpy.ndarray", b"\x80\x04.")), "cannot be read"),
    "other serialization": (
        array("b2", FlowerArray("float32", (10,), "\x1b[2J", saved((10,)).data)),
        "cannot be read",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_answer_that_cannot_be_averaged_is_refused(
    artifacts: Path,
    data: ClientData,
    trained: dict[str, np.ndarray],
    kind: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    change, reason = REFUSED[kind]
    with caplog.at_level(logging.WARNING, "onnxtrain.flower"):
        run = attacked(artifacts, data, change)
    (refused,) = run.refused
    assert (refused.node, refused.stage) == (1003, "train")
    assert reason in refused.reason
    assert len(refused.reason) <= 500
    assert all(
        record.getMessage().isprintable() for record in caplog.records if record.name == "onnxtrain.flower"
    )
    for name, value in values(run.state).items():
        np.testing.assert_allclose(value, trained[name], atol=1e-6)


@pytest.mark.parametrize("claimed", [10**4, 10**15, 2**62])
@pytest.mark.parametrize("clients", [2, 4, 11])
def test_a_huge_number_of_samples_never_outweighs_the_others(
    artifacts: Path, data: ClientData, trained: dict[str, np.ndarray], claimed: int, clients: int
) -> None:
    def claim(content: RecordDict) -> None:
        metrics(num_examples=claimed, loss=0.0)(content)
        array("b2", FlowerArray(np.full(10, 5.0, "f")))(content)

    run = attacked(artifacts, data, claim, clients=clients)
    # The mean in float64: ten times the median, 50, and at most as much as the others have together.
    weight = min(10 * ROWS, ROWS * (clients - 1))
    total = weight + ROWS * (clients - 1)
    want = (trained["b2"].astype(np.float64) * (total - weight) + 5.0 * weight) / total
    np.testing.assert_allclose(values(run.state)["b2"], want, rtol=1e-5)
    # One that was believed would leave nothing of the others; a limit of the server refuses it.
    assert attacked(artifacts, data, claim, clients=clients, max_examples=1000).refused
    believed = attacked(artifacts, data, claim, clients=clients, max_ratio=math.inf)
    honest = ROWS * (clients - 1) / (ROWS * (clients - 1) + claimed)
    np.testing.assert_allclose(values(believed.state)["b2"], 5.0 + honest * (trained["b2"] - 5.0), rtol=1e-5)


def test_numbers_within_the_limits_are_weights(artifacts: Path, data: ClientData) -> None:
    run = attacked(artifacts, data, metrics(num_examples=2 * ROWS, loss=7.0))
    honest = attacked(artifacts, data, lambda content: None).train[1]["loss"]
    assert run.train[1]["loss"] == pytest.approx((3 * honest + 2 * 7.0) / 5)


def test_the_reason_of_an_error_reaches_the_log_without_control_characters(
    artifacts: Path, data: ClientData, caplog: pytest.LogCaptureFixture
) -> None:
    def dying(client: int, answer: Message) -> Message:
        if client == 0:
            return answer
        raise ConnectionError("\x1b[2J\u202e\x9b" + "x" * 2**20)

    grid = LocalGrid(client_app(artifacts, lambda context: data), 2, dying)
    with caplog.at_level(logging.INFO, "flwr"):
        run_federation(grid, artifacts, full_of(2), rounds=1)
    lines = [record.getMessage() for record in caplog.records]
    assert len(grid.errors) == 1
    assert any(r"\x1b[2J\u202e\x9bxxx" in line for line in lines)
    assert not any(set("\x1b\u202e\x9b") & set(line) for line in lines)
    assert max(map(len, lines)) < 1000


def test_an_average_that_overflows_leaves_the_model(artifacts: Path, data: ClientData) -> None:
    app = client_app(artifacts, lambda context: data)

    def huge(client: int, answer: Message) -> Message:
        answer.content["arrays"]["b2"] = FlowerArray(np.full(10, 3e38, "f"))
        return answer

    strategy = FedAvgM(min_available_nodes=2, fraction_evaluate=0.0, server_learning_rate=10.0)
    with np.errstate(all="ignore"):
        run = run_federation(LocalGrid(app, 2, huge), artifacts, strategy, rounds=1)
    for name, value in values(loaded(artifacts)[0]).items():
        np.testing.assert_array_equal(value, values(run.state)[name])


def test_a_hostile_evaluation_is_refused(artifacts: Path, data: ClientData) -> None:
    app = client_app(artifacts, lambda context: data, learning_rate=0.0)

    def hostile(client: int, answer: Message) -> Message:
        if client == 2 and not answer.content.array_records:
            metrics(num_examples=10**12, loss=0.0, more=[1.0])(answer.content)
        return answer

    run = run_federation(LocalGrid(app, 3, hostile), artifacts, FedAvg(min_available_nodes=3), rounds=1)
    honest = run_federation(LocalGrid(app, 3), artifacts, FedAvg(min_available_nodes=3), rounds=1)
    assert [(refused.node, refused.stage) for refused in run.refused] == [(1002, "evaluate")]
    assert run.clients[1]["loss"] == pytest.approx(honest.clients[1]["loss"])


@pytest.mark.parametrize(
    "options",
    [
        {"max_examples": 0},
        {"max_examples": 1.5},
        {"max_examples": True},
        {"max_ratio": 0.5},
        {"max_ratio": math.nan},
    ],
)
def test_limits_of_the_server_are_checked(artifacts: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        CheckedStrategy(full_of(2), loaded(artifacts)[1].manifest, **options)


def asked(artifacts: Path, data: ClientData, config: dict[str, Any], **options: Any) -> list[str]:
    """Returns the errors of a client that another server, without our checks, asks to train with a config."""
    grid = LocalGrid(client_app(artifacts, lambda context: data, **options), 1)
    strategy = FedAvg(1, 0.0, 1, 0, 1)
    strategy.start(
        grid, trained_arrays(loaded(artifacts)[0]), num_rounds=1, train_config=ConfigRecord(config)
    )
    return grid.errors


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"epochs": 51}, "at most 50"),
        ({"epochs": 10**9}, "at most 50"),
        ({"batch-size": 2**62}, "at most 1024"),
        ({"learning-rate": 1e30}, "at most 10.0"),
    ],
)
def test_a_client_refuses_what_is_beyond_its_limits(
    artifacts: Path, data: ClientData, config: dict[str, Any], limit: str
) -> None:
    (error,) = asked(artifacts, data, config)
    ((name, value),) = config.items()
    assert error.startswith("InputError: Training a client: the server asks for")
    assert f"{name} {value}" in error
    assert limit in error


def test_limits_are_the_clients_own(artifacts: Path, data: ClientData) -> None:
    assert not asked(artifacts, data, {"epochs": 3}, limits=Limits(epochs=3))
    assert asked(artifacts, data, {"epochs": 4}, limits=Limits(epochs=3))
    # What the client does by itself may be asked for, too.
    assert not asked(artifacts, data, {"epochs": 4}, epochs=4, limits=Limits(epochs=3))
    for wrong in ({"epochs": 0}, {"batch_size": 1.5}, {"learning_rate": math.inf}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            Limits(**wrong)


@pytest.mark.parametrize(
    "config",
    [
        *({"epochs": value} for value in ("x", 2.5, [1], -1, True)),
        *({"batch-size": value} for value in (0, b"1")),
        *({"learning-rate": value} for value in (math.nan, "0.1", -0.1, True, [0.1])),
        {"onnxtrain-fingerprint": [1]},
    ],
    ids=str,
)
def test_malformed_settings_are_errors_of_this_package(
    artifacts: Path, data: ClientData, config: dict[str, Any]
) -> None:
    (error,) = asked(artifacts, data, config)
    assert error.startswith("InputError: ")
    if "onnxtrain-fingerprint" not in config:
        # A server of this package does not even ask.
        grid = LocalGrid(client_app(artifacts, lambda context: data), 1)
        with pytest.raises(InputError):
            run_federation(grid, artifacts, full_of(1), rounds=1, train_config=config)


@pytest.mark.parametrize("number", ["x", -1, 2**70, 1.5, [1]], ids=str)
def test_a_malformed_round_is_an_error_of_this_package(
    artifacts: Path, data: ClientData, number: Any
) -> None:
    class Server(FedAvg):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            for message in super().configure_train(server_round, arrays, config, grid):
                dict.__setitem__(message.content["config"]._data, "server-round", number)
                yield message

    grid = LocalGrid(client_app(artifacts, lambda context: data), 1)
    Server(1, 0.0, 1, 0, 1).start(grid, trained_arrays(loaded(artifacts)[0]), num_rounds=1)
    (error,) = grid.errors
    assert error.startswith("InputError: Reading a message from the server: 'server-round'")


def test_a_client_spends_no_more_than_its_epsilon(artifacts: Path, data: ClientData) -> None:
    from onnxtrain.integrations.flower import spent_epsilon

    # Five steps a round, each sample in one of five batches.
    budget = spent_epsilon(15, 0.2, 2.0, 1e-3)
    privacy = SamplePrivacy(noise_multiplier=2.0, clip_norm=1.0, delta=1e-3, max_epsilon=budget)
    grid = LocalGrid(client_app(artifacts, lambda context: data, batch_size=10, privacy=privacy), 1)
    run = run_federation(grid, artifacts, FedAvg(1, 0.0, 1, 0, 1), rounds=5)
    assert {number: found["epsilon"] for number, found in run.train.items()} == {
        number: pytest.approx(spent_epsilon(5 * number, 0.2, 2.0, 1e-3)) for number in (1, 2, 3)
    }
    assert len(grid.errors) == 2
    assert all("max_epsilon" in error for error in grid.errors)
    # One round that asks for all of it at once is refused before the samples are looked at.
    assert "max_epsilon" in asked(artifacts, data, {"epochs": 4}, batch_size=10, privacy=privacy)[0]
    with pytest.raises(InputError, match="max_epsilon"):
        SamplePrivacy(1.0, 1.0, max_epsilon=math.nan)


@pytest.mark.parametrize(
    "files",
    [
        {"checkpoint": "../secret", "training_model": "training_model.onnx"},
        {"checkpoint": "/etc/passwd", "training_model": "training_model.onnx"},
        {"checkpoint": "checkpoint", "training_model": ".."},
        {"checkpoint": "checkpoint", "training_model": 3},
        {"checkpoint": "checkpoint"},
        {"training_model": "training_model.onnx"},
        [],
        "checkpoint",
    ],
    ids=str,
)
def test_artifacts_name_files_of_their_own_folder(tmp_path: Path, artifacts: Path, files: Any) -> None:
    folder = shutil.copytree(artifacts, tmp_path / "artifacts")
    shutil.copy(artifacts / "checkpoint", tmp_path / "secret")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"files": files}))
    with pytest.raises(CheckpointError, match="not a directory written by generate_artifacts"):
        run_federation(LocalGrid(None, 1), folder, full_of(1), rounds=1)
