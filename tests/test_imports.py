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


def test_import_loads_one_module_besides_the_standard_library() -> None:
    code = """
import sys
before = set(sys.modules)
import onnxtrain
print([name for name in set(sys.modules) - before if name.split(".")[0] not in sys.stdlib_module_names])
"""
    assert python(code) == "['onnxtrain']\n"


# Each takes a tenth of a second or more, and most models need none of them.
LATE = (
    "torch",
    "sympy",
    "mpmath",
    "onnx.reference",
    "onnxscript",
    "sklearn",
    "pandas",
    "matplotlib",
    "tomlkit",
    "typer",
)


@pytest.mark.parametrize("name", ["Trainer", "differentiate", "generate_artifacts", "replace_head", "Recipe"])
def test_names_of_the_desk_load_no_packages_that_most_models_do_not_need(name: str) -> None:
    code = f"import onnxtrain, sys; onnxtrain.{name}; print([n for n in {LATE} if n in sys.modules])"
    assert python(code) == "[]\n"


def test_no_schema_is_kept_for_each_opset() -> None:
    """1,300 copies of schemas took 10 MB."""
    code = "import onnxtrain.autodiff; from onnxtrain.emitter import schema_of; print(schema_of.cache_info().currsize)"
    assert int(python(code)) < 400


def test_onnx_ir_without_us_imports_sympy() -> None:
    """The reason for `onnxtrain._late_sympy`, which can go when this test fails."""
    assert python("import onnx_ir, sys; print('sympy' in sys.modules)") == "True\n"


_DIMENSIONS = """
import sys
{first}
import onnxtrain.passes
print("sympy" in sys.modules)
import onnx_ir as ir
n = ir.SymbolicDim("max(batch, 3)")
m = ir.SymbolicDim("floor(sqrt(n)) - mod(k, 4)")
print((n + 1).evaluate({{"batch": 7}}), 2 * n, n // 2, m.evaluate({{"n": 17, "k": 7}}), (n - n).simplify(), -n)
print(ir.SymbolicDim(__import__("sympy").Symbol("a") + 1), "sympy" in sys.modules)
print(ir._core.sympy.Expr is sys.modules["sympy"].Expr, type(ir._core.__loader__).__name__, ir.Shape(["b", 3]))
try:
    ir.SymbolicDim(2.5)
except TypeError as error:
    print(error)
"""


def test_dimensions_compute_as_if_sympy_were_imported_at_once() -> None:
    late, *computed = python(_DIMENSIONS.format(first="")).splitlines()
    at_once, *expected = python(_DIMENSIONS.format(first="import onnx_ir")).splitlines()
    assert (late, at_once) == ("False", "True")
    assert computed == expected
    assert computed[0].startswith("8 ")


def test_dimensions_computed_first_by_several_threads() -> None:
    code = """
import threading
import onnxtrain.passes, onnx_ir as ir
begin, results = threading.Barrier(8), []
def compute():
    begin.wait()
    results.append((ir.SymbolicDim("max(n, 3)") + 1).evaluate({"n": 5}))
threads = [threading.Thread(target=compute) for _ in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
print(results)
"""
    assert python(code) == f"{[6] * 8}\n"


def test_a_version_of_onnx_ir_that_needs_sympy_at_import(tmp_path: Path) -> None:
    """Its module runs again with sympy itself."""
    package = tmp_path / "onnx_ir"
    package.mkdir()
    (package / "__init__.py").write_text("from onnx_ir import _core\n")
    (package / "_core.py").write_text("import sympy\nclass Dim(sympy.Expr): pass\nassert len('') == 0\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from onnxtrain._late_sympy import late_sympy
with late_sympy():
    import onnx_ir
print(onnx_ir._core.Dim.__mro__[1], onnx_ir._core.sympy is sys.modules["sympy"], len(sys.meta_path))
"""
    plain = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import onnx_ir; print(len(sys.meta_path))"
    assert python(code) == f"<class 'sympy.core.expr.Expr'> True {python(plain)}"


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
    page = (source.parents[1] / "notes" / "architecture.md").read_text(encoding="utf-8")
    (named,) = re.findall(r"no part of what users import\. (.*?) read a few such modules", page)
    assert readers == {*re.findall(r"`(\w+)/`", named)}
