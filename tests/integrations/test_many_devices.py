"""The numbers of notes/many-devices.md: bytes, counts and tables, counted again by other means."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed")
sys.path += [str(Path(__file__).parents[2] / "benchmarks" / name) for name in ("federated", "common")]

import digits
import page
import simulate
from flwr.app import Message
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from page_tables import place

from integrations.local_grid import LocalGrid
from onnxtrain.integrations.flower import ClientData, client_app, run_federation

CLIENTS, ROUNDS = 12, 4
SHAPES = [(32, 64), (32,), (10, 32), (10,)]


def array_file_bytes() -> int:
    """Bytes of the parameters, each written as a file of numpy."""
    total = 0
    for shape in SHAPES:
        file = io.BytesIO()
        np.save(file, np.zeros(shape, np.float32))
        total += len(file.getvalue())
    return total


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Trains some clients in this process, with the mod that lets some of them drop out or be late."""
    folder = digits.artifacts(tmp_path_factory.mktemp("artifacts"))
    x, y = digits.samples()
    app = client_app(
        folder,
        lambda context: ClientData((x[:20], y[:20])),
        epochs=2,
        batch_size=8,
        mods=[simulate.unreliable(3, 0.2, 0.3)],
    )
    messages: list[tuple[Message, Message]] = []

    class Grid(LocalGrid):
        def _answer(self, message: Message) -> Message:
            answer = super()._answer(message)
            messages.append((message, answer))
            return answer

    grid, rounds = Grid(app, CLIENTS), []
    end = simulate.note_rounds(grid, rounds)
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
    run_federation(grid, folder, strategy, rounds=ROUNDS)
    end()
    return {"rounds": rounds, "messages": messages}


def test_noted_counts_are_those_of_the_draws(run: dict[str, Any]) -> None:
    assert len(run["rounds"]) == ROUNDS
    for number, noted in enumerate(run["rounds"], 1):
        fates = [simulate.fate(3, client, number, 0.2, 0.3) for client in range(CLIENTS)]
        assert noted["asked"] == CLIENTS
        assert noted["dropped"] == fates.count(simulate.DROPPED)
        assert noted["late"] == fates.count(simulate.LATE)
        assert noted["answered"] == fates.count(None)
        assert noted["server_s"] > 0
    # Each of the three happened.
    assert all(sum(one[key] for one in run["rounds"]) for key in ("dropped", "late", "answered"))


def test_a_late_client_has_trained_and_a_dead_one_has_not(tmp_path: Path) -> None:
    folder = digits.artifacts(tmp_path)
    x, y = digits.samples()
    trained = []

    def data(context: Any) -> ClientData:
        trained.append(context.node_config["partition-id"])
        return ClientData((x[:9], y[:9]))

    grid = LocalGrid(client_app(folder, data, mods=[simulate.unreliable(3, 0.2, 0.3)]), CLIENTS)
    run_federation(grid, folder, FedAvg(fraction_evaluate=0.0, min_available_nodes=CLIENTS), rounds=1)
    fates = [simulate.fate(3, client, 1, 0.2, 0.3) for client in range(CLIENTS)]
    assert {simulate.DROPPED, simulate.LATE, None} == set(fates)
    assert sorted(trained) == [client for client, drawn in enumerate(fates) if drawn != simulate.DROPPED]


def test_noted_bytes_are_those_of_numpy_files(run: dict[str, Any]) -> None:
    size = array_file_bytes()
    assert size == 4 * 2410 + 4 * 128 == 10_152
    for noted in run["rounds"]:
        assert noted["bytes_down"] == size * noted["asked"]
        assert noted["bytes_up"] == size * noted["answered"]


def test_flower_sends_the_objects_of_a_message(run: dict[str, Any]) -> None:
    """The content of a message is sent as objects, each by its own call of gRPC."""
    answered = next(pair for pair in run["messages"] if not pair[1].has_error())
    down, back = (
        sum(len(each.deflate()) for each in get_all_nested_objects(message).values()) for message in answered
    )
    text = page.PAGE.read_text(encoding="utf-8")
    # Numbers of messages and of nodes are as long as they are: a simulation's have 19 digits, these have one to four.
    shown = [int(found.replace(",", "")) for found in ("11,974", "12,162")]
    assert "11,974 bytes to a client and 12,162 back" in text
    assert [down, back] == pytest.approx(shown, abs=60)


@pytest.mark.parametrize("file", page.RUNS.values())
def test_results_of_the_simulation_add_up(file: str) -> None:
    result = page.read(file)
    settings, rounds = result["settings"], result["rounds"]
    assert (settings["clients"], settings["rounds"], settings["share"]) == (1000, 60, 0.05)
    assert len(rounds) == 60
    assert list(result["accuracy"]) == [str(n) for n in range(61)]
    assert result["refused"] == 0
    size = array_file_bytes()
    for noted in rounds:
        assert noted["asked"] == 50
        assert noted["answered"] + noted["dropped"] + noted["late"] == 50
        assert noted["bytes_down"] == 50 * size
        assert noted["bytes_up"] == noted["answered"] * size
    for key, chance in (("dropped", settings["drop"]), ("late", settings["late"])):
        # 3,000 draws; six standard deviations.
        wide = 6 * math.sqrt(3000 * chance * (1 - chance))
        assert abs(sum(noted[key] for noted in rounds) - 3000 * chance) <= wide
    # Accuracies are shares of 397 samples.
    for value in result["accuracy"].values():
        assert abs(value * digits.TEST - round(value * digits.TEST)) < 0.03
    assert result["accuracy"]["60"] > 0.9


def test_the_page_says_who_the_clients_are() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    x, y = digits.samples()
    rows = digits.split(y[: -digits.TEST], 1000, 0.3, least=5)
    counts = [len(own) for own in rows]
    labels = [np.bincount(y[own], minlength=10) for own in rows]
    assert max(own.max() for own in rows) < len(x) - digits.TEST == 1400
    assert (
        f"1,000, with {min(counts)} to {max(counts)} digits each, {np.median(counts):.0f} in the median, "
        f"{sum(counts):,} in all"
    ) in text
    assert f"has {np.mean([(one > 0).sum() for one in labels]):.1f} of the 10 labels in the mean" in text
    most = np.mean([one.max() / one.sum() for one in labels])
    assert "half of its samples have the same label" in text
    assert 0.45 < most < 0.55
    assert page.read("simulation.json")["samples"] == sum(counts)


def test_the_page_shows_what_the_program_prints() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    for name, table in page.tables().items():
        shown = place(name).search(text)
        assert shown is not None, f"notes/many-devices.md has no table '{name}'"
        assert shown[1] == table, f"{name}: write the page again, by benchmarks/federated/page.py --write"


def test_the_page_computes_a_million_right() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    size = array_file_bytes()
    asked, answers = 50_000, 40_000
    assert (
        f"{asked * size / 1e6:.0f} MB to them and, with a fifth missing, {answers * size / 1e6:.0f} MB back"
        in text
    )
    million = 4 * 10**6
    assert (
        f"it is {asked * million / 1e9:.0f} GB in each direction, and {answers * million / 1e9:.0f} GB of memory"
        in text
    )
    rows = {(row["parameters"], row["answers"]): row for row in page.read("server.json")}
    large = rows[1_000_000, 500]
    assert large["bytes_up"] == 500 * (million + 128)
    assert f"With 500 devices it is {large['bytes_up'] / 1e9:.1f} GB, and {large['server_s']:.1f} s" in text
    small = rows[2410, 5000]
    assert small["bytes_up"] == 5000 * (4 * 2410 + 128)
    assert f"about {1000 * small['server_s'] / 5000:.2f} ms for a small answer" in text
    assert f"{large['server_s'] / large['bytes_up'] * 1e9:.1f} s for a gigabyte" in text
    for row in rows.values():
        # The answers of a round are in memory together.
        assert row["bytes_up"] <= row["memory"] * 1.02
        assert row["memory"] <= 1.35 * row["bytes_up"]
    # A device is asked once in so many rounds: 500 of a million.
    assert f"once in {10**6 // 500:,} rounds" in text


def test_flowers_devices_report_as_often_as_the_page_says() -> None:
    from flwr.common.constant import HEARTBEAT_BASE_MULTIPLIER, HEARTBEAT_DEFAULT_INTERVAL

    text = page.PAGE.read_text(encoding="utf-8")
    assert HEARTBEAT_BASE_MULTIPLIER < 1
    assert f"every {HEARTBEAT_DEFAULT_INTERVAL} s or a little less" in text
    assert f"more than {10**6 / HEARTBEAT_DEFAULT_INTERVAL // 1000 * 1000:,.0f} messages" in text
