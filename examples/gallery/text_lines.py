"""Fine-tunes the text recogniser of RapidOCR on serial numbers in worn print.

The recogniser has learnt sentences, and confuses `0` with `O` and `1` with `I` in codes. The lines are rendered on the
spot, in a typeface that Matplotlib brings, and distorted; the held-out lines are other codes.

Usage: python examples/gallery/text_lines.py [--seed 0]
"""

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import onnx
import onnx_ir as ir
import rapidocr
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from rapidocr import RapidOCR

from onnxtrain import Trainer
from onnxtrain.losses import Loss, TargetSpec

DEPLOYED = Path(rapidocr.__file__).parent / "models" / "PP-OCRv6_rec_small.onnx"
LOGITS = "p2o.pd_op.add.79.0"
FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
FACES = ["DejaVuSansMono.ttf", "DejaVuSansMono-Bold.ttf"]
SYMBOLS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LIKE = "0OQDI1L5S8B2Z"  # symbols that look like another one
HEIGHT, WIDTH = 48, 320  # of the recogniser's input
NEVER = -1e30  # log 0; infinity itself would make gradients NaN


@dataclass(frozen=True, kw_only=True)
class CTCLoss(Loss):
    """Connectionist temporal classification (Graves et al., 2006): `torch.nn.CTCLoss` with blank 0.

    The scores are logits, float [N, T, C]; the labels are int64 [N, L], padded with 0.
    """

    def targets(self, scores):
        batch = scores.shape[0]
        return [
            TargetSpec(
                "labels", ir.DataType.INT64, (getattr(batch, "value", batch), "length")
            )
        ]

    def build(self, op, scores, labels):
        # The labels with blanks between them and at both ends, int64 [N, S] with S = 2 L + 1.
        pairs = op.Concat(
            op.Unsqueeze(labels, [2]), op.Unsqueeze(op.Sub(labels, labels), [2]), axis=2
        )
        path = op.Pad(op.Reshape(pairs, [0, -1]), [0, 1, 0, 0])
        # The log-probability of each entry of the path at each time step, [T, N, S].
        size = op.Concat(op.Shape(scores, end=2), op.Shape(path, start=1), axis=0)
        log_p = op.LogSoftmax(scores, axis=2)
        log_p = op.GatherElements(
            log_p, op.Expand(op.Unsqueeze(path, [1]), size), axis=2
        )
        log_p = op.Transpose(log_p, perm=[1, 0, 2])
        # A blank between two different labels may be skipped.
        before = op.Pad(op.Slice(path, [0], [-2], [1]), [0, 2, 0, 0])
        may_skip = op.And(op.Greater(path, 0), op.Not(op.Equal(path, before)))
        skip = op.Where(
            may_skip, op.const(0.0, like=scores), op.const(NEVER, like=scores)
        )
        # A path begins with the blank or the first label.
        place = op.Range(0, op.Squeeze(op.Shape(path, start=1)), 1)
        begin = op.Where(
            op.Less(place, 2), op.const(0.0, like=scores), op.const(NEVER, like=scores)
        )
        first = op.Add(op.Squeeze(op.Slice(log_p, [0], [1], [0]), [0]), begin)

        body = op.subgraph({"alpha": scores.dtype, "log_p": scores.dtype})
        alpha, now = body.graph.inputs
        ways = [
            alpha,
            body.Pad(body.Slice(alpha, [0], [-1], [1]), [0, 1, 0, 0], NEVER),
            body.Add(
                body.Pad(body.Slice(alpha, [0], [-2], [1]), [0, 2, 0, 0], NEVER), skip
            ),
        ]
        ways = body.Concat(*(body.Unsqueeze(way, [0]) for way in ways), axis=0)
        after = body.Add(body.ReduceLogSumExp(ways, [0], keepdims=0), now)
        after.shape = ir.Shape([None, None])
        body.graph.outputs.append(after)
        rest = op.Slice(log_p, [1], [2**31 - 1], [0])
        last = op.Scan(first, rest, body=body.graph, num_scan_inputs=1)

        # A path ends with the last label or the blank behind it.
        length = op.ReduceSum(op.Cast(op.Greater(labels, 0), to=ir.DataType.INT64), [1])
        end = op.Mul(length, 2)
        ends = op.GatherElements(last, op.Concat(end, op.Sub(end, 1), axis=1), axis=1)
        loss = op.Neg(op.ReduceLogSumExp(ends, [1], keepdims=1))
        return op.ReduceMean(op.Div(loss, op.CastLike(length, loss)), keepdims=0)


def render(code: str, rng: np.random.Generator) -> np.ndarray:
    """Draws a code in worn print, uint8 [48, width, 3]."""
    font = ImageFont.truetype(
        FONTS / FACES[rng.integers(len(FACES))], int(rng.integers(26, 32))
    )
    left, top, right, bottom = font.getbbox(code)
    ink, paper = sorted(rng.integers(60, 230, 2))
    paper = max(paper, ink + 50)
    image = Image.new("L", (right - left + 16, HEIGHT), int(paper))
    ImageDraw.Draw(image).text(
        (8 - left, (HEIGHT - bottom - top) // 2), code, fill=int(ink), font=font
    )
    # Turned by up to 2 degrees and slanted, then blurred and scratched.
    slant, turn = rng.uniform(-0.25, 0.25), rng.uniform(-2, 2)
    image = image.transform(
        image.size,
        Image.Transform.AFFINE,
        (1, slant, -slant * HEIGHT / 2, 0, 1, 0),
        Image.Resampling.BILINEAR,
        fillcolor=int(paper),
    ).rotate(turn, Image.Resampling.BILINEAR, fillcolor=int(paper))
    draw = ImageDraw.Draw(image)
    for _ in range(rng.integers(4)):
        x, y = rng.integers(image.width), rng.integers(HEIGHT)
        draw.line(
            (x, y, x + rng.integers(-60, 60), y + rng.integers(-20, 20)),
            fill=int(rng.integers(60, 230)),
        )
    image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 1.6)))
    pixels = np.asarray(image, dtype=np.float32) + rng.normal(
        0, rng.uniform(5, 30), (HEIGHT, image.width)
    )
    return np.repeat(pixels.clip(0, 255).astype(np.uint8)[:, :, None], 3, axis=2)


def codes(rng: np.random.Generator, count: int) -> list[str]:
    """Returns serial numbers of 6 to 9 symbols, half of which look like other symbols."""
    return [
        "".join(
            rng.choice(list(LIKE if rng.random() < 0.5 else SYMBOLS))
            for _ in range(rng.integers(6, 10))
        )
        for _ in range(count)
    ]


def model_input(images: list[np.ndarray]) -> np.ndarray:
    """Returns images as RapidOCR passes them to the recogniser, float32 [N, 3, 48, 320] from -1 to 1."""
    batch = np.zeros((len(images), 3, HEIGHT, WIDTH), dtype=np.float32)
    for row, image in zip(batch, images, strict=True):
        row[:, :, : image.shape[1]] = image.transpose(2, 0, 1)[:, :, :WIDTH] / 127.5 - 1
    return batch


def accuracy(package: RapidOCR, images: list[np.ndarray], texts: list[str]) -> float:
    """Returns the fraction of lines that the package reads without a mistake."""
    return float(
        np.mean(
            [
                read(package, image) == text
                for image, text in zip(images, texts, strict=True)
            ]
        )
    )


def read(package: RapidOCR, image: np.ndarray) -> str:
    """Returns the text of an image of one line."""
    return package(image, use_det=False, use_cls=False, use_rec=True).txts[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    rng = np.random.default_rng(seed)
    train, test = codes(rng, 192), codes(rng, 100)
    train_images, test_images = (
        [render(code, rng) for code in part] for part in (train, test)
    )
    deployed = RapidOCR(params={"Global.log_level": "error"})
    before = accuracy(deployed, test_images, test)

    # Index 0 is the blank of CTC.
    (characters,) = [
        p.value.splitlines()
        for p in onnx.load(DEPLOYED).metadata_props
        if p.key == "character"
    ]
    index = {character: place for place, character in enumerate(characters, start=1)}
    labels = np.zeros((len(train), max(map(len, train))), dtype=np.int64)
    for row, code in zip(labels, train, strict=True):
        row[: len(code)] = [index[symbol] for symbol in code]

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tuned.onnx"
        began = time.process_time()
        trainer = Trainer(
            DEPLOYED,
            loss=CTCLoss(),
            loss_input_names=[
                LOGITS
            ],  # the output of the file has been through a softmax
            batch_norm="inference",
            frozen_params=[
                "helper.constant.*",
                "auto.cast.*",
            ],  # numbers of formulas, such as the 0.5 of GELU
            learning_rate=3e-4,
            clip_grad_norm=1.0,
            scheduler="linear",
            metrics=[],
            seed=seed,
        )
        trainer.fit(
            model_input(train_images), labels, epochs=3, batch_size=16, verbose=False
        )
        trainer.export(path)
        seconds = time.process_time() - began

        # Back into the package. It takes the characters from the metadata of the file.
        tuned = RapidOCR(
            params={"Global.log_level": "error", "Rec.model_path": str(path)}
        )
        after = accuracy(tuned, test_images, test)
        print(f"{len(train)} lines, {len(test)} held out")
        print(
            f"accuracy before {before:.3f}, after {after:.3f}, {seconds:.0f} s of processor time"
        )
        for image, code in list(zip(test_images, test, strict=True))[:3]:
            print(
                f"{code}: deployed {read(deployed, image)}, tuned {read(tuned, image)}"
            )


if __name__ == "__main__":
    main()
