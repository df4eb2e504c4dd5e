"""Runs `onnxtrain demo`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from onnxtrain.cli._command_options import DemoOptions
from onnxtrain.cli._output import info, print_json, print_next, print_table, summary_table
from onnxtrain.demo import DemoResult, run_demo
from onnxtrain.errors import OnnxTrainError


def run_command(options: DemoOptions) -> None:
    """Runs the demo and prints its results.

    Raises:
        OnnxTrainError: the exported model and the trainer differ in accuracy.
    """
    info("Training a convolutional network on scikit-learn's handwritten digits with ONNX Runtime alone.")
    result = run_demo(options.output, options.epochs, seed=options.seed)
    if options.json:
        print_json({**asdict(result), "files": [str(path) for path in result.files]})
    else:
        _print(result, options.output)
    # Raised after the table is printed, because a bug report needs its numbers.
    if result.exported_accuracy != result.test_accuracy:
        raise OnnxTrainError(
            f"the exported file has an accuracy of {result.exported_accuracy:.4%}, but the trainer "
            f"{result.test_accuracy:.4%}; please report this"
        )


def _print(result: DemoResult, output: Path) -> None:
    split = f"{result.training_samples} / {result.validation_samples} / {result.test_samples}"
    rows: list[tuple[str, object]] = [
        ("test accuracy, trainer", f"{result.test_accuracy:.2%}"),
        ("test accuracy, digits.onnx in a plain InferenceSession", f"{result.exported_accuracy:.2%}"),
        ("largest difference of the logits", f"{result.largest_difference:.1e}"),
        ("test loss", f"{result.test_loss:.4f}"),
        ("images: training / validation / test", split),
        ("trained parameters", f"{result.parameters:,}"),
        ("epochs", result.epochs),
        ("training time", f"{result.seconds:.1f} s"),
        ("training rate", f"{result.samples_per_second:,.0f} samples/s"),
        ("PyTorch imported", "yes" if result.torch_imported else "no"),
    ]
    print_table(summary_table("Handwritten digits", rows))
    print_table(f"Written to {output}: " + ", ".join(path.name for path in result.files))
    print_next("train", "--help")
