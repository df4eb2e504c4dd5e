"""Runs a host on the test vectors that write_vectors.py wrote, and says which cases it passes.

    python examples/hosts/check_host.py vectors build/onnxtrain_host
    python examples/hosts/check_host.py vectors python examples/hosts/device.py

The host takes ARTIFACTS FEEDS CHECKPOINT_OUT [--from FILE]... [--delta] and prints one loss per step, as the example
hosts do (docs/devices/test-your-host.md). Needs numpy only. The exit status is 1 if a case fails.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from checkpoint_file import read, require

# Single precision, summed up in another order.
LOSS, TENSOR = 1e-5, 1e-4


def run_host(command, timeout):
    return subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", timeout=timeout, check=False
    )  # fmt: skip


def check(folder, case, command, timeout):
    """Raises ValueError, which says what differs, unless the host does in a case what is expected."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place, "written")
        out.write_bytes(b"before")
        arguments = [folder / case["artifacts"], folder / case["feeds"], out]
        arguments += [x for start in case["from"] for x in ("--from", folder / start)]
        arguments += ["--delta"] if "delta" in case else []
        done = run_host([*command, *map(str, arguments)], timeout)
        losses = [float(line) for line in done.stdout.split()]
        expected = case["losses"]
        if "refused" in case:
            require(
                done.returncode == 1,
                f"exit status {done.returncode} instead of 1; it printed {done.stdout!r}",
            )
            # A host may check all batches first, so that it prints none of the losses before the bad batch.
            require(len(losses) <= len(expected), f"it trained on: the losses are {losses}")
            for word in case["says"]:
                require(word in done.stderr, f"the message does not name '{word}': {done.stderr!r}")
            lines = done.stderr.strip().splitlines()
            # A stack trace is no message.
            require(1 <= len(lines) <= 3, f"the message has {len(lines)} lines: {done.stderr!r}")
            require(out.read_bytes() == b"before", "the checkpoint was written")
            left = sorted(path.name for path in Path(place).iterdir())
            require(left == ["written"], f"files are left behind: {left}")
            expected = expected[: len(losses)]
        else:
            require(done.returncode == 0, f"exit status {done.returncode}: {done.stderr}")
        require(len(losses) == len(expected), f"{len(losses)} losses instead of {len(expected)}")
        worst = max(map(abs, np.subtract(losses, expected)), default=0)
        require(worst <= LOSS, f"a loss differs by {worst:g}")
        if "refused" not in case:
            check_file(out, folder / (case.get("checkpoint") or case["delta"]))


def check_file(written, expected):
    """Raises ValueError unless a checkpoint or a delta has the tensors and metadata of another one."""
    (metadata, tensors), (wanted, others) = read(written), read(expected)
    require(
        tensors.keys() == others.keys(),
        f"the checkpoint's tensors are {sorted(tensors)}, not {sorted(others)}",
    )
    for key, other in others.items():
        tensor = tensors[key]
        same = tensor.dtype == other.dtype and tensor.shape == other.shape
        require(same, f"'{key}' is {tensor.dtype}{[*tensor.shape]}, not {other.dtype}{[*other.shape]}")
        worst = np.abs(tensor.astype(np.float64) - other).max(initial=0)
        require(worst <= TENSOR, f"'{key}' differs by {worst:g}")
    for key, text in wanted.items():
        received = metadata.get(key, "")
        if key in ("format", "version", "fingerprint", "frozen"):
            same = received == text
        elif key == "properties":
            # By `repr`, in which NaN equals NaN, and 3 differs from 3.0.
            same = as_texts(received) == as_texts(text)
        elif key == "optimizer":
            same = json.loads(received)["step"] == json.loads(text)["step"]
        else:
            same = json.loads(received) == json.loads(text)
        require(same, f"the checkpoint's {key} is {received}, not {text}")


def as_texts(text):
    return {name: repr(value) for name, value in json.loads(text).items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="folder that write_vectors.py wrote")
    parser.add_argument("--timeout", type=float, default=60, help="most seconds per case; default: 60")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the host, e.g. python device.py")
    arguments = parser.parse_args()
    if not arguments.command:
        parser.error("give the command of the host, e.g. check_host.py vectors python device.py")
    listed = json.loads((arguments.folder / "vectors.json").read_text("utf-8"))
    failed = 0
    for case in listed["cases"]:
        try:
            check(arguments.folder, case, arguments.command, arguments.timeout)
            print(f"ok      {case['name']}", flush=True)
        except (ValueError, OSError, subprocess.TimeoutExpired) as error:
            failed += 1
            print(f"FAILED  {case['name']}: {error}", flush=True)
    print(f"{len(listed['cases']) - failed} of {len(listed['cases'])} cases passed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
