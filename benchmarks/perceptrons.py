"""Compares networks of `onnxtrain train --network mlp` with scikit-learn's perceptrons, both with their defaults.

    python benchmarks/perceptrons.py > benchmarks/results/perceptrons.json

Both are trained on the same three quarters of a data set, with standardized columns (and a standardized target), and
judged on the rest: accuracy of classes, R² of quantities. Three seeds choose the split and the initial weights.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
from sklearn import datasets
from sklearn.compose import TransformedTargetRegressor
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from onnxtrain.cli import main

SETS = {"breast_cancer": "accuracy", "digits": "accuracy", "diabetes": "r2"}


def command(*arguments: object) -> Any:
    """Runs `onnxtrain` with these arguments and --json; returns what it prints."""
    sys.argv = ["onnxtrain", *map(str, arguments), "--json"]
    out = io.StringIO()
    with redirect_stdout(out):
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise
    return json.loads(out.getvalue())


def compare(name: str, metric: str, seed: int) -> tuple[float, float]:
    """Returns the score of onnxtrain and that of scikit-learn for one seed."""
    frame = getattr(datasets, f"load_{name}")(as_frame=True).frame
    y = frame["target"]
    train, test = train_test_split(
        frame, test_size=0.25, random_state=seed, stratify=y if metric == "accuracy" else None
    )
    with tempfile.TemporaryDirectory() as folder:
        for part, rows in (("train", train), ("test", test)):
            rows.to_csv(Path(folder) / f"{part}.csv", index=False)
        run = Path(folder) / "run"
        command(
            *("train", "--network", "mlp", "--data", Path(folder) / "train.csv", "--target", "target"),
            *("--metric", metric, "--seed", seed, "-o", run),
        )
        ours = command("evaluate", run, "--data", Path(folder) / "test.csv")[metric]
    if metric == "accuracy":
        model = make_pipeline(StandardScaler(), MLPClassifier(random_state=seed))
    else:
        regressor = make_pipeline(StandardScaler(), MLPRegressor(random_state=seed))
        model = TransformedTargetRegressor(regressor, transformer=StandardScaler())
    with warnings.catch_warnings():
        # Its default of 200 iterations does not always converge.
        warnings.simplefilter("ignore")
        model.fit(train.drop(columns="target"), train["target"])
    return float(ours), float(model.score(test.drop(columns="target"), test["target"]))


if __name__ == "__main__":
    results = {}
    for name, metric in SETS.items():
        pairs = np.array([compare(name, metric, seed) for seed in range(3)]).T
        results[name] = {"metric": metric, "onnxtrain": pairs[0].tolist(), "scikit-learn": pairs[1].tolist()}
        means = ", ".join(
            f"{who} {values.mean():.3f}" for who, values in zip(("onnxtrain", "sklearn"), pairs, strict=True)
        )
        print(f"{name}: {metric} {means}", file=sys.stderr)
    print(json.dumps({"scikit-learn": sklearn.__version__, "seeds": 3, "results": results}, indent=1))
