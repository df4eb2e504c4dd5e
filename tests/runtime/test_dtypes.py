"""The table of element types beside what onnx, ONNX Runtime and safetensors call them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import safetensors.numpy

from onnxtrain.runtime.dtypes import BY_NAME, BY_ONNX, BY_ORT, BY_SAFETENSORS, narrow, widen
from onnxtrain.runtime.external_data import bits_of

ONNX_NAMES = {"float32": "FLOAT", "float64": "DOUBLE"}


def numpy_type(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


@pytest.mark.parametrize("name", BY_NAME)
def test_names_and_codes_of_other_packages_lead_back(name: str) -> None:
    dtype = BY_NAME[name]
    code = onnx.TensorProto.DataType.Value(ONNX_NAMES.get(name, name.upper()))
    assert dtype.onnx == code
    assert BY_ONNX[code] is dtype
    assert dtype.storage.itemsize == numpy_type(name).itemsize
    assert BY_SAFETENSORS[dtype.safetensors] is dtype

    info = onnx.helper.make_tensor_value_info("x", code, [2])
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    graph = onnx.helper.make_graph(
        [node], "net", [info], [onnx.helper.make_tensor_value_info("y", code, [2])]
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    (found,) = ort.InferenceSession(model.SerializeToString()).get_inputs()
    assert found.type == dtype.ort
    assert BY_ORT[found.type] is dtype


@pytest.mark.parametrize("name", [name for name in BY_NAME if name != "bfloat16"])
def test_safetensors_calls_them_so(name: str) -> None:
    data = safetensors.numpy.save({"x": np.zeros(2, name)})
    assert f'"dtype":"{BY_NAME[name].safetensors}"'.encode() in data


def test_bits_of_all_types_of_onnx() -> None:
    """As onnx packs them; texts have no size."""
    for name, code in onnx.TensorProto.DataType.items():
        if name in ("UNDEFINED", "STRING"):
            assert bits_of(code) is None
            continue
        packed = onnx.numpy_helper.from_array(np.zeros(8, onnx.helper.tensor_dtype_to_np_dtype(code)))
        assert packed.data_type == code
        assert bits_of(code) == len(packed.raw_data), name  # of eight elements


def test_bfloat16_is_rounded_as_by_ml_dtypes() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 20_000, dtype=np.uint32)
    bits[:6] = [
        0x3F808000,
        0x3F818000,
        0x7F7FFFFF,
        0x7F800000,
        0xFF800000,
        0x00000001,
    ]  # ties, infinities, tiny
    numbers = bits.view(np.float32)
    dtype = BY_NAME["bfloat16"]
    with np.errstate(invalid="ignore"):
        wide, expected = (
            widen(narrow(numbers, dtype), dtype),
            numbers.astype(ml_dtypes.bfloat16).astype(np.float32),
        )
    np.testing.assert_array_equal(wide, expected)
