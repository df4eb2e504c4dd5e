"""The wheel: its dependencies, version and files; the message if ONNX Runtime is missing; what workflows run."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fresh_process import python
from onnxtrain.runtime import kernel_advice

ROOT = Path(__file__).parents[1]


def requirements(tmp_path: Path, **variables: str) -> list[str]:
    """Builds the wheel offline and returns what it depends on without extras."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__"))
    code = "import sys, hatchling.build; print(hatchling.build.build_wheel(sys.argv[1]))"
    environment = {k: v for k, v in os.environ.items() if k != "ONNXTRAIN_ONNXRUNTIME"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=tree,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as wheel:
        (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(wheel.read(name).decode())
    return sorted(r for r in metadata.get_all("Requires-Dist") or [] if "extra ==" not in r)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "onnxruntime>=1.20"),
        ({"ONNXTRAIN_ONNXRUNTIME": "onnxruntime-gpu"}, "onnxruntime-gpu>=1.20"),
        ({"ONNXTRAIN_ONNXRUNTIME": "onnxruntime-gpu==1.23.2"}, "onnxruntime-gpu==1.23.2"),
        ({"ONNXTRAIN_ONNXRUNTIME": ""}, None),
    ],
)
def test_one_build_of_onnxruntime_is_depended_on(
    tmp_path: Path, variables: dict[str, str], expected: str | None
) -> None:
    others = ["numpy>=1.26.4", "safetensors>=0.4.3"]
    assert requirements(tmp_path, **variables) == sorted([*others, *([expected] if expected else [])])


def test_a_release_depends_on_the_kernels_where_they_have_a_wheel(tmp_path: Path) -> None:
    """A checkout does not: its kernels are in no index."""
    (kernels,) = (r for r in requirements(tmp_path, ONNXTRAIN_RELEASE="1") if "kernels" in r)
    required = Requirement(kernels)
    pinned = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][
        "kernels"
    ]
    assert [f"{required.name}{required.specifier}"] == pinned
    assert required.marker is not None
    systems = {"Linux": "linux", "Darwin": "darwin", "Windows": "win32"}
    targets = runpy.run_path(str(CROSS / "build.py"))["TARGETS"].values()
    # Not published (kernels/README.md).
    published = {(systems[t.system], t.processor) for t in targets} - {("win32", "ARM64")}
    assert published == kernel_advice.PLATFORMS
    others = {("linux", "armv7l"), ("darwin", "x86_64"), ("win32", "ARM64"), ("emscripten", "wasm32")}
    for system, machine in published | others:
        environment = {"sys_platform": system, "platform_machine": machine}
        assert required.marker.evaluate(environment) == ((system, machine) in published), (system, machine)


def test_the_sdist_of_a_release_gives_its_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m build` makes the wheel from the sdist."""
    monkeypatch.setenv("ONNXTRAIN_RELEASE", "1")
    sdist = build(ROOT, "sdist", tmp_path)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (tree,) = (tmp_path / "unpacked").iterdir()
    assert "Requires-Dist: onnxtrain-kernels==" in description(build(tree, "wheel", tmp_path))
    assert "Requires-Dist: onnxtrain-kernels==" in (tree / "PKG-INFO").read_text(encoding="utf-8")


def test_a_variable_that_names_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="expected a name as 'onnxruntime-gpu'"):
        requirements(tmp_path, ONNXTRAIN_ONNXRUNTIME="-gpu")


def test_the_lowest_versions_are_the_tested_ones() -> None:
    """Lower bounds of pyproject.toml and hatch_build.py are what `make test-oldest` installs."""
    text = (ROOT / "pyproject.toml").read_text()
    runtime = re.search(r'MINIMUM = "(.+)"', (ROOT / "hatch_build.py").read_text())
    assert runtime
    declared = dict(re.findall(r'"([\w-]+)>=([\d.]+)', text)) | {"onnxruntime": runtime[1]}
    oldest = dict(
        line.split("==")
        for line in (ROOT / "tests" / "oldest.txt").read_text().splitlines()
        if line[0] != "#"
    )
    device = {"numpy", "onnxruntime", "safetensors"}
    assert device | {"onnx", "onnx-ir", "ml_dtypes", "rich", "tomlkit", "typer", "onnxscript"} <= set(oldest)
    assert set(oldest) - set(declared) == {"pyparsing"}  # of matplotlib
    for name in oldest.keys() & declared.keys():
        bound = [int(part) for part in declared[name].split(".")]
        assert [int(part) for part in oldest[name].split(".")][: len(bound)] == bound, name


def test_the_torch_versions_that_are_tested_are_the_lowest_and_the_newest() -> None:
    """The bounds of pyproject.toml are what `make test-torch` installs."""
    bounds = re.search(r'"torch>=([\d.]+),<([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    tested = re.search(r"^TORCHES := ([\d.]+) ([\d.]+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert bounds
    assert tested
    assert tested[1] == bounds[1]
    newest, beyond = ([int(part) for part in text.split(".")[:2]] for text in (tested[2], bounds[2]))
    assert [newest[0], newest[1] + 1] == beyond


def test_where_onnxruntime_is_missing_the_way_is_named(tmp_path: Path) -> None:
    block = "import sys, importlib.abc\nclass Block(importlib.abc.MetaPathFinder):\n"
    block += "    def find_spec(self, name, path=None, target=None):\n"
    block += (
        "        if name == 'onnxruntime':\n            raise ModuleNotFoundError('No module', name=name)\n"
    )
    block += "sys.meta_path.insert(0, Block())\nimport onnxtrain.api\n"
    done = python("-c", block, code=1)
    assert "pip install onnxruntime, or onnxruntime-gpu for CUDA" in done.stderr


VERSIONS = runpy.run_path(str(ROOT / ".ci" / "check_version.py"))


def test_every_file_names_the_version_of_the_package() -> None:
    import onnxtrain

    assert set(VERSIONS["versions"]().values()) == {onnxtrain.__version__}
    VERSIONS["main"](f"v{onnxtrain.__version__}")


def test_a_tag_of_another_version_stops_a_release() -> None:
    with pytest.raises(
        SystemExit, match=r"The tag is v9.9.9, and the version is .* in src/onnxtrain/__init__.py"
    ):
        VERSIONS["main"]("v9.9.9")


def build(tree: Path, kind: str, to: Path) -> Path:
    """Builds the "sdist" or "wheel" of a tree, offline."""
    code = f"import sys, hatchling.build; print(hatchling.build.build_{kind}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(to)], cwd=tree, capture_output=True, text=True, check=True
    )
    return to / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ONNXTRAIN_REPOSITORY_URL", raising=False)
        return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


def description(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def test_links_of_the_description_lead_to_files_of_the_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxtrain

    monkeypatch.setenv("ONNXTRAIN_REPOSITORY_URL", "https://example.org/onnxtrain/")
    text = description(build(ROOT, "wheel", tmp_path))
    here = f"https://example.org/onnxtrain/blob/v{onnxtrain.__version__}/"
    assert f"Project-URL: Changelog, {here}CHANGELOG.md" in text
    links = LINK.findall(text)
    assert len(links) == len(LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))) > 10
    for link in links:
        assert link.startswith(here)
        assert (ROOT / link.removeprefix(here)).exists()


def test_without_an_address_the_description_has_no_dead_links(wheel: Path) -> None:
    text = description(wheel)
    assert LINK.findall(text) == []
    assert "Next, follow the ten-minute tutorial Fine-tune your first model, or read" in text


def test_links_in_code_and_to_elsewhere_stay() -> None:
    absolute_links = runpy.run_path(str(ROOT / "hatch_build.py"))["absolute_links"]
    text = "`f[0](x)` [a](https://a.org/b) [here](#top) [file](docs/x.md#part)\n```python\ny[1](z)\n```\n"
    changed = text.replace("docs/x.md#part", "https://e.org/o/blob/v1/docs/x.md#part")
    assert absolute_links(text, "https://e.org/o", "1") == changed


def test_the_description_of_the_kernels_has_no_relative_links() -> None:
    text = (ROOT / "kernels" / "README.md").read_text(encoding="utf-8")
    assert [link for link in LINK.findall(text) if "://" not in link] == []


def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def test_the_wheel_holds_the_package_alone(wheel: Path) -> None:
    import onnxtrain

    assert wheel.name == f"onnxtrain-{onnxtrain.__version__}-py3-none-any.whl"
    assert {name.split("/")[0] for name in names(wheel)} == {
        "onnxtrain",
        f"onnxtrain-{onnxtrain.__version__}.dist-info",
    }
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert sources | {"onnxtrain/py.typed"} <= set(names(wheel))


def test_the_sdist_gives_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sdist = build(ROOT, "sdist", tmp_path)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (tree,) = (tmp_path / "unpacked").iterdir()
    again = build(tree, "wheel", tmp_path)
    assert names(again) == names(wheel)
    assert {"mkdocs.yml", "tests", "CHANGELOG.md"} <= {path.name for path in tree.iterdir()}


def test_an_installed_wheel_runs_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        site,
        wheel,
    ]
    subprocess.run(pip, check=True, capture_output=True)
    code = "import onnxtrain, onnxtrain.cli; print(onnxtrain.__file__); onnxtrain.cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "ops", "--status", "not yet"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.splitlines()[0]) == site / "onnxtrain" / "__init__.py"
    assert "ConcatFromSequence" in done.stdout


def test_the_kernels_carry_the_licence() -> None:
    assert (ROOT / "kernels" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("name", ["onnxtrain_kernels.so", "onnxtrain_kernels.dylib", "onnxtrain_kernels.dll"])
def test_the_library_of_the_kernels_is_found_on_every_system(tmp_path: Path, name: str) -> None:
    source = shutil.copy(ROOT / "kernels" / "onnxtrain_kernels" / "__init__.py", tmp_path)
    package = runpy.run_path(str(source))
    with pytest.raises(FileNotFoundError, match="holds no library"):
        package["library"]()
    (tmp_path / name).touch()
    assert package["library"]() == tmp_path / name


CROSS = ROOT / "kernels" / "cross"


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs CMake")
@pytest.mark.parametrize("levels", ["all", "native", "baseline", "avx2"])
def test_levels_of_the_kernels_that_are_compiled(tmp_path: Path, levels: str) -> None:
    command = ["cmake", "-S", ROOT / "kernels", "-B", tmp_path, f"-DONNXTRAIN_LEVELS={levels}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "CMAKE_CXX_COMPILER" in done.stderr:
        pytest.skip("needs a C++ compiler")
    assert done.returncode == 0, done.stderr
    rules = subprocess.run(
        ["cmake", "--build", tmp_path, "--target", "help"], capture_output=True, text=True, check=True
    )
    compiled = set(re.findall(r"level_(\w+)", rules.stdout))
    if levels == "native":
        (level,) = compiled
        assert f"for this processor only: level {level}" in done.stdout
        kernels = pytest.importorskip("onnxtrain_kernels")
        assert level == kernels.level()
    elif levels == "all":
        assert compiled in ({"baseline", "avx2", "avx512"}, {"baseline"})
    else:
        assert compiled == {levels}


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs CMake")
@pytest.mark.parametrize("levels", ["avx3", "baseline;sse2", ";"])
def test_levels_of_the_kernels_that_do_not_exist(tmp_path: Path, levels: str) -> None:
    command = ["cmake", "-S", ROOT / "kernels", "-B", tmp_path, f"-DONNXTRAIN_LEVELS={levels}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "CMAKE_CXX_COMPILER" in done.stderr:
        pytest.skip("needs a C++ compiler")
    assert done.returncode != 0
    assert "expected all, native, or some of" in " ".join(done.stderr.split())


def test_every_platform_of_the_kernels_is_in_their_table() -> None:
    targets = runpy.run_path(str(CROSS / "build.py"))["TARGETS"]
    table = (ROOT / "kernels" / "README.md").read_text(encoding="utf-8")
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert {row.split("`")[1] for row in rows if "_" in row.split("`")[1]} >= {
        t.tag for t in targets.values()
    }
    # cibuildwheel makes the same platforms: its names have no version, which its images and settings give.
    built = tomllib.loads((ROOT / "kernels" / "pyproject.toml").read_text())["tool"]["cibuildwheel"]["build"]
    kinds = {re.sub(r"_\d+_\d+", "", t.tag) for t in targets.values()}
    for pattern in built.split():
        kind = pattern.removeprefix("cp311-")
        assert any(fnmatch(tag, kind) for tag in kinds), pattern
        kinds = {tag for tag in kinds if not fnmatch(tag, kind)}
    assert kinds == {"win_arm64"}  # for which cibuildwheel needs a machine of its own


@pytest.mark.skipif(os.name == "nt", reason="cross-compiles from Linux and macOS")
def test_zig_gets_its_own_names_of_processors() -> None:
    arguments = ["--target=x86_64-linux-musl", "-march=x86-64-v3", "-DA=a b", "-c"]
    done = subprocess.run(
        [CROSS / "zig-c++", *arguments],
        env=os.environ | {"PYTHON": "echo"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "-m ziglang c++ --target=x86_64-linux-musl -mcpu=x86_64_v3 -DA=a b -c\n"


@pytest.mark.parametrize(
    ("name", "platform"),
    [
        ("onnxtrain_kernels-0.1.0-py3-none-manylinux_2_28_aarch64.whl", "linux-aarch64"),
        # As auditwheel names the file after it has looked at the symbols.
        (
            "onnxtrain_kernels-0.1.0-py3-none-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl",
            "linux-x86_64",
        ),
        ("onnxtrain_kernels-0.1.0-py3-none-win_amd64.whl", "windows-x86_64"),
    ],
)
def test_a_wheel_is_checked_as_one_of_its_platform(
    monkeypatch: pytest.MonkeyPatch, name: str, platform: str
) -> None:
    monkeypatch.syspath_prepend(CROSS)
    check = runpy.run_path(str(CROSS / "check.py"))
    assert check["platform_of"](Path(name)) == platform
    assert check["RUNNERS"].keys() < check["TARGETS"].keys()


@pytest.fixture
def page_tree(tmp_path: Path) -> Path:
    """The folder that .ci/fresh_install.sh makes for the page, without the page."""
    script = (ROOT / ".ci" / "fresh_install.sh").read_text(encoding="utf-8")
    copied = re.findall(r'^cp (\S+) "\$root/page/', script, re.MULTILINE)
    assert copied[0] == "README.md"
    for name in copied[1:]:
        (tmp_path / name).parent.mkdir()
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_a_block_that_prints_what_the_page_does_not_show_ends_a_fresh_installation(page_tree: Path) -> None:
    (page_tree / "README.md").write_text("```python\nprint(1 + 1)\n```\n\n```output\n3\n```\n")
    done = python(str(page_tree / ".ci" / "readme_blocks.py"), code=1)
    assert "The page shows\n3\n\nand the block printed\n2" in done.stderr


def test_a_fresh_installation_names_the_kernels_of_a_training_step(page_tree: Path) -> None:
    pytest.importorskip("onnxtrain_kernels")
    block = "from onnxtrain import generate_artifacts\nfrom onnxtrain.demo import digits_network\n"
    block += "generate_artifacts(digits_network(), loss='cross_entropy', artifact_directory='artifacts')\n"
    (page_tree / "README.md").write_text(f"```python\n{block}```\n")
    done = python(str(page_tree / ".ci" / "readme_blocks.py"))
    assert "MeanCrossEntropyGradient_float" in done.stdout


def test_workflows_run_targets_and_files_that_exist() -> None:
    workflows = {path.name: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    assert workflows.keys() == {"docs.yml", "release.yml", "test.yml", "wheels.yml"}
    text = "\n".join(workflows.values())
    makefile = (ROOT / "Makefile").read_text()
    targets = {*re.findall(r"make ([a-z-]+)", text), *re.findall(r"target: ([a-z-]+)", text)}
    assert targets == {"test", "docs", "test-oldest", "test-newest", "test-torch"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    kernels = (ROOT / "kernels" / "pyproject.toml").read_text()
    files = re.findall(r"(?<![\w/])(?:tests|\.ci|\.github)/[\w./]*\w", text + kernels)
    assert len(files) > 10
    assert [file for file in files if not (ROOT / file).exists()] == []
    # Every version of Python that the package declares, and no other.
    declared = set(
        re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    )
    assert set(re.findall(r'"(3\.\d+)"', workflows["test.yml"])) == declared
