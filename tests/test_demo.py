"""The demo: the whole job on real data, without torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from fresh_process import python
from onnxtrain.demo import digits_network, load_digits_data, run_demo
from onnxtrain.errors import InputError

SOURCE = Path(__file__).parents[1] / "src"

WITHOUT_TORCH = """
import sys
from onnxtrain.cli import main

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, Refuse())
sys.argv = ["onnxtrain", "demo", "--output", sys.argv[1], "--json"]
try:
    main()
finally:
    assert "torch" not in sys.modules
"""


def test_demo_reaches_98_percent_without_torch(tmp_path: Path) -> None:
    """As a user runs it, with torch hidden; the claims are checked on the files alone."""
    result = python("-c", WITHOUT_TORCH, tmp_path, OMP_NUM_THREADS="1")
    document = json.loads(result.stdout)
    assert document["torch_imported"] is False
    assert result.stderr.splitlines()[-1].startswith("epoch 15/15")

    _, images, _, labels = load_digits_data()
    session = ort.InferenceSession(tmp_path / "digits.onnx")
    logits = session.run(["logits"], {"image": images})[0]
    accuracy = float((logits.argmax(axis=1) == labels).mean())
    assert accuracy >= 0.98
    assert document["exported_accuracy"] == accuracy
    assert document["test_accuracy"] == accuracy
    assert document["largest_difference"] < 1e-4

    untrained = ort.InferenceSession(tmp_path / "untrained.onnx")
    assert (untrained.run(["logits"], {"image": images})[0].argmax(axis=1) == labels).mean() < 0.3


def test_figures_and_files(tmp_path: Path) -> None:
    from matplotlib.image import imread

    result = run_demo(tmp_path / "new" / "folder", epochs=1, verbose=False)
    assert [path.name for path in result.files] == [
        "untrained.onnx",
        "digits.onnx",
        "loss_curve.png",
        "confusion_matrix.png",
    ]
    for path in result.files[2:]:
        image = imread(path)
        assert min(image.shape[:2]) >= 600
        assert len(np.unique(image.reshape(-1, image.shape[2]), axis=0)) > 50
    onnx.checker.check_model(onnx.load(result.files[1]), full_check=True)


def test_data_is_split_in_equal_shares_and_always_the_same() -> None:
    train_x, test_x, _, test_y = load_digits_data()
    assert (len(train_x), len(test_x)) == (1437, 360)
    assert train_x.shape[1:] == (1, 8, 8)
    assert (train_x.min(), train_x.max()) == (0, 1)
    counts = np.bincount(test_y)
    assert counts.max() - counts.min() <= 2
    np.testing.assert_array_equal(load_digits_data()[3], test_y)
    seen = {image.tobytes() for image in train_x}
    assert not any(image.tobytes() in seen for image in test_x)


def test_network_is_for_training() -> None:
    modes = [
        attribute.i
        for node in digits_network().graph.node
        for attribute in node.attribute
        if attribute.name == "training_mode"
    ]
    assert modes == [1, 1, 1]


def test_the_demo_needs_at_least_one_epoch(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="epochs must be at least 1"):
        run_demo(tmp_path, epochs=0)


@pytest.mark.parametrize("missing", ["sklearn", "matplotlib"])
def test_missing_extra_says_what_to_install(missing: str, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        f"sys.modules['{missing}'] = None\n"
        "from onnxtrain.cli import main\n"
        f"sys.argv = ['onnxtrain', 'demo', '--output', {str(tmp_path)!r}]\n"
        "main()\n"
    )
    result = python("-c", code, code=1)
    assert "pip install 'onnxtrain[demo]'" in result.stderr
    assert "Traceback" not in result.stderr
