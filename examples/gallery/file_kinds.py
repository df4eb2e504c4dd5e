"""Fine-tunes the classifier of Magika, which tells the kind of a file from its bytes.

Magika takes many short TOML files for INI files. The program writes files of both kinds
and trains on them; the held-out files have other words.

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
CONFIG = json.loads((DEPLOYED / "config.min.json").read_text())
LOGITS = "jax2tf_get_logits_/pjit_get_logits_/MagikaV2/Dense_1/AddV2:0"


def write_file(kind: str, words: list[str], rng: np.random.Generator) -> bytes:
    """Returns a file of one or two sections; a TOML file has its texts in quotes."""
    equals = " = " if kind == "toml" or rng.random() < 0.5 else "="
    quote = '"' if kind == "toml" else ""
    lines = []
    for _ in range(rng.integers(1, 3)):
        section, key, *text = rng.choice(words, rng.integers(3, 6))
        lines.append(f"[{section}]")
        lines.append(f"{key}{equals}{quote}{' '.join(text)}{quote}")
        for first, second in rng.choice(words, (rng.integers(3), 2)):
            value = rng.choice(["true", "false", str(rng.integers(10_000)), "0.5"])
            lines.append(f"{first}_{second}{equals}{value}")
    return "\n".join(lines).encode()


def model_input(contents: list[bytes]) -> np.ndarray:
    """Returns what Magika reads of files, int32 [files, 2048].

    These are the first and last 1024 bytes, without white space at the ends.
    """
    size, block = CONFIG["beg_size"], CONFIG["block_size"]
    rows = np.full((len(contents), 2 * size), CONFIG["padding_token"], np.int32)
    for row, content in zip(rows, contents, strict=True):
        begin, end = content[:block].lstrip()[:size], content[-block:].rstrip()[-size:]
        row[: len(begin)] = list(begin)
        row[len(row) - len(end) :] = list(end)
    return rows


def accuracy(package: Magika, contents: list[bytes], kinds: list[str]) -> float:
    """Returns the fraction of files whose kind the package tells."""
    answers = [package.identify_bytes(content).output.label for content in contents]
    return float(np.mean([a == kind for a, kind in zip(answers, kinds, strict=True)]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    rng = np.random.default_rng(seed)

    words = sorted(name for name in sys.stdlib_module_names if name[0] != "_")
    words = rng.permutation(words).tolist()
    kinds, test_kinds = ["toml", "ini"] * 120, ["toml", "ini"] * 100
    files = [write_file(kind, words[:150], rng) for kind in kinds]
    test_files = [write_file(kind, words[150:], rng) for kind in test_kinds]
    # The new model must not forget kinds that it isn't trained on.
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:100]
    modules = [path.read_bytes() for path in modules]
    python = ["python"] * len(modules)

    deployed = Magika()
    before = accuracy(deployed, test_files, test_kinds)
    python_before = accuracy(deployed, modules, python)

    began = time.process_time()
    trainer = Trainer(
        DEPLOYED / "model.onnx",
        loss="cross_entropy",
        loss_input_names=[LOGITS],  # the output of the file is behind a softmax
        frozen_params=["const_fold_opt__211"],  # the 1 in the formula of GELU
        learning_rate=3e-4,
        seed=seed,
    )
    labels = np.array([CONFIG["target_labels_space"].index(kind) for kind in kinds])
    trainer.fit(model_input(files), labels, epochs=2, batch_size=16, verbose=False)

    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        trainer.export(folder / "model.onnx")
        seconds = time.process_time() - began

        # Back into the package: the new model beside the old configuration.
        shutil.copy(DEPLOYED / "config.min.json", folder)
        tuned = Magika(model_dir=folder)
        after = accuracy(tuned, test_files, test_kinds)
        python_after = accuracy(tuned, modules, python)
        took = f"{seconds:.0f} s of processor time"
        print(f"accuracy before {before:.3f}, after {after:.3f}, {took}")
        print(f"Python files: before {python_before:.3f}, after {python_after:.3f}")

        example = b'[server]\nhost = "localhost"\nport = 8080\n'
        answer = tuned.identify_bytes(example)
        print(f"the package says {answer.output.label}, score {answer.score:.3f}")
        session = onnxruntime.InferenceSession(folder / "model.onnx")
        (scores,) = session.run(None, {"bytes": model_input([example])})
        place = CONFIG["target_labels_space"][scores[0].argmax()]
        print(f"the exported file says {place}, score {scores.max():.3f}")


if __name__ == "__main__":
    main()
