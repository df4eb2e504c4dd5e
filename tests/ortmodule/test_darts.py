"""darts' own models that use RINorm, trained by ONNX Runtime: an ORTModule in the place of the network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onnxtrain.ortmodule import ORTModule

darts = pytest.importorskip("darts")
pytorch_lightning = pytest.importorskip("pytorch_lightning")
datasets = pytest.importorskip("statsmodels.datasets")
models = pytest.importorskip("darts.models")

pytestmark = [
    pytest.mark.torch,
    # PyTorch renamed what Lightning asks for.
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:DeprecationWarning"),
]

MODELS = {
    "TiDE": (models.TiDEModel, {"hidden_size": 16, "dropout": 0.1, "use_layer_norm": True}),
    "TSMixer": (
        models.TSMixerModel,
        {"hidden_size": 16, "ff_size": 16, "num_blocks": 1, "dropout": 0.1, "norm_type": "LayerNormNoBias"},
    ),
    "N-HiTS": (models.NHiTSModel, {"num_stacks": 2, "num_blocks": 1, "num_layers": 1, "layer_widths": 16}),
}


class Losses(pytorch_lightning.Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.values.append(float(outputs["loss"]))


def co2() -> tuple[Any, Any]:
    monthly = datasets.co2.load_pandas().data["co2"].resample("MS").mean().interpolate("time")
    scaled = ((monthly - monthly.iloc[:250].mean()) / monthly.iloc[:250].std()).astype(np.float32)
    return darts.TimeSeries.from_series(scaled.iloc[:250]), darts.TimeSeries.from_series(scaled.iloc[250:310])


def in_onnxruntime(model: type) -> type:
    """As in examples/forecasting/personalise.md."""

    class InONNXRuntime(model):
        def _create_model(self, train_sample: Any) -> ORTModule:
            return ORTModule(super()._create_model(train_sample))

    return InONNXRuntime


def settings(losses: Losses) -> dict[str, Any]:
    return {
        "input_chunk_length": 36,
        "output_chunk_length": 12,
        "n_epochs": 2,
        "batch_size": 64,
        "random_state": 0,
        "use_reversible_instance_norm": True,
        # Adam, the default, would make whole steps of the rounding errors of gradients that are zero.
        "optimizer_cls": torch.optim.SGD,
        "optimizer_kwargs": {"lr": 0.05},
        "pl_trainer_kwargs": {
            "accelerator": "cpu",
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "logger": False,
            "callbacks": [losses],
        },
    }


def train(model: type, options: dict[str, Any]) -> tuple[Any, list[float], np.ndarray]:
    losses = Losses()
    forecaster = model(**settings(losses), **options)
    known, later = co2()
    loader = {"pin_memory": False}
    forecaster.fit(known, dataloader_kwargs=loader)
    forecast = forecaster.predict(24, series=later, dataloader_kwargs=loader).values()
    return forecaster, losses.values, forecast


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_darts_trains_in_onnxruntime_as_without(name: str) -> None:
    model, options = MODELS[name]
    plain, expected, expected_forecast = train(model, options)
    ours, losses, forecast = train(in_onnxruntime(model), options)
    assert isinstance(ours.model, ORTModule)
    assert ours.model.report().runs_in_onnxruntime, ours.model.report()
    modes = [graph.mode for graph in ours.model.report()]
    assert {"training", "inference"} <= set(modes)
    assert len(losses) == len(expected) >= 6
    assert np.mean(expected[-3:]) < expected[0]
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    np.testing.assert_allclose(
        forecast, expected_forecast, rtol=0, atol=1e-4 * np.abs(expected_forecast).max()
    )
    state, reference = ours.model.state_dict(), plain.model.state_dict()
    assert state.keys() == reference.keys()
    assert "rin.affine_weight" in state
    assert not np.array_equal(state["rin.affine_weight"].numpy(), np.ones(1, np.float32))
    for key, value in reference.items():
        np.testing.assert_allclose(state[key].numpy(), value.numpy(), rtol=0, atol=1e-4, err_msg=key)


# Lightning asks for pinned memory, of which PyTorch says that it is of no use here.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.pin_memory. argument is set as true:UserWarning")
def test_the_documented_way_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "examples" / "forecasting" / "personalise.md").read_text(
        encoding="utf-8"
    )
    (block,) = (text for text in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "darts" in text)
    namespace: dict[str, Any] = {"np": np, "time": np.arange(400), "__name__": "documented"}
    exec(compile(block, "examples/forecasting/personalise.md", "exec"), namespace)
    assert namespace["model"].model.report().runs_in_onnxruntime
    # The page trains for a moment only.
    known, later = co2()
    model = namespace["TiDEInONNXRuntime"](
        36,
        12,
        n_epochs=20,
        use_reversible_instance_norm=True,
        random_state=0,
        pl_trainer_kwargs=namespace["quiet"],
    )
    model.fit(known)
    error = np.abs(model.predict(24).values() - later.values()[:24]).mean()
    seasonal_naive = np.abs(np.tile(known.values()[-12:], (2, 1)) - later.values()[:24]).mean()
    assert error < seasonal_naive


class TiDEInONNXRuntime(models.TiDEModel):
    """At module level, since darts pickles its models."""

    def _create_model(self, train_sample: Any) -> ORTModule:
        return ORTModule(super()._create_model(train_sample))


def test_what_was_trained_is_loaded_into_the_plain_model(tmp_path: Path) -> None:
    _, options = MODELS["TiDE"]
    ours, _, forecast = train(TiDEInONNXRuntime, options)
    ours.save(str(tmp_path / "tide.pt"))
    plain = models.TiDEModel(**settings(Losses()), **options)
    plain.load_weights(str(tmp_path / "tide.pt"))
    assert type(plain.model) is not ORTModule
    again = plain.predict(24, series=co2()[1], dataloader_kwargs={"pin_memory": False}).values()
    np.testing.assert_allclose(again, forecast, rtol=0, atol=1e-5 * np.abs(forecast).max())
