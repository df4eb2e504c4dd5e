"""One transformation of a model per file: from what a user holds to the canonical form, and on."""

from __future__ import annotations

import onnxtrain._desk  # noqa: F401  # isort: skip

from onnxtrain.passes.absent import AbsentInputsPass
from onnxtrain.passes.axes import PositiveAxesPass
from onnxtrain.passes.broadcast import ImplicitExpandPass
from onnxtrain.passes.canonical import canonicalize
from onnxtrain.passes.ceil_mode import CeilModePass
from onnxtrain.passes.cleanup import RANDOM_OPS, CleanupPass
from onnxtrain.passes.constants import is_constant, is_float_parameter, lift_constants, mark_constant
from onnxtrain.passes.cross_entropy import CrossEntropyPass
from onnxtrain.passes.dynamic_batch import DynamicBatchPass, fixed_batch, free_batch
from onnxtrain.passes.fixed_inputs import is_quantisation_or_rotary, is_setting
from onnxtrain.passes.float_products import FloatProductsPass
from onnxtrain.passes.fold import FoldConstantsPass
from onnxtrain.passes.gradients import simplify_gradients
from onnxtrain.passes.inline import inline_functions
from onnxtrain.passes.inline_schema import has_schema_function, inline_schema_functions
from onnxtrain.passes.load import MAX_IR_VERSION, MAX_OPSET, NEWEST_OPSET, ModelSource, load_model
from onnxtrain.passes.mode import Mode, TrainingModePass, is_training_batch_norm
from onnxtrain.passes.opset import CANONICAL_OPSET
from onnxtrain.passes.parameters import embed_parameters, promote_initializers
from onnxtrain.passes.pooling import ReluAfterMaxPoolPass
from onnxtrain.passes.products import ColumnVectorPass, TransposedProductPass
from onnxtrain.passes.ranks import ImpliedRanksPass
from onnxtrain.passes.rewire import stand_in
from onnxtrain.passes.save import as_given, save_model, to_proto, write_model
from onnxtrain.passes.shapes import infer_shapes, settle_shapes
from onnxtrain.passes.statistics import IsolateStatisticsPass
from onnxtrain.passes.stop_gradient import (
    is_stop_gradient,
    lost_detaches,
    mark_stop_gradient,
    mark_stopped_gradients,
)
from onnxtrain.passes.suit_runtime import suit_runtime
from onnxtrain.passes.torch_parameters import TorchSignature, mark_gradients
from onnxtrain.passes.twins import BODIES, TWINS
from onnxtrain.passes.unread import remove_unread_chains, remove_unread_initializers, remove_unread_nodes
from onnxtrain.passes.untyped import why_untyped
from onnxtrain.passes.widen import EXACT_OPS, has_narrow_floats, widen_narrow_floats

__all__ = [
    "BODIES",
    "CANONICAL_OPSET",
    "EXACT_OPS",
    "MAX_IR_VERSION",
    "MAX_OPSET",
    "NEWEST_OPSET",
    "RANDOM_OPS",
    "TWINS",
    "AbsentInputsPass",
    "CeilModePass",
    "CleanupPass",
    "ColumnVectorPass",
    "CrossEntropyPass",
    "DynamicBatchPass",
    "FloatProductsPass",
    "FoldConstantsPass",
    "ImplicitExpandPass",
    "ImpliedRanksPass",
    "IsolateStatisticsPass",
    "Mode",
    "ModelSource",
    "PositiveAxesPass",
    "ReluAfterMaxPoolPass",
    "TorchSignature",
    "TrainingModePass",
    "TransposedProductPass",
    "as_given",
    "canonicalize",
    "embed_parameters",
    "fixed_batch",
    "free_batch",
    "has_narrow_floats",
    "has_schema_function",
    "infer_shapes",
    "inline_functions",
    "inline_schema_functions",
    "is_constant",
    "is_float_parameter",
    "is_quantisation_or_rotary",
    "is_setting",
    "is_stop_gradient",
    "is_training_batch_norm",
    "lift_constants",
    "load_model",
    "lost_detaches",
    "mark_constant",
    "mark_gradients",
    "mark_stop_gradient",
    "mark_stopped_gradients",
    "promote_initializers",
    "remove_unread_chains",
    "remove_unread_initializers",
    "remove_unread_nodes",
    "save_model",
    "settle_shapes",
    "simplify_gradients",
    "stand_in",
    "suit_runtime",
    "to_proto",
    "why_untyped",
    "widen_narrow_floats",
    "write_model",
]
