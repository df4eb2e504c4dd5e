"""Runs `onnxtrain mine`: writes pairs of texts with the hard negatives that a model finds for them."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

from onnxtrain.cli._command_options import MineOptions
from onnxtrain.cli._output import info, print_json, print_next, print_table
from onnxtrain.cli._texts import read_texts, split_columns
from onnxtrain.errors import InputError, ModelError
from onnxtrain.losses import InfoNCELoss
from onnxtrain.runtime.artifact_folder import keep_inside
from onnxtrain.runtime.atomic import replace_file
from onnxtrain.texts import TextPairs, mine_hard_negatives
from onnxtrain.texts._pairs import SUFFIXES
from onnxtrain.trainer import Trainer


def run_command(options: MineOptions) -> None:
    """Embeds the texts, and writes the rows with their negatives to a file.

    Raises:
        InputError: the data, the corpus or an option is wrong, or no negatives are found.
        ModelError: the output cannot be written.
    """
    output = options.output
    if output.suffix.lower() not in SUFFIXES:
        raise InputError(
            f"--output is '{output}'; pairs of texts are written to a {', '.join(SUFFIXES)} file."
        )
    pairs = TextPairs.read(options.data, split_columns(options.text_columns))
    corpus = None if options.corpus is None else read_texts(options.corpus, None)
    if options.source.is_dir():
        trainer = Trainer.resume(options.source)
    else:
        # The loss is that of any model that embeds texts; nothing is trained.
        trainer = Trainer(options.source, InfoNCELoss(), "sgd", tokenizer=options.tokenizer)
    mined = mine_hard_negatives(
        trainer,
        pairs,
        corpus,
        num_negatives=options.num_negatives,
        range_min=options.range_min,
        range_max=options.range_max,
        margin=options.margin,
        relative_margin=options.relative_margin,
        min_score=options.min_score,
        max_score=options.max_score,
        sampling="random" if options.random else "top",
        triplets=options.triplets,
        seed=options.seed,
    )
    if options.source.is_dir():
        keep_inside(output, options.source)
    _write(output, mined)
    found = len({row[:2] for row in mined.texts})
    if options.json:
        print_json({"output": str(output), "rows": len(mined), "pairs": len(pairs), "texts": mined.width})
        return
    print_table(f"{len(mined):,} rows with {mined.width - 2} negatives each: {output}")
    if (left := len({row[:2] for row in pairs.texts}) - found) > 0:
        info(f"{left:,} pairs were left out, because too few negatives were found for them.")
    print_next("train", options.source, "--data", output)


def _write(path: Path, pairs: TextPairs) -> None:
    """Writes pairs of texts to a .csv, .tsv or .jsonl file with the columns anchor, positive, negative_1, ..."""
    names = ["anchor", "positive", *(f"negative_{number}" for number in range(1, pairs.width - 1))]
    rows: list[tuple[str | float, ...]] = list(pairs.texts)
    if pairs.weights is not None:
        names.append("sample_weight")
        rows = [(*row, weight) for row, weight in zip(rows, pairs.weights, strict=True)]
    text = io.StringIO()
    if path.suffix.lower() == ".jsonl":
        for row in rows:
            text.write(json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) + "\n")
    else:
        delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
        csv.writer(text, delimiter=delimiter, lineterminator="\n").writerows([names, *rows])
    try:
        with replace_file(path) as file:
            file.write(text.getvalue().encode())
    except OSError as error:
        raise ModelError(f"Writing the pairs to '{path}' failed: {error}.") from error
