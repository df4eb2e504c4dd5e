"""Parses and encodes protobuf messages without the onnx package, as far as needed for editing an ONNX model.

A message is a sequence of fields. A field is a key `(number << 3) | wire type` and a value: a varint (wire type 0), 8
bytes (1), a length and that many bytes (2), or 4 bytes (5). Field numbers are those of `onnx.proto`. Unknown fields are
copied unchanged.

>>> [(field.number, bytes(field.payload)) for field in parse(text(4, "Gemm"))]
[(4, b'Gemm')]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

Bytes = bytes | memoryview
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


# A tuple, because a dataclass takes as long to make as the rest of parsing a field.
class Field(NamedTuple):
    """A field of a message.

    Attributes:
        number: number of the field in `onnx.proto`, e.g. 7 for a ModelProto's graph.
        payload: the bytes after the length, for wire type 2 (a string, bytes or a message); else empty.
        integer: the value of a varint, else 0.
        raw: all bytes of the field, including the key.
    """

    number: int
    payload: memoryview
    integer: int
    raw: memoryview


def _read_varint(data: memoryview, position: int) -> tuple[int, int]:
    """Reads the varint at `position`; returns its value and the position after it."""
    # Seven bits per byte, lowest first; the eighth bit means that another byte follows.
    result = shift = 0
    while True:
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, position
        shift += 7
        if shift > 63:
            raise ValueError("a varint is longer than 10 bytes")


def parse(message: Bytes) -> Iterator[Field]:
    """Yields the fields of a message in order, as views of its memory.

    Raises:
        ValueError: the bytes are not a message, or are truncated.
    """
    # Views, so that the weights of a model are not copied.
    data = memoryview(message)
    position, end = 0, len(data)
    try:
        while position < end:
            start = position
            key = data[position]
            position += 1
            # Most keys are one byte, for which no call is worth it.
            if key >= 0x80:
                key, position = _read_varint(data, start)
            number, kind = key >> 3, key & 7
            payload, integer = data[:0], 0
            if kind == _VARINT:
                integer, position = _read_varint(data, position)
            elif kind == _LENGTH:
                length, position = _read_varint(data, position)
                payload = data[position : position + length]
                position += length
            elif kind in (_FIXED64, _FIXED32):
                position += 8 if kind == _FIXED64 else 4
            else:
                raise ValueError(f"unknown wire type {kind}")
            # Slices of a memoryview are silently truncated, so lengths must be checked.
            if position > end:
                raise ValueError("a field reaches beyond the end of its message")
            yield Field(number, payload, integer, data[start:position])
    except IndexError as error:
        raise ValueError("the message ends within a field") from error


def varints(packed: Bytes) -> list[int]:
    """Reads a packed field of varints, such as the dims of a tensor.

    Raises:
        ValueError: the field is truncated.
    """
    data, position, numbers = memoryview(packed), 0, []
    try:
        while position < len(data):
            number, position = _read_varint(data, position)
            numbers.append(number)
    except IndexError as error:
        raise ValueError("the message ends within a number") from error
    return numbers


def varint(value: int) -> bytes:
    """Encodes a non-negative integer as a varint."""
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def integer(number: int, value: int) -> bytes:
    """Encodes an integer field."""
    return varint(number << 3 | _VARINT) + varint(value)


def header(number: int, length: int) -> bytes:
    """Encodes the start of a length-delimited field: the key for field `number`, and the payload's length in bytes."""
    return varint(number << 3 | _LENGTH) + varint(length)


def embed(number: int, *chunks: Bytes) -> bytes:
    """Encodes a length-delimited field whose payload is the concatenation of `chunks`."""
    return header(number, sum(map(len, chunks))) + b"".join(chunks)


def text(number: int, value: str) -> bytes:
    """Encodes a string field."""
    return embed(number, value.encode())


def strings(message: Bytes, number: int) -> list[str]:
    """Returns the values of a repeated string field."""
    return [bytes(f.payload).decode() for f in parse(message) if f.number == number]


def string(message: Bytes, number: int) -> str:
    """Returns the value of a string field; "" if it is absent."""
    # If a field occurs several times, protobuf uses the last one.
    return (strings(message, number) or [""])[-1]


def messages(message: Bytes, number: int) -> list[memoryview]:
    """Returns the payloads of a repeated message field."""
    return [f.payload for f in parse(message) if f.number == number]


def total(chunks: Iterable[Bytes]) -> int:
    """Returns the total length of all chunks in bytes."""
    return sum(len(chunk) for chunk in chunks)
