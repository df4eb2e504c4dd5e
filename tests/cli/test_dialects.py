"""Options and values of other programs: the message says what to type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--learning_rate 0.1", "No such option: --learning_rate. Pass --learning-rate."),
        ("--batch 4", "No such option: --batch. Pass --batch-size."),
        ("--batch=4", "No such option: --batch. Pass --batch-size."),
        ("--num_train_epochs 3", "Pass --epochs."),
        ("--per-device-train-batch-size 8", "Pass --batch-size."),
        ("--optim adamw_torch", "Pass --optimizer."),
        ("--criterion mse", "Pass --loss."),
        ("--momentum 0.9", "Pass --optimizer-option momentum=0.9."),
        ("--label_smoothing=0.1", "Pass --loss-option label_smoothing=0.1."),
        ("--output_dir out", "Pass --output."),
        ("--gpu", "Pass --device cuda."),
        ("--fp16", "Pass --precision bf16."),
        ("--validation-split 0.2", "Pass --validation."),
        ("--metrics acc", "Pass --metric."),
        ("--max_grad_norm 1", "Pass --clip-norm."),
        ("--num_classes 3", "Pass --replace-head 3."),
        ("--random-state 1", "Pass --seed."),
        ("-epochs 3", "No such option: -epochs. Pass --epochs."),
        ("--epochz 3", "Pass --epochs."),
        ("--loss ce", "pass --loss cross_entropy"),
        ("--loss CrossEntropyLoss", "pass --loss cross_entropy"),
        ("--loss cross_entropy --optimizer Adam", "pass --optimizer adam"),
        ("--loss cross_entropy --metric acc", "pass --metric accuracy"),
        ("--loss cross_entropy --schedule CosineAnnealingLR", "pass --schedule cosine"),
    ],
)
def test_the_message_says_what_to_type(
    words: str, said: str, run: Any, mlp: Path, data: Path, tmp_path: Path
) -> None:
    result = run("train", mlp, "--data", data, "-o", tmp_path / "run", *words.split())
    assert result.code in (1, 2)
    assert said in " ".join(result.err.replace("│", " ").split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("command", "ours"), [("fit", "train"), ("eval", "evaluate"), ("infer", "predict"), ("info", "inspect")]
)
def test_a_command_of_another_program(command: str, ours: str, run: Any) -> None:
    result = run(command, "model.onnx")
    assert result.code == 2
    assert f"No such command '{command}'. Use: onnxtrain {ours}" in " ".join(
        result.err.replace("│", " ").split()
    )


def test_an_option_of_another_command_is_not_suggested(run: Any, mlp: Path) -> None:
    """`predict` has no epochs: `--epochs` of `train` is named as such."""
    result = run("predict", mlp, "--data", "x.npz", "--num_train_epochs", "3")
    message = " ".join(result.err.replace("│", " ").split())
    assert "No such option: --num_train_epochs." in message
    assert "Pass --epochs." not in message
