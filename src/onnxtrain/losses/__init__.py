"""Losses: each appends the nodes that turn scores and a target into a loss, as `torch.nn.functional` does.

    >>> import onnx_ir as ir
    >>> from onnxtrain.losses import CrossEntropyLoss
    >>> loss = CrossEntropyLoss(label_smoothing=0.1)
    >>> scores = ir.Value(name="scores", shape=ir.Shape(["n", 10]), type=ir.TensorType(ir.DataType.FLOAT))
    >>> loss.targets(scores)
    [TargetSpec(name='labels', dtype=INT64, shape=('n',),
                class_labels=ClassLabels(count=10, ignore_index=-100))]

Losses of float16 and bfloat16 scores are computed in float32, so that sums over a batch neither overflow nor
lose digits; the result has the dtype of the scores again, as in PyTorch.
"""

from __future__ import annotations

from onnxtrain.errors import GraphBuildError

from ._base import ClassLabels, Loss, Reduction, TargetSpec
from ._classes import CrossEntropyLoss, NLLLoss
from ._elementwise import BCEWithLogitsLoss, HuberLoss, L1Loss, MSELoss, SmoothL1Loss

__all__ = [
    "LOSSES",
    "BCEWithLogitsLoss",
    "ClassLabels",
    "CrossEntropyLoss",
    "HuberLoss",
    "L1Loss",
    "Loss",
    "MSELoss",
    "NLLLoss",
    "Reduction",
    "SmoothL1Loss",
    "TargetSpec",
    "make_loss",
]

LOSSES: dict[str, type[Loss]] = {
    "mse": MSELoss,
    "l1": L1Loss,
    "huber": HuberLoss,
    "smooth_l1": SmoothL1Loss,
    "cross_entropy": CrossEntropyLoss,
    "bce_with_logits": BCEWithLogitsLoss,
    "nll": NLLLoss,
}
"""The losses by the names that :func:`make_loss` takes."""


def make_loss(spec: str | Loss) -> Loss:
    """Returns the loss of a name in :data:`LOSSES`, with default settings; a :class:`Loss` stays as it is.

    Raises:
        GraphBuildError: there is no loss of that name.

    Example:
        >>> make_loss("mse")
        MSELoss(reduction='mean')
    """
    if isinstance(spec, Loss):
        return spec
    if not isinstance(spec, str) or spec not in LOSSES:
        raise GraphBuildError(
            f"choosing a loss: received {spec!r}; give one of {', '.join(sorted(LOSSES))}, or a Loss object"
        )
    return LOSSES[spec]()
