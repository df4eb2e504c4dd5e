"""Lists the names of losses and optimizers without importing their classes, so that `--help` works without onnx.

To add a loss or an optimizer, add a row here. `onnxtrain.losses.LOSSES`, `onnxtrain.optimizers.OPTIMIZERS`, `Trainer`
and the help texts of `--loss` and `--optimizer` are derived from these tables.
"""

from __future__ import annotations

from itertools import groupby

LOSSES: dict[str, tuple[str, str]] = {
    "cross_entropy": ("CrossEntropyLoss", "classes"),
    "nll": ("NLLLoss", "classes"),
    "multi_margin": ("MultiMarginLoss", "classes"),
    "arcface": ("ArcFaceLoss", "classes"),
    "causal_lm": ("CausalLMLoss", "the next token"),
    "bce_with_logits": ("BCEWithLogitsLoss", "yes or no"),
    "bce": ("BCELoss", "yes or no"),
    "focal": ("FocalLoss", "yes or no"),
    "multilabel_soft_margin": ("MultiLabelSoftMarginLoss", "yes or no"),
    "multilabel_margin": ("MultiLabelMarginLoss", "lists of classes"),
    "ctc": ("CTCLoss", "label sequences without alignment"),
    "tversky": ("TverskyLoss", "the overlap of regions"),
    "mse": ("MSELoss", "quantities"),
    "l1": ("L1Loss", "quantities"),
    "huber": ("HuberLoss", "quantities"),
    "smooth_l1": ("SmoothL1Loss", "quantities"),
    "quantile": ("QuantileLoss", "quantities"),
    "gaussian_nll": ("GaussianNLLLoss", "quantities"),
    "poisson_nll": ("PoissonNLLLoss", "counts"),
    "kl_div": ("KLDivLoss", "distributions"),
    "soft_margin": ("SoftMarginLoss", "1 and -1"),
    "hinge_embedding": ("HingeEmbeddingLoss", "1 and -1"),
    "cosine_embedding": ("CosineEmbeddingLoss", "1 and -1"),
    "margin_ranking": ("MarginRankingLoss", "1 and -1"),
    "triplet_margin": ("TripletMarginLoss", "no targets"),
    "triplet_margin_with_distance": ("TripletMarginWithDistanceLoss", "no targets"),
    "info_nce": ("InfoNCELoss", "pairs of texts"),
    "triplet": ("TripletLoss", "triples of texts"),
    "cosine_similarity": ("CosineSimilarityLoss", "scored pairs of texts"),
}
"""Maps each loss to its class in `onnxtrain.losses` and its kind of targets. Losses with the same kind are adjacent."""

OPTIMIZERS: dict[str, str] = {
    "adamw": "AdamW",
    "adam": "Adam",
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
    "nadam": "NAdam",
    "lion": "Lion",
    "adafactor": "Adafactor",
    "muon": "Muon",
    "prodigy": "Prodigy",
    "sparse_adam": "SparseAdam",
}
"""Maps each optimizer to its class in `onnxtrain.optimizers`."""


def enumerated(names: list[str]) -> str:
    """Returns names joined by commas and "or".

    Example:
        >>> enumerated(["mse", "l1", "huber"])
        'mse, l1 or huber'
    """
    return " or ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def losses_by_targets() -> str:
    """Lists losses by kind of target, for a help text, e.g. "mse or l1 for quantities, poisson_nll for counts"."""
    groups = groupby(LOSSES, key=lambda name: LOSSES[name][1])
    return ", ".join(f"{enumerated(list(names))} for {targets}" for targets, names in groups)


def settings_by_name(settings: dict[str, str]) -> str:
    """Lists the settings of each loss, optimizer or schedule on one line, for a help text.

    Example:
        >>> settings_by_name({"focal": "alpha, gamma", "huber": "delta"})
        'focal: alpha, gamma; huber: delta'
    """
    return "; ".join(f"{name}: {listed}" for name, listed in settings.items())
