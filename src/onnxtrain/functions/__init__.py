"""Composite training ops as model-local functions of domain `onnxtrain`."""

from ._composite import COMPOSITES, DOMAIN, CompositeOp, composite
from ._specialized import SpecializedOp
from .activation import (
    clip_gradient,
    clip_gradient_of_finite,
    gelu_gradient,
    gelu_tanh_gradient,
    log_softmax_gradient,
    mish_gradient,
    relu_gradient,
    relu_gradient_of_finite,
    sigmoid_gradient,
    softmax_gradient,
    tanh_gradient,
)
from .batch_norm import (
    batch_normalization_max_pool_relu,
    batch_normalization_max_pool_relu_gradient,
    batch_normalization_relu,
    batch_normalization_relu_gradient,
    batch_normalization_training,
)
from .convolution import convolution
from .indexing import embedding_gradient
from .instance_norm import (
    instance_standardization,
    reversible_instance_normalization,
    reversible_instance_normalization_gradient,
    reversible_instance_normalization_parameter_gradient,
)
from .linalg import cholesky, inverse
from .loss import softmax_cross_entropy_gradient
from .normalization import (
    batch_normalization_gradient,
    group_normalization_gradient,
    layer_normalization_gradient,
    rms_normalization_gradient,
)
from .optimizer import (
    adagrad_step,
    adam_step,
    adamw_step,
    momentum_step,
    nesterov_step,
    rmsprop_step,
    sgd_step,
)
from .recurrent import (
    LAYERS,
    gru,
    gru_gradient,
    gru_reverse,
    gru_reverse_gradient,
    lstm,
    lstm_gradient,
    lstm_reverse,
    lstm_reverse_gradient,
    recurrent_weight_gradient,
    recurrent_weight_reverse_gradient,
)
from .rms_norm import (
    floored_rms_normalization,
    floored_rms_normalization_gradient,
    inverse_rms_normalization,
    inverse_rms_normalization_gradient,
)

__all__ = [
    "COMPOSITES",
    "DOMAIN",
    "LAYERS",
    "CompositeOp",
    "SpecializedOp",
    "adagrad_step",
    "adam_step",
    "adamw_step",
    "batch_normalization_gradient",
    "batch_normalization_max_pool_relu",
    "batch_normalization_max_pool_relu_gradient",
    "batch_normalization_relu",
    "batch_normalization_relu_gradient",
    "batch_normalization_training",
    "cholesky",
    "clip_gradient",
    "clip_gradient_of_finite",
    "composite",
    "convolution",
    "embedding_gradient",
    "floored_rms_normalization",
    "floored_rms_normalization_gradient",
    "gelu_gradient",
    "gelu_tanh_gradient",
    "group_normalization_gradient",
    "gru",
    "gru_gradient",
    "gru_reverse",
    "gru_reverse_gradient",
    "instance_standardization",
    "inverse",
    "inverse_rms_normalization",
    "inverse_rms_normalization_gradient",
    "layer_normalization_gradient",
    "log_softmax_gradient",
    "lstm",
    "lstm_gradient",
    "lstm_reverse",
    "lstm_reverse_gradient",
    "mish_gradient",
    "momentum_step",
    "nesterov_step",
    "recurrent_weight_gradient",
    "recurrent_weight_reverse_gradient",
    "relu_gradient",
    "relu_gradient_of_finite",
    "reversible_instance_normalization",
    "reversible_instance_normalization_gradient",
    "reversible_instance_normalization_parameter_gradient",
    "rms_normalization_gradient",
    "rmsprop_step",
    "sgd_step",
    "sigmoid_gradient",
    "softmax_cross_entropy_gradient",
    "softmax_gradient",
    "tanh_gradient",
]
