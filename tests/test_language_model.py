"""examples/language_model in a short form: trained, quantized to int4, adapted to other text, merged."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnxruntime
import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "language_model"
WINDOWS = 16


@pytest.fixture(scope="module")
def example() -> Iterator[dict[str, ModuleType]]:
    """The modules of the example; other examples have modules of the same names."""
    names = ("corpus", "model", "desk", "device", "report")
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(FOLDER))
    import corpus
    import desk
    import device
    import report

    # A quarter of the texts: the tokenizer takes most of the time of a short run.
    with pytest.MonkeyPatch.context() as patch:
        documentation, code = corpus.documentation()[::4], corpus.code()[::4]
        patch.setattr(corpus, "documentation", lambda: documentation)
        patch.setattr(corpus, "code", lambda: code)
        patch.setattr(desk, "BATCH", 8)
        patch.setattr(device, "BATCH", 8)
        yield {"corpus": corpus, "desk": desk, "device": device, "report": report}
    sys.path.remove(str(FOLDER))
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.fixture(scope="module")
def run(
    example: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, dict[str, float]]]:
    """A short run: its folder, and the table that the report prints."""
    folder = tmp_path_factory.mktemp("language_model")
    example["desk"].prepare(folder, steps=25)
    for kind in ("lora", "full"):
        example["device"].adapt(folder, kind, steps=12)
    return folder, example["report"].measure(folder, windows=WINDOWS)


def reference_perplexity(model: onnx.ModelProto, row: np.ndarray) -> float:
    """Perplexity by a session and a log-softmax in numpy, written apart from the example's."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    total, count = 0.0, 0
    for start in np.linspace(0, len(row) - 128, WINDOWS).astype(int):
        window = row[start : start + 128]
        (logits,) = session.run(["logits"], {"tokens": window[None]})
        for scores, following in zip(logits[0, :-1].astype(np.float64), window[1:], strict=True):
            total += np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[following]
            count += 1
    return float(np.exp(total / count))


@pytest.mark.torch
@pytest.mark.thorough
def test_every_figure_is_that_of_the_file(run: tuple[Path, dict[str, dict[str, float]]]) -> None:
    folder, table = run
    rows = np.load(folder / "tokens.npz")
    files = {
        "float": "float.onnx",
        "int4": "int4.onnx",
        "float, all weights trained": "full.onnx",
        "merged, float": "merged.onnx",
        "merged, int4 again": "requantised.onnx",
    }
    for name, file in files.items():
        for text in ("code", "docs"):
            expected = reference_perplexity(onnx.load(folder / file), rows[f"{text}_held_out"])
            assert table[name][text] == pytest.approx(expected, rel=1e-5)


@pytest.mark.torch
@pytest.mark.thorough
def test_the_model_with_its_adapter_is_the_one_that_was_trained(
    run: tuple[Path, dict[str, dict[str, float]]],
) -> None:
    """The adapter file beside the deployed model, the eval model of the device, and the merged file: one loss."""
    from onnxtrain.api import CheckpointState, Module

    folder, table = run
    row = np.load(folder / "tokens.npz")["code_held_out"]
    files = folder / "lora"
    state = CheckpointState.load_checkpoint(files / "trained")
    module = Module(files / "training_model.onnx", state, files / "eval_model.onnx")
    module.eval()
    starts = np.linspace(0, len(row) - 128, WINDOWS).astype(int)
    batch = np.stack([row[start : start + 128] for start in starts])
    trained = float(np.exp(np.asarray(module(batch, batch))))
    assert table["int4 + LoRA"]["code"] == pytest.approx(trained, rel=1e-5)
    for text in ("code", "docs"):
        assert table["merged, float"][text] == pytest.approx(table["int4 + LoRA"][text], rel=1e-4)
    # All but the adapters stays: the device's checkpoint holds nothing else, and the output layer has none.
    names = {name for name, _ in state.parameters}
    assert len(names) == 4 * 6 * 2
    assert "layers.0.self_attn.q_proj.lora_A.weight" in names
    assert not any("lm_head" in name for name in names)


@pytest.mark.torch
@pytest.mark.thorough
def test_without_its_adapter_the_deployed_file_is_the_int4_file(
    run: tuple[Path, dict[str, dict[str, float]]],
) -> None:
    folder, _ = run
    batch = np.load(folder / "tokens.npz")["code_held_out"][:256].reshape(2, 128)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # onnxruntime warns of optional inputs
    logits = [
        onnxruntime.InferenceSession(folder / file, options).run(["logits"], {"tokens": batch})[0]
        for file in ("int4.onnx", "deployed.onnx")
    ]
    np.testing.assert_array_equal(*logits)


@pytest.mark.torch
@pytest.mark.thorough
def test_the_order_of_the_figures(run: tuple[Path, dict[str, dict[str, float]]]) -> None:
    folder, table = run
    assert table["int4"]["docs"] < 2048 / 2  # a model that knows nothing has the size of the vocabulary
    assert table["int4 + LoRA"]["code"] < 0.95 * table["int4"]["code"]
    assert table["float, all weights trained"]["code"] < 0.95 * table["float"]["code"]
    # The rounding keeps what was learned, up to the error of int4.
    assert table["merged, int4 again"]["code"] == pytest.approx(table["merged, float"]["code"], rel=0.05)
    assert table["merged, int4 again"]["code"] < 0.95 * table["int4"]["code"]
    assert table["merged, int4 again"]["MB"] == pytest.approx(table["int4"]["MB"], rel=0.01)
    assert table["int4"]["MB"] < table["float"]["MB"] / 3
    for kind in ("lora", "full"):
        losses = json.loads((folder / kind / "losses.json").read_text())
        assert np.mean(losses[-3:]) < np.mean(losses[:3])


@pytest.mark.torch
def test_the_texts_are_held_out(example: dict[str, ModuleType]) -> None:
    corpus = example["corpus"]
    for texts in (corpus.documentation(), corpus.code()):
        training, held_out = corpus.parts(texts)
        assert len(held_out) == len(texts) // 5
        assert not set(training) & set(held_out)
