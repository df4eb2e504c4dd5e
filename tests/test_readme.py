"""Every Python block of the front page and the guides runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest

import models
from test_generation_models import generation_model

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "docs/fine-tuning.md",
    "docs/data.md",
    "docs/callbacks.md",
    "docs/derivatives.md",
    "docs/ortmodule.md",
    "docs/layer-norms.md",
    "docs/lora.md",
    "docs/own-host.md",
    "docs/quantisation-aware-training.md",
    "docs/threads.md",
]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)\)")


def blocks() -> list[object]:
    return [
        pytest.param(text, page, id=f"{page}-{index}")
        for page in PAGES
        for index, text in enumerate(BLOCK.findall((ROOT / page).read_text(encoding="utf-8")))
    ]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Files that the guides take for granted: a model, data for it, a run to go on with."""
    from onnxtrain import Trainer

    monkeypatch.chdir(tmp_path)
    onnx.save(models.mlp(), "model.onnx")
    onnx.save(generation_model(), "llm.onnx")
    x = np.random.default_rng(0).standard_normal((100, 4))
    return {"x": x, "y": x[:, :3].argmax(axis=1), "Trainer": Trainer}


@pytest.mark.parametrize(("text", "page"), blocks())
def test_a_block_of_code_runs(text: str, page: str, workplace: dict[str, object]) -> None:
    with_data = page in ("docs/fine-tuning.md", "docs/data.md", "docs/callbacks.md", "docs/lora.md")
    namespace = {"x": workplace["x"], "y": workplace["y"]} if with_data else {}
    if 'resume("run")' in text:
        workplace["Trainer"]("model.onnx", "cross_entropy", directory="run")  # type: ignore[operator]
    exec(compile(text, page, "exec"), {"__name__": "__main__", **namespace})


OTHER_PAGES = [
    "CONTRIBUTING.md",
    "docs/README.md",
    "docs/browser.md",
    "docs/command-line.md",
    "docs/forecasting.md",
    "docs/index.md",
    "docs/install.md",
    "docs/tabular-data.md",
    "docs/transfer-learning.md",
    "examples/forecasting/README.md",
    "web/README.md",
]


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES])
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in LINK.findall(path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), f"{page} links to {target}"


def test_commands_of_the_readme_are_targets_of_the_makefile() -> None:
    readme, makefile = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "Makefile"))
    targets = re.findall(r"^make (\w+)", readme, re.MULTILINE)
    assert targets == ["demo", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_every_loss_and_optimizer_is_in_the_guide() -> None:
    from onnxtrain.losses import LOSSES, make_loss
    from onnxtrain.optimizers import OPTIMIZERS

    page = (ROOT / "docs" / "fine-tuning.md").read_text(encoding="utf-8")
    rows = {name: line for line in page.splitlines() if (name := line.lstrip("> |`").split("`")[0])}
    for name, kind in {**LOSSES, **OPTIMIZERS}.items():
        assert f"`{kind.__name__}" in rows.get(name, ""), (
            f"{name}: add a row to its table in docs/fine-tuning.md"
        )
    for name, kind in LOSSES.items():
        (settings,) = re.findall(rf"`{kind.__name__}\((.*?)\)`", rows[name])
        declared = {setting.split("=")[0] for setting in settings.split(", ") if setting}
        assert declared == vars(make_loss(name)).keys() - {"reduction"}, name


def test_every_schedule_and_metric_is_in_the_guide() -> None:
    from onnxtrain.trainer import METRICS, SCHEDULES

    page = (ROOT / "docs" / "fine-tuning.md").read_text(encoding="utf-8")
    whole = {
        name.split("_")[0] if name.startswith(("f1", "precision", "recall")) else name for name in METRICS
    }
    assert [name for name in [*SCHEDULES, *whole] if f"`{name}`" not in page] == []
    for name, kind in SCHEDULES.items():
        assert f"| `{kind.__name__}(" in page or f", `{kind.__name__}(" in page, name
