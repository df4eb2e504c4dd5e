"""The device needs numpy, onnxruntime and safetensors, little time and little memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import fresh_process

SOURCE = str(Path(__file__).parents[2] / "src")

BLOCK = """
import sys

class Blocker:
    allowed = {"numpy", "onnxruntime", "safetensors", "onnxtrain"} | set(sys.stdlib_module_names)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in self.allowed:
            raise ImportError(f"{name} is not available on the device")
        return None

sys.meta_path.insert(0, Blocker())
before = set(sys.modules)
"""

TRAIN = (
    BLOCK
    + """
import json, pathlib, resource
import numpy as np
from onnxtrain.api import CheckpointState, LinearLRScheduler, Module, Optimizer

state = CheckpointState.load_checkpoint("checkpoint")
module = Module("training_model.onnx", state, "eval_model.onnx")
optimizer = Optimizer("optimizer_model.onnx", module)
scheduler = LinearLRScheduler(optimizer, 5, 200, 0.05)
rng = np.random.default_rng(0)
losses = []
for _ in range(200):
    x = rng.standard_normal((64, 4)).astype(np.float32)
    losses.append(float(module(x, np.argmax(x[:, :3], axis=1))[0]))
    optimizer.step()
    scheduler.step()
    module.lazy_reset_grad()
CheckpointState.save_checkpoint(state, "trained", include_optimizer_state=True)
module.export_model_for_inferencing("trained.onnx", ["logits", "h"])
# What has no spec was not imported, but made by an extension module (numpy.random's Cython runtime).
loaded = {name for name in set(sys.modules) - before if getattr(sys.modules[name], "__spec__", None)}
third_party = {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names)
status = pathlib.Path("/proc/self/status")
if status.exists():  # unlike ru_maxrss, VmHWM does not start from what the parent process had
    peak = int(status.read_text().split("VmHWM:")[1].split()[0]) / 2**10
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps({"first": losses[0], "last": losses[-1], "modules": sorted(third_party), "peak_mb": peak}))
"""
)

CALLS = """
import sys

def calls(work):
    count = 0
    def see(frame, event, argument):
        nonlocal count
        count += event == "call"
    sys.setprofile(see)
    exec(work)
    sys.setprofile(None)
    return count

dependencies = calls("import numpy, onnxruntime, safetensors")
print(calls("import onnxtrain.api") / dependencies)
"""


def python(code: str, directory: Path) -> str:
    done = fresh_process.python("-c", code, cwd=directory)
    assert done.stderr == ""
    return done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="the resource module is POSIX only")
def test_training_with_nothing_else_installed(mlp_dir):
    result = json.loads(python(TRAIN, mlp_dir))
    assert result["modules"] == ["numpy", "onnxruntime", "onnxtrain", "safetensors"]
    assert result["last"] < 0.35 * result["first"]
    assert result["peak_mb"] < 150


def test_import_adds_a_third_at_most_of_what_its_dependencies_take(tmp_path):
    """0.08 s to their 0.27 s; counted are calls of Python functions, which are the same on every machine."""
    assert float(python(CALLS, tmp_path)) <= 1 / 3


def test_api_is_that_of_the_old_package():
    import onnxtrain.api

    assert onnxtrain.api.__all__ == [
        "CheckpointState",
        "LinearLRScheduler",
        "Module",
        "Optimizer",
        "Parameter",
        "Parameters",
        "Properties",
        # Not of the old package, which passed the library to the session options of its own build.
        "register_custom_ops_library",
    ]
