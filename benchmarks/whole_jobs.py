"""Times whole short jobs, from the start of Python to its end: eager PyTorch, ORTModule and torch.compile.

Each run is a process of its own. torch.compile runs twice, the second time with the files that the first run has left
in its cache; ORTModule keeps no files. Run it on a machine without other work.

Usage: python whole_jobs.py [JOB ...] [--rounds 3]
Writes results/whole_jobs.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "whole_jobs.json"
ENGINES = ("eager", "ORTModule", "torch.compile", "torch.compile, second")
SAME = 1e-3
"""Maximum relative difference of the losses of two engines."""


def _wrap(module: Any, engine: str) -> Any:
    if engine == "ORTModule":
        from onnxtrain.ortmodule import ORTModule

        return ORTModule(module)
    if engine.startswith("torch.compile"):
        import torch

        return torch.compile(module)
    return module


def loop(engine: str) -> float:
    """Trains a convolutional net on scikit-learn's digits for two epochs of 19 steps, each with an evaluation."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    model = _wrap(net, engine)
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images.reshape(-1, 1, 8, 8) / 16, dtype=torch.float32)
    y = torch.tensor(labels)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loss = nn.functional.cross_entropy
    for _ in range(2):
        model.train()
        for rows in torch.arange(1200).split(64):
            optimizer.zero_grad()
            loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            result = sum(loss(model(x[rows]), y[rows]).item() for rows in torch.arange(1200, 1797).split(64))
    return result


def lightning(engine: str) -> float:
    """Trains an MLP on the digits for 40 steps, with a validation, by Lightning."""
    import lightning
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    lightning.seed_everything(0, verbose=False)
    net = nn.Sequential(
        nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10)
    )

    class Digits(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _wrap(net, engine)

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
            self.log("loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    trainer = lightning.Trainer(
        max_steps=40, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    train, validation = TensorDataset(x[:1200], y[:1200]), TensorDataset(x[1200:], y[1200:])
    trainer.fit(Digits(), DataLoader(train, 64), DataLoader(validation, 64))
    return float(trainer.callback_metrics["loss"])


def _hugging_face(engine: str, half: bool) -> float:
    import torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=200, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
        max_position_embeddings=64, num_labels=2,
    )  # fmt: skip
    tokens = torch.randint(0, 200, (330, 16))
    rows = [{"input_ids": row, "labels": int(row[0] > 100)} for row in tokens]
    model = BertForSequenceClassification(config)
    compiles = engine.startswith("torch.compile")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=8, max_steps=40, eval_strategy="steps", eval_steps=20,
            save_strategy="no", report_to=[], use_cpu=True, bf16=half, disable_tqdm=True, logging_strategy="no",
            dataloader_pin_memory=False, torch_compile=compiles,
        )  # fmt: skip
        trainer = Trainer(
            model=model if compiles else _wrap(model, engine),
            args=arguments,
            train_dataset=rows[:300],
            eval_dataset=rows[300:],
        )
        trainer.train()
        return float(trainer.evaluate()["eval_loss"])


def hugging_face(engine: str) -> float:
    """Trains a tiny BERT for 40 steps, with three evaluations, by Hugging Face's Trainer."""
    return _hugging_face(engine, half=False)


def hugging_face_bf16(engine: str) -> float:
    """The same job in bfloat16 (autocast)."""
    return _hugging_face(engine, half=True)


JOBS = {
    "loop": loop,
    "lightning": lightning,
    "hugging-face": hugging_face,
    "hugging-face-bf16": hugging_face_bf16,
}


def _run(job: str, engine: str, cache: str) -> tuple[float, float, float]:
    """Runs a job in a new process; returns its wall time, its processor time, both in seconds, and its loss."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--job", job, "--engine", engine],
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, processor, float(done.stdout.split()[-1])


def times(job: str, rounds: int) -> dict[str, dict[str, float]]:
    """Returns the median seconds of each engine, and their ratio to eager PyTorch's."""
    runs: dict[str, list[tuple[float, float]]] = {engine: [] for engine in ENGINES}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            losses = {}
            for engine in ENGINES:
                *seconds, losses[engine] = _run(job, engine, cache)
                runs[engine].append(tuple(seconds))
        first = losses["eager"]
        assert abs(losses["ORTModule"] - first) < SAME * abs(first), losses
    medians = {
        engine: [statistics.median(column) for column in zip(*r, strict=True)] for engine, r in runs.items()
    }
    wall, processor = medians["eager"]
    return {
        engine: {
            "wall": round(w, 2),
            "processor": round(p, 2),
            "wall ratio": round(w / wall, 2),
            "processor ratio": round(p / processor, 2),
        }
        for engine, (w, p) in medians.items()
    }


def main() -> None:
    """Runs one job, as a process that is timed does, or times the jobs that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"default: {', '.join(JOBS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        print(JOBS[arguments.job](arguments.engine))
        return
    from steps.machine import about_machine

    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results["machine"] = about_machine()
    for job in arguments.jobs or JOBS:
        results[job] = times(job, arguments.rounds)
        print(
            job,
            *(f"{e}: {v['wall']} s ({v['wall ratio']})" for e, v in results[job].items()),
            sep="\n  ",
            flush=True,
        )
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
