"""`import onnxtrain` is light, and offers what it says it offers."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import fresh_process
import onnxtrain

HEAVY = (
    "onnx",
    "onnx_ir",
    "onnxruntime",
    "numpy",
    "torch",
    "rich",
    "typer",
    "matplotlib",
    "sklearn",
    "safetensors",
)


def python(code: str) -> str:
    """Return what the code prints in a fresh process."""
    return fresh_process.python("-c", code).stdout


def test_import_loads_nothing_heavy() -> None:
    code = f"import onnxtrain, sys; dir(onnxtrain); print([n for n in {HEAVY} if n in sys.modules])"
    assert python(code) == "[]\n"


@pytest.mark.parametrize("name", ["Trainer", "differentiate", "generate_artifacts", "check_gradients"])
def test_desk_side_names_load_no_torch(name: str) -> None:
    assert python(f"import onnxtrain, sys; onnxtrain.{name}; print('torch' in sys.modules)") == "False\n"


@pytest.mark.parametrize(
    "name", ["CheckpointState", "Module", "Optimizer", "LinearLRScheduler", "OnnxTrainError"]
)
def test_device_side_names_load_no_graph_code(name: str) -> None:
    forbidden = ("onnx", "onnx_ir", "torch", "rich", "typer")
    code = f"import onnxtrain, sys; onnxtrain.{name}; print([n for n in {forbidden} if n in sys.modules])"
    assert python(code) == "[]\n"


@pytest.mark.parametrize("name", onnxtrain.__all__)
def test_every_name_is_the_one_of_its_home(name: str) -> None:
    value = getattr(onnxtrain, name)
    home = onnxtrain._HOME.get(name)
    if home is None:
        assert name == "__version__"
        return
    module = importlib.import_module(f"onnxtrain.{home}")
    assert value is getattr(module, name)
    assert name in module.__all__
    assert name in dir(onnxtrain)


_SHAPE_OF_A_NONSTANDARD_OP = """
import sys
import onnx, onnx_ir as ir
from onnxtrain.passes import infer_shapes
assert "onnxtrain.autodiff" not in sys.modules
model = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> g (float[2, 3] x, float[3] b) => (float z)'
    '{ y = com.microsoft.BiasGelu(x, b)  z = ReduceSum<keepdims=0>(y) }'
)
print(infer_shapes(ir.from_proto(model)).graph.node(0).outputs[0].shape)
"""


def test_shapes_of_nonstandard_ops_do_not_depend_on_what_was_imported_before() -> None:
    """`autodiff` registers these ops; whoever infers shapes need not have imported it."""
    assert python(_SHAPE_OF_A_NONSTANDARD_OP) == "[2,3]\n"


def test_all_is_complete() -> None:
    assert set(onnxtrain.__all__) == {*onnxtrain._HOME, "__version__"}
    assert sorted(onnxtrain.__all__) == onnxtrain.__all__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'onnxtrain' has no attribute 'Nothing'"):
        onnxtrain.Nothing  # noqa: B018


@pytest.mark.parametrize(
    "statement",
    [
        "from onnxtrain import Trainer",
        "from onnxtrain import generate_artifacts",
        "from onnxtrain import artifacts",
        "from onnxtrain import differentiate",
        "from onnxtrain import check_gradients",
        "import onnxtrain.onnxblock",
        "import onnxtrain.losses",
        "import onnxtrain.optimizers",
        "import onnxtrain.passes",
        "import onnxtrain.demo",
    ],
)
@pytest.mark.parametrize("missing", ["onnx", "onnx_ir"])
def test_desk_side_without_its_packages(statement: str, missing: str) -> None:
    code = f"""
import sys
sys.modules[{missing!r}] = None
try:
    {statement}
except ModuleNotFoundError as error:
    print(error)
"""
    printed = python(code)
    assert printed.startswith(f"{missing} is not installed")
    assert "pip install 'onnxtrain[build]'" in printed


@pytest.mark.parametrize("package", ["nn", "optim", "ortmodule", "utils.data"])
def test_packages_for_pytorch_without_it(package: str) -> None:
    code = f"""
import sys
sys.modules["torch"] = None
try:
    import onnxtrain.{package}
except ModuleNotFoundError as error:
    print(error)
"""
    printed = python(code)
    assert printed.startswith("PyTorch is not installed")
    assert "pip install 'onnxtrain[torch]'" in printed


def test_command_line_without_its_packages() -> None:
    code = "import sys; sys.modules['typer'] = None; from onnxtrain.cli import main; main()"
    result = fresh_process.python("-c", code, code=1)
    assert "pip install 'onnxtrain[build]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_private_modules_of_another_room_are_read_by_the_rooms_that_the_architecture_names() -> None:
    source = Path(onnxtrain.__file__).parent
    readers = set()
    for path in source.rglob("*.py"):
        room = path.relative_to(source).parts[0]
        for module in re.findall(
            r"^\s*from onnxtrain\.([\w.]+) import", path.read_text("utf-8"), re.MULTILINE
        ):
            other, *rest = module.split(".")
            if other != room and any(part.startswith("_") for part in rest):
                readers.add(room)
    page = (source.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    (named,) = re.findall(r"no part of what users import\. (.*?) read a few such modules", page)
    assert readers == {*re.findall(r"`(\w+)/`", named)}
