"""Measures the perplexity of every file on both texts, in plain sessions of onnxruntime, and draws it.

Usage: python report.py FOLDER [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import corpus
import numpy as np
import onnx
import onnxruntime

from onnxtrain.lora import merge, save_adapter


def write_files(folder: Path) -> None:
    """Writes the adapter for onnxruntime, and the models into which it is merged."""
    adapter = folder / "code.onnx_adapter"
    save_adapter(folder / "lora" / "trained", adapter)
    onnx.save(merge(folder / "int4.onnx", adapter), folder / "merged.onnx")
    onnx.save(merge(folder / "int4.onnx", adapter, requantize=True), folder / "requantised.onnx")


def perplexity(model: Path, row: np.ndarray, adapter: Path | None = None, windows: int = 256) -> float:
    """Computes exp of the mean loss per token, over windows that are spread over a row of tokens."""
    settings = onnxruntime.SessionOptions()
    # onnxruntime warns of the optional inputs for adapters.
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, settings)
    options = onnxruntime.RunOptions()
    if adapter is not None:
        weights = onnxruntime.LoraAdapter()
        weights.Load(str(adapter))
        options.add_active_adapter(weights)
    losses = []
    for batch in corpus.spread(row, windows):
        logits = session.run(["logits"], {"tokens": batch}, options)[0][:, :-1].astype(np.float64)
        highest = logits.max(-1, keepdims=True)
        scores = logits - highest - np.log(np.exp(logits - highest).sum(-1, keepdims=True))
        losses.append(-np.take_along_axis(scores, batch[:, 1:, None], -1).mean())
    return float(np.exp(np.mean(losses)))


def measure(folder: Path, windows: int = 256) -> dict[str, dict[str, float]]:
    """Returns, by model, perplexity on held-out code and documentation, and the size of the file in MB."""
    write_files(folder)
    with np.load(folder / "tokens.npz") as file:
        rows = {text: file[f"{text}_held_out"] for text in ("code", "docs")}
    adapter = folder / "code.onnx_adapter"
    files: dict[str, tuple[str, Path | None]] = {
        "float": ("float.onnx", None),
        "int4": ("int4.onnx", None),
        "int4 + LoRA": ("deployed.onnx", adapter),
        "float, all weights trained": ("full.onnx", None),
        "merged, float": ("merged.onnx", None),
        "merged, int4 again": ("requantised.onnx", None),
    }
    return {
        name: {text: perplexity(folder / file, row, active, windows) for text, row in rows.items()}
        | {"MB": sum(path.stat().st_size for path in (folder / file, active) if path is not None) / 1e6}
        for name, (file, active) in files.items()
    }


def plot(folder: Path, table: dict[str, dict[str, float]], path: Path) -> None:
    """Draws the losses of both trainings, and the perplexity of each file on both texts."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, 4), width_ratios=(1, 1.5), layout="constrained"
    )
    for kind, label, color in (
        ("lora", "adapters, on int4", "#1b6ca8"),
        ("full", "all float weights", "#d1495b"),
    ):
        losses = np.array(json.loads((folder / kind / "losses.json").read_text()))
        # A mean over 20 steps: single batches differ more than the curves do.
        few = min(20, len(losses))
        smooth = np.convolve(losses, np.full(few, 1 / few), mode="valid")
        left.plot(np.arange(few, len(losses) + 1), smooth, color=color, label=label)
    left.set(xlabel="step", ylabel="loss per token", title="Training on source code")
    left.legend(frameon=False)
    places = np.arange(len(table))
    for shift, (text, label, color) in enumerate(
        (("code", "held-out code", "#1b6ca8"), ("docs", "held-out documentation", "#9aa5b1"))
    ):
        values = [row[text] for row in table.values()]
        bars = right.barh(places + 0.4 * shift, values, 0.38, color=color, label=label)
        right.bar_label(bars, [f"{value:.1f}" for value in values], padding=3, fontsize=8)
    right.set_yticks(places + 0.2, list(table))
    right.invert_yaxis()
    right.set(xlabel="perplexity per token", title="Held-out text")
    right.margins(x=0.1)
    right.legend(frameon=False, loc="lower right")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    table = measure(options.folder)
    print(f"{'model':28} {'code':>8} {'docs':>8} {'MB':>6}")
    for name, row in table.items():
        print(f"{name:28} {row['code']:8.2f} {row['docs']:8.2f} {row['MB']:6.2f}")
    if options.plot is not None:
        plot(options.folder, table, options.plot)


if __name__ == "__main__":
    main()
