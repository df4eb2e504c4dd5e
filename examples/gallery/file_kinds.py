"""Fine-tunes the classifier of Magika, which tells the kind of a file from its bytes, on short TOML and INI files.

The two formats look alike in files of a few lines, and Magika calls many TOML files INI. The files are written on the
spot; names and texts of the held-out files do not occur in the others.

Usage: python examples/gallery/file_kinds.py [--seed 0]
"""

import argparse
import json
import shutil
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import magika
import numpy as np
import onnxruntime
from magika import Magika

from onnxtrain import Trainer

DEPLOYED = Path(magika.__file__).parent / "models" / "standard_v3_3"
LOGITS = "jax2tf_get_logits_/pjit_get_logits_/MagikaV2/Dense_1/AddV2:0"
CONFIG = json.loads((DEPLOYED / "config.min.json").read_text())


def settings(rng: np.random.Generator, words: list[str]) -> dict[str, dict[str, object]]:
    """Returns one or two sections, each with a text and up to two other values."""

    def word() -> str:
        return str(rng.choice(words))

    def text() -> str:
        return f"/{word()}/{word()}" if rng.random() < 0.3 else " ".join(word() for _ in range(rng.integers(1, 4)))

    def value() -> object:
        kinds = [text, lambda: bool(rng.integers(2)), lambda: int(rng.integers(10_000)), lambda: rng.integers(999) / 10]
        return kinds[rng.integers(4)]()

    return {
        word(): {word(): text(), **{f"{word()}_{word()}": value() for _ in range(rng.integers(3))}}
        for _ in range(rng.integers(1, 3))
    }


def as_toml(sections: dict[str, dict[str, object]], rng: np.random.Generator) -> str:
    """Writes settings as a TOML file: texts in quotes, and some values in lists."""
    lines = []
    for section, values in sections.items():
        lines.append(f"[{section}]")
        for key, value in values.items():
            written = f'"{value}"' if isinstance(value, str) else str(value).lower()
            lines.append(f"{key} = {f'[{written}]' if rng.random() < 0.1 else written}")
        lines.append("")
    return "\n".join(lines)


def as_ini(sections: dict[str, dict[str, object]], rng: np.random.Generator) -> str:
    """Writes settings as an INI file: texts without quotes, and often without spaces around the sign of equality."""
    equals, truth = rng.choice(["=", " = "]), ("no", "yes") if rng.random() < 0.5 else ("false", "true")
    lines = []
    for section, values in sections.items():
        lines.append(f"[{section}]")
        for key, value in values.items():
            lines.append(f"{key}{equals}{truth[value] if isinstance(value, bool) else value}")
        lines.append("")
    return "\n".join(lines)


def files(rng: np.random.Generator, words: list[str], count: int) -> tuple[list[bytes], list[str]]:
    """Returns the contents of `count` files and their kinds, half of them TOML and half INI."""
    writers = {"toml": as_toml, "ini": as_ini}
    kinds = list(writers) * (count // 2)
    return [writers[kind](settings(rng, words), rng).encode() for kind in kinds], kinds


def model_input(contents: list[bytes]) -> np.ndarray:
    """Returns what Magika reads of files, int32 [files, 2048]: their first and last 1024 bytes, without white space."""
    size, block = CONFIG["beg_size"], CONFIG["block_size"]
    rows = np.full((len(contents), 2 * size), CONFIG["padding_token"], dtype=np.int32)
    for row, content in zip(rows, contents, strict=True):
        begin, end = content[:block].lstrip()[:size], content[-block:].rstrip()[-size:]
        row[: len(begin)] = list(begin)
        row[len(row) - len(end) :] = list(end)
    return rows


def accuracy(package: Magika, contents: list[bytes], kinds: list[str]) -> float:
    """Returns the fraction of files whose kind the package tells."""
    return float(np.mean([package.identify_bytes(c).output.label == k for c, k in zip(contents, kinds, strict=True)]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    rng = np.random.default_rng(seed)
    # Names for the files, of which the held-out files have others.
    words = rng.permutation(sorted(name for name in sys.stdlib_module_names if name[0] != "_")).tolist()
    train, train_kinds = files(rng, words[:150], 240)
    test, test_kinds = files(rng, words[150:], 200)
    # Files of a kind that the training does not see, and which the model must not forget.
    modules = [path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:100]]
    python = ["python"] * len(modules)

    deployed = Magika()
    before, python_before = accuracy(deployed, test, test_kinds), accuracy(deployed, modules, python)

    began = time.perf_counter()
    labels = np.array([CONFIG["target_labels_space"].index(kind) for kind in train_kinds])
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        trainer = Trainer(
            DEPLOYED / "model.onnx",
            loss="cross_entropy",
            loss_input_names=[LOGITS],  # the output of the file has been through a softmax
            learning_rate=3e-4,
            seed=seed,
        )
        trainer.fit(model_input(train), labels, epochs=2, batch_size=16, verbose=False)
        trainer.export(folder / "model.onnx")
        seconds = time.perf_counter() - began

        # Back into the package: a folder with the new model and the configuration of the old one.
        shutil.copy(DEPLOYED / "config.min.json", folder)
        tuned = Magika(model_dir=folder)
        after, python_after = accuracy(tuned, test, test_kinds), accuracy(tuned, modules, python)
        print(f"{len(train)} files, {len(test)} held out")
        print(f"accuracy before {before:.3f}, after {after:.3f}, {seconds:.0f} s")
        print(f"Python files: accuracy before {python_before:.3f}, after {python_after:.3f}")

        example = b'[server]\nhost = "localhost"\nport = 8080\n'
        for name, package in (("deployed", deployed), ("tuned", tuned)):
            result = package.identify_bytes(example)
            print(f"magika, {name} model: {result.output.label} {result.score:.4f}")
        # The same score from the exported file alone.
        session = onnxruntime.InferenceSession(folder / "model.onnx")
        print(f"exported file: {session.run(None, {'bytes': model_input([example])})[0].max():.4f}")


if __name__ == "__main__":
    main()
