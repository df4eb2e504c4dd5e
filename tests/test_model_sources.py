"""Public functions take models as paths, ModelProtos and onnx_ir.Models, and leave them as they are."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import models
import onnxtrain
from onnxtrain import Trainer, generate_artifacts, lora, qat
from onnxtrain.lora import LoraConfig

CONFIG = LoraConfig(r=2, target_modules=["layer"])

QUANTIZED = """<ir_version: 10, opset_import: ["": 21]>
  small (float[n, 3] x) => (float[n, 2] y)
  <int8[3, 2] w_quantized = {1, 2, 3, -4, 5, 6}, float w_scale = {0.5}, int8 w_zero = {0}>
  { w = DequantizeLinear(w_quantized, w_scale, w_zero)  y = MatMul(x, w) }"""

DROPOUT = """<ir_version: 10, opset_import: ["": 21]>
  small (float[n, 3] x) => (float[n, 2] y) <float[3, 2] w = {1, 2, 3, -4, 5, 6}, float ratio = {0.5}>
  { h = MatMul(x, w)  y = Dropout(h, ratio) }"""

SCALAR = """<ir_version: 10, opset_import: ["": 21]>
  small (float[n, 3] x) => (float loss) <float[3, 2] w = {1, 2, 3, -4, 5, 6}>
  { h = MatMul(x, w)  t = Tanh(h)  loss = ReduceMean<keepdims = 0>(t) }"""

FIXED = """<ir_version: 10, opset_import: ["": 21]>
  small (float[4, 3] x) => (float[4, 2] y) <float[3, 2] w = {1, 2, 3, -4, 5, 6}>
  { y = MatMul(x, w) }"""

TRAINING = """<ir_version: 10, opset_import: ["": 21]>
  small (float[n, 3] x, float[n, 3] y) => (float[n, 3] z) { z = Add(x, y) }"""


def parse(text: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(text)
    for tensor in model.graph.initializer:
        # The parser writes lists of numbers. Files may have either form, and results are compared as bytes.
        tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor), tensor.name))
    return model


def layer() -> onnx.ModelProto:
    weight = np.array([[1, 2], [3, -4], [5, 6]], np.float32)
    nodes = [onnx.helper.make_node("MatMul", ["x", "layer.weight"], ["y"])]
    return models.make_model(nodes, {"x": ["n", 3]}, {"y": ["n", 2]}, {"layer.weight": weight})


def prepared() -> onnx.ModelProto:
    return qat.prepare(parse(QUANTIZED))


def with_adapter() -> onnx.ModelProto:
    return lora.add_lora(layer(), CONFIG)


def adapter(folder: Path) -> Path:
    lora.save_adapter(with_adapter(), folder / "a.onnx_adapter")
    return folder / "a.onnx_adapter"


def saved_adapter(model: Any, folder: Path) -> bytes:
    lora.save_adapter(model, folder / "b.onnx_adapter")
    return (folder / "b.onnx_adapter").read_bytes()


def artifacts(model: Any, folder: Path) -> list[bytes]:
    generate_artifacts(
        model, loss="cross_entropy", optimizer="adamw", artifact_directory=folder / "artifacts"
    )
    return [(folder / "artifacts" / f"{name}.onnx").read_bytes() for name in ("training_model", "eval_model")]


def trained(model: Any, folder: Path) -> list[bytes]:
    x = np.random.default_rng(0).standard_normal((32, 4)).astype(np.float32)
    trainer = Trainer(model, "cross_entropy")
    trainer.fit(x, x[:, :3].argmax(axis=1), verbose=False)
    trainer.export(folder / "trained.onnx")
    return [parameter.data.tobytes() for _, parameter in trainer.parameters]


def estimated(kind: str) -> Callable[[Any, Path], Any]:
    def fit(model: Any, folder: Path) -> Any:
        x = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)
        y = x[:, :3].argmax(axis=1) if kind == "OnnxClassifier" else x[:, :3]
        return getattr(onnxtrain, kind)(model, epochs=1, random_state=0).fit(x, y).predict(x).tobytes()

    return fit


def planned(model: Any, folder: Path) -> list[Any]:
    choices = onnxtrain.plan_training(model, "2GB", loss="cross_entropy", requires_grad=["b2"], steps=1)
    return [(choice.name, choice.trained, choice.fits) for choice in choices]


def checked(model: Any, folder: Path) -> list[Any]:
    return [(result.name, result.derivative) for result in onnxtrain.check_gradients(model)]


def averaged(model: Any, folder: Path) -> bytes:
    onnxtrain.average_models([model, models.mlp(seed=1)], output=folder / "soup.onnx")
    return onnx.load(folder / "soup.onnx").graph.SerializeToString(deterministic=True)


MADE: dict[str, tuple[Callable[[], onnx.ModelProto], Callable[[Any, Path], Any]]] = {
    "onnxtrain.Trainer": (models.mlp, trained),
    "onnxtrain.generate_artifacts": (models.mlp, artifacts),
    "onnxtrain.OnnxClassifier": (models.mlp, estimated("OnnxClassifier")),
    "onnxtrain.OnnxRegressor": (models.mlp, estimated("OnnxRegressor")),
    "onnxtrain.plan_training": (models.mlp, planned),
    "onnxtrain.check_gradients": (models.mlp, checked),
    "onnxtrain.differentiate": (lambda: parse(SCALAR), lambda m, _: onnxtrain.differentiate(m, of="loss", wrt=["w"])),
    "onnxtrain.vjp": (models.mlp, lambda m, _: onnxtrain.vjp(m, ["logits"], ["w1"])),
    "onnxtrain.jvp": (models.mlp, lambda m, _: onnxtrain.jvp(m, ["logits"], ["w1"])),
    "onnxtrain.hessian_vector_product": (
        lambda: parse(SCALAR),
        lambda m, _: onnxtrain.hessian_vector_product(m, "loss", ["w"]),
    ),
    "onnxtrain.per_sample_gradients": (
        lambda: parse(SCALAR.replace("loss = ReduceMean<keepdims = 0>(t)", "s = ReduceSum<keepdims = 0>(t, axes)")
                      .replace("float loss", "float[n] s").replace("6}>", "6}, int64[1] axes = {1}>")),
        lambda m, _: onnxtrain.per_sample_gradients(m, "s", ["w"]),
    ),
    "onnxtrain.add_classes": (models.mlp, lambda m, _: onnxtrain.add_classes(m, 2, seed=1)),
    "onnxtrain.average_models": (models.mlp, averaged),
    "onnxtrain.replace_head": (models.mlp, lambda m, _: onnxtrain.replace_head(m, 5, seed=1)),
    "onnxtrain.make_batch_dynamic": (lambda: parse(FIXED), lambda m, _: onnxtrain.make_batch_dynamic(m)),
    "onnxtrain.restore_dropout": (lambda: parse(DROPOUT), lambda m, _: onnxtrain.restore_dropout(m)),
    "onnxtrain.lower_training_ops": (lambda: parse(TRAINING), lambda m, _: onnxtrain.lower_training_ops(m)),
    "onnxtrain.lora.add_lora": (layer, lambda m, _: lora.add_lora(m, CONFIG)),
    "onnxtrain.lora.adapter_model": (layer, lambda m, _: lora.adapter_model(m, CONFIG)),
    "onnxtrain.lora.linear_layers": (layer, lambda m, _: lora.linear_layers(m)),
    "onnxtrain.lora.target_names": (layer, lambda m, _: lora.target_names(m)),
    "onnxtrain.lora.copy_module_names": (
        layer, lambda m, _: lora.copy_module_names(m, layer())
    ),
    "onnxtrain.lora.load_adapter": (layer, lambda m, folder: lora.load_adapter(adapter(folder), m)),
    "onnxtrain.lora.merge": (layer, lambda m, folder: lora.merge(m, adapter(folder))),
    "onnxtrain.lora.save_adapter": (with_adapter, saved_adapter),
    "onnxtrain.qat.prepare": (lambda: parse(QUANTIZED), lambda m, _: qat.prepare(m)),
    "onnxtrain.qat.convert": (prepared, lambda m, _: qat.convert(m)),
}  # fmt: skip
"""Per function, a model and a use of it."""

OTHERWISE = {
    "onnxtrain.Module": "the device reads paths and bytes, without onnx",
    "onnxtrain.Optimizer": "the device reads paths and bytes, without onnx",
    "onnxtrain.Recipe": "a teacher, whose kinds tests/test_distillation.py covers",
    "onnxtrain.lora.train_adapters": "changes a loaded model in place, for blocks of onnxblock",
    "onnxtrain.onnxblock.base": "changes a ModelProto in place, as in onnxruntime-training",
    "onnxtrain.onnxblock.load_checkpoint_to_model": "changes a ModelProto in place, as in onnxruntime-training",
}
"""Functions that take one kind of model, with the reason."""

MODULES = ("", ".lora", ".qat", ".surgery", ".functional", ".trainer", ".artifacts", ".planning", ".estimators",
           ".onnxblock", ".api", ".compat", ".demo")  # fmt: skip


def test_every_function_that_takes_a_model_is_here() -> None:
    found: dict[int, str] = {}
    for suffix in MODULES:
        module = importlib.import_module(f"onnxtrain{suffix}")
        for name in module.__all__:
            value = getattr(module, name)
            # Errors have no signature.
            is_error = isinstance(value, type) and issubclass(value, BaseException)
            if (
                not callable(value)
                or is_error
                or not getattr(value, "__module__", "").startswith("onnxtrain")
            ):
                continue
            annotations = [str(p.annotation) for p in inspect.signature(value).parameters.values()]
            if any(
                kind in text for text in annotations for kind in ("ModelSource", "ModelProto", "ir.Model")
            ):
                found.setdefault(id(value), f"{module.__name__}.{name}")
    assert set(found.values()) == {*MADE, *OTHERWISE}


def comparable(result: Any) -> Any:
    """Return a result in a form that can be compared: models as the bytes of their protos."""
    if isinstance(result, ir.Model):
        result = ir.to_proto(result)
    if isinstance(result, onnx.ModelProto):
        # Numbers of versions and producers say who wrote the file.
        return result.graph.SerializeToString(deterministic=True)
    return result


@pytest.mark.parametrize("name", MADE)
def test_takes_a_path_a_proto_and_an_ir_model(name: str, tmp_path: Path) -> None:
    make, use = MADE[name]
    proto = make()
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    of_ir = ir.from_proto(proto)
    before = [proto.SerializeToString(deterministic=True), comparable(of_ir), path.read_bytes()]
    results = []
    for number, source in enumerate((path, str(path), proto, of_ir)):
        folder = tmp_path / str(number)
        folder.mkdir()
        result = use(source, folder)
        if isinstance(result, onnx.ModelProto | ir.Model):
            # A model comes back in the form in which it was given; of a file as a proto.
            assert isinstance(result, ir.Model) == (source is of_ir)
        results.append(comparable(result))
    assert [result == results[0] for result in results] == [True] * 4
    assert before == [proto.SerializeToString(deterministic=True), comparable(of_ir), path.read_bytes()]


@pytest.mark.parametrize("name", MADE)
def test_anything_else_is_an_error_that_says_so(name: str, tmp_path: Path) -> None:
    _, use = MADE[name]
    with pytest.raises((TypeError, onnxtrain.OnnxTrainError), match=r"int|path|ModelProto"):
        use(3, tmp_path)
