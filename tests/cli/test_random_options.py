"""Random option sets of the command line end with a result or with one message, never with a traceback.

`ONNXTRAIN_FUZZ_OPTIONS` is the number of jobs, of two commands on average; `ONNXTRAIN_FUZZ_SEED` is the seed of the
first one.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cli.random_options.drawing import draw_job
from cli.random_options.judging import judge, make_files
from onnxtrain import Trainer
from onnxtrain.errors import InputError

JOBS = int(os.environ.get("ONNXTRAIN_FUZZ_OPTIONS", "12"))
SEED = int(os.environ.get("ONNXTRAIN_FUZZ_SEED", "0"))


@pytest.mark.sample(every=2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(SEED, SEED + JOBS))
def test_random_options_end_with_a_result_or_a_message(seed: int, tmp_path: Path) -> None:
    make_files(tmp_path)
    found = judge(draw_job(seed), tmp_path)
    assert not found, "\n".join(found)


TRAIN = ["train", "mlp.onnx", "--data", "data.npz", "--loss", "cross_entropy", "--epochs", "1", "-o", "run"]


@pytest.mark.filterwarnings("ignore")
def test_judge_sees_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_files(tmp_path)
    evaluate = ["evaluate", "run", "--data", "data.npz", "--json"]
    again = ["train", "--config", "run/run.toml", "-o", "again"]
    assert not judge([TRAIN, evaluate, again], tmp_path)
    other = judge([[*TRAIN, "--overwrite", "--seed", "1"], [*again, "--seed", "2", "--overwrite"]], tmp_path)
    assert [line.splitlines()[1].strip() for line in other] == [
        "the run that run.toml repeats has other weights"
    ]

    def fails(self: Trainer, *arguments: object, **settings: object) -> None:
        raise errors.pop()

    errors = [RuntimeError("unexpected"), InputError("pass drop_last=True")]
    monkeypatch.setattr(Trainer, "fit", fails)
    python, unexpected = judge([[*TRAIN, "--overwrite"], [*TRAIN, "--overwrite"]], tmp_path)
    assert "'drop_last' in a shell" in python
    assert "RuntimeError: unexpected" in unexpected
