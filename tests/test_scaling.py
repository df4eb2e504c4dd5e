"""The model behind notes/scaling.md: its formulas beside messages that are counted one by one, and measured bytes."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path += [str(Path(__file__).parents[1] / "benchmarks" / name) for name in ("distributed", "common")]

import page_tables
import scaling_measured
import scaling_model
import scaling_page
from scaling_model import ENGINES, Engine, Net

ROOT = Path(__file__).parents[1]
WORKERS = (2, 3, 4, 8)


class Wire:
    """Carries arrays between workers, and counts the bytes that each has sent."""

    def __init__(self, workers: int) -> None:
        self.sent = [0] * workers

    def send(self, source: int, array: np.ndarray) -> np.ndarray:
        self.sent[source] += array.nbytes
        return array.copy()


def parts_of(arrays: list[np.ndarray]) -> list[list[np.ndarray]]:
    """Copies each worker's array in as many parts as there are workers."""
    return [[part.copy() for part in np.split(array, len(arrays))] for array in arrays]


def reduce_scatter(wire: Wire, parts: list[list[np.ndarray]]) -> None:
    """Hands sums around the ring; worker w ends with the sum of part w + 1."""
    n = len(parts)
    for hop in range(n - 1):
        moved = [wire.send(w, parts[w][(w - hop) % n]) for w in range(n)]
        for w in range(n):
            parts[w][(w - 1 - hop) % n] += moved[w - 1]


def all_gather(wire: Wire, parts: list[list[np.ndarray]]) -> None:
    """Hands finished parts around the ring; worker w begins with part w + 1."""
    n = len(parts)
    for hop in range(n - 1):
        moved = [wire.send(w, parts[w][(w + 1 - hop) % n]) for w in range(n)]
        for w in range(n):
            parts[w][(w - hop) % n] = moved[w - 1]


def broadcast(wire: Wire, array: np.ndarray, root: int) -> list[np.ndarray | None]:
    """Sends through a tree: those who have the array send it to as many others."""
    n = len(wire.sent)
    have: list[np.ndarray | None] = [None] * n
    have[root] = array
    reach = 1
    while reach < n:
        for place in range(min(reach, n - reach)):
            source = have[(root + place) % n]
            assert source is not None
            have[(root + place + reach) % n] = wire.send((root + place) % n, source)
        reach *= 2
    return have


@pytest.mark.parametrize("workers", WORKERS)
def test_rings_send_what_the_formulas_say(workers: int) -> None:
    arrays = list(np.random.default_rng(0).standard_normal((workers, 24 * 7)))
    wire, parts = Wire(workers), parts_of(arrays)
    reduce_scatter(wire, parts)
    assert wire.sent == [scaling_model.half_ring(arrays[0].nbytes, workers)] * workers
    all_gather(wire, parts)
    assert wire.sent == pytest.approx([scaling_model.all_reduce(arrays[0].nbytes, workers)] * workers)
    for own in parts:
        np.testing.assert_allclose(np.concatenate(own), np.sum(arrays, axis=0))


@pytest.mark.parametrize("workers", WORKERS)
def test_a_broadcast_sends_the_mean_of_the_formula(workers: int) -> None:
    array, wire = np.arange(30.0), Wire(workers)
    for one in broadcast(wire, array, workers - 1):
        np.testing.assert_array_equal(one, array)
    assert sum(wire.sent) / workers == pytest.approx(scaling_model.half_ring(array.nbytes, workers))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", ENGINES)
def test_a_step_sends_what_its_messages_add_up_to(name: str, workers: int) -> None:
    net = Net((24 * 50, 24 * 50, 24 * 3), trained=(24 * 4, 24 * 4) if "LoRA" in name else None)
    wire = Wire(workers)

    def of(elements: int, dtype: type = np.float32) -> list[np.ndarray]:
        return [np.zeros(elements, dtype) for _ in range(workers)]

    def reduce_all(elements: int, dtype: type = np.float32) -> None:
        parts = parts_of(of(elements, dtype))
        reduce_scatter(wire, parts)
        all_gather(wire, parts)

    if name.startswith("fully_shard"):
        for layer, elements in enumerate(net.layers):
            # The outermost module keeps its parameters from forward to backward.
            gathers = 2 if "each" in name and layer < 2 else 1
            for _ in range(gathers):
                all_gather(wire, parts_of(of(elements)))
            reduce_scatter(wire, parts_of(of(elements)))
    else:
        for elements in net.tensors:
            # Two bytes per element, as bfloat16.
            reduce_all(elements, np.float16 if "bfloat16" in name else np.float32)
        if "Zero" in name or "ZeRO" in name:
            for elements in net.tensors:
                broadcast(wire, np.zeros(elements, np.float32), 0)
    assert sum(wire.sent) / workers == pytest.approx(scaling_model.step_bytes(ENGINES[name], net, workers))


def test_copies_of_gradients_are_those_of_the_trainer() -> None:
    from onnxtrain.distributed._buckets import group_arrays

    for sizes in ((10, 20), (5_000_000, 3, 3), (2_000_000,) * 9, (7_000_000, 100, 7_000_000, 100, 200)):
        arrays = [np.broadcast_to(np.float32(0), size) for size in sizes]
        groups = group_arrays(arrays, 25 * 2**20)
        elements = [sum(sizes[i] for i in group) for group in groups]
        joined = [4 * count * (len(group) > 1) for count, group in zip(elements, groups, strict=True)]
        assert scaling_model.copied_bytes(Net(sizes), 4, 0) == max(
            sum(joined[i : i + 3]) for i in range(len(joined))
        )
        # As bfloat16 every gradient is copied, small ones twice.
        every = [one + 2 * count for one, count in zip(joined, elements, strict=True)]
        assert scaling_model.copied_bytes(Net(sizes), 4, 2) == max(
            sum(every[i : i + 3]) for i in range(len(every))
        )


def test_state_is_counted_tensor_by_tensor() -> None:
    layers = (30_000_000, 20_000_000, 1_000)
    net, adapters = Net(layers), Net(layers, trained=(500, 700))
    parameter = gradient = moments = 4 * sum(layers)
    moments *= 2
    trainer, sharded = ENGINES["Trainer"], ENGINES["Trainer, ZeRO-1"]
    copy = parameter + moments
    # The graph hands its gradients over.
    ddp = parameter + gradient + moments + gradient
    assert scaling_model.state_bytes(ENGINES["DistributedDataParallel"], net, 8) == ddp
    assert scaling_model.state_bytes(trainer, net, 8) == parameter + gradient + moments + copy
    assert scaling_model.state_bytes(trainer, net, 8, built=True) == 2 * parameter + gradient + moments + copy
    assert scaling_model.state_bytes(sharded, net, 8) == 2 * parameter + gradient + 2 * moments / 8
    # Frozen parameters have neither gradient nor moments nor a copy. Small gradients are joined for sending.
    assert scaling_model.state_bytes(trainer, adapters, 8) == 3 * parameter + 1200 * (4 + 4 + 8 + 12) + 4800
    # Two layers are whole, and the gradients of one, twice.
    whole_layers = 4 * 50_000_000 + 2 * 4 * 30_000_000
    share = (parameter + gradient + moments) / 8
    assert scaling_model.state_bytes(ENGINES["fully_shard, each layer"], net, 8) == share + whole_layers
    assert (
        scaling_model.state_bytes(ENGINES["fully_shard, whole"], net, 8) == share + parameter + 2 * gradient
    )


def test_measured_memory_is_that_of_the_model() -> None:
    rows = scaling_page.read_results()["memory"]
    assert {(row["engine"], row["workers"]) for row in rows} == {(e, n) for e in ENGINES for n in (2, 4)}
    for row in rows:
        said = scaling_page.said_memory(row["engine"], row["workers"])
        assert row["bytes per parameter"] == pytest.approx(said, rel=0.15, abs=1.0), row


def test_the_nets_of_the_tables_have_their_sizes() -> None:
    for shape in scaling_model.SIZES.values():
        net = scaling_model.transformer(**shape)
        assert net.size == shape["size"]
        assert min(net.layers) > 0
    # Llama 2 7B: rank 8 on q, k, v, o and on gate, up and down of 32 blocks.
    adapters = scaling_model.transformer(**scaling_model.SIZES["7 B"], rank=8)
    assert sum(adapters.tensors) == 32 * (4 * 8 * (4096 + 4096) + 3 * 8 * (4096 + 11008)) == 19_988_480


def test_seconds_of_an_exchange_by_hand() -> None:
    network = scaling_model.Network(rate=1e9, latency=1e-3)
    net = Net((10**8,))
    # 400 MB are 16 buckets, six times three. Eight workers: 700 MB, and 14 hops each time.
    trainer = ENGINES["Trainer"]
    assert scaling_model.exchange_seconds(trainer, net, 8, network) == pytest.approx(0.7 + 6 * 14e-3)
    assert scaling_model.step_seconds(trainer, net, 8, network, 2.0) == pytest.approx(2.784)
    # Then each of eight workers broadcasts 50 MB through three levels.
    zero = ENGINES["Trainer, ZeRO-1"]
    want = 0.784 + 8 * 3 * (0.05 + 1e-3)
    assert scaling_model.exchange_seconds(zero, net, 8, network) == pytest.approx(want)
    # Two layers that are gathered twice and one that is gathered once, in rings of seven hops.
    each = Net((10**8, 10**8, 10**6))
    sharded = ENGINES["fully_shard, each layer"]
    want = (3 * 2 * 0.4 + 2 * 0.004) * 7 / 8 + (3 * 2 + 2) * 7e-3
    assert scaling_model.exchange_seconds(sharded, each, 8, network) == pytest.approx(want)
    assert scaling_model.step_seconds(sharded, each, 8, network, 9.0) == 9.0


def test_federated_bytes_are_those_of_numpy_files() -> None:
    shapes = [(32, 64), (32,), (10, 32), (10,)]
    files = 0
    for shape in shapes:
        file = io.BytesIO()
        np.save(file, np.zeros(shape, np.float32))
        files += len(file.getvalue())
    assert scaling_model.round_bytes([int(np.prod(shape)) for shape in shapes]) == files == 10_152


def near(measured: float, engine: str, workers: int) -> bool:
    """Tells if the bytes of a step are those of the model, but for headers and short messages."""
    said = workers * scaling_model.step_bytes(
        ENGINES[engine], scaling_measured.net_of(engine, scaling_measured.WIDTH), workers, gloo=True
    )
    # Trainer's workers tell one another counts and decisions: some kilobytes each.
    short = 12_000 * workers if engine.startswith("Trainer") else 0
    return abs(measured - said) <= 0.01 * said + short


def test_measured_bytes_are_those_of_the_model() -> None:
    rows = scaling_page.read_results()["bytes"]
    assert {(row["engine"], row["workers"]) for row in rows} == {(e, n) for e in ENGINES for n in (2, 4)}
    for row in rows:
        assert near(row["bytes"], row["engine"], row["workers"]), row


def test_the_page_shows_what_the_program_prints() -> None:
    page = scaling_page.PAGE.read_text(encoding="utf-8")
    for name, table in scaling_page.tables().items():
        shown = page_tables.place(name).search(page)
        assert shown is not None, f"notes/scaling.md has no table '{name}'"
        assert shown[1] == table, (
            f"{name}: write the page again, by benchmarks/distributed/scaling_page.py --write"
        )


def test_numbers_in_the_text_of_the_page() -> None:
    page = scaling_page.PAGE.read_text(encoding="utf-8")
    # "make 18 % into 47 %": a net of a billion parameters, 8 workers, 25 GbE, and four times the computation.
    share = scaling_page.efficiency("Trainer", "1 B", 8, "25 GbE")
    longer = 4 * share / (4 * share + 1 - share)
    assert f"make {100 * share:.0f} % into {100 * longer:.0f} %" in page
    assert f"{2 * 1023:,} hops" in page
    hundredth = [
        sum(scaling_model.transformer(**s, rank=8).tensors) / s["size"] for s in scaling_model.SIZES.values()
    ]
    assert max(hundredth) < 0.0135


def can_isolate() -> bool:
    """Tells if this user may make a network namespace."""
    if not (sys.platform == "linux" and shutil.which("unshare") and shutil.which("ip")):
        return False
    return (
        subprocess.run(["unshare", "-rn", "ip", "link", "set", "lo", "up"], capture_output=True).returncode
        == 0
    )


@pytest.mark.thorough
@pytest.mark.torch
@pytest.mark.skipif(not can_isolate(), reason="the system allows no network namespace")
@pytest.mark.parametrize("engine", ["Trainer, bfloat16", "Trainer, ZeRO-1"])
def test_two_workers_send_what_the_model_says(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    sent: Any = scaling_measured.launch("bytes", engine, 2)
    assert near(sent, engine, 2), sent


def test_an_engine_of_another_kind_would_be_noticed() -> None:
    # The tolerance tells bfloat16 from float32, and an all-reduce from one with a broadcast.
    said = 2 * scaling_model.step_bytes(
        ENGINES["Trainer"], scaling_measured.net_of("Trainer", scaling_measured.WIDTH), 2
    )
    assert near(said, "Trainer", 2)
    assert not near(said, "Trainer, bfloat16", 2)
    assert not near(said, "Trainer, ZeRO-1", 2)
    assert scaling_model.step_bytes(Engine(), Net((5,)), 4) == 0
