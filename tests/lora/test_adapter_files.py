"""Adapters go to ONNX Runtime and PEFT and come back; those of other models are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from lora.models import in_bits, products, run
from onnxtrain import api
from onnxtrain.artifacts import generate_artifacts
from onnxtrain.errors import AdapterMismatchError, CheckpointError, GraphBuildError
from onnxtrain.lora import (
    LoraConfig,
    adapter_model,
    add_lora,
    copy_module_names,
    load_adapter,
    save_adapter,
)

LAYERS = {"model.layers.0.fc1": (16, 32), "model.layers.1.fc1": (32, 32), "model.layers.1.fc2": (32, 16)}
CONFIG = LoraConfig(
    r=4, lora_alpha=6, init_lora_weights=False, rank_pattern={"fc2": 2}, alpha_pattern={"fc2": 3}
)
X = np.random.default_rng(1).normal(size=(5, 16)).astype(np.float32)


@pytest.fixture
def base() -> onnx.ModelProto:
    return products(LAYERS)


@pytest.fixture
def trained(base: onnx.ModelProto) -> onnx.ModelProto:
    return add_lora(base, CONFIG)


def with_active(model: onnx.ModelProto, *paths: Path) -> np.ndarray:
    """Runs a plain session with active adapters."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    run_options = onnxruntime.RunOptions()
    adapters = [onnxruntime.LoraAdapter() for _ in paths]
    for adapter, path in zip(adapters, paths, strict=True):
        adapter.Load(str(path))
        run_options.add_active_adapter(adapter)
    return session.run(None, {"x": X}, run_options)[0]


def test_onnx_runtime_runs_a_saved_adapter(
    base: onnx.ModelProto, trained: onnx.ModelProto, tmp_path: Path
) -> None:
    save_adapter(trained, tmp_path / "a.onnx_adapter")
    deployed = adapter_model(base, LoraConfig())
    expected = run(trained, x=X)
    assert np.allclose(with_active(deployed, tmp_path / "a.onnx_adapter"), expected, atol=1e-5)
    assert not np.allclose(run(base, x=X), expected, atol=1e-2)
    # Without an adapter not a bit differs.
    assert run(deployed, x=X).tobytes() == run(base, x=X).tobytes()


def test_names_and_scaling_are_those_of_olive(trained: onnx.ModelProto, tmp_path: Path) -> None:
    save_adapter(trained, tmp_path / "a.onnx_adapter")
    file = onnxruntime.AdapterFormat.read_adapter(str(tmp_path / "a.onnx_adapter"))
    found = {name: value.numpy() for name, value in file.get_parameters().items()}
    held = {i.name: onnx.numpy_helper.to_array(i) for i in trained.graph.initializer}
    assert set(found) == {f"{path}.lora_{letter}.weight" for path in LAYERS for letter in "AB"}
    # alpha / r: 6 / 4 and, of fc2, 3 / 2.
    for path, scaling in zip(LAYERS, (1.5, 1.5, 1.5), strict=True):
        assert np.array_equal(found[f"{path}.lora_A.weight"], held[f"{path}.lora_A.weight"])
        assert np.allclose(found[f"{path}.lora_B.weight"], scaling * held[f"{path}.lora_B.weight"], rtol=1e-6)


def test_the_folder_of_peft_holds_its_names_shapes_and_settings(
    trained: onnx.ModelProto, tmp_path: Path
) -> None:
    save_adapter(trained, tmp_path / "peft", format="peft")
    tensors = safetensors.numpy.load_file(tmp_path / "peft" / "adapter_model.safetensors")
    settings = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    prefix = "base_model.model.model.layers.1"
    assert tensors[f"{prefix}.fc1.lora_A.weight"].shape == (4, 32)
    assert tensors[f"{prefix}.fc2.lora_A.weight"].shape == (2, 32)
    assert tensors[f"{prefix}.fc2.lora_B.weight"].shape == (16, 2)
    assert len(tensors) == 6
    assert (settings["peft_type"], settings["r"], settings["lora_alpha"]) == ("LORA", 4, 6)
    assert settings["target_modules"] == sorted(LAYERS)
    assert settings["rank_pattern"] == {"model.layers.1.fc2": 2}
    # B A of PEFT, [out, in], is the transpose of what the graph computes with.
    held = {i.name: onnx.numpy_helper.to_array(i) for i in trained.graph.initializer}
    a, b = (held[f"model.layers.1.fc2.lora_{letter}.weight"] for letter in "AB")
    delta = tensors[f"{prefix}.fc2.lora_B.weight"] @ tensors[f"{prefix}.fc2.lora_A.weight"]
    assert np.allclose(delta.T, a @ b, atol=1e-6)


@pytest.mark.parametrize("form", ["onnx_adapter", "peft"])
@pytest.mark.parametrize("bits", [None, 4])
def test_a_loaded_adapter_computes_the_same(
    form: str, bits: int | None, base: onnx.ModelProto, tmp_path: Path
) -> None:
    model = base if bits is None else in_bits(base, bits)
    trained = add_lora(model, CONFIG)
    save_adapter(trained, tmp_path / "adapter", format=form)  # type: ignore[arg-type]
    loaded = load_adapter(tmp_path / "adapter", model)
    assert np.allclose(run(loaded, x=X), run(trained, x=X), atol=1e-5)
    # And goes back to PEFT as it came.
    save_adapter(loaded, tmp_path / "again", format="peft")
    again = load_adapter(tmp_path / "again", model)
    assert np.allclose(run(again, x=X), run(trained, x=X), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_adapters_of_other_precisions_are_read_in_float32(
    dtype: str, base: onnx.ModelProto, trained: onnx.ModelProto, tmp_path: Path
) -> None:
    """As PEFT reads them; in bfloat16 most of its users write them."""
    save_adapter(trained, tmp_path / "a", format="peft")
    # Not with `safetensors.numpy`, which does not know bfloat16.
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = {n: t.to(getattr(torch, dtype)) for n, t in safetensors.torch.load_file(file).items()}
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    loaded = load_adapter(tmp_path / "a", base)
    adapters = [i for i in loaded.graph.initializer if ".lora_" in i.name]
    assert {i.data_type for i in adapters} == {onnx.TensorProto.FLOAT}
    tolerance = {"float64": 1e-6, "float16": 1e-2, "bfloat16": 5e-2}[dtype]
    assert np.allclose(run(loaded, x=X), run(trained, x=X), atol=tolerance)


def test_the_checkpoint_of_a_run_can_be_saved(base: onnx.ModelProto, tmp_path: Path) -> None:
    generate_artifacts(base, loss="mse", artifact_directory=tmp_path, lora=CONFIG)
    state = api.CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    state.parameters["model.layers.0.fc1.lora_B.weight"].data[:] = 0.25
    save_adapter(state, tmp_path / "a.onnx_adapter")
    loaded = load_adapter(tmp_path / "a.onnx_adapter", base)
    held = {i.name: onnx.numpy_helper.to_array(i) for i in loaded.graph.initializer}
    assert np.array_equal(held["model.layers.0.fc1.lora_B.weight"], np.full((4, 32), 0.375, np.float32))
    # A delta, on top of the checkpoint as it was written, holds the adapters with their description.
    api.CheckpointState.save_checkpoint(state, tmp_path / "delta", trainable_only=True)
    again = api.CheckpointState.load_checkpoint(tmp_path / "checkpoint", delta=tmp_path / "delta")
    save_adapter(again, tmp_path / "b.onnx_adapter")
    assert (tmp_path / "b.onnx_adapter").read_bytes() == (tmp_path / "a.onnx_adapter").read_bytes()


def test_an_adapter_trained_on_float_weights_runs_on_the_quantized_ones(
    base: onnx.ModelProto, trained: onnx.ModelProto, tmp_path: Path
) -> None:
    save_adapter(trained, tmp_path / "peft", format="peft")
    quantized = in_bits(base, 8)
    with pytest.raises(AdapterMismatchError, match="trained on other base weights"):
        load_adapter(tmp_path / "peft", quantized)
    # PEFT itself writes no fingerprint of the base.
    forget_base(tmp_path / "peft")
    loaded = load_adapter(tmp_path / "peft", quantized)
    assert np.abs(run(loaded, x=X) - run(trained, x=X)).max() < 0.05


def forget_base(folder: Path) -> None:
    tensors = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})


def change_tensors(folder: Path, change) -> None:
    tensors = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    safetensors.numpy.save_file(change(tensors), folder / "adapter_model.safetensors", {"format": "pt"})


def change_settings(folder: Path, **settings: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def keep_in_file(path: Path, holds: Callable[[str], bool], version: int | None = None) -> None:
    """Writes a file of ONNX Runtime again, with the tensors whose names `holds` accepts."""
    file = onnxruntime.AdapterFormat.read_adapter(str(path))
    kept = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy(value.numpy().copy())
        for name, value in file.get_parameters().items()
        if holds(name)
    }
    part = onnxruntime.AdapterFormat()
    part.set_adapter_version(file.get_adapter_version() if version is None else version)
    part.set_model_version(file.get_model_version() if version is None else version)
    part.set_parameters(kept)
    part.export_adapter(str(path))


class TestRefused:
    @pytest.fixture
    def folder(self, trained: onnx.ModelProto, tmp_path: Path) -> Path:
        save_adapter(trained, tmp_path / "peft", format="peft")
        return tmp_path / "peft"

    def test_half_of_the_matrices(self, base: onnx.ModelProto, folder: Path) -> None:
        change_tensors(folder, lambda tensors: {n: t for n, t in tensors.items() if "lora_B" not in n})
        with pytest.raises(AdapterMismatchError, match="has only one of A and B"):
            load_adapter(folder, base)

    def test_half_of_the_layers(self, base: onnx.ModelProto, folder: Path) -> None:
        change_tensors(folder, lambda tensors: {n: t for n, t in tensors.items() if "layers.0" not in n})
        with pytest.raises(AdapterMismatchError, match=r"names the layers model\.layers\.0\.fc1"):
            load_adapter(folder, base)

    def test_half_of_the_layers_in_a_file_of_onnx_runtime(
        self, base: onnx.ModelProto, trained: onnx.ModelProto, tmp_path: Path
    ) -> None:
        save_adapter(trained, tmp_path / "a")
        # As another program writes it, which does not count.
        keep_in_file(tmp_path / "a", lambda name: "layers.1.fc1" not in name, version=1)
        with pytest.raises(AdapterMismatchError, match=r"none for model\.layers\.1\.fc1"):
            load_adapter(tmp_path / "a", base)

    def test_all_layers_of_a_name_are_gone(
        self, base: onnx.ModelProto, trained: onnx.ModelProto, tmp_path: Path
    ) -> None:
        """The versions in the file tell how many there were."""
        save_adapter(trained, tmp_path / "a")
        keep_in_file(tmp_path / "a", lambda name: "fc2" not in name)
        with pytest.raises(AdapterMismatchError, match="adapters for 3 layers, but contains only 2"):
            load_adapter(tmp_path / "a", base)

    def test_half_of_the_layers_where_the_settings_say_all_linear(
        self, base: onnx.ModelProto, folder: Path
    ) -> None:
        change_settings(folder, target_modules="all-linear")
        change_tensors(folder, lambda tensors: {n: t for n, t in tensors.items() if "layers.0" not in n})
        with pytest.raises(AdapterMismatchError, match=r"none for model\.layers\.0\.fc1"):
            load_adapter(folder, base)

    def test_an_adapter_of_the_quantized_model_beside_the_float_one(
        self, base: onnx.ModelProto, tmp_path: Path
    ) -> None:
        quantized = copy_module_names(in_bits(base, 4), base)
        for form in ("onnx_adapter", "peft"):
            save_adapter(add_lora(quantized, CONFIG), tmp_path / form, format=form)
            assert load_adapter(tmp_path / form, quantized)
            with pytest.raises(AdapterMismatchError, match="trained on other base weights"):
                load_adapter(tmp_path / form, base)

    def test_integers(self, base: onnx.ModelProto, folder: Path) -> None:
        change_tensors(folder, lambda tensors: {n: t.astype(np.int8) for n, t in tensors.items()})
        with pytest.raises(AdapterMismatchError, match="has the dtype int8"):
            load_adapter(folder, base)

    @pytest.mark.parametrize("value", [np.nan, -np.inf])
    def test_a_training_that_diverged(self, value: float, base: onnx.ModelProto, folder: Path) -> None:
        change_tensors(
            folder, lambda tensors: {n: np.where("lora_B" in n, value, t) for n, t in tensors.items()}
        )
        with pytest.raises(
            AdapterMismatchError, match=r"lora_B\.weight contains values that are NaN or infinite"
        ):
            load_adapter(folder, base)

    @pytest.mark.parametrize("form", ["onnx_adapter", "peft"])
    def test_a_file_that_ends_too_early(
        self, form: str, base: onnx.ModelProto, trained: onnx.ModelProto, tmp_path: Path
    ) -> None:
        save_adapter(trained, tmp_path / "a", format=form)  # type: ignore[arg-type]
        file = tmp_path / "a" / "adapter_model.safetensors" if form == "peft" else tmp_path / "a"
        whole = file.read_bytes()
        for length in range(0, len(whole), len(whole) // 40):
            file.write_bytes(whole[:length])
            with pytest.raises(AdapterMismatchError, match=r"not an? (ONNX Runtime adapter|PEFT folder)"):
                load_adapter(tmp_path / "a", base)

    @pytest.mark.parametrize("form", ["onnx_adapter", "peft"])
    def test_another_model_of_the_same_layers(
        self, form: str, trained: onnx.ModelProto, tmp_path: Path
    ) -> None:
        save_adapter(trained, tmp_path / "a", format=form)  # type: ignore[arg-type]
        with pytest.raises(AdapterMismatchError, match="trained on other base weights"):
            load_adapter(tmp_path / "a", products(LAYERS, seed=1))

    def test_other_layers(self, folder: Path) -> None:
        forget_base(folder)
        with pytest.raises(
            AdapterMismatchError, match=r"the layer model\.layers\.\d\.fc\d, which the model does not"
        ):
            load_adapter(folder, products({"fc": (16, 16)}))

    def test_other_sizes(self, folder: Path) -> None:
        forget_base(folder)
        with pytest.raises(AdapterMismatchError, match="the layer has 16 inputs and 48 outputs"):
            load_adapter(
                folder, products({**LAYERS, "model.layers.0.fc1": (16, 48), "model.layers.1.fc1": (48, 32)})
            )

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"use_dora": True}, "use_dora"),
            (
                {"lora_bias": True, "alora_invocation_tokens": [1, 2]},
                "with alora_invocation_tokens, lora_bias; only",
            ),
            ({"layer_replication": [[0, 4], [2, 5]]}, "layer_replication"),
            ({"trainable_token_indices": [0]}, "trainable_token_indices"),
            ({"use_qalora": True, "kasa_config": {"beta": 0.1}}, "kasa_config, use_qalora"),
            # A setting of a later version.
            ({"use_newer": True}, "with use_newer; only LoRA of linear layers is supported"),
            *(
                (
                    {"init_lora_weights": kind},
                    f"init_lora_weights='{kind}', which changes .*path_initial_model_for_weight_conversion",
                )
                for kind in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "new")
            ),
            ({"peft_type": "IA3"}, "of the kind IA3"),
            ({"bias": "all"}, "bias"),
            ({"modules_to_save": ["head"]}, "modules_to_save"),
            ({"r": 3, "rank_pattern": {}}, "has rank 4, but adapter_config.json says 3"),
            ({"r": "four"}, "not a PEFT folder"),
        ],
    )
    def test_settings_that_are_not_lora(
        self, base: onnx.ModelProto, folder: Path, settings: dict[str, object], message: str
    ) -> None:
        change_settings(folder, **settings)
        with pytest.raises(AdapterMismatchError, match=message):
            load_adapter(folder, base)

    def test_settings_of_plain_lora(self, base: onnx.ModelProto, folder: Path) -> None:
        """All that PEFT 0.21 writes for plain LoRA, and initialisations that leave the base as it is."""
        expected = run(load_adapter(folder, base), x=X)
        neutral = {
            "auto_mapping": {"base_model_class": "Net", "parent_library": "nets"}, "corda_config": None,
            "ensure_weight_tying": False, "fan_in_fan_out": False, "kasa_config": None, "loftq_config": {},
            "lora_bias": False, "lora_dropout": 0.1, "megatron_core": "megatron.core", "peft_version": "0.21.2",
            "qalora_group_size": 16, "revision": "main", "use_bdlora": None, "use_dora": False, "velora_config": None,
        }  # fmt: skip
        for kind in (True, False, "gaussian", "eva", "orthogonal", "mica"):
            change_settings(folder, **neutral, init_lora_weights=kind)
            np.testing.assert_array_equal(run(load_adapter(folder, base), x=X), expected)

    def test_foreign_tensors(self, base: onnx.ModelProto, folder: Path) -> None:
        change_tensors(folder, lambda tensors: {"weight": np.zeros(3, np.float32)})
        with pytest.raises(AdapterMismatchError, match="weight are not LoRA's A and B"):
            load_adapter(folder, base)

    @pytest.mark.parametrize("content", [b"", b"TORT", b"x" * 100])
    def test_damaged_files(self, base: onnx.ModelProto, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(AdapterMismatchError, match="not an ONNX Runtime adapter"):
            load_adapter(tmp_path / "a", base)

    def test_a_damaged_folder(self, base: onnx.ModelProto, folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-10])
        with pytest.raises(AdapterMismatchError, match="not a PEFT folder"):
            load_adapter(folder, base)

    def test_a_path_without_file(self, base: onnx.ModelProto, tmp_path: Path) -> None:
        with pytest.raises(AdapterMismatchError, match="no such file or folder"):
            load_adapter(tmp_path / "nothing", base)

    def test_a_state_without_adapters(self, base: onnx.ModelProto, tmp_path: Path) -> None:
        generate_artifacts(base, loss="mse", artifact_directory=tmp_path)
        state = api.CheckpointState.load_checkpoint(tmp_path / "checkpoint")
        for held in (state, base):
            with pytest.raises(AdapterMismatchError, match="has no adapters"):
                save_adapter(held, tmp_path / "a")

    def test_a_checkpoint_beside_another_model(self, base: onnx.ModelProto, tmp_path: Path) -> None:
        """Of adapters of the same shapes; results would be wrong, and the loss would fall all the same."""
        alike = {"own": (base, CONFIG), "other": (products(LAYERS, seed=1), CONFIG)}
        alike["scaled"] = (base, replace(CONFIG, lora_alpha=60))
        for name, (model, config) in alike.items():
            generate_artifacts(model, loss="mse", artifact_directory=tmp_path / name, lora=config)
        for name, message in (("other", "on other base weights than"), ("scaled", "with another scaling")):
            state = api.CheckpointState.load_checkpoint(tmp_path / "own" / "checkpoint")
            with pytest.raises(CheckpointError, match=f"its adapters were trained {message}"):
                api.Module(tmp_path / name / "training_model.onnx", state)
            assert api.Module(tmp_path / "own" / "training_model.onnx", state)

    @pytest.mark.parametrize("form", ["onnx_adapter", "peft"])
    def test_values_that_are_not_finite_are_not_saved(
        self, form: str, trained: onnx.ModelProto, tmp_path: Path
    ) -> None:
        for initializer in trained.graph.initializer:
            if initializer.name == "model.layers.1.fc1.lora_B.weight":
                array = onnx.numpy_helper.to_array(initializer) * np.float32(np.nan)
                initializer.CopyFrom(onnx.numpy_helper.from_array(array, initializer.name))
        with pytest.raises(
            AdapterMismatchError, match=r"layers\.1\.fc1\.lora_B\.weight contains values that are NaN"
        ):
            save_adapter(trained, tmp_path / "a", format=form)  # type: ignore[arg-type]

    def test_values_beyond_the_range_of_float16_are_not_saved(self, tmp_path: Path) -> None:
        model = onnx.parser.parse_model(
            """<ir_version: 10, opset_import: ["": 21]> g (float16[n, 2] x) => (float16[n, 2] y)
            <float16[2, 2] fc = {1, 2, 3, 4}> { y = MatMul(x, fc) }"""
        )
        large = add_lora(model, LoraConfig(r=1, lora_alpha=1e6, init_lora_weights=False))
        with pytest.raises(AdapterMismatchError, match="beyond the range of float16"):
            save_adapter(large, tmp_path / "a")
        save_adapter(large, tmp_path / "a", format="peft")

    def test_inputs_for_adapters_hold_no_weights(self, base: onnx.ModelProto, tmp_path: Path) -> None:
        with pytest.raises(AdapterMismatchError, match="are missing"):
            save_adapter(adapter_model(base, LoraConfig()), tmp_path / "a")

    def test_an_unknown_format(self, trained: onnx.ModelProto, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="format is 'gguf'"):
            save_adapter(trained, tmp_path / "a", format="gguf")  # type: ignore[arg-type]

    def test_a_model_with_adapters(self, trained: onnx.ModelProto, folder: Path) -> None:
        with pytest.raises((GraphBuildError, AdapterMismatchError)):
            load_adapter(folder, trained)
