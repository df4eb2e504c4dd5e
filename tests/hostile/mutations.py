"""Damage and malice: seeded changes of bytes, JSON texts, ONNX models and the files beside them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

Rng = np.random.Generator

HUGE = [2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1]


def choose(rng: Rng, options: Any) -> Any:
    """Returns one of `options`, not turned into a numpy value."""
    return options[int(rng.integers(len(options)))]


def damage(rng: Rng, content: bytes) -> bytes:
    """Returns `content` with flipped bits, other bytes, a piece cut, repeated, moved or zeroed, or the end gone."""
    data = bytearray(content)
    if not data:
        return os.urandom(8)
    kind = rng.integers(7)
    start = int(rng.integers(len(data)))
    length = int(rng.integers(1, 1 + min(64, len(data) - start)))
    piece = data[start : start + length]
    if kind == 0:
        for _ in range(rng.integers(1, 9)):
            data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        for _ in range(rng.integers(1, 5)):
            data[rng.integers(len(data))] = choose(rng, [0, 1, 0x7F, 0x80, 0xFE, 0xFF])
    elif kind == 2:
        del data[start:]
    elif kind == 3:
        del data[start : start + length]
    elif kind == 4:
        data[start:start] = piece * int(rng.integers(1, 50))
    elif kind == 5:
        data[start : start + length] = bytes(len(piece))
    else:
        data[start : start + length] = rng.integers(0, 256, length, dtype=np.uint8).tobytes()
    return bytes(data)


def _scalar(rng: Rng) -> Any:
    deep: Any = 0
    for _ in range(int(choose(rng, [10, 200]))):
        deep = [deep]
    return choose(
        rng,
        [
            None, True, False, 0, -1, 1, 3, 0.5, float("nan"), float("inf"), -float("inf"), 1e308, 10**400,
            *HUGE, -(2**63), "", "x", "../outside/secret.bin", "\0", "\ud800", "é" * 300, [], {}, [[]], deep,
            [1, "a", None], {"a": {}}, [2**40, 2**40], "float32", "F64", "int64", "string",
        ],
    )  # fmt: skip


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Returns every (container, key) of a JSON tree."""
    pending, found = [tree], []
    while pending:
        node = pending.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else []
        for key in keys:
            found.append((node, key))
            pending.append(node[key])
    return found


def edit_json(rng: Rng, text: str) -> str:
    """Returns a JSON text with values replaced, removed, renamed, repeated or nested, or with keys twice."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):  # it has been edited before
        return text
    for _ in range(int(rng.integers(1, 3))):
        places = _places(tree)
        if not places:
            return json.dumps(_scalar(rng))
        node, key = choose(rng, places)
        kind = rng.integers(7)
        if kind <= 2:
            node[key] = _scalar(rng)
        elif kind == 3:
            del node[key]
        elif kind == 4 and isinstance(node, dict):
            node[str(choose(rng, ["", "../x", "name", "w", "x" * 2000, "parameter/w1"]))] = node.pop(key)
        elif kind == 5 and isinstance(node, list):
            node.extend([node[key]] * int(choose(rng, [1, 2, 1000])))
        else:
            other, other_key = choose(rng, places)
            node[key] = json.loads(json.dumps(other[other_key]))
    result = json.dumps(tree)
    kind = rng.integers(12)
    if kind == 0 and "{" in result:  # the same key twice
        at = choose(rng, [i for i, c in enumerate(result) if c == "{" and result[i + 1] == '"'] or [0])
        stop = result.find(",", at)
        if stop > 0:
            result = result[: stop + 1] + result[at + 1 : stop + 1] + result[stop + 1 :]
    elif kind == 1:
        result = "[" * 20_000 + result
    elif kind == 2:
        result = result[: int(rng.integers(len(result)))]
    return result


def edit_safetensors(rng: Rng, content: bytes) -> bytes:
    """Returns a safetensors file with another header, whose metadata holds JSON texts itself."""
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].decode()
    if rng.integers(2):
        tree = json.loads(header)
        metadata = tree["__metadata__"]
        texts = [k for k, v in metadata.items() if v[:1] in "[{"]
        key = choose(rng, texts)
        metadata[key] = edit_json(rng, metadata[key])
        header = json.dumps(tree)
    else:
        header = edit_json(rng, header)
    text = header.encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    size = len(text) if rng.integers(8) else int(choose(rng, [0, 1, *HUGE]))
    return size.to_bytes(8, "little") + text + content[8 + length :]


def _tensors(model: onnx.ModelProto) -> list[TensorProto]:
    attributes = [a.t for node in model.graph.node for a in node.attribute if a.type == a.TENSOR]
    return [*model.graph.initializer, *attributes]


def _size(rng: Rng, model: onnx.ModelProto) -> None:
    infos = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    info = choose(rng, infos)
    dims = info.type.tensor_type.shape.dim
    if len(dims):
        choose(rng, dims).dim_value = choose(rng, [-1, 0, 1, 3, *HUGE])
    else:
        info.type.tensor_type.elem_type = int(rng.integers(0, 30))


def _tensor(rng: Rng, model: onnx.ModelProto) -> None:
    tensors = _tensors(model)
    if not tensors:
        return _size(rng, model)
    tensor = choose(rng, tensors)
    kind = rng.integers(4)
    if kind == 0:
        tensor.dims.append(choose(rng, [-1, 0, 2, *HUGE]))
    elif kind == 1 and len(tensor.dims):
        tensor.dims[int(rng.integers(len(tensor.dims)))] = choose(rng, [-1, 0, 2, *HUGE])
    elif kind == 2:
        tensor.data_type = int(rng.integers(0, 30))
    else:
        tensor.raw_data = damage(rng, tensor.raw_data)
    return None


_OF_CONSTANTS = {
    "_float": 0.5,
    "_int": 3,
    "_string": "text",
    "_floats": [0.5, 2.0],
    "_ints": [1, 2],
    "_strings": ["a", "b"],
}
"""Ends of names of the attributes of Constant, and what each is for."""


def _node(rng: Rng, model: onnx.ModelProto) -> None:
    nodes = model.graph.node
    node = choose(rng, nodes)
    kind = rng.integers(10)
    names = [n for other in nodes for n in (*other.input, *other.output)]
    if kind == 0 and len(node.input):
        node.input[int(rng.integers(len(node.input)))] = choose(rng, [*names, "", "nothing"])
    elif kind == 1 and len(node.output):
        node.output[int(rng.integers(len(node.output)))] = choose(rng, [*names, "new"])
    elif kind == 2:
        ops = [
            "Relu",
            "Add",
            "Loop",
            "If",
            "Einsum",
            "Resize",
            "ConstantOfShape",
            "EyeLike",
            "Range",
            "Tile",
            "Nope",
        ]
        node.op_type = choose(rng, [*ops, *(n.op_type for n in nodes)])
    elif kind == 3 and len(node.attribute):
        attribute = choose(rng, node.attribute)
        attribute.i = choose(rng, [-1, 0, 7, *HUGE])
        attribute.type = int(rng.integers(0, 12))
    elif kind == 3 or kind == 7:  # a Constant of a value that is, or is not, of the kind that its name says
        name = choose(rng, [f"value{kind}" for kind in ("", *_OF_CONSTANTS)])
        constant = onnx.helper.make_node("Constant", [], [choose(rng, [*names, "constant"])])
        constant.attribute.append(onnx.helper.make_attribute(name, choose(rng, list(_OF_CONSTANTS.values()))))
        nodes.insert(int(rng.integers(len(nodes) + 1)), constant)
    elif kind == 4:
        node.attribute.append(onnx.helper.make_attribute("axis", choose(rng, [-99, 3, 2**40])))
    elif kind == 5:
        nodes.append(node)
    elif kind >= 8:  # which ONNX Runtime does not mind
        moved = onnx.NodeProto()
        moved.CopyFrom(node)
        nodes.remove(node)
        nodes.insert(int(rng.integers(len(nodes) + 1)), moved)
    else:
        nodes.remove(node)


def _nest(rng: Rng, model: onnx.ModelProto) -> None:
    """Graphs within graphs, less and more deeply than readers of protobuf go."""
    depth = int(choose(rng, [3, 20, 33]))
    inner = onnx.GraphProto(name="inner")
    inner.node.append(onnx.helper.make_node("Constant", [], ["c"], value_float=1.0))
    for _ in range(depth):
        outer = onnx.GraphProto(name="outer")
        outer.node.append(onnx.helper.make_node("If", ["c"], ["d"], then_branch=inner, else_branch=inner))
        inner = outer
        if inner.ByteSize() > 100_000:
            break
    model.graph.node.extend(inner.node)


def edit_model(rng: Rng, content: bytes) -> bytes:
    """Returns a model with other sizes, types, names, nodes or versions, or with another manifest."""
    model = onnx.ModelProto.FromString(content)
    manifest = next((p for p in model.metadata_props if p.key == "onnxtrain.manifest"), None)
    for _ in range(int(rng.integers(1, 3))):
        kind = rng.integers(11)
        if kind <= 2 and manifest is not None:
            manifest.value = edit_json(rng, manifest.value).encode("utf-8", "replace").decode()
        elif kind <= 4:
            _size(rng, model)
        elif kind <= 6:
            _tensor(rng, model)
        elif kind <= 8:
            _node(rng, model)
        elif kind == 9:
            _nest(rng, model)
        else:
            model.opset_import[0].version = choose(rng, [-1, 0, 1, 7, 21, 26, 27, 2**40])
            model.ir_version = choose(rng, [0, 3, 10, 13, 14, 2**40])
    return model.SerializeToString()


LOCATIONS = [
    "../outside/secret.bin",
    "./../outside/secret.bin",
    "sub/../../outside/secret.bin",
    "link.bin",
    "dirlink/secret.bin",
    "{outside}/secret.bin",
    "file://{outside}/secret.bin",
    "..\\outside\\secret.bin",
    "C:\\secret.bin",
    "../outside/secret.bin\0.bin",
    "",
    ".",
    "..",
    "/",
    "/dev/zero",
    "/proc/self/environ",
    "nothing.bin",
    "folder",
    "pipe",
    "*/_ORT_MEM_ADDR_/*",
    "x" * 5000,
]


def edit_external_data(rng: Rng, folder: Path, model: str) -> None:
    """Changes what a model says about its external data, or the data, or what lies at its place."""
    path = folder / model
    proto = onnx.load(path, load_external_data=False)
    tensor = choose(rng, [t for t in _tensors(proto) if t.data_location == TensorProto.EXTERNAL])
    entries = {e.key: e for e in tensor.external_data}
    data = folder / entries["location"].value
    outside = str(folder.parent / "outside")
    (folder / "link.bin").symlink_to(Path(outside) / "secret.bin")
    (folder / "dirlink").symlink_to(outside)
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    kind = rng.integers(8)
    if kind <= 3:
        entries["location"].value = choose(rng, LOCATIONS).format(outside=outside)
        if rng.integers(2):
            entries["offset"].value = "0"
    elif kind == 4:
        entry = choose(rng, list(entries.values()))
        numbers = [
            "-1",
            "1",
            "1e3",
            " 0",
            "0x10",
            "99999999999999999999",
            "18446744073709551615",
            "",
            "٣",
            "1_0",
        ]
        entry.value = choose(rng, [*map(str, HUGE), *numbers])
    elif kind == 5:
        choose(rng, [_tensor, _size])(rng, proto)
        tensor.dims.append(choose(rng, [2, *HUGE]))
    elif kind == 6:
        data.write_bytes(damage(rng, data.read_bytes()))
    else:
        data.unlink()
        choose(
            rng, [lambda: data.symlink_to(Path(outside) / "secret.bin"), data.mkdir, lambda: os.mkfifo(data)]
        )()
    if rng.integers(6) == 0:  # the same key twice: readers take the first or the last
        tensor.external_data.add(key="location", value="../outside/secret.bin")
    if rng.integers(6) == 0:
        proto.graph.node.append(onnx.helper.make_node("Constant", [], ["leaked"], value=tensor))
    content = proto.SerializeToString()
    path.write_bytes(content if rng.integers(8) else damage(rng, content))
