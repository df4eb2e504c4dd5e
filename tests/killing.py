"""Kills processes while they save, in all ways that this package saves, and looks at what they leave; and at what a
kill at each step of a save would leave.

`python -m killing at_random "checkpoint,fit" directory kills seed` and `python -m killing at_each_step "checkpoint,fit"
directory` print what was found, by kind. One process imports everything, and forks those that save and those that look,
so that a kill costs a tenth of a second.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from onnxtrain.trainer import _trainer  # noqa: F401  # imported before the forks
from saving import AT_EACH_STEP, Kind


def forked(work: Callable[[int], None]) -> tuple[int, int]:
    """Starts `work` in a forked process, with a pipe to write to; returns its id and the pipe's other end."""
    read, write = os.pipe()
    process = os.fork()
    if process:
        os.close(write)
        return process, read
    os.close(read)
    status = 1
    try:
        work(write)
        status = 0
    except BaseException:
        os.write(write, traceback.format_exc()[-3000:].encode())
    finally:
        os._exit(status)


def in_process(work: Callable[[], object]) -> str:
    """Returns the text of what `work` returns in a forked process; raises AssertionError if it fails."""
    process, pipe = forked(lambda write: os.write(write, str(work()).encode()) and None)
    with open(pipe, "rb") as file:
        text = file.read().decode()
    _, status = os.waitpid(process, 0)
    assert status == 0, text
    return text


def leftovers(directory: Path) -> int:
    return sum(1 for _ in directory.rglob(".*onnxtrain-*"))


def at_random(kind: Kind, where: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kills `kills` processes at random moments of their saves; returns what was found."""
    chance = random.Random(seed)
    in_process(lambda: kind.prepare(where))
    last = 0
    found: dict[str, Any] = dict.fromkeys(("kills", "unreadable", "lost", "in the middle", "saves"), 0)
    found["first problem"] = ""
    for _ in range(kills):
        start = last

        def save(write: int, start: int = start) -> None:
            for k in kind.saves(where, start):
                os.write(write, b"%d\n" % k)

        process, pipe = forked(save)
        with open(pipe, "rb") as file:
            first = file.readline()
            time.sleep(chance.uniform(0, 0.03))
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            text = first + file.read()
        acknowledged = [int(k) for k in text.decode().split()]
        found["kills"] += 1
        found["saves"] += len(acknowledged)
        found["in the middle"] += leftovers(where) > 0
        try:
            k = int(in_process(lambda: kind.look(where)))
        except AssertionError as error:
            found["unreadable"] += 1
            found["first problem"] = found["first problem"] or str(error)
            continue
        found["lost"] += k != -1 and k < acknowledged[-1]
        last = max(acknowledged[-1], k)
    return found


def _before_each_step(act: Callable[[], None]) -> None:
    """Has this process call `act` before each call that changes something on the disk."""
    acting = False

    def acting_first(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal acting
            if not acting:
                acting = True
                act()
                acting = False
            return function(*arguments, **options)

        return call

    names = "open replace rename unlink remove fsync mkdir rmdir truncate fdopen"
    for name in names.split():
        setattr(os, name, acting_first(getattr(os, name)))


def _content(directory: Path) -> bytes:
    """A digest of all names and files, which is the same for the same ones."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        link = os.readlink(path) if path.is_symlink() else None
        digest.update(repr((path.relative_to(directory), path.is_dir(), link)).encode())
        if path.is_file() and link is None:
            digest.update(path.read_bytes())
    return digest.digest()


def _save_and_copy(kind: Kind, where: Path, copies: Path) -> str:
    """Copies what a kill would leave at each step of a save, no content twice.

    Returns:
        The number of steps, and of those at which there are temporary files.
    """
    seen: set[bytes] = set()
    found = {"steps": 0, "in the middle": 0}

    def copy() -> None:
        found["steps"] += 1
        found["in the middle"] += leftovers(where) > 0
        content = _content(where)
        if content not in seen:
            seen.add(content)
            shutil.copytree(where, copies / str(len(seen)), symlinks=True)

    saves = kind.saves(where, 4)
    _before_each_step(copy)
    next(saves)
    return json.dumps(found)


def _problem(kind: Kind, left: Path) -> str:
    """Return what is wrong with the files a kill has left: they have to load, and the next save has to be complete."""
    try:
        kind.look(left)
        next(kind.saves(left, 4))
        kind.look(left)
        assert not leftovers(left), sorted(p.name for p in left.rglob("*"))
    except Exception:
        return f"{left.name}: {traceback.format_exc()[-3000:]}"
    return ""


def at_each_step(kind: Kind, folder: Path) -> dict[str, Any]:
    """Looks at what a kill would leave at each step of a save on the disk; returns what was found."""
    where, copies = folder / "run", folder / "copies"
    for path in (where, copies):
        path.mkdir()
    in_process(lambda: kind.prepare(where))
    found: dict[str, Any] = json.loads(in_process(partial(_save_and_copy, kind, where, copies)))
    left = [*copies.iterdir(), where]
    problems = json.loads(
        in_process(lambda: json.dumps([text for path in left if (text := _problem(kind, path))]))
    )
    return found | {"unreadable": len(problems), "first problem": problems[0] if problems else ""}


def main(way: str, names: str, directory: str, *numbers: str) -> None:
    found = {}
    for name in names.split(","):
        folder = Path(directory) / name
        folder.mkdir()
        kill = {"at_random": at_random, "at_each_step": at_each_step}[way]
        found[name] = kill(AT_EACH_STEP[name](), folder, *map(int, numbers))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
