"""A stream, or a file, ten times larger than the memory that a process is given is trained on within it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fresh_process import python

PROGRAM = """
import resource
import sys

import numpy as np
import onnx

from onnxtrain import Trainer

ALLOWED = 16 * 2**20
ROWS, WIDTH = 64, 2048
BATCHES = 10 * ALLOWED // (4 * ROWS * WIDTH)


def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key + ":"))


def stream():
    for index in range(BATCHES):
        x = np.full((ROWS, WIDTH), index % 7, np.float32)
        yield x, x[:, :1]


model = onnx.parser.parse_model('''
  <ir_version: 10, opset_import: ["": 21]>
  line (float[n, 2048] x) => (float[n, 1] y) <float[1] b = {0.0}>
  { m = ReduceMean <keepdims = 1> (x, axes)  y = Add(m, b) }
'''.replace("<float[1] b = {0.0}>", "<float[1] b = {0.0}, int64[1] axes = {1}>"))
trainer = Trainer(model, "mse", "sgd", learning_rate=1e-3)
warm = [next(stream())] * 3
trainer.fit(warm, verbose=False)
trainer.evaluate(warm)
trainer.predict(warm)
kind = sys.argv[1]
if kind == "memmap":
    data = np.memmap(sys.argv[2], np.float64, "w+", shape=(BATCHES * ROWS // 2, WIDTH))
    data.flush()
    arguments = (data, np.zeros((len(data), 1), np.float32))
else:
    arguments = (stream,)
peak, limit = status("VmHWM"), status("VmData") + ALLOWED
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
trainer.fit(*arguments, verbose=False)
trainer.evaluate(*arguments)
if kind == "stream":
    trainer.fit(*arguments, epochs=2, steps_per_epoch=50, accumulate=2, verbose=False, validation=stream)
    print((status("VmHWM") - peak) / ALLOWED)
else:
    print(0)
try:
    np.ones((BATCHES * ROWS, WIDTH), np.float32)
except MemoryError:
    print("the whole would not fit")
"""


@pytest.mark.sample(every=2)
@pytest.mark.skipif(sys.platform != "linux", reason="limits and high-water marks are those of Linux")
@pytest.mark.parametrize("kind", ["stream", "memmap"])
def test_data_of_ten_times_the_memory(kind: str, tmp_path: Path) -> None:
    done = python("-c", PROGRAM, kind, tmp_path / "data", path=filter(None, sys.path))
    growth, whole = done.stdout.splitlines()
    assert float(growth) < 0.25
    assert whole == "the whole would not fit"
