"""Names the losses and optimizers without importing them: `--help` lists them also where onnx is missing.

A new loss or optimizer is one row here, and one with its settings. `onnxtrain.losses.LOSSES`,
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

LOSS_SETTINGS: dict[str, str] = {
    "cross_entropy": "label_smoothing, weight, ignore_index, axis, probabilities",
    "nll": "weight, ignore_index, axis",
    "causal_lm": "ignore_index",
    "bce_with_logits": "pos_weight, weight",
    "focal": "alpha, gamma",
    "tversky": "alpha, beta, smooth",
    "huber": "delta",
    "smooth_l1": "beta",
    "poisson_nll": "log_input, full, eps",
}
"""Per name of a loss, its settings besides `reduction`, which all have. A test compares them with the classes."""

OPTIMIZER_SETTINGS: dict[str, str] = {
    "adamw": "betas, eps, bias_correction, adam_mode",
    "adam": "betas, eps",
    "sgd": "momentum, dampening, nesterov",
    "adagrad": "lr_decay, initial_accumulator_value, eps",
    "rmsprop": "alpha, eps, momentum, centered",
    "lion": "betas",
    "adafactor": "beta2_decay, eps, d",
    "muon": "momentum, nesterov, ns_coefficients, ns_steps, eps, adjust_lr_fn",
    "prodigy": "betas, eps, d0, d_coef",
    "sparse_adam": "betas, eps",
}
"""Per name of an optimizer, its settings besides `weight_decay`. A test compares them with the classes."""


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
