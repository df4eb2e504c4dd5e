"""Protocol-buffer wire format, as far as cutting an ONNX model needs it, without the onnx package.

A message is a sequence of fields; a field is a key `(number << 3) | wire type` followed by a value: a varint
(wire type 0), 8 bytes (1), a length and that many bytes (2), or 4 bytes (5). Fields that are not understood
are carried along byte for byte. Field numbers are those of `onnx.proto`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Bytes = bytes | memoryview
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class Field:
    """One field: number, payload (of wire type 2, else empty), value (of a varint, else 0), all its bytes."""

    number: int
    payload: memoryview
    integer: int
    raw: memoryview


def _read_varint(data: memoryview, position: int) -> tuple[int, int]:
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
    """Yields the fields of a message in order.

    Raises:
        ValueError: Not a message, or truncated.
    """
    data = memoryview(message)
    position, end = 0, len(data)
    try:
        while position < end:
            start = position
            key, position = _read_varint(data, position)
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
            if position > end:
                raise ValueError("a field reaches beyond the end of its message")
            yield Field(number, payload, integer, data[start:position])
    except IndexError as error:
        raise ValueError("the message ends within a field") from error


def varints(packed: Bytes) -> list[int]:
    """Returns the numbers of a packed field of varints.

    Raises:
        ValueError: Truncated.
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
    """Returns the varint of a non-negative integer."""
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def integer(number: int, value: int) -> bytes:
    """Returns a varint field."""
    return varint(number << 3 | _VARINT) + varint(value)


def header(number: int, length: int) -> bytes:
    """Returns the key and length with which a field of `length` bytes begins."""
    return varint(number << 3 | _LENGTH) + varint(length)


def embed(number: int, *chunks: Bytes) -> bytes:
    """Returns a field whose payload is the concatenation of `chunks`."""
    return header(number, sum(map(len, chunks))) + b"".join(chunks)


def text(number: int, value: str) -> bytes:
    """Returns a string field."""
    return embed(number, value.encode())


def strings(message: Bytes, number: int) -> list[str]:
    """Returns the values of a repeated string field."""
    return [bytes(f.payload).decode() for f in parse(message) if f.number == number]


def string(message: Bytes, number: int) -> str:
    """Returns the value of a string field, "" if it is absent."""
    return (strings(message, number) or [""])[-1]


def messages(message: Bytes, number: int) -> list[memoryview]:
    """Returns the payloads of a repeated message field."""
    return [f.payload for f in parse(message) if f.number == number]


def total(chunks: Iterable[Bytes]) -> int:
    """Returns the length of all chunks together."""
    return sum(len(chunk) for chunk in chunks)
