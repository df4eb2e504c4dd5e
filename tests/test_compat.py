"""The old names on a stock runtime. Each test runs in a process of its own: imports leave traces."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fresh_process import python


def check(code: str, *folders: Path) -> str:
    """Return what code prints with `folders` at the front of the path."""
    return python("-c", code, path=[*folders, *filter(None, sys.path)]).stdout.strip()


INSTALL = "import onnxtrain.compat\nonnxtrain.compat.install()\n"


OLD_NAMES = [
    ("import onnxruntime.training.onnxblock as found", "onnxblock"),
    ("from onnxruntime.training import onnxblock as found", "onnxblock"),
    ("import onnxruntime.training.onnxblock.loss as found", "onnxblock.loss"),
    ("from onnxruntime.training.onnxblock import optim as found", "onnxblock.optim"),
    ("from onnxruntime.training.onnxblock.blocks import Add as found", "onnxblock.blocks.Add"),
    ("import onnxruntime.training.api as found", "api"),
    ("from onnxruntime.training.api import Module as found", "api.Module"),
    ("from onnxruntime.training.api.checkpoint_state import Parameter as found", "api.Parameter"),
    (
        "from onnxruntime.training.api.lr_scheduler import LinearLRScheduler as found",
        "api.LinearLRScheduler",
    ),
    ("from onnxruntime.training.onnxblock.loss.loss import MSELoss as found", "onnxblock.loss.MSELoss"),
    ("from onnxruntime.training.onnxblock.optim.optim import AdamW as found", "onnxblock.optim.AdamW"),
    ("import onnxruntime.training.artifacts as found", "artifacts"),
    ("from onnxruntime.training import artifacts as found, api", "artifacts"),
    ("import onnxruntime.training as t; found = t.artifacts", "artifacts"),
    ("import onnxtrain.onnxblock; import onnxruntime.training.onnxblock as found", "onnxblock"),
]

OLD_NAMES_THAT_NEED_PYTORCH = [
    ("from onnxruntime.training.optim import FusedAdam as found", "optim.FusedAdam"),
    ("from onnxruntime.training.optim.fused_adam import AdamWMode as found", "optim.AdamWMode"),
    (
        "from onnxruntime.training.optim.fp16_optimizer import FP16_Optimizer as found",
        "optim.FP16_Optimizer",
    ),
    ("from onnxruntime.training import optim as found", "optim"),
    (
        "from onnxruntime.training.utils.data import LoadBalancingDistributedSampler as found",
        "utils.data.LoadBalancingDistributedSampler",
    ),
]


def wrong(names: list[tuple[str, str]]) -> dict[str, str]:
    """The statements that do not find what they should, each run as if it were the first import of this package."""
    code = f"""
import json, pkgutil, sys, traceback
import onnx, onnx_ir, onnxruntime

def check(statement, expected):
    import onnxtrain.compat
    onnxtrain.compat.install()
    names = {{}}
    exec(statement, names)
    value = pkgutil.resolve_name("onnxtrain." + expected)
    assert names["found"] is value, names["found"]
    onnxtrain.compat.uninstall()

wrong, there = {{}}, set(sys.modules)
for statement, expected in {names!r}:
    try:
        check(statement, expected)
    except BaseException:
        wrong[statement] = traceback.format_exc()
    for name in set(sys.modules) - there:
        if name.partition(".")[0] == "onnxtrain" or name.startswith("onnxruntime.training"):
            del sys.modules[name]
print(json.dumps(wrong))
"""
    found: dict[str, str] = json.loads(check(code))
    return found


def test_old_name_is_the_new_object() -> None:
    assert wrong(OLD_NAMES) == {}


@pytest.mark.torch
def test_old_name_of_what_needs_pytorch() -> None:
    assert wrong(OLD_NAMES_THAT_NEED_PYTORCH) == {}


def test_modules_keep_their_own_name() -> None:
    check(
        f"{INSTALL}import onnxruntime.training.onnxblock.loss as loss, onnxtrain.onnxblock as onnxblock\n"
        "assert loss.__name__ == loss.__spec__.name == 'onnxtrain.onnxblock.loss'\n"
        "assert onnxblock.__spec__.name == 'onnxtrain.onnxblock'\n"
        "import sys\n"
        "assert len({id(m) for n, m in sys.modules.items() if n.endswith('onnxblock.loss')}) == 1"
    )


def test_device_api_needs_no_graph_code() -> None:
    loaded = check(
        f"{INSTALL}import sys\n"
        "for name in ('onnx', 'onnx_ir', 'torch'):\n    sys.modules[name] = None\n"
        "from onnxruntime.training.api import CheckpointState, LinearLRScheduler, Module, Optimizer\n"
        "print(','.join(n for n in ('onnxtrain.passes', 'onnxtrain.autodiff') if n in sys.modules))"
    )
    assert loaded == ""


def test_installing_imports_nothing() -> None:
    assert (
        check(f"{INSTALL}import sys\nprint('onnx' in sys.modules, 'onnxtrain.api' in sys.modules)")
        == "False False"
    )


def test_installing_twice_and_uninstalling() -> None:
    check(
        f"{INSTALL}onnxtrain.compat.install()\n"
        "import sys, onnxruntime\n"
        "from onnxruntime.training import api\n"
        "onnxtrain.compat.uninstall()\n"
        "onnxtrain.compat.uninstall()\n"
        "assert not [n for n in sys.modules if n.startswith('onnxruntime.training')]\n"
        "assert not hasattr(onnxruntime, 'training')\n"
        "try:\n    import onnxruntime.training\n"
        "except ModuleNotFoundError:\n    pass\n"
        "else:\n    raise SystemExit('still there')\n"
        "onnxtrain.compat.install()\n"
        "from onnxruntime.training import api as again\n"
        "assert again is api"
    )


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("import onnxruntime.training.amp", "onnxtrain has no counterpart"),
        (
            "from onnxruntime.training import experimental",
            "experimental: onnxtrain has no counterpart; it provides these modules of onnxruntime.training",
        ),
        ("import onnxruntime.training.utils.hooks", "onnxtrain.utils.hooks"),
        ("import onnxruntime.training.onnxblock.nothing", "onnxtrain.onnxblock.nothing"),
    ],
)
def test_what_is_not_there_is_an_import_error(statement: str, message: str) -> None:
    printed = check(f"{INSTALL}try:\n    {statement}\nexcept ImportError as error:\n    print(error)")
    assert message in printed


ORTMODULE = "class ORTModule:\n    pass\n"


@pytest.mark.parametrize(
    "statement",
    ["from onnxruntime.training.ortmodule import ORTModule", "from onnxruntime.training import ORTModule"],
)
def test_ortmodule_comes_from_onnxtrain_where_it_is_there(statement: str, tmp_path: Path) -> None:
    (tmp_path / "ortmodule.py").write_text(ORTMODULE)
    extend = f"import onnxtrain\nonnxtrain.__path__ = [{str(tmp_path)!r}, *onnxtrain.__path__]\n"
    assert check(f"{INSTALL}{extend}{statement}\nprint(ORTModule.__module__)") == "onnxtrain.ortmodule"


@pytest.mark.thorough
def test_torch_ort_is_ortmodule() -> None:
    check(
        f"{INSTALL}from torch_ort import ORTModule, DebugOptions, LogLevel\nimport torch_ort, onnxtrain.ortmodule\n"
        "assert torch_ort is onnxtrain.ortmodule and ORTModule is torch_ort.ORTModule\n"
        "import sys\nonnxtrain.compat.uninstall()\nassert 'torch_ort' not in sys.modules"
    )


@pytest.mark.thorough
def test_installed_torch_ort_stays_and_finds_ours(tmp_path: Path) -> None:
    package = tmp_path / "torch_ort"
    package.mkdir()
    (package / "__init__.py").write_text("from onnxruntime.training.ortmodule import ORTModule as Found\n")
    check(
        f"{INSTALL}import torch_ort, onnxtrain.ortmodule, sys\n"
        "assert torch_ort.Found is onnxtrain.ortmodule.ORTModule and torch_ort.__name__ == 'torch_ort'\n"
        "onnxtrain.compat.uninstall()\nassert 'torch_ort' in sys.modules",
        tmp_path,
    )


def test_ortmodule_without_torch_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "ortmodule.py").write_text("import torch_that_is_not_there\n")
    extend = f"import onnxtrain\nonnxtrain.__path__ = [{str(tmp_path)!r}, *onnxtrain.__path__]\n"
    code = f"{INSTALL}{extend}from onnxruntime.training.ortmodule import ORTModule"
    assert (
        "No module named 'torch_that_is_not_there'"
        in python("-c", code, code=1, path=filter(None, sys.path)).stderr
    )


def test_absent_ortmodule_is_explained(tmp_path: Path) -> None:
    elsewhere = f"import onnxtrain\nonnxtrain.__path__ = [{str(tmp_path)!r}]\n"
    code = f"{INSTALL}{elsewhere}import onnxruntime.training.ortmodule"
    assert (
        "it comes with onnxtrain.ortmodule" in python("-c", code, code=1, path=filter(None, sys.path)).stderr
    )


@pytest.mark.parametrize(
    "name",
    ["onnxruntime-training", "onnxruntime_training_cpu", "onnxruntime-training-rocm", "ort-nightly-training"],
)
def test_real_distribution_is_not_shadowed(name: str, tmp_path: Path) -> None:
    folder = tmp_path / f"{name.replace('-', '_')}-1.19.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.19.2\n")
    done = python("-c", INSTALL, path=[tmp_path, *filter(None, sys.path)], code=None)
    assert "CompatError" in done.stderr
    assert f"{name} 1.19.2 provides `onnxruntime.training` itself" in done.stderr


@pytest.mark.parametrize("name", ["onnxruntime-extensions", "onnxruntime-genai", "my-onnxruntime-training"])
def test_other_distributions_do_not_matter(name: str, tmp_path: Path) -> None:
    folder = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    check(f"{INSTALL}import onnxruntime.training", tmp_path)


_FOLDER = "import onnxruntime\nonnxruntime.__path__.append({folder!r})\n"


def test_training_build_is_not_shadowed(tmp_path: Path) -> None:
    """A runtime built from source with training: a package, and natives that have its classes."""
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "__init__.py").write_text("")
    native = "import onnxruntime.capi._pybind_state as native\nnative.CheckpointState = object\n"
    folder = _FOLDER.format(folder=str(tmp_path))
    assert (
        "a training build of ONNX Runtime"
        in python("-c", folder + native + INSTALL, code=None, path=filter(None, sys.path)).stderr
    )


@pytest.mark.parametrize("leftover", ["training/__init__.py", "training/__pycache__/x.pyc"])
def test_leftover_folder_does_not_matter(leftover: str, tmp_path: Path) -> None:
    file = tmp_path / leftover
    file.parent.mkdir(parents=True)
    file.write_text("")
    folder = _FOLDER.format(folder=str(tmp_path))
    use = "from onnxruntime.training.api import Module\nassert Module.__module__.startswith('onnxtrain')"
    check(f"{folder}{INSTALL}{use}")
