"""Runs `onnxtrain calibrate`."""

from __future__ import annotations

from dataclasses import asdict

from onnxtrain.cli._command_options import CalibrateOptions
from onnxtrain.cli._export import export_model
from onnxtrain.cli._output import heading, print_json, print_next, print_table, table
from onnxtrain.cli._use import open_run, run_data


def run_command(options: CalibrateOptions) -> None:
    """Writes the calibrated model, and prints how good the probabilities were before and are now."""
    trainer, encoder = open_run(options.directory)
    x, y = run_data(trainer, encoder, options.data, options.text)
    found = trainer.calibrate(x, y, threshold=options.threshold, batch_size=options.batch_size)
    export_model(trainer, encoder, options.output)
    if options.json:
        print_json(
            {
                "directory": str(options.directory),
                "data": str(options.data),
                "model": str(options.output),
                **asdict(found),
            }
        )
        return
    rows = [
        ("negative log-likelihood", f"{found.nll_before:.6g}", f"{found.nll:.6g}"),
        ("expected calibration error", f"{found.ece_before:.6g}", f"{found.ece:.6g}"),
        ("temperature", "1", f"{found.temperature:.6g}"),
    ]
    if found.threshold is not None:
        rows += [
            ("decision threshold", "0.5", f"{found.threshold:.6g}"),
            (str(found.metric), f"{found.metric_before:.6g}", f"{found.metric_value:.6g}"),
        ]
    title = heading(f"{options.directory} on {options.data.name}: {found.samples:,} labels")
    print_table(title, table(None, ("", "before", "calibrated"), rows, right=(1, 2)))
    print_table(f"Calibrated model: {options.output}")
    print_next("predict", options.output, "--data", "FILE", "-o", "predictions.csv")
