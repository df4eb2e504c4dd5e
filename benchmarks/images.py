"""Images per second that reach training: ImageFolder beside PyTorch's DataLoader with Pillow, and torchvision.

1,000 JPEG files of 500 x 375 are decoded, resized to 256, cropped to 224 and normalized, in batches of 32, with as many
threads (ImageFolder) as processes (DataLoader). An epoch before the measured one starts the workers of DataLoader,
which are kept, and reads the files into the cache of the system. The engines take turns, and each has a process of its
own. Memory is the peak of a process after an epoch over 1,000, and over 100,000 hard links to 100 small files.

Usage: python benchmarks/images.py [--workers 2] [--rounds 3] [--files 1000]
Writes benchmarks/results/images.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from steps.machine import about_machine, memory_mb

HERE = Path(__file__).parent
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLASSES, BATCH = 10, 32
ENGINES = ("ImageFolder", "DataLoader with Pillow", "DataLoader with torchvision")


def write_photos(root: Path, count: int, width: int = 500, height: int = 375) -> None:
    """Writes JPEG files with structure at several scales, as photos have, and about their size."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for index in range(count):
        folder = root / f"class{index % CLASSES}"
        folder.mkdir(parents=True, exist_ok=True)
        image = np.zeros((height, width, 3), np.float32)
        for cells in (3, 12, 48, 160):
            noise = rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
            image += np.asarray(Image.fromarray(noise).resize((width, height)), np.float32) / 4
        Image.fromarray(image.astype(np.uint8)).save(folder / f"{index:06}.jpg", quality=90)


def link_photos(root: Path, count: int) -> None:
    """Makes a folder of hard links to a hundred small files."""
    write_photos(root.parent / f"{root.name}-files", 100, 64, 48)
    files = sorted((root.parent / f"{root.name}-files").rglob("*.jpg"))
    for index in range(count):
        folder = root / f"class{index % CLASSES}"
        folder.mkdir(parents=True, exist_ok=True)
        os.link(files[index % 100], folder / f"{index:06}.jpg")


def source(root: Path, workers: int, side: int = 224) -> Any:
    """The source that a fit reads."""
    from onnxtrain import ImageFolder
    from onnxtrain.images._pipeline import make_pipeline
    from onnxtrain.runtime.dtypes import BY_NAME
    from onnxtrain.runtime.manifest import ClassLabels, InputSpec
    from onnxtrain.trainer.data import BoundImages, Layout, Options, open_source

    folder = ImageFolder(root, mean=MEAN, std=STD, resize=side * 8 // 7, workers=workers)
    x = InputSpec("x", BY_NAME["float32"], (None, 3, side, side))
    y = InputSpec("y", BY_NAME["int64"], (None,), ClassLabels(CLASSES, None))
    weight = InputSpec("w", BY_NAME["float32"], (None,))
    pipeline = make_pipeline(x, folder.passed, None)
    images = BoundImages(
        folder=folder, pipeline=pipeline, labels=folder.labels, classes=tuple(folder.classes)
    )
    return open_source(Layout((x,), (y,), weight), images, options=Options(BATCH, training=True))


def epochs_of_ours(root: Path, workers: int) -> Iterator[Iterable[Any]]:
    from onnxtrain.trainer.data import Pass

    opened = source(root, workers)
    epoch = 0
    while True:
        yield opened.read(Pass(0, epoch, 0, True, True))
        epoch += 1


class Photos:
    """A dataset as tutorials write it, by Pillow and NumPy."""

    def __init__(self, root: Path) -> None:
        self.files = sorted(root.rglob("*.jpg"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        import torch
        from PIL import Image

        with Image.open(self.files[index]) as file:
            image = file.convert("RGB")
        width, height = image.size
        short = min(width, height)
        image = image.resize((int(256 * width / short), int(256 * height / short)), Image.Resampling.BILINEAR)
        left, top = round((image.width - 224) / 2), round((image.height - 224) / 2)
        pixels = np.asarray(image.crop((left, top, left + 224, top + 224)), np.float32) / 255
        pixels = (pixels - np.float32(MEAN)) / np.float32(STD)
        return torch.from_numpy(pixels.transpose(2, 0, 1)), int(self.files[index].parent.name[5:])


def epochs_of_torch(root: Path, workers: int, *, torchvision: bool) -> Iterator[Iterable[Any]]:
    import torch

    torch.set_num_threads(1)
    dataset: Any = Photos(root)
    if torchvision:
        from torchvision import datasets, transforms

        chain = [transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor()]
        dataset = datasets.ImageFolder(root, transforms.Compose([*chain, transforms.Normalize(MEAN, STD)]))
    loader: Any = torch.utils.data.DataLoader(
        dataset, BATCH, shuffle=True, num_workers=workers, persistent_workers=True
    )
    while True:
        yield loader


def measure(engine: str, root: Path, workers: int) -> float:
    """Returns the images per second of the second epoch."""
    epochs = (
        epochs_of_ours(root, workers)
        if engine == "ImageFolder"
        else epochs_of_torch(root, workers, torchvision="torchvision" in engine)
    )
    for _ in range(2):
        start, count = time.perf_counter(), 0
        for batch in next(epochs):
            count += len(batch[0])
        seconds = time.perf_counter() - start
    return count / seconds


def peak(root: Path, workers: int) -> float:
    """Returns the peak memory of the process in MB after an epoch over small images."""
    from onnxtrain.trainer.data import Pass

    for batch in source(root, workers, 28).read(Pass(0, 0, 0, True, True)):
        assert len(batch[0])
    return memory_mb("VmHWM")


def child(*arguments: object) -> float | None:
    """Runs a measurement in a process of its own; returns None if a package is missing."""
    command = [sys.executable, __file__, "--child", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if "ModuleNotFoundError" in result.stderr:
        return None
    if result.returncode:
        raise RuntimeError(result.stderr)
    return float(result.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--many", type=int, default=100_000)
    parser.add_argument("--child", nargs=3)
    options = parser.parse_args()
    if options.child:
        engine, root, workers = options.child
        print(
            peak(Path(root), int(workers))
            if engine == "memory"
            else measure(engine, Path(root), int(workers))
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder, "photos")
        write_photos(photos, options.files)
        rates: dict[str, list[float]] = {}
        for _ in range(options.rounds):
            for engine in ENGINES:
                rate = child(engine, photos, options.workers)
                if rate is not None:
                    rates.setdefault(engine, []).append(rate)
                    print(f"{engine}: {rate:,.0f} images/s")
        memory = {}
        for count in (1000, options.many):
            link_photos(Path(folder, f"many{count}"), count)
            memory[count] = child("memory", Path(folder, f"many{count}"), options.workers)
            print(f"peak memory with {count:,} files: {memory[count]:,.0f} MB")
    result = {
        "machine": about_machine(),
        "workers": options.workers,
        "images_per_second": {engine: statistics.median(values) for engine, values in rates.items()},
        "rounds": rates,
        "peak_mb_by_files": memory,
    }
    (HERE / "results" / "images.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
