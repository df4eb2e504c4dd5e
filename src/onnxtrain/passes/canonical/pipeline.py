"""Converts a model to the canonical form that the rest of the package expects."""

from __future__ import annotations

from collections.abc import Collection

import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from onnxtrain.errors import ModelError, OnnxTrainError, UnsupportedOpsetError
from onnxtrain.op_bodies import has_own_gradient
from onnxtrain.passes.canonical.check_inputs import check_inputs
from onnxtrain.passes.canonical.check_types import check_types
from onnxtrain.passes.canonical.einsum_pairs import EinsumPairsPass
from onnxtrain.passes.canonical.embedding_bag_loop import EmbeddingBagLoopPass
from onnxtrain.passes.canonical.explicit_defaults import DefaultsPass
from onnxtrain.passes.canonical.inline_functions import inline_functions
from onnxtrain.passes.canonical.inline_op_bodies import inline_schema_functions
from onnxtrain.passes.canonical.input_ranks import InputRanksPass
from onnxtrain.passes.canonical.loop_invariants import LoopInvariantsPass
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

# Ops without a float64 kernel in ONNX Runtime, with the first opset at which it falls back to their function body.
_FLOAT64_BODIES = {
    **dict.fromkeys(("LeakyRelu", "PRelu"), 16),
    **dict.fromkeys(
        ("Elu", "HardSigmoid", "HardSwish", "Mish", "Selu", "Softplus", "Softsign", "ThresholdedRelu"), 18
    ),
}

_FLOAT64_BODIES_SINCE = min(_FLOAT64_BODIES.values())


def canonicalize(model: ir.Model, variable: Collection[str] = ()) -> ir.Model:
    """Returns a copy of `model` in canonical form.

    In canonical form

    - the opset is 21 to 26 (older models are converted to 21, newer ones to 26), and the IR version is the minimum for
      that opset;
    - there are no model-local functions, except those for which users have registered a gradient;
    - no initializer is a graph input, and all initializers are in the main graph, including the tensors of Constant
      nodes (`is_constant` distinguishes them from parameters);
    - values have dtypes and shapes, as far as these can be inferred;
    - gradients stop at the Identity nodes that `is_stop_gradient` recognizes;
    - parameters that PyTorch's exporters merged are separate initializers;
    - recurrent layers have layout=0.

    Names of inputs, outputs and other initializers are kept, as is the order of initializers.

    Args:
        model: result of :func:`onnxtrain.passes.load_model`.
        variable: names of initializers and Constant nodes that will become graph inputs or be differentiated, e.g.
            {"fc.weight"}. Their current values are not used for folding or inference. Unknown names are ignored.

    Raises:
        ModelError: the graph is not valid ONNX, an op of ONNX Runtime lacks a required input, or dtypes are mixed.
        UnsupportedOpsetError: the opset is above 28 or cannot be converted.
    """
    model = model.clone(deep_copy=True)
    common.RemoveInitializersFromInputsPass()(model)
    fit_ir_version(model)
    # Turned into inputs, the variable initializers have no value that could be folded or used for shape inference.
    withheld = withhold(model, variable)
    # The gradient that a user has registered for a function of the model must find its call.
    model = inline_functions(model, lambda function: not has_own_gradient((function.domain, function.name)))
    # Before shapes are first inferred: onnx would infer wrong ones.
    VectorsPass()(model)
    DefaultsPass()(model)
    # Before the checker and the converter, which would serialize large Constant nodes.
    lift_constants(model, min_elements=BIG_ELEMENTS + 1)
    opset = model.graph.opset_imports[""]
    if opset < CANONICAL_OPSET:
        if model.functions:
            name = "::".join(next(iter(model.functions))[:2])
            raise UnsupportedOpsetError(
                f"Cannot convert the model from opset {opset} to {CANONICAL_OPSET} with the call of its function "
                f"{name}, for which a gradient is registered. Export it with opset {CANONICAL_OPSET} or newer."
            )
        model = _expand_unconvertible_ops(model, opset)
    # The converter needs the values: it turns sizes and axes into attributes or inputs.
    give_back(model, withheld)
    _check(model, ModelError, "The model is not valid ONNX: {}")
    check_inputs(model)
    model = convert_opset(model)
    if opset < CANONICAL_OPSET:
        problem = (
            f"Converting the model from opset {opset} to {CANONICAL_OPSET} produced an invalid graph: {{}}. "
        )
        remedy = f"Export it again with opset {CANONICAL_OPSET} or newer."
        _check(model, UnsupportedOpsetError, problem + remedy)
    model = lift_constants(model)
    if BlockedLayoutPass()(model).modified:
        lift_constants(model)
    RestoreParametersPass()(model)
    TimeFirstPass()(model)
    # For folding and inference, including the parameters that RestoreParametersPass has added.
    withheld = withhold(model, variable)
    model = settle_shapes(model, inferred=correct_declared_shapes(model))
    check_types(model)
    # After inference, because the pass needs dtypes.
    if NormalizerPass()(model).modified:
        infer_shapes(model)
    # After inference, because the passes need ranks.
    if any([ColumnVectorPass()(model).modified, InputRanksPass(unknown=True)(model).modified]):
        lift_constants(model)
    # After inference, which has replaced sequences that loops append to.
    LoopInvariantsPass()(model)
    # After inference, because the order depends on sizes. The gradients of pairwise Einsums are pairwise Einsums, too.
    if any([EmbeddingBagLoopPass()(model).modified, EinsumPairsPass()(model).modified]):
        infer_shapes(lift_constants(model))
    model = mark_stopped_gradients(model)
    give_back(model, withheld)
    return model


def _expand_unconvertible_ops(model: ir.Model, opset: int) -> ir.Model:
    """Returns `model` with ops replaced by their function bodies if conversion would change or break them.

    GroupNormalization-18 scales per group, GroupNormalization-21 per channel, but the converter leaves the node
    unchanged. ONNX Runtime (1.31) has no float64 kernels for some activations. It runs their function bodies instead,
    but only in a model that has the same opset as the body, i.e. not after conversion.
    """
    if opset < _FLOAT64_BODIES_SINCE:
        return model
    # Finding float64 nodes requires type inference, which is skipped if the model has no float64 input or tensor.
    wide = any(
        value.dtype == ir.DataType.DOUBLE
        for value in (*model.graph.inputs, *model.graph.initializers.values())
    )
    if wide:
        infer_shapes(model)

    def keep(node: ir.Node) -> bool:
        if node.op_type == "GroupNormalization":
            return opset < 18
        # None: the dtype of the outputs of nonstandard ops, such as those of com.microsoft, is not known yet.
        double = node.inputs[0] is not None and node.inputs[0].dtype in (ir.DataType.DOUBLE, None)
        return not (wide and double and opset >= _FLOAT64_BODIES.get(node.op_type, CANONICAL_OPSET))

    return inline_schema_functions(model, keep)


def _checkable_proto(model: ir.Model) -> onnx.ModelProto:
    """Returns a proto for onnx's checker, with placeholders for unknown types and shapes of inputs and outputs."""
    proto = lean_proto(model)
    for info in (*proto.graph.input, *proto.graph.output):
        if not info.type.WhichOneof("value"):
            info.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        if info.type.HasField("tensor_type"):
            info.type.tensor_type.shape.SetInParent()
    # Declared shapes of other values are inferred again, so wrong ones don't make the model invalid.
    del proto.graph.value_info[:]
    return proto


def _check(model: ir.Model, kind: type[OnnxTrainError], message: str) -> None:
    """Raises an error of class `kind` if onnx's checker rejects a model.

    The error's message is `message`, in which {} is replaced with the message of the checker.
    """
    try:
        onnx.checker.check_model(_checkable_proto(model))
    except onnx.checker.ValidationError as error:
        raise kind(message.format(error)) from error
