"""Runs models for a program in another language whose ONNX Runtime is a stand-in: the tests' Java and C#.

Reads requests from the standard input and writes answers to the standard output.

- A request: the path of a model, the number of inputs, the inputs, the number of outputs, their names.
- An answer: 0, the number of outputs, the outputs; or 1 and the text of the error.

Numbers are big-endian int32, texts a length and UTF-8. A tensor is a name, a dtype, a rank, the sizes (int64), the
number of bytes, and the elements (little-endian).
"""

from __future__ import annotations

import struct
import sys
from typing import BinaryIO

import numpy as np
import onnxruntime as ort


class Channel:
    def __init__(self, source: BinaryIO, target: BinaryIO) -> None:
        self._source, self._target = source, target

    def read(self, count: int) -> bytes:
        data = self._source.read(count)
        if len(data) < count:
            raise EOFError
        return data

    def integer(self) -> int:
        return int(struct.unpack(">i", self.read(4))[0])

    def text(self) -> str:
        return self.read(self.integer()).decode()

    def tensor(self) -> tuple[str, np.ndarray]:
        name, dtype = self.text(), self.text()
        rank = self.integer()
        shape = struct.unpack(f">{rank}q", self.read(8 * rank))
        return name, np.frombuffer(self.read(self.integer()), dtype).reshape(shape)

    def write(self, *values: int | str | np.ndarray) -> None:
        for value in values:
            if isinstance(value, int):
                self._target.write(struct.pack(">i", value))
            elif isinstance(value, str):
                encoded = value.encode()
                self._target.write(struct.pack(">i", len(encoded)) + encoded)
            else:
                self.write(value.dtype.name, value.ndim)
                self._target.write(
                    struct.pack(f">{value.ndim}q", *value.shape) + struct.pack(">i", value.nbytes)
                )
                self._target.write(value.tobytes())

    def flush(self) -> None:
        self._target.flush()


def main() -> None:
    channel = Channel(sys.stdin.buffer, sys.stdout.buffer)
    sessions: dict[str, ort.InferenceSession] = {}
    while True:
        try:
            model = channel.text()
            feeds = dict(channel.tensor() for _ in range(channel.integer()))
        except EOFError:
            return
        outputs = [channel.text() for _ in range(channel.integer())]
        try:
            if model not in sessions:
                sessions[model] = ort.InferenceSession(model)
            results = sessions[model].run(outputs, feeds)
        except Exception as error:
            channel.write(1, str(error))
        else:
            channel.write(0, len(results))
            for name, result in zip(outputs, results, strict=True):
                channel.write(name, np.asarray(result))
        channel.flush()


if __name__ == "__main__":
    main()
