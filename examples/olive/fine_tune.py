"""Training as a pass of Olive: a model is fine-tuned, and then quantized by Olive's own pass.

Needs: pip install olive-ai 'onnxtrain[demo]'
Usage: python examples/olive/fine_tune.py [--epochs 5]
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from olive.hardware.accelerator import AcceleratorSpec
from olive.model import ONNXModelHandler
from olive.model.utils import resolve_onnx_path
from olive.passes import Pass
from olive.passes.olive_pass import create_pass_from_dict
from olive.passes.onnx.quantization import OnnxDynamicQuantization
from olive.passes.pass_config import BasePassConfig, PassConfigParam

from onnxtrain import Trainer
from onnxtrain.demo import digits_network, load_digits_data


class OnnxFineTuning(Pass):
    """Fine-tunes an ONNX model on the arrays `x` and `y` of an .npz file."""

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        return {
            "data": PassConfigParam(type_=str, required=True, description="Path of the .npz file."),
            "loss": PassConfigParam(
                type_=str, default_value="cross_entropy", description="Name of the loss."
            ),
            "learning_rate": PassConfigParam(type_=float, default_value=1e-3, description="Learning rate."),
            "epochs": PassConfigParam(type_=int, default_value=1, description="Passes over the data."),
        }

    def _run_for_config(
        self, model: ONNXModelHandler, config: BasePassConfig, output_model_path: str
    ) -> ONNXModelHandler:
        arrays = np.load(config.data)
        trainer = Trainer(model.model_path, config.loss, learning_rate=config.learning_rate)
        trainer.fit(arrays["x"], arrays["y"], epochs=config.epochs, verbose=False)
        path = resolve_onnx_path(output_model_path)
        trainer.export(path)
        return ONNXModelHandler(path)


def accuracy(path: str, images: np.ndarray, labels: np.ndarray) -> float:
    logits = onnxruntime.InferenceSession(path).run(None, {"image": images})[0]
    return float((logits.argmax(axis=1) == labels).mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_args().epochs
    train_x, test_x, train_y, test_y = load_digits_data()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        onnx.save(digits_network(), folder / "network.onnx")
        np.savez(folder / "digits.npz", x=train_x, y=train_y)
        settings: dict[str, Any] = {
            "data": str(folder / "digits.npz"),
            "learning_rate": 4e-3,
            "epochs": epochs,
        }
        fine_tuning = create_pass_from_dict(OnnxFineTuning, settings, disable_search=True)
        quantization = create_pass_from_dict(OnnxDynamicQuantization, {}, disable_search=True)
        tuned = fine_tuning.run(ONNXModelHandler(str(folder / "network.onnx")), str(folder / "tuned"))
        small = quantization.run(tuned, str(folder / "small"))
        for name, model in {"fine-tuned": tuned, "quantized": small}.items():
            size = Path(model.model_path).stat().st_size / 1000
            print(f"{name}: test accuracy {accuracy(model.model_path, test_x, test_y):.4f}, {size:.0f} kB")


if __name__ == "__main__":
    main()
