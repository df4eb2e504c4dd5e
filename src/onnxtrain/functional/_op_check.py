"""Checks the gradient of a single op against finite differences."""

from __future__ import annotations

import onnxtrain._desk  # noqa: F401  # isort: skip

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from onnxtrain.autodiff import op_signature
from onnxtrain.errors import DifferentiationError, InputError
from onnxtrain.passes import CANONICAL_OPSET, apply_workarounds, canonicalize, load_model, to_proto
from onnxtrain.runtime.device import CPU
from onnxtrain.runtime.session import open_session, run_on_arrays

from ._gradient_check import GradientCheck, check_gradients

_IR_VERSION = 10


def check_op(
    domain: str,
    op_type: str,
    inputs: Mapping[str, npt.ArrayLike] | Sequence[npt.ArrayLike | None],
    *,
    attributes: Mapping[str, Any] | None = None,
    wrt: Sequence[str] | None = None,
    of: str | None = None,
    opset: int = CANONICAL_OPSET,
    version: int = 1,
    seed: int = 0,
    raise_exception: bool = True,
) -> list[GradientCheck]:
    """Compares the gradient of an op with finite differences, for each input.

    The op is run by its kernel in ONNX Runtime (:func:`onnxtrain.register_custom_ops_library`), or by its body
    (:func:`onnxtrain.register_body`).

    Args:
        domain: domain of the op, e.g. "com.example"; "" for an op of the ONNX standard.
        op_type: name of the op, e.g. "Swish2".
        inputs: values of the inputs, by name, e.g. {"X": array}, or in order. None or an absent name omits an optional
            input.
        attributes: attributes of the node, e.g. {"alpha": 1.5}.
        wrt: names of the inputs to check. Default: all floating-point ones.
        of: name of the output to differentiate. Default: the first one.
        opset: version of the ONNX standard, for an op of the standard, e.g. 21.
        version: version of the op's domain, for other ops.
        seed: seed of the random directions.
        raise_exception: False to return checks that differ, instead of raising an error.

    Returns:
        One check per input, named by the input; see :class:`onnxtrain.functional.GradientCheck`.

    Raises:
        DifferentiationError: a gradient differs from the finite differences; the message names the input and gives both
            numbers.
        InputError: an input is unknown, or none has a gradient.
        OnnxTrainError: the op has no gradient, or cannot be run.

    Example:
        >>> import numpy as np, onnxtrain
        >>> x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
        >>> [(check.name, check.verdict) for check in onnxtrain.check_op("", "Softplus", [x])]
        [('X', 'agrees')]
    """
    domain = "" if domain == "ai.onnx" else domain
    spelled = f"{domain}::{op_type}" if domain else op_type
    signature = op_signature(domain, op_type)
    arrays = _by_name(inputs, signature.inputs, spelled)
    names = [name for name, array in arrays.items() if array.dtype.kind == "f"] if wrt is None else list(wrt)
    if wrong := [name for name in names if name not in arrays]:
        raise InputError(
            f"Checking {spelled}: wrt names {wrong[0]!r}; the given inputs are {', '.join(arrays)}."
        )
    if not names:
        raise InputError(f"Checking {spelled}: none of the inputs is floating point.")
    output = signature.outputs[0] if of is None else of
    if output not in signature.outputs:
        raise InputError(f"Checking {spelled}: of is {of!r}; the outputs are {', '.join(signature.outputs)}.")
    last = max(signature.inputs.index(name) for name in arrays)
    # Outputs of standard ops may be optional. Kernels of other ops may write all of them, whether the node has them or
    # not, as those of onnxruntime-extensions 0.15 do.
    count = len(signature.outputs) if domain else signature.outputs.index(output) + 1
    node = onnx.helper.make_node(
        op_type,
        [name if name in arrays else "" for name in signature.inputs[: last + 1]],
        # A value must not have the name of an input.
        [f"{name}_out" for name in signature.outputs[:count]],
        name=op_type,
        domain=domain,
        **(attributes or {}),
    )
    model = _declare(_model(node, arrays, opset, version))
    checks = check_gradients(model, of=f"{output}_out", wrt=names, seed=seed)
    wrong_checks = [check for check in checks if check.verdict == "differs"]
    if wrong_checks and raise_exception:
        raise DifferentiationError(
            f"checking the gradient of {spelled}: " + "; ".join(f"input {check}" for check in wrong_checks)
        )
    return checks


def _by_name(
    inputs: Mapping[str, npt.ArrayLike] | Sequence[npt.ArrayLike | None], names: Sequence[str], spelled: str
) -> dict[str, npt.NDArray[Any]]:
    """Returns the inputs as arrays by name, in the order of the op; float64 values that are no arrays become float32.

    Raises:
        InputError: a name is unknown, or there are too many inputs.
    """
    if not isinstance(inputs, Mapping):
        if len(inputs) > len(names):
            raise InputError(
                f"Checking {spelled}: received {len(inputs)} inputs, but the op has {len(names)}: {', '.join(names)}."
            )
        inputs = {name: value for name, value in zip(names, inputs, strict=False) if value is not None}
    if unknown := [name for name in inputs if name not in names]:
        raise InputError(
            f"Checking {spelled}: it has no input {unknown[0]!r}; its inputs are {', '.join(names)}."
        )
    if not inputs:
        raise InputError(f"Checking {spelled}: no inputs are given.")
    arrays = {}
    for name in names:
        if name in inputs:
            value = np.asarray(inputs[name])
            is_float = value.dtype == np.float64 and not isinstance(inputs[name], np.ndarray)
            arrays[name] = value.astype(np.float32) if is_float else value
    return arrays


def _model(
    node: onnx.NodeProto, arrays: Mapping[str, npt.NDArray[Any]], opset: int, version: int
) -> onnx.ModelProto:
    """Returns a model of one node, whose inputs are initializers."""
    graph = onnx.GraphProto(name="check")
    graph.node.append(node)
    graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output)
    imports = {"": opset} | ({node.domain: version} if node.domain else {})
    return onnx.helper.make_model(
        graph,
        ir_version=_IR_VERSION,
        opset_imports=[onnx.helper.make_opsetid(*pair) for pair in imports.items()],
    )


def _declare(model: onnx.ModelProto) -> onnx.ModelProto:
    """Declares the dtypes and shapes of the outputs, in place, by running the model; returns it."""
    # An op without a body or `shapes` has unknown ones.
    runnable = to_proto(
        apply_workarounds(canonicalize(load_model(model), [t.name for t in model.graph.initializer]))
    )
    session = open_session(runnable.SerializeToString(), "op to check", CPU, None)
    names = [info.name for info in model.graph.output]
    arrays = run_on_arrays(session, names, {})
    types = {info.name: info.type for info in session.get_outputs()}
    for info, array in zip(model.graph.output, arrays, strict=True):
        # bfloat16 results are returned as float32.
        bfloat16 = types[info.name] == "tensor(bfloat16)"
        dtype = ir.DataType.BFLOAT16 if bfloat16 else ir.DataType.from_numpy(array.dtype)
        info.CopyFrom(onnx.helper.make_tensor_value_info(info.name, int(dtype), array.shape))
    return model
