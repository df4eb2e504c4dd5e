"""examples/text_model in a short form: trained, exported, fused by onnxruntime, and fine-tuned from that file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import onnx
import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "text_model"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, ModuleType]]:
    """The modules `desk` and `device`, which other examples have as well."""
    names = ("corpus", "desk", "device", "model")
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    monkeypatch.syspath_prepend(FOLDER)
    import corpus
    import desk
    import device

    monkeypatch.setattr(corpus, "spread", partial(corpus.spread, count=1))
    yield desk, device
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.mark.torch
def test_a_fused_text_model_is_fine_tuned(example: tuple[ModuleType, ModuleType], tmp_path: Path) -> None:
    desk, device = example
    at_desk = desk.prepare(tmp_path, steps=20)
    assert at_desk["trained in ORTModule"] < at_desk["at the start"] - 1
    for name in ("exported", "fused by onnxruntime"):
        assert at_desk[name] == pytest.approx(at_desk["trained in ORTModule"], rel=1e-5)
    fused = {n.op_type for n in onnx.load(tmp_path / "fused.onnx").graph.node if n.domain == "com.microsoft"}
    assert {"SkipLayerNormalization", "BiasGelu"} <= fused

    tuned = device.fine_tune(tmp_path, steps=15)
    assert tuned["prose before"] == pytest.approx(at_desk["fused by onnxruntime"], rel=1e-5)
    assert tuned["code after"] < tuned["code before"] - 0.05
    _, held_out = desk.corpus.parts(desk.corpus.code())
    logits = desk.in_file(tmp_path / "tuned.onnx")
    assert desk.loss_of(logits, held_out) == pytest.approx(tuned["code after"], rel=1e-5)
