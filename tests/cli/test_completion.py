"""Completion in bash, zsh and fish: the scripts that typer prints, and what they ask the program for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fresh_process
from cli.processes import environment
from onnxtrain._names import LOSSES, OPTIMIZERS
from onnxtrain.schedules import SCHEDULES

PROGRAM = "import sys; from onnxtrain.cli import main; sys.argv[0] = 'onnxtrain'; main()"


def program(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `onnxtrain` with environment variables, as the scripts of the shells do."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=environment() | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


def completed(line: str) -> list[str]:
    """Return what bash offers at the end of a line."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    result = program(_ONNXTRAIN_COMPLETE="complete_bash", **words)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.parametrize(
    ("shell", "sign"),
    [
        ("bash", "complete -o default"),
        ("zsh", "#compdef onnxtrain"),
        ("fish", "complete --command onnxtrain"),
    ],
)
def test_each_shell_gets_a_script(shell: str, sign: str) -> None:
    result = program("--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert result.returncode == 0, result.stderr
    assert sign in result.stdout
    assert f"_ONNXTRAIN_COMPLETE=complete_{shell}" in result.stdout


def test_help_offers_to_install_completion() -> None:
    shown = program("--help").stdout
    assert "--install-completion" in shown
    assert "--show-completion" in shown


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("onnxtrain train --loss ", list(LOSSES)),
        ("onnxtrain artifacts --loss ca", ["causal_lm"]),
        ("onnxtrain plan --optimizer ", list(OPTIMIZERS)),
        ("onnxtrain train --schedule ", list(SCHEDULES)),
        # Half a command: the file of --config is not read, so that it cannot be missing.
        ("onnxtrain train --config missing.toml --metric top", []),
        ("onnxtrain train --metric roc", []),
        ("onnxtrain train --metric f1", ["f1", "f1_macro", "f1_micro", "f1_weighted"]),
        ("onnxtrain train --precision b", ["bf16"]),
        ("onnxtrain ev", ["evaluate"]),
        ("onnxtrain train --swa-", ["--swa-start", "--swa-lr"]),
    ],
)
def test_values_of_options_are_completed(line: str, expected: list[str]) -> None:
    found = completed(line)
    if line.endswith("f1"):
        assert "f1" in found
        assert all(name.startswith("f1") for name in found)
        return
    assert found == expected


def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    """The script in a real bash; zsh and fish are not everywhere."""
    script = program("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1").stdout
    # The script finds the program by its name.
    command = tmp_path / "onnxtrain"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{PROGRAM}" "$@"\n')
    command.chmod(0o755)
    words = "COMP_WORDS=(onnxtrain train --optimizer ad); COMP_CWORD=3; _onnxtrain_completion onnxtrain"
    result = subprocess.run(
        ["bash", "-c", f'{script}\n{words}; echo "${{COMPREPLY[*]}}"'],
        env=environment() | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.stdout.split() == [name for name in OPTIMIZERS if name.startswith("ad")], result.stderr


def test_completion_waits_for_no_graph_code() -> None:
    code = "import onnxtrain.cli._app, sys; print([n for n in ('onnx', 'onnxruntime', 'numpy') if n in sys.modules])"
    assert fresh_process.python("-c", code).stdout == "[]\n"
