"""Names the losses and optimizers without importing them: `--help` lists them also where onnx is missing.

A new loss or optimizer is one row here. `onnxtrain.losses.LOSSES`,
`onnxtrain.optimizers.OPTIMIZERS`, `Trainer` and the help texts of `--loss` and `--optimizer` follow.
"""

from __future__ import annotations

from itertools import groupby

LOSSES: dict[str, tuple[str, str]] = {
    "cross_entropy": ("CrossEntropyLoss", "classes"),
    "nll": ("NLLLoss", "classes"),
    "causal_lm": ("CausalLMLoss", "the next token"),
    "bce_with_logits": ("BCEWithLogitsLoss", "yes or no"),
    "focal": ("FocalLoss", "yes or no"),
    "tversky": ("TverskyLoss", "the overlap of regions"),
    "mse": ("MSELoss", "quantities"),
    "l1": ("L1Loss", "quantities"),
    "huber": ("HuberLoss", "quantities"),
    "smooth_l1": ("SmoothL1Loss", "quantities"),
    "poisson_nll": ("PoissonNLLLoss", "counts"),
}
"""Per name, the class in `onnxtrain.losses`, and what its targets are. Losses for the same targets stand together."""

OPTIMIZERS: dict[str, str] = {
    "adamw": "AdamW",
    "adam": "Adam",
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
    "lion": "Lion",
    "adafactor": "Adafactor",
    "muon": "Muon",
    "prodigy": "Prodigy",
    "sparse_adam": "SparseAdam",
}
"""Per name, the class in `onnxtrain.optimizers`."""


def enumerated(names: list[str]) -> str:
    """Joins names for a sentence.

    Example:
        >>> enumerated(["mse", "l1", "huber"])
        'mse, l1 or huber'
    """
    return " or ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def losses_by_targets() -> str:
    """Lists the losses for a help text, e.g. "cross_entropy or nll for classes, poisson_nll for counts"."""
    groups = groupby(LOSSES, key=lambda name: LOSSES[name][1])
    return ", ".join(f"{enumerated(list(names))} for {targets}" for targets, names in groups)


def settings_by_name(settings: dict[str, str]) -> str:
    """Lists settings for a help text.

    Example:
        >>> settings_by_name({"focal": "alpha, gamma", "huber": "delta"})
        'focal: alpha, gamma; huber: delta'
    """
    return "; ".join(f"{name}: {listed}" for name, listed in settings.items())
