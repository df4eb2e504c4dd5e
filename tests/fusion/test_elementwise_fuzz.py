"""Random nets of elementwise ops, on numbers that include NaN and infinities, integers and booleans.

`ONNXTRAIN_ELEMENTWISE_CASES` is the number of nets; `ONNXTRAIN_ELEMENTWISE_SEED` the first one's seed.

Nets of exact ops must give the bits of ONNX Runtime's ops, by the functions' bodies and by the kernels. For other nets
the bodies must give these bits. Of each call, the kernel must give the bits of the instructions one after the other,
each of which `tests/kernels/test_elementwise.py` compares with ONNX Runtime or float64; and, for nine of ten elements,
numbers near those of the body. Elements that change by as much if the net's inputs change by their last bits don't
count.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from fusion.rewriting import rewritten
from fusion.test_elementwise import BINARY, COMPARISONS, UNARY
from kernels.test_elementwise import (
    OPERATIONS,
    SPECIAL,
    Instruction,
    assert_same_bits,
    model_of,
    session_of,
    step_by_step,
)
from onnxtrain.fusion import ElementwisePass
from onnxtrain.passes import to_proto
from onnxtrain.runtime.kernels import kernel_library, register_kernels
from passes._models import run

CASES = int(os.environ.get("ONNXTRAIN_ELEMENTWISE_CASES", "60"))
SEED = int(os.environ.get("ONNXTRAIN_ELEMENTWISE_SEED", "0"))

EXACT = ("Neg", "Abs", "Sqrt", "Relu", "Sign", "Floor", "Ceil", "Round", "LeakyRelu")
SHAPES = {"full": "n, 4, 6", "last": "6", "rows": "n, 1, 1", "middle": "4, 1", "one": "1", "scalar": ""}
BOOLS = {"b": "n, 4, 6", "b_last": "6", "b_rows": "n, 1, 1", "b_middle": "4, 1"}
MASKS = {"triangle": np.tri(4, 6, dtype=bool), "yes": np.bool_(True)}
CONSTANTS = [0.0, -0.0, 1, 2, 3, 0.5, -1, np.inf, -np.inf, np.nan, 1e-45, 1e-39, 3.4e38]


class _Net:
    """A random net.

    Args:
        seed: of the ops and the inputs.
        exact: True to draw ops only that ONNX Runtime and the kernels round alike.
    """

    def __init__(self, seed: int, exact: bool) -> None:
        self._rng = np.random.default_rng([seed, exact])
        self._unary = EXACT if exact else UNARY
        self._binary = BINARY[:-1] if exact else BINARY
        self._floats, self._others = ["full"], [*SHAPES]
        self._masks, self._ints = list[str](), ["i"]
        self._lines: list[str] = []
        self._constants = dict(zip("cdef", self._rng.choice(CONSTANTS, 4).tolist(), strict=True))
        for number in range(int(self._rng.integers(3, 40))):
            self._add(number)
        results = {self._pick(self._floats) for _ in range(3)} | {self._floats[-1]}
        self.proto = self._model(sorted(results - {"full"}))

    def _pick(self, names: Sequence[str]) -> str:
        # Most often a recent value, so that chains are long.
        return names[max(0, len(names) - 1 - int(self._rng.exponential(3)))]

    def _mask(self, *, whole: bool) -> str:
        """Returns most often a recent mask, else an input or an initializer; of all elements for `whole`."""
        if not self._masks or self._rng.random() < (0.1 if whole else 0.3):
            return "b" if whole else str(self._rng.choice([*BOOLS, *MASKS]))
        return self._pick(self._masks)

    def _operand(self) -> str:
        kind = self._rng.random()
        if kind < 0.5:
            return self._pick(self._floats)
        return str(self._rng.choice(self._others if kind < 0.8 else [*self._constants]))

    def _pair(self) -> str:
        pair = [self._pick(self._floats), self._operand()]
        return ", ".join(pair if self._rng.random() < 0.5 else pair[::-1])

    def _add(self, number: int) -> None:
        name, drawn, choice = f"v{number}", self._rng.random(), self._rng.choice
        if drawn < 0.25:
            line = f"{choice(self._unary)}({self._pick(self._floats)})"
        elif drawn < 0.5:
            line = f"{choice(self._binary)}({self._pair()})"
            if line.startswith(("Max", "Min")):
                # Which of 0 and -0 is the larger one in ONNX Runtime depends on how the operands broadcast.
                self._lines.append(f"w{number} = {line}")
                line = f"Add(w{number}, zero)"
        elif drawn < 0.52:
            self._lines.append(
                f"w{number} = Clip({self._pick(self._floats)}, {', '.join(choice(['two', 'three', 'zero'], 2))})"
            )
            line = f"Add(w{number}, zero)"
        elif drawn < 0.54:
            line = f"Pow({self._pick(self._floats)}, {choice(['two', 'three'])})"
        elif drawn < 0.75:
            return self._add_mask(name)
        elif drawn < 0.87:
            # ONNX Runtime's Where returns 0 for -0 (1.32).
            self._lines.append(f"w{number} = Where({self._mask(whole=False)}, {self._pair()})")
            line = f"Add(w{number}, zero)"
        elif drawn < 0.95:
            source = self._pick(self._ints) if self._rng.random() < 0.3 else self._mask(whole=True)
            line = f"Cast<to = 1>({source})"
        elif drawn < 0.97:
            self._lines.append(f"n{number} = Cast<to = 7>({self._pick(self._floats)})")
            self._ints.append(f"n{number}")
            return None
        elif drawn < 0.985:
            line = f"Softmax({self._pick(self._floats)})"
        else:
            # Over the middle axis, it is not part of a program, whose maxima of NaN differ from ONNX Runtime's.
            self._lines.append(f"{name} = ReduceMax<keepdims = 1>({self._pick(self._floats)}, middle_axis)")
            self._others.append(name)
            return None
        self._lines.append(f"{name} = {line}")
        self._floats.append(name)
        return None

    def _add_mask(self, name: str) -> None:
        drawn, choice = self._rng.random(), self._rng.choice
        if drawn < 0.4:
            line = f"{choice(COMPARISONS)}({self._pair()})"
        elif drawn < 0.5:
            line = f"IsNaN({self._pick(self._floats)})"
        elif drawn < 0.55:
            line = f"{choice(COMPARISONS)}({self._pick(self._ints)}, i)"
        elif drawn < 0.65:
            line = f"Not({self._mask(whole=True)})"
        elif drawn < 0.7:
            # A program computes neither of these.
            line = f"{choice(['Equal', 'Xor'])}({self._mask(whole=True)}, {self._mask(whole=False)})"
        else:
            line = f"{choice(['And', 'Or'])}({self._mask(whole=True)}, {self._mask(whole=False)})"
        self._lines.append(f"m{name} = {line}")
        self._masks.append(f"m{name}")

    def _model(self, results: Sequence[str]) -> onnx.ModelProto:
        inputs = [f"float[{shape}] {name}" if shape else f"float {name}" for name, shape in SHAPES.items()]
        inputs += ["int64[n, 4, 6] i", *(f"bool[{shape}] {name}" for name, shape in BOOLS.items())]
        outputs = ", ".join(f"float[n, 4, 6] {name}" for name in results) or "float[n, 4, 6] y"
        body = " ".join(self._lines) if results else "y = Neg(full)"
        proto = onnx.parser.parse_model(
            f'<ir_version: 10, opset_import: ["": 21]> net ({", ".join(inputs)}) => ({outputs}) {{ {body} }}'
        )
        numbers = self._constants | {"zero": 0.0, "two": 2.0, "three": 3.0}
        proto.graph.initializer.extend(numpy_helper.from_array(np.float32(v), k) for k, v in numbers.items())
        arrays = {**MASKS, "middle_axis": np.array([1])}
        proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), k) for k, v in arrays.items())
        return proto

    def feeds(self) -> dict[str, np.ndarray]:
        """Returns inputs of which some numbers are special; n is 5."""
        rng = self._rng
        feeds: dict[str, np.ndarray] = {}
        for name, shape in SHAPES.items():
            x = np.array(rng.standard_normal(_sizes(shape)), np.float32)
            some = rng.random(x.shape) < 0.1
            feeds[name] = np.where(some, rng.choice(SPECIAL, x.shape), x).astype(np.float32)
        feeds["i"] = rng.choice([0, 1, -1, 2, 1 << 24, (1 << 24) + 1, 1 << 62, -(1 << 63)], (5, 4, 6))
        feeds |= {name: rng.random(_sizes(shape)) < 0.5 for name, shape in BOOLS.items()}
        return feeds


def _sizes(shape: str) -> list[int]:
    return [5 if size == "n" else int(size) for size in shape.split(", ") if size]


def with_kernels(proto: onnx.ModelProto, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    register_kernels(options, [function.name for function in proto.functions])
    return ort.InferenceSession(proto.SerializeToString(), options).run(None, feed)


def _near(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.isclose(one, other, rtol=1e-3, atol=1e-5, equal_nan=True)


def check_calls(proto: onnx.ModelProto, feed: dict[str, np.ndarray]) -> None:
    """Compares the kernel's results in each call with those of its instructions, and with those of the body."""
    calls = [node for node in proto.graph.node if node.domain == "onnxtrain"]
    if not calls:
        return
    more = onnx.ModelProto()
    more.CopyFrom(proto)
    names = list(dict.fromkeys(name for node in calls for name in (*node.input, *node.output) if name))
    del more.graph.output[:]
    more.graph.output.extend(
        onnx.helper.make_empty_tensor_value_info(name) for name in names if name not in feed
    )
    names = [output.name for output in more.graph.output]
    values = dict(zip(names, run(more, feed), strict=True)) | feed
    nudged = {name: x * np.float32(1 + 2**-22) if x.dtype == np.float32 else x for name, x in feed.items()}
    others = dict(zip(names, run(more, nudged), strict=True)) | nudged
    for node in calls:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        inputs = [values[name] for name in node.input if name]
        code = np.reshape(attributes["program"], (-1, 4)).tolist()
        program: list[Instruction] = [
            (OPERATIONS[name], *(place for place in operands if place >= 0)) for name, *operands in code
        ]
        numbers = np.array(attributes["constants"], np.int64).astype(np.int32).view(np.float32).tolist()
        outputs = [f"y{i}" for i in range(len(node.output))]
        model = model_of(
            {k: v for k, v in attributes.items() if k != "inputs"}, [x.ndim for x in inputs], outputs
        )
        got = session_of(model).run(None, {f"x{i}": x for i, x in enumerate(inputs)})
        steps = step_by_step(program, numbers, attributes["outputs"], inputs)
        for value, expected, name in zip(got, steps, node.output, strict=True):
            assert_same_bits(value, expected, name)
            near = _near(value, values[name]) | ~_near(others[name], values[name])
            assert near.mean() >= 0.9, f"{name}: {value[~near][:5]} instead of {values[name][~near][:5]}"


@pytest.mark.filterwarnings("ignore:invalid value|overflow|divide by zero:RuntimeWarning")
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "all"])
@pytest.mark.parametrize("part", range(4))
def test_random_nets_of_any_numbers(part: int, exact: bool) -> None:
    fused = masks = 0
    for seed in range(SEED + part, SEED + CASES, 4):
        net = _Net(seed, exact)
        feed = net.feeds()
        new = to_proto(rewritten(net.proto, ElementwisePass()))
        fused += sum(node.domain == "onnxtrain" for node in new.graph.node)
        # A call reads a bool value, or the Cast of one.
        casts = {node.output[0]: node.input[0] for node in new.graph.node if node.op_type == "Cast"}
        bools = [
            casts.get(name, name)
            for node in new.graph.node
            if node.domain == "onnxtrain"
            for name in node.input
        ]
        masks += sum(name in (*BOOLS, *MASKS) for name in bools)
        expected = run(net.proto, feed)
        try:
            for got, want in zip(run(new, feed), expected, strict=True):
                np.testing.assert_array_equal(got, want)
            if kernel_library() is None:
                continue
            if exact:
                for got, want in zip(with_kernels(new, feed), expected, strict=True):
                    np.testing.assert_array_equal(got, want)
            else:
                check_calls(new, feed)
        except Exception as error:
            error.add_note(f"seed {seed}, exact {exact}")
            raise
    assert fused >= CASES // 8
    assert masks >= CASES // 8
