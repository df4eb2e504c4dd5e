"""Models with texts: labels of classifiers, and inputs of strings that the loss does not read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxtrain import CheckpointState, Module, Trainer, differentiate, generate_artifacts
from onnxtrain.errors import GraphBuildError

HEAD = """<ir_version: 9, opset_import: ["": 20, "ai.onnx.ml": 2]>"""
# How a file may come to the label of the largest probability, as converters of scikit-learn write it.
LABELS = {
    "ArrayFeatureExtractor": "t = ai.onnx.ml.ArrayFeatureExtractor(classes, i)  label = Reshape(t, all)",
    "Gather": "label = Gather(classes, i)",
    "Gather of a Constant": "c = Constant<value_strings = ['a', 'ß', '']>()  label = Gather(c, i)",
    "LabelEncoder": """label = ai.onnx.ml.LabelEncoder<keys_int64s = [0, 1, 2], values_strings = ['a', 'ß', '']>(i)""",
    "StringConcat": "t = Gather(classes, i)  label = StringConcat(t, t)",
    "the initializer itself": "label = Identity(classes)",
}


def classifier(label: str) -> onnx.ModelProto:
    size = "k" if label == "the initializer itself" else "n"
    model = onnx.parser.parse_model(f"""{HEAD} g (float[n, 5] x) => (string[{size}] label, float[n, 3] p)
        <float[5, 3] w = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}}, int64[1] all = {{-1}}> {{
            z = MatMul(x, w)  p = Softmax<axis = 1>(z)  i = ArgMax<axis = 1, keepdims = 0>(p)
            {LABELS[label].replace("'", '"')} }}""")
    if "classes" in LABELS[label]:
        # As skl2onnx writes them: bytes in the field of strings.
        tensor = onnx.helper.make_tensor("classes", onnx.TensorProto.STRING, [3], [b"a", "ß".encode(), b""])
        model.graph.initializer.append(tensor)
    return model


@pytest.mark.parametrize("label", LABELS)
def test_a_classifier_with_text_labels_trains_and_keeps_them(label: str, tmp_path: Path) -> None:
    model = classifier(label)
    session = ort.InferenceSession(model.SerializeToString())
    x = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
    labels, probabilities = session.run(["label", "p"], {"x": x})

    onnx.save(model, tmp_path / "net.onnx")
    trainer = Trainer(tmp_path / "net.onnx", "mse", loss_input_names="p")
    trainer.export(tmp_path / "out.onnx")
    exported = ort.InferenceSession(tmp_path / "out.onnx").run(["label", "p"], {"x": x})
    assert exported[0].tolist() == labels.tolist()
    np.testing.assert_allclose(exported[1], probabilities, rtol=1e-6)
    if len(labels) == len(x):
        predicted = trainer.predict(x)
        assert isinstance(predicted, dict)
        assert predicted["label"].tolist() == labels.tolist()
    trainer.fit(x, probabilities, verbose=False)

    step = differentiate(model, of="p", wrt=["w"], cotangent="ct")
    gradient = ort.InferenceSession(step.SerializeToString()).run(
        ["w_grad"], {"x": x, "ct": np.ones((4, 3), np.float32)}
    )
    # Probabilities add up to 1 whatever the weights.
    np.testing.assert_allclose(gradient[0], np.zeros((5, 3)), atol=1e-5)

    generate_artifacts(
        model,
        loss="mse",
        loss_input_names=["p"],
        artifact_directory=tmp_path,
        additional_output_names=["label"],
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    module.export_model_for_inferencing(tmp_path / "device.onnx", ["p", "label"])
    exported = ort.InferenceSession(tmp_path / "device.onnx").run(["label"], {"x": x})
    assert exported[0].tolist() == labels.tolist()


def test_texts_that_the_loss_does_not_read_are_exported(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(f"""{HEAD} g (string[n] key, float[n, 3] x) => (string[n] same, float[n, 2] y)
        <float[3, 2] w = {{1, 2, 3, 4, 5, 6}}> {{ y = MatMul(x, w)  same = Identity(key) }}""")
    x, keys = np.ones((2, 3), np.float32), np.array(["a", "b"], object)
    trainer = Trainer(model, "mse", loss_input_names="y")
    np.testing.assert_allclose(trainer.predict(x), np.full((2, 2), [9, 12]))
    trainer.fit(x, np.zeros((2, 2), np.float32), verbose=False)
    trainer.export(tmp_path / "out.onnx")
    session = ort.InferenceSession(tmp_path / "out.onnx")
    assert [value.name for value in session.get_inputs()] == ["key", "x"]
    results = session.run(["same", "y"], {"x": x, "key": keys})
    assert results[0].tolist() == ["a", "b"]
    np.testing.assert_allclose(results[1], trainer.predict(x))


def test_texts_that_the_loss_reads_are_refused() -> None:
    """The message says what to do: docs/reference/error-messages.md."""
    model = onnx.parser.parse_model(f"""{HEAD} g (string[n] key, float[n, 3] x) => (float[n, 2] y)
        <float[3, 2] w = {{1, 2, 3, 4, 5, 6}}, int64[1] one = {{1}}> {{
            l = ai.onnx.ml.LabelEncoder<keys_strings = ["a"], values_floats = [2.0]>(key)
            c = Unsqueeze(l, one)  h = MatMul(x, w)  y = Mul(h, c) }}""")
    with pytest.raises(GraphBuildError, match="the input 'key' contains strings"):
        Trainer(model, "mse")
