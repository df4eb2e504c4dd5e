"""Adapters over one base: the models refer to its weights, which every host reads once and checks."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from models import make_model, parse_nodes
from onnxtrain import api
from onnxtrain.artifacts import generate_artifacts
from onnxtrain.errors import ModelLoadError
from onnxtrain.lora import LoraConfig
from onnxtrain.passes.io.shared_weights import MIN_SHARED_BYTES

from .cases import TOLERANCE, losses_of
from .nets import ADAPTERS, LEARNING_RATE, STEPS, Net, write_feeds
from .test_host_checkpoints import PROGRAMS

pytestmark = pytest.mark.usefixtures("without_kernels")

OPTIONS: dict[str, Any] = {
    "loss": "cross_entropy",
    "optimizer": "adamw",
    "additional_output_names": ["logits"],
    "profile": "portable",
}


def save_base(net: Net, folder: Path) -> Path:
    """Save a base whose weights are in `base.onnx.data`."""
    folder.mkdir(exist_ok=True)
    path = folder / "base.onnx"
    onnx.save(net.model(), path, save_as_external_data=True, location="base.onnx.data", size_threshold=1024)
    return path


def manifest_of(folder: Path, prefix: str = "") -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / f"{prefix}manifest.json").read_text())
    return manifest


def downloaded(folder: Path, prefix: str = "") -> set[str]:
    """The names of all files of a run, as its manifest lists them."""
    manifest = manifest_of(folder, prefix)
    data = {name for names in manifest["external_data"].values() for name in names}
    return {f"{prefix}manifest.json", *manifest["files"].values(), *data}


def size_of(folder: Path, names: set[str]) -> int:
    return sum((folder / name).stat().st_size for name in names)


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def train(folder: Path, batches: list[list[np.ndarray]], prefix: str = "") -> list[float]:
    state = api.CheckpointState.load_checkpoint(folder / f"{prefix}checkpoint")
    module = api.Module(folder / f"{prefix}training_model.onnx", state)
    optimizer = api.Optimizer(folder / f"{prefix}optimizer_model.onnx", module)
    optimizer.set_learning_rate(LEARNING_RATE)
    losses = []
    for batch in batches:
        module.lazy_reset_grad()
        losses.append(float(module(*batch)[0]))
        optimizer.step()
    return losses


@pytest.fixture(scope="module", params=[net.name for net in ADAPTERS])
def net(request: pytest.FixtureRequest) -> Net:
    return next(net for net in ADAPTERS if net.name == request.param)


@pytest.fixture(scope="module")
def batches(net: Net) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(0)
    return [net.batch(rng) for _ in range(STEPS)]


@pytest.fixture(scope="module")
def site(net: Net, batches: list[list[np.ndarray]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, its artifacts, and feeds."""
    folder = tmp_path_factory.mktemp(net.name)
    base = save_base(net, folder / "site")
    before = digest_of(base), digest_of(folder / "site" / "base.onnx.data")
    generate_artifacts(base, artifact_directory=folder / "site", **OPTIONS, **net.arguments)
    assert (digest_of(base), digest_of(folder / "site" / "base.onnx.data")) == before
    write_feeds(folder / "feeds", manifest_of(folder / "site"), batches)
    return folder / "site"


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("program", PROGRAMS)
def test_losses_are_those_of_models_that_hold_their_weights(
    program: str,
    net: Net,
    site: Path,
    batches: list[list[np.ndarray]],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    generate_artifacts(
        net.model(), artifact_directory=tmp_path, share_weights=False, **OPTIONS, **net.arguments
    )
    assert manifest_of(tmp_path)["external_data"] == {}
    expected = train(tmp_path, batches)
    assert np.mean(expected[-10:]) < np.mean(expected[:10]) - 0.1
    losses = losses_of(request.getfixturevalue(program), site, site.parent / "feeds")
    np.testing.assert_allclose(losses, expected, rtol=0, atol=TOLERANCE)


def test_a_run_is_hardly_larger_than_its_base(net: Net, site: Path, tmp_path: Path) -> None:
    base = (site / "base.onnx").stat().st_size + (site / "base.onnx.data").stat().st_size
    assert base > 2 * MIN_SHARED_BYTES
    names = downloaded(site)
    assert "base.onnx.data" in names
    assert not list(site.glob("weights.*"))
    assert size_of(site, names) <= 1.1 * base + 200_000
    # As well if the base is somewhere else, or no file at all.
    for source in (site / "base.onnx", net.model()):
        generate_artifacts(source, artifact_directory=tmp_path, **OPTIONS, **net.arguments)
        assert size_of(tmp_path, {path.name for path in tmp_path.iterdir()}) <= 1.1 * base + 200_000
    (data,) = manifest_of(tmp_path)["data_files"]
    assert data == f"weights.{digest_of(tmp_path / data)[:12]}.data"


def tall_base(kind: str) -> onnx.ModelProto:
    """13 products of 512 x 512, in float32 or in 4 bits."""
    rng, size, block = np.random.default_rng(0), 512, 32
    nodes, values, x = [], {}, "x"
    for i in range(13):
        if kind == "float":
            values[f"w{i}"] = rng.normal(0, 0.04, (size, size)).astype(np.float32)
            nodes.append(helper.make_node("MatMul", [x, f"w{i}"], [f"h{i}"], f"fc{i}"))
        else:
            values[f"w{i}"] = rng.integers(0, 256, (size, size // block, block // 2), np.uint8)
            values[f"s{i}"] = rng.uniform(0.01, 0.02, size * size // block).astype(np.float32)
            nodes.append(
                helper.make_node(
                    "MatMulNBits", [x, f"w{i}", f"s{i}"], [f"h{i}"], f"fc{i}", domain="com.microsoft",
                    K=size, N=size, bits=4, block_size=block,
                )
            )  # fmt: skip
        x = f"a{i}"
        nodes.append(helper.make_node("Relu", [f"h{i}"], [x]))
    model = make_model(nodes, {"x": ["batch", size]}, {x: ["batch", size]}, values)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "sizes"), [("float", (13.63, 41.3, 14.01)), ("int4", (2.13, 8.4, 2.54))], ids=["float", "int4"]
)
def test_sizes_are_those_of_the_pages(kind: str, sizes: tuple[float, float, float], tmp_path: Path) -> None:
    model, options = tall_base(kind), OPTIONS | {"additional_output_names": None, "lora": LoraConfig(r=4)}
    measured = [len(model.SerializeToString()) / 1e6]
    for share in (False, None):
        folder = tmp_path / str(share)
        generate_artifacts(model, artifact_directory=folder, share_weights=share, **options)
        measured.append(size_of(folder, downloaded(folder)) / 1e6)
    np.testing.assert_allclose(measured, sizes, rtol=0.01)
    assert measured[2] <= 1.1 * measured[0] + 0.2
    docs = Path(__file__).parents[2]
    row = f"| {'float32' if kind == 'float' else kind} | {sizes[0]:.2f} MB | {sizes[1]:.1f} MB | {sizes[2]:.2f} MB |"
    assert row in (docs / "notes" / "web.md").read_text("utf-8")
    row = f"| {'float32' if kind == 'float' else kind} | {sizes[0]:.1f} MB | {sizes[2]:.1f} MB |"
    assert row in (docs / "docs" / "devices" / "browser.md").read_text("utf-8")


def test_adapters_share_the_base(net: Net, batches: list[list[np.ndarray]], tmp_path: Path) -> None:
    base = save_base(net, tmp_path)
    data = tmp_path / "base.onnx.data"
    before = data.stat()
    for prefix, rank in (("a_", 1), ("b_", 3)):
        generate_artifacts(
            base, prefix=prefix, lora=LoraConfig(r=rank), artifact_directory=tmp_path, **OPTIONS
        )
        assert manifest_of(tmp_path, prefix)["data_files"] == {
            data.name: {"bytes": before.st_size, "sha256": digest_of(data)}
        }
        assert size_of(tmp_path, downloaded(tmp_path, prefix) - {data.name}) < 200_000
        losses = train(tmp_path, batches, prefix)
        assert losses[-1] < losses[0]
    after = data.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def other_base() -> onnx.ModelProto:
    """As the float base, with other weights."""
    model = ADAPTERS[0].model()
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * 2, tensor.name))
    return model


def test_data_files_stay_as_long_as_a_run_needs_them(tmp_path: Path) -> None:
    def write(prefix: str, model: onnx.ModelProto) -> str:
        generate_artifacts(model, prefix=prefix, lora=LoraConfig(r=1), artifact_directory=tmp_path, **OPTIONS)
        (name,) = manifest_of(tmp_path, prefix)["data_files"]
        return str(name)

    first = write("a_", ADAPTERS[0].model())
    status = (tmp_path / first).stat()
    assert write("b_", ADAPTERS[0].model()) == first
    assert ((tmp_path / first).stat().st_ino, (tmp_path / first).stat().st_mtime_ns) == (
        status.st_ino,
        status.st_mtime_ns,
    )
    second = write("a_", other_base())
    assert {path.name for path in tmp_path.glob("*.data")} == {first, second}
    assert write("b_", other_base()) == second
    assert {path.name for path in tmp_path.glob("*.data")} == {second}
    # A damaged file of the right name is written again, and a manifest that cannot be read keeps all.
    (tmp_path / second).write_bytes(b"damaged")
    (tmp_path / "c_manifest.json").write_text("{")
    assert write("a_", other_base()) == second
    assert digest_of(tmp_path / second).startswith(second.split(".")[1])
    write("a_", ADAPTERS[0].model())
    write("b_", ADAPTERS[0].model())
    assert {path.name for path in tmp_path.glob("*.data")} == {first, second}


def pad_name(model: onnx.ModelProto, length: int) -> None:
    """Shift the weights in the file by the length of a text in front of them."""
    model.producer_name = "x" * length


def test_weights_inside_of_the_onnx_file_are_used_only_where_they_are_aligned(tmp_path: Path) -> None:
    values = {"w": np.random.default_rng(0).normal(0, 0.1, (160, 160)).astype(np.float32)}
    used = []
    for shift in range(4):
        folder = tmp_path / str(shift)
        folder.mkdir()
        model = make_model(
            parse_nodes("h = MatMul(x, w)  logits = Relu(h)"),
            {"x": ["batch", 160]},
            {"logits": ["batch", 160]},
            values,
        )
        pad_name(model, 10 + shift)
        onnx.save(model, folder / "base.onnx")
        content = (folder / "base.onnx").read_bytes()
        options = OPTIONS | {"additional_output_names": None, "lora": LoraConfig(r=1)}
        generate_artifacts(folder / "base.onnx", artifact_directory=folder, **options)
        assert (folder / "base.onnx").read_bytes() == content
        aligned = content.index(values["w"].tobytes()) % 4 == 0
        (name,) = manifest_of(folder)["data_files"]
        assert (name == "base.onnx") == aligned
        used.append(aligned)
        state = api.CheckpointState.load_checkpoint(folder / "checkpoint")
        module = api.Module(folder / "training_model.onnx", state)
        x = np.eye(160, dtype=np.float32)
        logits = np.maximum(values["w"].astype(np.float64), 0)
        shifted = logits - logits.max(1, keepdims=True)
        expected = np.mean(np.log(np.exp(shifted).sum(1)) - shifted.diagonal())
        np.testing.assert_allclose(module(x, np.arange(160)), expected, rtol=1e-5)
    assert sorted(used) == [False, False, False, True]


def test_a_base_of_which_little_is_frozen_is_not_downloaded(tmp_path: Path) -> None:
    base = save_base(ADAPTERS[0], tmp_path)
    # Only the first layer, which is small, is frozen: the checkpoint holds the others.
    generate_artifacts(base, artifact_directory=tmp_path, requires_grad=["second", "head"], **OPTIONS)
    assert manifest_of(tmp_path)["external_data"] == {}


def test_own_files_are_no_base(tmp_path: Path) -> None:
    """A model that the artifacts replace would lose its weights."""
    base = tmp_path / "inference_model.onnx"
    model = ADAPTERS[0].model()
    onnx.save(model, base, save_as_external_data=True, location=f"{base.name}.0123456789ab.data")
    generate_artifacts(base, lora=LoraConfig(r=1), artifact_directory=tmp_path, **OPTIONS)
    (name,) = manifest_of(tmp_path)["data_files"]
    assert name.startswith("weights.")
    assert {path.name for path in tmp_path.glob("*.data")} == {name}
    state = api.CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    assert api.Module(tmp_path / "training_model.onnx", state).manifest.data_files[0].name == name


@pytest.mark.sample(every=8)
@pytest.mark.parametrize("net", ["adapter"], indirect=True)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "is not the file with which"),
        (lambda data: data + b"\0", "is not the file with which"),
        (lambda data: data[: len(data) // 2], "base.onnx.data"),
        (None, "base.onnx.data"),
    ],
    ids=["other", "longer", "shorter", "missing"],
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_another_base_is_refused(
    program: str,
    damage: Callable[[bytes], bytes] | None,
    message: str,
    site: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    folder = shutil.copytree(site, tmp_path / "site")
    path = folder / "base.onnx.data"
    data = path.read_bytes()
    path.unlink()
    if damage is not None:
        path.write_bytes(damage(data))
    done = request.getfixturevalue(program)(folder, site.parent / "feeds")
    assert done.returncode != 0
    assert done.stdout == ""
    assert message in done.stderr
    assert "base.onnx.data" in done.stderr


def change_references(path: Path, **entries: str) -> None:
    """Change the places of all tensors that a model keeps in other files."""
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = entries.get(entry.key, entry.value)
    path.write_bytes(model.SerializeToString())


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("net", ["adapter"], indirect=True)
@pytest.mark.parametrize(
    "entries",
    [
        {"offset": "999999999"},
        {"offset": "-4096"},
        {"location": "../secret.data"},
        {"location": "/etc/passwd"},
        {"length": "999999999"},
    ],
)
@pytest.mark.parametrize("program", ["python", "node"])
def test_places_outside_of_the_file_and_the_folder_are_refused(
    program: str, entries: dict[str, str], site: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = shutil.copytree(site, tmp_path / "site")
    shutil.copy(site / "base.onnx.data", tmp_path / "secret.data")
    change_references(folder / "training_model.onnx", **entries)
    done = request.getfixturevalue(program)(folder, site.parent / "feeds")
    assert done.returncode != 0
    assert done.stdout == ""
    assert "raining model" in done.stderr


@pytest.mark.parametrize("net", ["adapter"], indirect=True)
def test_a_manifest_with_wrong_digests_is_refused(site: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(site, tmp_path / "site")
    model = onnx.load(folder / "training_model.onnx", load_external_data=False)
    (entry,) = (entry for entry in model.metadata_props if entry.key == "onnxtrain.manifest")
    manifest = json.loads(entry.value)
    state = api.CheckpointState.load_checkpoint(folder / "checkpoint")
    for wrong in ({"bytes": -1}, {"bytes": True}, {"sha256": "0" * 63}, {"sha256": 7}, {"bytes": None}):
        files = {name: {**file, **wrong} for name, file in manifest["data_files"].items()}
        entry.value = json.dumps(manifest | {"data_files": files})
        (folder / "training_model.onnx").write_bytes(model.SerializeToString())
        with pytest.raises(ModelLoadError, match="not a usable manifest"):
            api.Module(folder / "training_model.onnx", state)


def test_the_default_profile_shares_on_request(tmp_path: Path) -> None:
    for share in (None, True):
        options = OPTIONS | {"profile": "default", "share_weights": share, "lora": LoraConfig(r=1)}
        generate_artifacts(ADAPTERS[0].model(), artifact_directory=tmp_path / str(share), **options)
    assert not list((tmp_path / "None").glob("*.data"))
    assert len(list((tmp_path / "True").glob("*.data"))) == 1


def test_names_that_hosts_refuse_are_not_referred_to(tmp_path: Path) -> None:
    net = ADAPTERS[0]
    onnx.save(
        net.model(), tmp_path / "base.onnx", save_as_external_data=True, location="50%.data", size_threshold=0
    )
    generate_artifacts(tmp_path / "base.onnx", lora=LoraConfig(r=1), artifact_directory=tmp_path, **OPTIONS)
    (name,) = manifest_of(tmp_path)["data_files"]
    assert name.startswith("weights.")


def test_the_base_may_be_below_the_artifacts(batches: list[list[np.ndarray]], tmp_path: Path) -> None:
    base = save_base(ADAPTERS[0], tmp_path / "base")
    generate_artifacts(base, lora=LoraConfig(r=1), artifact_directory=tmp_path, **OPTIONS)
    assert [*manifest_of(tmp_path)["data_files"]] == ["base/base.onnx.data"]
    assert TensorProto.EXTERNAL in {
        tensor.data_location
        for tensor in onnx.load(tmp_path / "training_model.onnx", load_external_data=False).graph.initializer
    }
    assert train(tmp_path, [[x[:8] for x in batch] for batch in batches[:3]])


def test_outputs_of_an_ir_model_refer_to_its_data_file(tmp_path: Path) -> None:
    import onnx_ir as ir

    save_base(ADAPTERS[0], tmp_path)
    model = ir.load(tmp_path / "base.onnx")
    generate_artifacts(model, lora=LoraConfig(r=1), artifact_directory=tmp_path, **OPTIONS)
    assert [*manifest_of(tmp_path)["data_files"]] == ["base.onnx.data"]
