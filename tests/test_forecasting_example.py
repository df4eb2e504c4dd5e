"""examples/forecasting, end to end: the same errors in three ways, and a personal network in a small file."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from fresh_process import python
from onnxtrain import differentiate
from onnxtrain.api import CheckpointState
from runtime.test_imports import BLOCK

FOLDER = Path(__file__).parents[1] / "examples" / "forecasting"
SOURCE = Path(__file__).parents[1] / "src"
NEEDS = ("torch", "statsmodels", "matplotlib", "rich")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.thorough,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in NEEDS), reason=f"needs {', '.join(NEEDS)}"
    ),
]


def run(*arguments: str | Path) -> str:
    path = [SOURCE, os.environ.get("PYTHONPATH", "")]
    return python(*arguments, cwd=FOLDER, path=path, OMP_NUM_THREADS="1").stdout


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run `compare.py`; return the directory of its plots, errors and artifacts."""
    directory = tmp_path_factory.mktemp("forecasting")
    (directory / "printed").write_text(run("compare.py", "--output", directory))
    return directory


@pytest.fixture(scope="module")
def errors(output: Path) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Series -> forecast -> part -> error."""
    return json.loads((output / "errors.json").read_text())


@pytest.fixture(scope="module")
def protocol():
    """The module of the example, without its folder on the path."""
    spec = importlib.util.spec_from_file_location("forecasting_protocol", FOLDER / "protocol.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("series", ["co2", "sunspots"])
@pytest.mark.parametrize("method", ["ORTModule", "on the device"])
def test_forecasts_are_those_of_eager_pytorch_and_better_than_seasonal_naive(errors, series, method):
    methods = errors[series]
    for part in ("validation", "test"):
        for name in ("MAE", "RMSE", "MASE"):
            eager, error = methods["PyTorch, eager"][part][name], methods[method][part][name]
            assert abs(error - eager) < 0.01 * eager
    for name in ("MAE", "RMSE", "MASE"):
        assert methods[method]["test"][name] < 0.8 * methods["seasonal-naive"]["test"][name]


def test_the_personalised_network_is_better_than_before_and_small(errors, output):
    methods = errors["elnino"]
    for part in ("validation", "test"):
        for name in ("MAE", "RMSE", "MASE"):
            after = methods["personalised"][part][name]
            assert after < 0.6 * methods["trained on co2"][part][name]
            assert after < 0.85 * methods["seasonal-naive"][part][name]
    base, delta = output / "artifacts/co2/trained", output / "artifacts/elnino/delta"
    assert delta.stat().st_size < 0.1 * base.stat().st_size
    before, after = CheckpointState.load_checkpoint(base), CheckpointState.load_checkpoint(base, delta=delta)
    sizes = {True: 0, False: 0}
    for name, parameter in after.parameters:
        sizes[parameter.requires_grad] += parameter.data.size
        unchanged = np.array_equal(parameter.data, before.parameters[name].data)
        assert unchanged != parameter.requires_grad, name
    assert 0 < sizes[True] < 0.1 * sum(sizes.values())
    assert (
        f"personalised: {sizes[True]} of {sum(sizes.values())} parameters" in (output / "printed").read_text()
    )


def test_the_readme_tells_what_the_program_gives(errors):
    rows = re.findall(
        r"^\|.*?\| (.+?) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|",
        (FOLDER / "README.md").read_text(encoding="utf-8"),
        re.M,
    )
    given = [(name, parts["test"]) for methods in errors.values() for name, parts in methods.items()]
    assert [name for name, *_ in rows] == [name for name, _ in given]
    for (_, *numbers), (_, expected) in zip(rows, given, strict=True):
        np.testing.assert_allclose([float(number) for number in numbers], list(expected.values()), rtol=0.01)


def test_a_figure_for_each_series(output):
    for name in ("co2", "sunspots", "elnino"):
        content = (output / f"{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG")
        assert 30_000 < len(content) < 150_000


def test_the_device_has_neither_torch_nor_onnx(output, errors, tmp_path):
    for name in ("co2", "elnino"):
        shutil.copytree(output / "artifacts" / name, tmp_path / name)
    code = BLOCK + (
        "Blocker.allowed.add('protocol')\n"
        "import runpy\n"
        "sys.path.insert(0, '.')\n"
        "runpy.run_path('device.py', run_name='__main__')\n"
        "assert not {'torch', 'onnx'} & set(sys.modules)\n"
    )
    printed = run("-c", code, "train", tmp_path / "co2")
    mae = float(re.search(r"trained +test +MAE ([\d.]+)", printed)[1])
    assert abs(mae - errors["co2"]["on the device"]["test"]["MAE"]) < 1e-3
    printed = run("-c", code, "personalise", tmp_path / "elnino", "--base", tmp_path / "co2" / "trained")
    mae = float(re.search(r"after +test +MAE ([\d.]+)", printed)[1])
    assert abs(mae - errors["elnino"]["personalised"]["test"]["MAE"]) < 1e-3


OTHER_NORMS = ["layer_norm_no_bias", "rms_norm"]


@pytest.fixture(scope="module")
def printed_with_norm() -> dict[str, str]:
    """Norm -> what `train.py` prints with it; one process trains with all of `OTHER_NORMS`."""
    end = "-- end of a training --\n"
    code = (
        "import runpy, sys\n"
        "sys.path.insert(0, '.')\n"
        f"for norm in {OTHER_NORMS}:\n"
        "    sys.argv = ['train.py', 'co2', '--norm', norm]\n"
        "    runpy.run_path('train.py', run_name='__main__')\n"
        f"    print({end!r}, end='')\n"
    )
    *printed, _ = run("-c", code).split(end)
    return dict(zip(OTHER_NORMS, printed, strict=True))


@pytest.mark.parametrize("norm", OTHER_NORMS)
def test_other_norms_train_in_onnxruntime(norm, errors, printed_with_norm):
    printed = printed_with_norm[norm]
    mae = float(re.search(r"test +MAE ([\d.]+)", printed)[1])
    assert mae < 0.5 * errors["co2"]["seasonal-naive"]["test"]["MAE"]
    report = printed[printed.index("graph    mode") :]
    assert "ONNX Runtime" in report
    assert "PyTorch" not in report, report


def input_gradient(path: Path, x: np.ndarray) -> np.ndarray:
    """Of the sum of the forecasts by PyTorch, in a network with the weights of the file."""
    import torch

    sys.path.insert(0, str(FOLDER))
    try:
        from model import Forecaster
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("model", None)
    network = Forecaster(60, 24, 96)
    weights = {
        t.name: torch.from_numpy(onnx.numpy_helper.to_array(t).copy())
        for t in onnx.load(path).graph.initializer
    }
    network.load_state_dict({name: weights[name] for name in network.state_dict()})
    context = torch.from_numpy(x).requires_grad_()
    network(context).sum().backward()
    return context.grad.numpy()


def test_statistics_of_rinorm_carry_no_gradient_in_the_exported_file(output):
    """With them, shifting a window would shift its forecast: the gradient's sum would be the horizon's length."""
    model = onnx.load(output / "artifacts/co2/network.onnx")
    (forecast,) = model.graph.output
    model.graph.node.append(onnx.helper.make_node("ReduceSum", [forecast.name], ["total"], keepdims=0))
    del model.graph.output[:]
    model.graph.output.append(onnx.helper.make_tensor_value_info("total", onnx.TensorProto.FLOAT, []))
    step = differentiate(model, of="total", wrt=["context"])
    session = onnxruntime.InferenceSession(step.SerializeToString())
    x = np.random.default_rng(0).standard_normal((3, 60, 1)).astype(np.float32)
    total, gradient = session.run(["total", "context_grad"], {"context": x})
    shifted, _ = session.run(["total", "context_grad"], {"context": x + 1})
    assert shifted - total == pytest.approx(3 * 24, rel=1e-3)
    expected = input_gradient(output / "artifacts/co2/network.onnx", x)
    np.testing.assert_allclose(gradient, expected, atol=1e-5)
    assert abs(gradient.sum() - 3 * 24) > 1


def test_windows_do_not_look_ahead(protocol):
    values = np.arange(200.0)
    task = protocol.Task(12, 6, 4, width=1, epochs=1, learning_rate=0.1, weight_decay=0)
    windows = protocol.Windows(protocol.Series("s", "S", "m", values, values), task)
    assert windows.borders == [0, 140, 170, 200]
    for index, part in enumerate(protocol.PARTS):
        contexts, horizons = (windows.in_units(array) for array in windows.of(part))
        begin, end = windows.borders[index : index + 2]
        np.testing.assert_allclose(horizons, windows.truth(part), atol=1e-4)
        assert horizons.min() >= begin - 1e-4
        assert horizons.max() < end
        np.testing.assert_allclose(contexts[:, -1] + 1, horizons[:, 0], atol=1e-4)
        assert len(contexts) == end - max(begin, 12) - 6 + 1
    later = values.copy()
    later[140:] = 1e6
    changed = protocol.Windows(protocol.Series("s", "S", "m", values, later), task)
    for before, after in zip(windows.of("train"), changed.of("train"), strict=True):
        np.testing.assert_array_equal(before, after)


def test_errors_and_seasonal_naive_by_hand(protocol):
    values = np.tile([0.0, 1.0, 2.0, 3.0], 50) + np.repeat(np.arange(50.0), 4)  # rises by 1 a period
    task = protocol.Task(12, 6, 4, width=1, epochs=1, learning_rate=0.1, weight_decay=0)
    windows = protocol.Windows(protocol.Series("s", "S", "m", np.arange(200), values), task)
    naive = windows.seasonal_naive("test")
    np.testing.assert_array_equal(windows.truth("test") - naive, np.tile([1, 1, 1, 1, 2, 2], (25, 1)))
    assert windows.errors(naive, "test") == pytest.approx({"MAE": 8 / 6, "RMSE": 2**0.5, "MASE": 8 / 6})


def test_every_window_is_seen_once_an_epoch(protocol):
    seen = np.concatenate(list(protocol.batches(70, epochs=3, seed=1)))
    assert sorted(seen) == sorted([*range(70)] * 3)
    assert len(list(protocol.batches(70, 3, 1))) == 3 * protocol.steps_per_epoch(70) == 9
