"""Averages trained models ("model soup"): files, runs and the checkpoints of a run."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx
import onnx_ir as ir

from onnxtrain._words import argument
from onnxtrain.errors import InputError, ModelError
from onnxtrain.passes import ModelSource, load_model, save_model
from onnxtrain.surgery._average import average
from onnxtrain.trainer._run.files import CHECKPOINT, holds_run
from onnxtrain.trainer._trainer import Trainer

_DOING = "Averaging models"


def average_models(
    models: Sequence[ModelSource] | ModelSource,
    weights: Sequence[float] | None = None,
    *,
    output: str | os.PathLike[str],
    score: Callable[[str], float] | None = None,
) -> list[ModelSource]:
    """Writes a model whose parameters are the means over several models (a "model soup", Wortsman et al. 2022).

    Average models that were fine-tuned from the same file, e.g. with several seeds or learning rates, or the last
    checkpoints of one run: the mean is often better than each of them, and as fast as one. Means of networks that were
    trained from different initial values are useless.

    Floating-point tensors are averaged in float64 and cast back, including the running statistics of
    BatchNormalization; all else has to be equal.

    Args:
        models: paths of `.onnx` files, `ModelProto` or `onnx_ir.Model`; directories of runs, whose trained models are
            exported; or directories with the checkpoints of a run, e.g. "run/checkpoints", which stand for all of them.
        weights: weight of each model, e.g. [2, 1, 1]; they are divided by their sum. Default: equal weights.
        output: path of the `.onnx` file to write.
        score: function that takes the path of a model and returns how good it is, where higher is better, e.g. the
            accuracy on validation data. With it, the soup is greedy: models are added in the order of their scores, and
            a model that lowers the score of the mean is left out.

    Returns:
        The models that were averaged, in the order of `models`, with one path for each checkpoint; with `score`, those
        that were kept.

    Raises:
        InputError: the models differ in more than the values of floating-point tensors; a tensor has NaN; weights are
            negative, not finite, all zero, or more or fewer than the models; or both `weights` and `score` are passed.
        CheckpointError: a directory contains no run.
        ModelError: the output cannot be written.

    Example:
        >>> import onnx, tempfile
        >>> text = '''<ir_version: 10, opset_import: ["": 21]>
        ...   net (float[n, 1] x) => (float[n, 1] y) <float[1, 1] w = {WEIGHT}> { y = MatMul(x, w) }'''
        >>> models = [onnx.parser.parse_model(text.replace("WEIGHT", weight)) for weight in ("1.0", "4.0")]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     kept = average_models(models, output=f"{folder}/soup.onnx")
        ...     onnx.numpy_helper.to_array(onnx.load(f"{folder}/soup.onnx").graph.initializer[0])
        array([[2.5]], dtype=float32)
    """
    return average_sources(models, weights, output, score, _export)


def _export(directory: Path, file: Path) -> None:
    Trainer.resume(directory).export(file)


def average_sources(
    models: Sequence[ModelSource] | ModelSource,
    weights: Sequence[float] | None,
    output: str | os.PathLike[str],
    score: Callable[[str], float] | None,
    export: Callable[[Path, Path], None],
) -> list[ModelSource]:
    """Does what :func:`average_models` documents; `export` writes the model of a run to a file."""
    listed = [models] if isinstance(models, str | os.PathLike | onnx.ModelProto | ir.Model) else list(models)
    if weights is not None and score is not None:
        raise InputError(
            f"{_DOING}: {argument('weights')} and {argument('score')} exclude each other. Pass one of them."
        )
    sources: list[ModelSource] = [source for entry in listed for source in _expanded(entry)]
    if not sources:
        raise InputError(f"{_DOING}: there are no models. Pass at least two paths.")
    shares = _shares(weights, len(sources))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        files: list[ModelSource] = []
        for index, source in enumerate(sources):
            files.append(source)
            if isinstance(source, str | os.PathLike) and Path(source).is_dir():
                files[-1] = folder / f"{index}.onnx"
                export(Path(source), folder / f"{index}.onnx")
        names = [_name(source, index) for index, source in enumerate(sources)]

        def mean(chosen: Sequence[int]) -> ir.Model:
            return average(
                [load_model(files[index]) for index in chosen],
                [names[index] for index in chosen],
                [shares[index] for index in chosen],
            )

        kept = list(range(len(sources)))
        if score is not None:
            # All are compared first, so that an error does not depend on the scores.
            mean(kept)
            kept = _greedy(files, mean, score, folder / "mean.onnx")
        result = mean(kept)
        try:
            save_model(result, output)
        except OSError as error:
            raise ModelError(
                f"Writing the averaged model to '{os.fspath(output)}' failed: {error}."
            ) from error
    return [sources[index] for index in kept]


def _greedy(
    files: Sequence[ModelSource],
    mean: Callable[[Sequence[int]], ir.Model],
    score: Callable[[str], float],
    path: Path,
) -> list[int]:
    """Chooses models as recipe 1 of Wortsman et al. 2022 does.

    Args:
        files: the models.
        mean: function that averages the models with the given indices.
        score: function that returns how good a model is.
        path: file for models that are scored.

    Returns:
        The indices of the chosen models, sorted.
    """

    def scored(model: ir.Model) -> float:
        save_model(model, path)
        value = float(score(str(path)))
        # NaN would be kept by any comparison.
        return -math.inf if math.isnan(value) else value

    scores = [scored(load_model(file)) for file in files]
    first, *others = sorted(range(len(files)), key=lambda index: -scores[index])
    kept, best = [first], scores[first]
    for index in others:
        value = scored(mean(sorted([*kept, index])))
        if value >= best:
            kept, best = sorted([*kept, index]), value
    return kept


def _shares(weights: Sequence[float] | None, count: int) -> list[float]:
    """Returns the weights of `count` models.

    Raises:
        InputError: the weights are invalid.
    """
    if weights is None:
        return [1.0] * count
    try:
        values = [float(weight) for weight in weights]
    except (TypeError, ValueError):
        values = []
    if len(values) != count or not all(math.isfinite(v) and v >= 0 for v in values) or not sum(values) > 0:
        raise InputError(
            f"{_DOING}: {argument('weights')} must be {count} numbers, one per model, that are not negative and not "
            f"all zero; received {weights!r}."
        )
    return values


def _expanded(source: ModelSource) -> list[ModelSource]:
    """Returns a model, a run, or the checkpoints in a directory, oldest first."""
    if not isinstance(source, str | os.PathLike) or not Path(source).is_dir() or holds_run(Path(source)):
        return [source]
    saves = sorted(
        entry for entry in Path(source).iterdir() if (entry / CHECKPOINT).is_file() and holds_run(entry)
    )
    # A directory without checkpoints is opened as a run, which says what is missing.
    return list(saves) or [source]


def _name(source: ModelSource, index: int) -> str:
    return os.fspath(source) if isinstance(source, str | os.PathLike) else f"model {index}"
