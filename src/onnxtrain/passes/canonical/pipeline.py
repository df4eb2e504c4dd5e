"""Bring a model to the canonical form that every other room of the package assumes."""

from __future__ import annotations

from collections.abc import Collection

import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from onnxtrain.errors import ModelError, UnsupportedOpsetError
from onnxtrain.passes.canonical.check_types import check_types
from onnxtrain.passes.canonical.explicit_defaults import DefaultsPass
from onnxtrain.passes.canonical.inline_functions import inline_functions
from onnxtrain.passes.canonical.inline_op_bodies import inline_schema_functions
from onnxtrain.passes.canonical.nchwc_layout import BlockedLayoutPass
from onnxtrain.passes.canonical.opset import convert_opset, fit_ir_version
from onnxtrain.passes.io.load import CANONICAL_OPSET
from onnxtrain.passes.io.without_weights import BIG_ELEMENTS, lean_proto
from onnxtrain.passes.parameters.promotion import give_back, withhold
from onnxtrain.passes.parameters.stop_gradient import mark_stopped_gradients
from onnxtrain.passes.parameters.torch_parameters import RestoreParametersPass
from onnxtrain.passes.runtime_faults.column_vectors import ColumnVectorPass
from onnxtrain.passes.runtime_faults.time_first import TimeFirstPass
from onnxtrain.passes.shapes.infer import infer_shapes, settle_shapes
from onnxtrain.passes.shapes.vector_inputs import VectorsPass
from onnxtrain.passes.tidy.constants import lift_constants

_FLOAT64_BODIES = {
    **dict.fromkeys(("LeakyRelu", "PRelu"), 16),
    **dict.fromkeys(
        ("Elu", "HardSigmoid", "HardSwish", "Mish", "Selu", "Softplus", "Softsign", "ThresholdedRelu"), 18
    ),
}
"""Ops of which ONNX Runtime computes float64 by their function body, and the opset from which on it does so."""

_FLOAT64_BODIES_SINCE = min(_FLOAT64_BODIES.values())


def canonicalize(model: ir.Model, variable: Collection[str] = ()) -> ir.Model:
    """Return `model` in canonical form; `model` itself is not changed.

    Canonical form: opset 21 with IR 10, or opset 22 to 26, of which newer ones become 26; no model-local functions; no
    initializer among the graph inputs; tensors of Constant nodes are initializers of the main graph (`is_constant`
    tells them from parameters); dtypes and shapes are annotated as far as they can be inferred; gradients stop at the
    Identity nodes that `is_stop_gradient` knows; parameters that PyTorch's exporters have merged are initializers of
    their own again; recurrent layers have layout=0. Names of inputs, outputs and other initializers, and the order of
    initializers, stay.

    Args:
        model: What :func:`onnxtrain.passes.load_model` returns.
        variable: Names of initializers and Constant nodes that will be graph inputs, or be differentiated: nothing
            is computed or inferred from the values that they have. Other names are overlooked.

    Raises:
        ModelError: The graph is not valid ONNX, or mixes dtypes.
        UnsupportedOpsetError: The opset is above 28 or cannot be converted.
    """
    model = model.clone(deep_copy=True)
    common.RemoveInitializersFromInputsPass()(model)
    fit_ir_version(model)
    withheld = withhold(model, variable)
    model = inline_functions(model)
    VectorsPass()(model)
    DefaultsPass()(model)
    # Now, lest checker and converter have to serialise them.
    lift_constants(model, min_elements=BIG_ELEMENTS + 1)
    opset = model.graph.opset_imports[""]
    if opset < CANONICAL_OPSET:
        model = _expand_what_conversion_breaks(model, opset)
    give_back(model, withheld)  # the converter may want them
    _check_input(model)
    model = convert_opset(model)
    if opset < CANONICAL_OPSET:
        _check_converted(model, opset)
    model = lift_constants(model)
    if BlockedLayoutPass()(model).modified:
        lift_constants(model)
    RestoreParametersPass()(model)
    TimeFirstPass()(model)
    withheld = withhold(model, variable)
    model = settle_shapes(model)
    check_types(model)
    if ColumnVectorPass()(model).modified:
        lift_constants(model)
    model = mark_stopped_gradients(model)
    give_back(model, withheld)
    return model


def _expand_what_conversion_breaks(model: ir.Model, opset: int) -> ir.Model:
    """Return `model` with the function bodies of ops that mean or can less at the canonical opset.

    GroupNormalization-18 scales per group, 21 per channel; the converter passes it on unchanged, and wrong. In float64
    ONNX Runtime (1.31) has activations as function bodies only, and at the opset of the body only.
    """
    if opset < _FLOAT64_BODIES_SINCE:
        return model
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
    """Return a proto for the checker, which insists on types and shapes that runtimes infer."""
    proto = lean_proto(model)
    for info in (*proto.graph.input, *proto.graph.output):
        if not info.type.WhichOneof("value"):
            info.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        if info.type.HasField("tensor_type"):
            info.type.tensor_type.shape.SetInParent()
    del proto.graph.value_info[:]
    return proto


def _check_input(model: ir.Model) -> None:
    try:
        onnx.checker.check_model(_checkable_proto(model))
    except onnx.checker.ValidationError as error:
        raise ModelError(f"The model is not valid ONNX: {error}") from error


def _check_converted(model: ir.Model, opset: int) -> None:
    try:
        onnx.checker.check_model(_checkable_proto(model))
    except onnx.checker.ValidationError as error:
        raise UnsupportedOpsetError(
            f"Converting the model from opset {opset} to {CANONICAL_OPSET} gave an invalid graph: {error}. "
            f"Export it again with opset {CANONICAL_OPSET} or newer."
        ) from error
