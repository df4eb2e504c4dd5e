"""Bring a model to the canonical form that the rest of the package expects."""

from __future__ import annotations

from collections.abc import Collection

import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from onnxtrain.errors import ModelError, OnnxTrainError, UnsupportedOpsetError
from onnxtrain.passes.canonical.check_inputs import check_inputs
from onnxtrain.passes.canonical.check_types import check_types
from onnxtrain.passes.canonical.explicit_defaults import DefaultsPass
from onnxtrain.passes.canonical.inline_functions import inline_functions
from onnxtrain.passes.canonical.inline_op_bodies import inline_schema_functions
from onnxtrain.passes.canonical.input_ranks import InputRanksPass
from onnxtrain.passes.canonical.nchwc_layout import BlockedLayoutPass
from onnxtrain.passes.canonical.opset import convert_opset, fit_ir_version
from onnxtrain.passes.io.load import CANONICAL_OPSET
from onnxtrain.passes.io.without_weights import BIG_ELEMENTS, lean_proto
from onnxtrain.passes.parameters.promotion import give_back, withhold
from onnxtrain.passes.parameters.stop_gradient import mark_stopped_gradients
from onnxtrain.passes.parameters.torch_parameters import RestoreParametersPass
from onnxtrain.passes.runtime_faults.column_vectors import ColumnVectorPass
from onnxtrain.passes.runtime_faults.normalizer import NormalizerPass
from onnxtrain.passes.runtime_faults.time_first import TimeFirstPass
from onnxtrain.passes.shapes.declared import correct_declared_shapes
from onnxtrain.passes.shapes.infer import infer_shapes, settle_shapes
from onnxtrain.passes.shapes.vector_inputs import VectorsPass
from onnxtrain.passes.tidy.constants import lift_constants

# Ops without a float64 kernel in ONNX Runtime, and the oldest opset at which it runs their function body instead.
_FLOAT64_BODIES = {
    **dict.fromkeys(("LeakyRelu", "PRelu"), 16),
    **dict.fromkeys(
        ("Elu", "HardSigmoid", "HardSwish", "Mish", "Selu", "Softplus", "Softsign", "ThresholdedRelu"), 18
    ),
}

_FLOAT64_BODIES_SINCE = min(_FLOAT64_BODIES.values())


def canonicalize(model: ir.Model, variable: Collection[str] = ()) -> ir.Model:
    """Return `model` in canonical form; `model` itself is not changed.

    In canonical form

    - the opset is 21 to 26 (older models are converted to 21, newer ones to 26), the IR version the oldest for it;
    - there are no model-local functions;
    - no initializer is a graph input, and all initializers are in the main graph, tensors of Constant nodes among
      them (`is_constant` tells them from parameters);
    - values have dtypes and shapes, as far as they can be inferred;
    - gradients stop at the Identity nodes for which `is_stop_gradient` is true;
    - parameters that PyTorch's exporters merged are separate initializers;
    - recurrent layers have layout=0.

    Names of inputs, outputs and other initializers stay, and so does the order of initializers.

    Args:
        model: Result of :func:`onnxtrain.passes.load_model`.
        variable: Names of initializers and Constant nodes that will be graph inputs or be differentiated: nothing is
            folded or inferred from their present values, e.g. {"fc.weight"}. Unknown names are ignored.

    Raises:
        ModelError: The graph is not valid ONNX, an op of ONNX Runtime lacks a required input, or dtypes are mixed.
        UnsupportedOpsetError: The opset is above 28 or cannot be converted.
    """
    model = model.clone(deep_copy=True)
    common.RemoveInitializersFromInputsPass()(model)
    fit_ir_version(model)
    # As inputs the variable initializers have no value that a pass could fold or infer shapes from.
    withheld = withhold(model, variable)
    invalid = "The model is not valid ONNX: {}"
    try:
        model = inline_functions(model)
        # Both come before shapes are inferred: without them onnx infers wrong ones.
        VectorsPass()(model)
        DefaultsPass()(model)
        # Big Constant nodes are lifted before checker and converter, which would serialise them.
        lift_constants(model, min_elements=BIG_ELEMENTS + 1)
    except (TypeError, ValueError, IndexError):
        # These passes come before the checker, which says what is wrong, e.g. an attribute of another type.
        _check(model, ModelError, invalid)
        raise
    opset = model.graph.opset_imports[""]
    if opset < CANONICAL_OPSET:
        model = _expand_what_conversion_breaks(model, opset)
    # The converter reads values: sizes and axes become attributes or inputs.
    give_back(model, withheld)
    _check(model, ModelError, invalid)
    check_inputs(model)
    model = convert_opset(model)
    if opset < CANONICAL_OPSET:
        problem = (
            f"Converting the model from opset {opset} to {CANONICAL_OPSET} gave an invalid graph: {{}}. "
        )
        remedy = f"Export it again with opset {CANONICAL_OPSET} or newer."
        _check(model, UnsupportedOpsetError, problem + remedy)
    model = lift_constants(model)
    if BlockedLayoutPass()(model).modified:
        lift_constants(model)
    RestoreParametersPass()(model)
    TimeFirstPass()(model)
    # Withheld again for folding and inference. Parameters that RestoreParametersPass has added are withheld, too.
    withheld = withhold(model, variable)
    model = settle_shapes(model, inferred=correct_declared_shapes(model))
    check_types(model)
    # After inference, as the pass must tell the dtype.
    if NormalizerPass()(model).modified:
        infer_shapes(model)
    # After inference, as the passes must tell a vector from a matrix or a scalar.
    if any([ColumnVectorPass()(model).modified, InputRanksPass(unknown=True)(model).modified]):
        lift_constants(model)
    model = mark_stopped_gradients(model)
    give_back(model, withheld)
    return model


def _expand_what_conversion_breaks(model: ir.Model, opset: int) -> ir.Model:
    """Return `model` with function bodies in place of ops that would change or lose their meaning by conversion.

    GroupNormalization-18 scales per group, GroupNormalization-21 per channel; the converter keeps the node unchanged,
    which is wrong. For float64 activations ONNX Runtime (1.31) only has function bodies, and finds them only at the
    opset of the body.
    """
    if opset < _FLOAT64_BODIES_SINCE:
        return model
    # Types must be inferred to tell float64 nodes; models without any float64 are spared that.
    wide = any(
        value.dtype == ir.DataType.DOUBLE
        for value in (*model.graph.inputs, *model.graph.initializers.values())
    )
    if wide:
        infer_shapes(model)

    def keep(node: ir.Node) -> bool:
        if node.op_type == "GroupNormalization":
            return opset < 18
        # Of results of ops that onnx does not know, such as those of com.microsoft, the dtype is not known either yet.
        double = node.inputs[0] is not None and node.inputs[0].dtype in (ir.DataType.DOUBLE, None)
        return not (wide and double and opset >= _FLOAT64_BODIES.get(node.op_type, CANONICAL_OPSET))

    return inline_schema_functions(model, keep)


def _checkable_proto(model: ir.Model) -> onnx.ModelProto:
    """Return a proto for onnx's checker, which wants types and shapes of inputs and outputs; runtimes infer them."""
    proto = lean_proto(model)
    for info in (*proto.graph.input, *proto.graph.output):
        if not info.type.WhichOneof("value"):
            info.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        if info.type.HasField("tensor_type"):
            info.type.tensor_type.shape.SetInParent()
    # Shapes of inner values are inferred anew; wrong ones in the file do not make a model invalid.
    del proto.graph.value_info[:]
    return proto


def _check(model: ir.Model, kind: type[OnnxTrainError], message: str) -> None:
    """Raise an error if onnx's checker refuses a model; `message` has a {} for what the checker says."""
    try:
        onnx.checker.check_model(_checkable_proto(model))
    except onnx.checker.ValidationError as error:
        raise kind(message.format(error)) from error
