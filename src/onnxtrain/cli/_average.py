"""Runs `onnxtrain average`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onnxtrain._names import LOSSES
from onnxtrain.cli._command_options import AverageOptions, EvaluateOptions
from onnxtrain.cli._evaluate_model import score_model
from onnxtrain.cli._export import export_model
from onnxtrain.cli._output import print_json, print_next, print_table, summary_table
from onnxtrain.cli._remember import saved_encoder
from onnxtrain.errors import InputError
from onnxtrain.trainer import Trainer
from onnxtrain.trainer._average_models import average_sources
from onnxtrain.trainer._run.files import holds_run


def run_command(options: AverageOptions) -> None:
    """Writes the averaged model, and prints which models are in it.

    Raises:
        InputError: options for the greedy soup are given without `--greedy`, or are missing; or the models cannot be
            averaged.
    """
    scores: list[float] = []

    def score(path: str) -> float:
        scores.append(_score(options, Path(path)))
        return scores[-1]

    needed = [
        name for name in ("data", "loss", "loss_option", "metric", "batch_size") if getattr(options, name)
    ]
    if options.greedy and options.data is None:
        raise InputError("--greedy compares the models on --data, e.g. --data validation.npz. Pass both.")
    if needed and not options.greedy:
        raise InputError(
            f"--{needed[0].replace('_', '-')} is for --greedy, which compares models. Pass both."
        )
    weights = _weights(options.weights)
    kept = average_sources(
        options.models, weights, options.output, score if options.greedy else None, _export
    )
    names = [str(source) for source in kept]
    if options.json:
        print_json({"model": str(options.output), "averaged": names, "weights": weights})
        return
    print_table(summary_table(None, [("averaged model", options.output), *(("of", name) for name in names)]))
    print_next("predict", options.output, "--data", "FILE", "-o", "predictions.csv")


def _export(directory: Path, file: Path) -> None:
    trainer = Trainer.resume(directory)
    export_model(trainer, saved_encoder(trainer, directory), file)


def _weights(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--weights is '{text}'; pass one number per model, such as 2,1,1.") from None


def _score(options: AverageOptions, path: Path) -> float:
    """Returns how good a model is on `--data`, where higher is better: `--metric`, or else the negative loss."""
    assert options.data is not None
    scored = score_model(
        EvaluateOptions(
            path,
            options.data,
            loss=options.loss or _loss_of_runs(options.models),
            loss_option=options.loss_option,
            metric=[options.metric] if options.metric else None,
        )
    )
    values = scored.trainer.evaluate(scored.x, scored.y, batch_size=options.batch_size)
    if options.metric is None and scored.has_loss:
        return -values["loss"]
    metric = next(iter(scored.trainer.metrics), None)
    if metric is None or metric.higher_is_better is None:
        raise InputError("--greedy needs --loss or --metric, by which it compares the models.")
    return values[metric.name] if metric.higher_is_better else -values[metric.name]


def _loss_of_runs(sources: Sequence[Path]) -> str | None:
    """Returns the name of the loss of the first run among the sources; None if all are files, or it has no name."""
    run = next((path for path in sources if path.is_dir() and holds_run(path)), None)
    kind = None if run is None else Trainer.resume(run).loss_name
    return next((name for name, (class_name, _) in LOSSES.items() if class_name == kind), None)
