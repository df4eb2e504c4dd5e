"""Folders of runs that a stranger has made: links, pipes, remembered paths, `../`, huge counts, deep texts.

:data:`FOLDERS` is a table of functions that each turn a good run into a hostile one. Beside the run lies `outside`, a
folder with a whole copy of the run and with files that nobody may read or change. To try another kind of folder, such
as one with hostile names, add a function to the table.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from onnxtrain.api import CheckpointState

MakeHostile = Callable[[Path, Path], object]
"""`make(run, outside)` changes the run in place."""

READ = [
    "checkpoint", "manifest.json", "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx",
    "inference_model.onnx", "best", "average", "swa", "predictions-1-1.npz",
]  # fmt: skip
WRITTEN = [
    "trained.onnx", "run.toml", "log.csv", "log.steps.csv",
    "log.evaluations.csv", "README.md", "predictions.npz", ".checkpoint.0123456789ab.onnxtrain-tmp",
    ".log.csv.0123456789ab.onnxtrain-tmp", "checkpoints/.onnxtrain-unfinished-step-00000002",
]  # fmt: skip
FOLDERS_OF_A_RUN = [
    "checkpoints",
    "checkpoints/step-00000001",
    "checkpoints/step-00000002",
    "tensorboard",
    "saved",
]


def _cleared(path: Path) -> Path:
    """Returns a path at which nothing is any more, and whose folder exists."""
    path.parent.mkdir(exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    return path


def precious_link(name: str, run: Path, outside: Path) -> None:
    link(name, "precious.txt", run, outside)


def link(name: str, target: str, run: Path, outside: Path) -> None:
    _cleared(run / name).symlink_to(os.path.relpath(outside / target, (run / name).parent))


def absolute_link(name: str, run: Path, outside: Path) -> None:
    _cleared(run / name).symlink_to(outside / "precious.txt")


def dangling_link(name: str, run: Path, outside: Path) -> None:
    _cleared(run / name).symlink_to(outside / "new")


def pipe(name: str, run: Path, outside: Path) -> None:
    os.mkfifo(_cleared(run / name))


def all_written(make: Callable[[str, Path, Path], None], run: Path, outside: Path) -> None:
    for name in WRITTEN:
        make(name, run, outside)


def files_of_manifest(role: str, name: str, run: Path, outside: Path) -> None:
    path = run / "manifest.json"
    content = json.loads(path.read_text())
    content["files"][role] = name.format(outside=outside)
    path.write_text(json.dumps(content))


def manifest_entry(key: str, change: Callable[[Any], Any], run: Path, outside: Path) -> None:
    path = run / "manifest.json"
    content = json.loads(path.read_text())
    content[key] = change(content[key])
    path.write_text(json.dumps(content))


def labels(count: int, targets: Any) -> Any:
    return [
        target | {"class_labels": {**(target["class_labels"] or {}), "count": count}} for target in targets
    ]


def prop(name: str, change: Callable[[Any, Path], Any], run: Path, outside: Path) -> None:
    """Changes the JSON text of a property of the checkpoint."""
    state = CheckpointState.load_checkpoint(run / "checkpoint")
    content = json.loads(str(state.properties[name]))
    changed = change(content, outside)
    state.properties[name] = changed if isinstance(changed, str) else json.dumps(changed)
    CheckpointState.save_checkpoint(state, run / "checkpoint", include_optimizer_state=True)


def option(key: str, value: Any, content: Any, outside: Path) -> Any:
    text = value.format(outside=outside, home=os.environ["HOME"]) if isinstance(value, str) else value
    content["options"][key] = text
    return content


def place(part: str, key: str, value: Any, content: Any, outside: Path) -> Any:
    where = content["position"]["plan"] if part == "plan" else content[part]
    where[key] = value
    return content


def nested(content: Any, outside: Path) -> str:
    return "[" * 200_000 + "]" * 200_000


def remembered(key: str, value: Any) -> MakeHostile:
    return partial(prop, "onnxtrain.cli", partial(option, key, value))


def state(part: str, key: str, value: Any) -> MakeHostile:
    return partial(prop, "onnxtrain.trainer", partial(place, part, key, value))


def remembered_through_a_link(run: Path, outside: Path) -> None:
    (run / "logs").symlink_to(outside)
    remembered("log", "logs/log.csv")(run, outside)


def remembered_pipe(run: Path, outside: Path) -> None:
    os.mkfifo(run / "mine.csv")
    remembered("log", "mine.csv")(run, outside)


def journal(moves: list[list[str]], remove: list[str], run: Path, outside: Path) -> None:
    (run / ".checkpoint.0123456789ab.onnxtrain-tmp").symlink_to(outside / "checkpoint")
    (run / ".onnxtrain-commit").write_text(json.dumps({"moves": moves, "remove": remove}))


def deep_manifest(run: Path, outside: Path) -> None:
    (run / "manifest.json").write_text('{"files":' * 100_000 + "1" + "}" * 100_000)


def long_history(run: Path, outside: Path) -> None:
    def claim(content: Any, outside: Path) -> Any:
        content["position"]["epoch"] = 10**18
        return content

    prop("onnxtrain.trainer", claim, run, outside)


_MOVE = [".checkpoint.0123456789ab.onnxtrain-tmp", "checkpoint"]

FOLDERS: dict[str, MakeHostile] = {
    **{f"link {name}": partial(link, name, name) for name in READ},
    **{f"{make.__name__} of all that is written": partial(all_written, make) for make in (
        precious_link, dangling_link, pipe
    )},
    **{f"{make.__name__} {name}": partial(make, name) for make in (precious_link, pipe) for name in (
        ".onnxtrain-lock", ".onnxtrain-commit"
    )},
    **{f"absolute link {name}": partial(absolute_link, name) for name in ("best", "trained.onnx", "checkpoint")},
    **{f"dangling link {name}": partial(dangling_link, name) for name in READ},
    **{f"link {name}": partial(link, name, ".") for name in FOLDERS_OF_A_RUN},
    **{f"link {name} to a run": partial(link, name, "twin") for name in FOLDERS_OF_A_RUN},
    **{f"pipe {name}": partial(pipe, name) for name in (*READ, *FOLDERS_OF_A_RUN)},
    **{
        f"manifest {role} {name}": partial(files_of_manifest, role, name)
        for role in ("checkpoint", "training_model", "inference_model")
        for name in ("../outside/checkpoint", "{outside}/checkpoint", "..", "x/../../outside/precious.txt")
    },
    **{
        f"remembered {key} {value[:30]!r}": remembered(key, value)
        for key in ("log", "tensorboard", "validation")
        for value in ("{home}/.bashrc", "../outside/precious.txt", "{outside}/new", "x\0y", "a" * 5000)
    },
    # Read only: a fault of the code, run as root, would replace a device that a log is named after.
    "remembered validation /dev/zero": remembered("validation", "/dev/zero"),
    "remembered log through a link": remembered_through_a_link,
    "remembered log is a pipe": remembered_pipe,
    **{f"remembered {key} {str(value)[:25]}": remembered(key, value) for key, value in (
        ("epochs", 10**18), ("epochs", 2**70), ("epochs", -1), ("epochs", "many"), ("batch_size", 10**18),
        ("accumulate", 10**18), ("keep", 10**18), ("save_every", 10**18), ("patience", 10**18), ("seed", 10**18),
        ("schedule_epochs", 10**18), ("steps_per_epoch", 10**18), ("evaluate_every", 10**18), ("sam", "x"),
        ("swa_start", "9" * 5000), ("mixup", 1e300), ("class_weight", [f"{10**18}=1"]), ("metric", [3]),
    )},
    **{f"{part} {key}": state(part, key, value) for part, key, value in (
        ("position", "step", 10**18), ("position", "batch", 10**18), ("position", "averaged", 10**18),
        ("position", "fit_start", 10**18), ("position", "seed", 10**18), ("plan", "epochs", 10**18),
        ("plan", "batch_size", 10**18), ("plan", "accumulate", 10**18), ("settings", "warmup_steps", 10**18),
        ("settings", "total_steps", 10**18), ("settings", "threads", 10**9), ("settings", "positive", 10**18),
        ("settings", "metrics", ["top999999999_accuracy"]),
    )},
    "classes 10^18": partial(manifest_entry, "targets", partial(labels, 10**18)),
    "classes 10^7": partial(manifest_entry, "targets", partial(labels, 10**7)),
    "history of 10^18 epochs": long_history,
    "deep manifest": deep_manifest,
    "deep record": partial(prop, "onnxtrain.cli", nested),
    "deep state": partial(prop, "onnxtrain.trainer", nested),
    "journal moves a link": partial(journal, [_MOVE], []),
    "journal leaves the folder": partial(journal, [[_MOVE[0], "../outside/checkpoint"]], []),
    "journal removes outside": partial(journal, [], ["../outside/x.0123456789ab.data"]),
}  # fmt: skip
