"""Graph passes, one transformation per file: load, canonicalize, infer shapes, simplify, adapt to runtimes, save.

Each folder contains the passes of one stage; notes/architecture.md lists their order.
"""

from __future__ import annotations

# Before the first import of onnx: if it is missing, the message says what to install.
import onnxtrain._desk  # noqa: F401  # isort: skip

# Names for other packages and tests. Passes import each other from their modules, because this package is only partly
# initialized while they are imported.
from onnxtrain.passes.canonical.inline_functions import inline_functions
from onnxtrain.passes.canonical.inline_op_bodies import has_schema_function, inline_schema_functions
from onnxtrain.passes.canonical.older_opset import fit_opset
from onnxtrain.passes.canonical.pipeline import canonicalize
from onnxtrain.passes.canonical.repeated_axes import inverse_permutation, permutation
from onnxtrain.passes.io.load import (
    CANONICAL_OPSET,
    MAX_IR_VERSION,
    MAX_OPSET,
    NEWEST_OPSET,
    ModelSource,
    load_model,
)
from onnxtrain.passes.io.save import as_given, same_kind, save_model, to_proto, write_models
from onnxtrain.passes.parameters.dropout_traces import dropout_traces

# `selection` uses these to find initializers that are never trained.
from onnxtrain.passes.parameters.op_settings import has_quantized_ops, is_quantization_or_rotary, is_setting
from onnxtrain.passes.parameters.promotion import embed_parameters, promote_initializers
from onnxtrain.passes.parameters.stop_gradient import (
    is_stop_gradient,
    lost_detaches,
    mark_stop_gradient,
    mark_stopped_gradients,
)
from onnxtrain.passes.parameters.torch_parameters import TorchSignature, mark_gradients
from onnxtrain.passes.parameters.training_mode import Mode, TrainingModePass, is_training_batch_norm
from onnxtrain.passes.runtime_faults.absent_inputs import AbsentInputsPass
from onnxtrain.passes.runtime_faults.column_vectors import ColumnVectorPass
from onnxtrain.passes.runtime_faults.inexact_sigmoid import ExactSigmoidPass
from onnxtrain.passes.runtime_faults.long_sums import LongSumsPass, is_long_sum, mark_long_sum
from onnxtrain.passes.runtime_faults.narrow_floats import has_narrow_floats, widen_narrow_floats
from onnxtrain.passes.runtime_faults.pipeline import apply_workarounds
from onnxtrain.passes.runtime_faults.quantized_products import FloatDequantizedPass, FloatProductsPass
from onnxtrain.passes.runtime_faults.racing_scatter import RacingScatterPass
from onnxtrain.passes.runtime_faults.reduction_axes import PositiveAxesPass
from onnxtrain.passes.runtime_faults.running_statistics import IsolateStatisticsPass
from onnxtrain.passes.shapes.ceil_mode import CeilModePass
from onnxtrain.passes.shapes.dims import Dims, broadcasts_to, dims_of, same_size
from onnxtrain.passes.shapes.dynamic_batch import DynamicBatchPass, fixed_batch, free_batch
from onnxtrain.passes.shapes.explain_missing import why_untyped
from onnxtrain.passes.shapes.implied_ranks import ImpliedRanksPass
from onnxtrain.passes.shapes.infer import infer_shapes, settle_shapes
from onnxtrain.passes.tidy.after_gradients import simplify_gradients
from onnxtrain.passes.tidy.cleanup import CleanupPass
from onnxtrain.passes.tidy.constants import (
    is_constant,
    is_float_parameter,
    known_array,
    lift_constants,
    mark_constant,
)
from onnxtrain.passes.tidy.cross_entropy import CrossEntropyPass
from onnxtrain.passes.tidy.fold_constants import FoldConstantsPass

# For frozen backbones only: `training` runs it when parameters are graph inputs.
from onnxtrain.passes.tidy.frozen_batch_norm import FoldFrozenBatchNormPass
from onnxtrain.passes.tidy.implicit_expand import ImplicitExpandPass
from onnxtrain.passes.tidy.late_expand import LateExpandPass, expand_source
from onnxtrain.passes.tidy.reads import captured_values, read_once, reads
from onnxtrain.passes.tidy.relu_after_pooling import ReluAfterMaxPoolPass
from onnxtrain.passes.tidy.relu_before_reshape import ReluBeforeReshapePass
from onnxtrain.passes.tidy.replace_value import stand_in, successor
from onnxtrain.passes.tidy.shared_sizes import SharedSizesPass
from onnxtrain.passes.tidy.transposed_products import TransposedProductPass
from onnxtrain.passes.tidy.unused import remove_unread_chains, remove_unread_initializers, remove_unread_nodes

__all__ = [
    "CANONICAL_OPSET",
    "MAX_IR_VERSION",
    "MAX_OPSET",
    "NEWEST_OPSET",
    "AbsentInputsPass",
    "CeilModePass",
    "CleanupPass",
    "ColumnVectorPass",
    "CrossEntropyPass",
    "Dims",
    "DynamicBatchPass",
    "ExactSigmoidPass",
    "FloatDequantizedPass",
    "FloatProductsPass",
    "FoldConstantsPass",
    "FoldFrozenBatchNormPass",
    "ImplicitExpandPass",
    "ImpliedRanksPass",
    "IsolateStatisticsPass",
    "LateExpandPass",
    "LongSumsPass",
    "Mode",
    "ModelSource",
    "PositiveAxesPass",
    "RacingScatterPass",
    "ReluAfterMaxPoolPass",
    "ReluBeforeReshapePass",
    "SharedSizesPass",
    "TorchSignature",
    "TrainingModePass",
    "TransposedProductPass",
    "apply_workarounds",
    "as_given",
    "broadcasts_to",
    "canonicalize",
    "captured_values",
    "dims_of",
    "dropout_traces",
    "embed_parameters",
    "expand_source",
    "fit_opset",
    "fixed_batch",
    "free_batch",
    "has_narrow_floats",
    "has_quantized_ops",
    "has_schema_function",
    "infer_shapes",
    "inline_functions",
    "inline_schema_functions",
    "inverse_permutation",
    "is_constant",
    "is_float_parameter",
    "is_long_sum",
    "is_quantization_or_rotary",
    "is_setting",
    "is_stop_gradient",
    "is_training_batch_norm",
    "known_array",
    "lift_constants",
    "load_model",
    "lost_detaches",
    "mark_constant",
    "mark_gradients",
    "mark_long_sum",
    "mark_stop_gradient",
    "mark_stopped_gradients",
    "permutation",
    "promote_initializers",
    "read_once",
    "reads",
    "remove_unread_chains",
    "remove_unread_initializers",
    "remove_unread_nodes",
    "same_kind",
    "same_size",
    "save_model",
    "settle_shapes",
    "simplify_gradients",
    "stand_in",
    "successor",
    "to_proto",
    "why_untyped",
    "widen_narrow_floats",
    "write_models",
]
