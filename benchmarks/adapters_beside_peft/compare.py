"""Compares adapters on deployed files with PyTorch and PEFT, with plain sessions of onnxruntime, and with genai.

Files are those that the model builder of onnxruntime-genai writes for tiny random Llamas, a Qwen2, a Qwen3 and a Phi,
in int4 and float32, and those that PyTorch exports and onnxruntime quantizes, in 4 and 8 bits, in blocks of 32 and 128,
with and without zero points; of Llama also in 2 bits, in other blocks, and with g_idx. For each file, and for adapters
that begin with B = 0 as PEFT's do and with a random B:

- gradient: the norm of the difference of the adapters' gradients and those of PEFT in float64 on the dequantized
  weights, as a part of the norm, with float activations.
- losses: the largest difference of the losses of 50 steps of AdamW. Behind it, that of PEFT in float32 and in float64.
- deployed: with deployed activations, of how many of 16 sequences the training loss is the loss in float64 of the
  logits of the file in a plain session, to 1e-6, and the largest difference. A number that lies between two steps of
  int8 is rounded either way by errors in the last bit. So behind it stands how far the file's own losses get from each
  other: at onnxruntime's levels of optimisation, and when norms and biases are moved to the next numbers of float32.
- eval: the largest difference of a logit of the eval model, with deployed activations, and of the file with the adapter
  in a plain session.
- from PEFT, to PEFT: the difference of logits after an adapter was loaded that PEFT has saved, and the other way round.
- base: "equal" if the file with inputs for adapters, and none of them active, computes the bits of the base.
- tokens: how many tokens are those of the trained graph, in a plain session and in genai, with the trained adapter.

A line per file is printed, with exit status 1 if a bound is missed:

    python compare.py [--only TEXT] [--json FILE]

It needs torch 2.13, transformers 5, peft 0.21, onnxruntime-genai 0.18 and onnxtrain[build].
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

# Before transformers is imported: nothing is fetched, and no bars of progress stand between the lines.
os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}

import dequantized
import in_genai
import nets
import numpy as np
import onnx
import ours
import peft_side
import torch
from files import File, built, exported

from onnxtrain.lora import LoraConfig, adapter_model, load_adapter, save_adapter

STEPS, PROMPT, NEW_TOKENS = 50, 8, 24
BUILT = EXPORTED = ("llama", "llama tied", "qwen2", "qwen3", "phi")
LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")
GRADIENT, LOSSES, DEPLOYED, LOGITS = 1e-5, 1e-4, 1e-6, 1e-5
"""Bounds of the figures."""


@dataclass
class Figures:
    """Figures of a file with adapters of one kind; see the head of this file."""

    file: str
    random_b: bool
    gradient: float
    losses: float
    losses_of_peft: float
    deployed: list[float]
    levels: float
    moved: float
    evaluated: float
    from_peft: float
    to_peft: float
    base_is_equal: bool
    tokens: dict[str, str]
    effect: int

    def missed(self) -> list[str]:
        """Returns the names of the figures that miss their bound."""
        # AdamW divides small gradients by their size, and so their errors of rounding, too: two precisions of PyTorch
        # show how far losses get apart by these.
        found = {
            "gradient": self.gradient > GRADIENT,
            "losses": self.losses > max(LOSSES, self.losses_of_peft),
            "deployed": statistics.median(self.deployed) > DEPLOYED
            or max(self.deployed) > max(DEPLOYED, self.levels, self.moved),
            "from PEFT": self.from_peft > LOGITS,
            "to PEFT": self.to_peft > LOGITS,
            "base": not self.base_is_equal,
            **{f"tokens {place}": text != "all" for place, text in self.tokens.items()},
        }
        return [name for name, is_missed in found.items() if is_missed]

    def __str__(self) -> str:
        places = ", ".join(f"{place} {text}" for place, text in self.tokens.items())
        base = "equal" if self.base_is_equal else "DIFFERS"
        start = "random B" if self.random_b else "B = 0"
        line = (
            f"{self.file}; {start}: gradient {self.gradient:.1e}, losses {self.losses:.1e} "
            f"({self.losses_of_peft:.1e}), "
            f"deployed {sum(d <= DEPLOYED for d in self.deployed)} of {len(self.deployed)}, {max(self.deployed):.1e} "
            f"(levels {self.levels:.1e}, moved {self.moved:.1e}), eval {self.evaluated:.1e}, from PEFT "
            f"{self.from_peft:.1e}, to PEFT {self.to_peft:.1e}, base {base}, tokens {places} "
            f"(of {NEW_TOKENS}; {self.effect} others without the adapter)"
        )
        missed = self.missed()
        return line + (f" MISSED: {', '.join(missed)}" if missed else "")


def batches(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns batches of random tokens and labels, of which some do not count."""
    rng = np.random.default_rng(0)
    result = []
    for _ in range(count):
        tokens = rng.integers(3, nets.VOCABULARY, (4, PROMPT + NEW_TOKENS))
        labels = tokens.copy()
        labels[0, 10:] = -100
        result.append((tokens, labels))
    return result


def measure(file: File, folder: Path, *, random_b: bool) -> Figures:
    """Measures one file, with files of its own in a folder."""
    net = nets.make(file.net)
    quantized = onnx.load(file.path)
    if file.path != file.float_path:
        dequantized.take_weights(net, quantized, onnx.load(file.float_path))
    adapted = peft_side.with_adapters(net, random_b=random_b)
    adapted.save_pretrained(folder / "from-peft")
    model = load_adapter(folder / "from-peft", file.path)
    rate = 1e-3
    data = batches(STEPS)
    mine = ours.Training(model, folder / "float", "float", rate)
    theirs, theirs_in_float32 = (
        peft_side.Training(adapted, dtype, rate) for dtype in (torch.float64, torch.float32)
    )
    from_peft = ours.largest_difference(mine.logits(data[0][0]), theirs.logits(data[0][0]))
    gradient = ours.relative(mine.loss_and_gradients(*data[0])[1], theirs.loss_and_gradients(*data[0])[1])
    losses, expected, in_float32 = (
        np.array(training.steps(data)) for training in (mine, theirs, theirs_in_float32)
    )
    save_adapter(mine.state, folder / "to-peft", format="peft")
    back = peft_side.Training(peft_side.loaded(net, folder / "to-peft"), torch.float64, rate)
    to_peft = ours.largest_difference(mine.logits(data[0][0]), back.logits(data[0][0]))
    del mine, theirs, theirs_in_float32, back
    deployed = _deployed(file, model, folder, data)
    return Figures(
        file.name,
        random_b,
        gradient,
        float(np.abs(losses - expected).max()),
        float(np.abs(in_float32 - expected).max()),
        *deployed[:4],
        from_peft,
        to_peft,
        *deployed[4:],
    )


def _deployed(
    file: File, model: onnx.ModelProto, folder: Path, data: list[tuple[np.ndarray, np.ndarray]]
) -> tuple[list[float], float, float, float, bool, dict[str, str], int]:
    """Trains with deployed activations; compares with the file in plain sessions, and with genai."""
    with_inputs, before = folder / "with-inputs.onnx", folder / "before.onnx_adapter"
    # Inputs for adapters of the same layers, of any rank.
    deployed = adapter_model(file.path, LoraConfig())
    onnx.save(deployed, with_inputs)
    save_adapter(_saved(model, folder / "with-adapter.onnx"), before)
    training = ours.Training(model, folder / "deployed", "deployed", 1e-2)
    sequences = [tokens[i : i + 1] for tokens, _ in data[:4] for i in range(len(tokens))]

    def losses(session: ours.Session) -> np.ndarray:
        return np.array([ours.loss_of(session.logits(tokens), tokens) for tokens in sequences])

    trained_on = np.array([training.loss_and_gradients(tokens, tokens)[0] for tokens in sequences])
    # The last level is the default, at which files are deployed.
    *of_levels, of_file = (losses(ours.Session(with_inputs, before, level)) for level in LEVELS)
    of_moved = [losses(ours.Session(ours.moved(deployed, seed), before)) for seed in range(4)]
    tokens = data[0][0]
    evaluated = float(
        np.abs(training.logits(tokens) - ours.Session(with_inputs, before).logits(tokens)).max()
    )
    plain, base = ours.Session(with_inputs).outputs(tokens), ours.Session(file.path).outputs(tokens)
    is_equal = plain.keys() == base.keys() and all(plain[n].tobytes() == base[n].tobytes() for n in base)
    # One batch again and again is learned by heart: the most likely token is then far above the next one.
    training.steps([(tokens, tokens)] * STEPS)
    after, prompt = folder / "after.onnx_adapter", tokens[:1, :PROMPT]
    save_adapter(training.state, after)
    by_graph = ours.greedy(training.logits, prompt, NEW_TOKENS, nets.END)
    without = ours.greedy(ours.Session(file.path).logits, prompt, NEW_TOKENS, nets.END)
    session = ours.greedy(ours.Session(with_inputs, after).logits, prompt, NEW_TOKENS, nets.END)
    places = {"session": _same(session, by_graph)}
    if file.is_built:
        in_folder = in_genai.folder_with(deployed, file.path.parent, folder / "genai")
        places["genai"] = _same(in_genai.generated(in_folder, prompt, NEW_TOKENS, after), by_graph)
        of_base = in_genai.generated(file.path.parent, prompt, NEW_TOKENS, None)
        places["genai without"] = _same(in_genai.generated(in_folder, prompt, NEW_TOKENS, None), of_base)
    differences = [float(d) for d in np.abs(trained_on - of_file)]
    of_levels, of_moved = (float(np.abs(np.array(found) - of_file).max()) for found in (of_levels, of_moved))
    effect = sum(a != b for a, b in zip(by_graph, without, strict=False))
    return differences, of_levels, of_moved, evaluated, is_equal, places, effect


def _saved(model: onnx.ModelProto, path: Path) -> Path:
    onnx.save(model, path)
    return path


def _same(tokens: list[int], expected: list[int]) -> str:
    """Returns "all", or after how many tokens the two differ."""
    equal = [a == b for a, b in zip(tokens, expected, strict=False)]
    return "all" if tokens == expected else f"first {([*equal, False]).index(False)}"


def main() -> int:
    """Measures all files; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", help="Measure files whose names hold this text, e.g. 'qwen3, built'."
    )
    parser.add_argument("--json", type=Path, help="Write all figures to this file, too.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # The builder of genai asks for the log of all packages.
    logging.getLogger().setLevel(logging.WARNING)
    rows: list[Figures] = []
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        for way, names in ((built, BUILT), (exported, EXPORTED)):
            for name in names:
                # Names of files begin so, and say "built" or "exported" next.
                if options.only and not options.only.startswith(name) and not name.startswith(options.only):
                    continue
                for number, file in enumerate(way(name, place / way.__name__ / name)):
                    for random_b in (False, True):
                        if options.only in file.name:
                            folder = place / "work" / f"{way.__name__}-{name}-{number}-{random_b}"
                            rows.append(measure(file, folder, random_b=random_b))
                            print(rows[-1], flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    missed = [row for row in rows if row.missed()]
    print(f"{len(rows)} measurements, {len(missed)} with a bound that is missed")
    return 1 if missed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
