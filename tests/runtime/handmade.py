"""Training artifacts written by hand with onnx.helper: gradients derived on paper, no code of the desk.

Each function returns an `Artifacts`, whose numpy twin (`reference_*`) is an independent implementation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from models import parse_nodes
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.errors import CheckpointError
from onnxtrain.runtime.manifest import fingerprint

OPSET = [helper.make_opsetid("", 21)]
IGNORE = -100


@dataclass
class Artifacts:
    """The models of a run as protos, its manifest and its initial values."""

    training: onnx.ModelProto
    evaluation: onnx.ModelProto
    optimizer: onnx.ModelProto | None
    manifest: dict
    parameters: dict[str, np.ndarray]
    statistics: dict[str, np.ndarray]

    def state(self, **options: bool) -> CheckpointState:
        trainable = [p["name"] for p in self.manifest["parameters"] if p["trainable"]]
        return CheckpointState.from_arrays(self.parameters, trainable, self.statistics, **options)

    def save(self, directory: Path) -> Path:
        for name, model in (
            ("training", self.training),
            ("eval", self.evaluation),
            ("optimizer", self.optimizer),
        ):
            if model is not None:
                onnx.save(model, directory / f"{name}_model.onnx")
        CheckpointState.save_checkpoint(self.state(), directory / "checkpoint")
        return directory


def open_run(directory: Path, state: CheckpointState) -> tuple[Module, Optimizer]:
    """Open the models of a run that `Artifacts.save` has written."""
    module = Module(directory / "training_model.onnx", state, directory / "eval_model.onnx")
    return module, Optimizer(directory / "optimizer_model.onnx", module)


def train(module: Module, optimizer: Optimizer, steps: int, seed: int) -> None:
    """Take steps on random batches of `mlp`: x float32 [8, 4], labels int64 [8]."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        module(rng.standard_normal((8, 4)).astype(np.float32), rng.integers(0, 3, 8))
        optimizer.step()
        module.lazy_reset_grad()


def check_damaged_checkpoints(path: Path, contents: Iterable[bytes], least: int) -> None:
    """Assert that damaged checkpoints raise `CheckpointError` or load, and that at least so many raise it."""
    messages = []
    for content in contents:
        path.write_bytes(content)
        try:
            CheckpointState.load_checkpoint(path)
        except CheckpointError as error:
            messages.append(str(error))
    assert all("Checkpoint verification failed." in message for message in messages)
    assert len(messages) > least


def info(name: str, array_or_dtype, shape=None) -> onnx.ValueInfoProto:
    if isinstance(array_or_dtype, np.ndarray):
        code = (
            TensorProto.BFLOAT16
            if array_or_dtype.dtype.name == "bfloat16"
            else helper.np_dtype_to_tensor_dtype(array_or_dtype.dtype)
        )
        return helper.make_tensor_value_info(name, code, array_or_dtype.shape)
    return helper.make_tensor_value_info(name, array_or_dtype, shape)


def model(nodes, inputs, outputs, manifest, initializers=(), functions=(), opsets=OPSET, check=True, **graph):
    built = helper.make_model(
        helper.make_graph(nodes, "handmade", inputs, outputs, list(initializers), **graph),
        opset_imports=list(opsets),
        ir_version=10,
        functions=list(functions),
    )
    helper.set_model_props(built, {"onnxtrain.manifest": json.dumps(manifest), "author": "hand"})
    if check:
        onnx.checker.check_model(built, full_check=True)
    return built


def make_manifest(inputs, targets, outputs, parameters, trainable, statistics=None, optimizer=None):
    statistics = statistics or {}

    def entry(name, array):
        return {"name": name, "dtype": array.dtype.name, "shape": list(array.shape)}

    def signature(group):
        return [(n, a.dtype.name, a.shape) for n, a in group.items()]

    return {
        "format": "onnxtrain",
        "version": 1,
        "fingerprint": fingerprint(signature(parameters), signature(statistics)),
        "files": {"training_model": "training_model.onnx", "checkpoint": "checkpoint"},
        "inputs": inputs,
        "targets": targets,
        "outputs": outputs,
        "loss": outputs[0],
        "parameters": [
            {**entry(n, a), "trainable": n in trainable, "gradient": f"{n}_grad" if n in trainable else None}
            for n, a in parameters.items()
        ],
        "statistics": [{**entry(n, a), "output": f"{n}_updated"} for n, a in statistics.items()],
        "optimizer": optimizer,
        "opset": 21,
    }


ADAMW = {
    "type": "AdamW",
    "moments": ["momentum0", "momentum1"],
    "learning_rate": "learning_rate",
    "step": "step",
}
SGD = {"type": "SGD", "moments": [], "learning_rate": "learning_rate", "step": "step"}


def constant(name: str, value: float, dtype=np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(value, dtype), name)


def optimizer_model(manifest: dict, parameters: dict[str, np.ndarray], weight_decay: float = 0.01):
    """SGD, or AdamW in Hugging Face's form (betas 0.9, 0.999, eps 1e-6), per trainable parameter."""
    adam = manifest["optimizer"]["type"] == "AdamW"
    nodes, outputs = [], []
    inputs = [info("learning_rate", TensorProto.FLOAT, []), info("step", TensorProto.INT64, [])]
    values = {"b1": 0.9, "b2": 0.999, "c1": 0.1, "c2": 0.001, "one": 1.0, "eps": 1e-6, "wd": weight_decay}
    constants = [constant(name, value) for name, value in values.items()]

    def op(kind, output, *args, **attributes):
        nodes.append(helper.make_node(kind, list(args), [output], **attributes))

    if adam:
        op("Cast", "t", "step", to=TensorProto.FLOAT)
        for b in "12":
            op("Pow", f"b{b}t", f"b{b}", "t")
            op("Sub", f"corr{b}", "one", f"b{b}t")
        op("Sqrt", "root2", "corr2")
        op("Div", "ratio", "root2", "corr1")
        op("Mul", "rate", "learning_rate", "ratio")
        op("Mul", "decay", "learning_rate", "wd")
    for entry in manifest["parameters"]:
        p = entry["name"]
        if not entry["trainable"]:
            continue
        array = parameters[p]
        inputs += [info(p, array), info(f"{p}_grad", array)]
        outputs.append(info(f"{p}_updated", array))
        if not adam:
            op("Mul", f"{p}_delta", "learning_rate", f"{p}_grad")
            op("Sub", f"{p}_updated", p, f"{p}_delta")
            continue
        inputs += [info(f"{p}_momentum0", array), info(f"{p}_momentum1", array)]
        outputs += [info(f"{p}_momentum0_updated", array), info(f"{p}_momentum1_updated", array)]
        op("Mul", f"{p}_g2", f"{p}_grad", f"{p}_grad")
        for i, term, old, new in ((0, f"{p}_grad", "b1", "c1"), (1, f"{p}_g2", "b2", "c2")):
            op("Mul", f"{p}_old{i}", old, f"{p}_momentum{i}")
            op("Mul", f"{p}_new{i}", new, term)
            op("Add", f"{p}_momentum{i}_updated", f"{p}_old{i}", f"{p}_new{i}")
        op("Sqrt", f"{p}_root", f"{p}_momentum1_updated")
        op("Add", f"{p}_denominator", f"{p}_root", "eps")
        op("Div", f"{p}_direction", f"{p}_momentum0_updated", f"{p}_denominator")
        op("Mul", f"{p}_delta", "rate", f"{p}_direction")
        op("Sub", f"{p}_u", p, f"{p}_delta")
        op("Mul", f"{p}_shrink", "decay", f"{p}_u")
        op("Sub", f"{p}_updated", f"{p}_u", f"{p}_shrink")
    return model(nodes, inputs, outputs, manifest, constants if adam else ())


def mlp(frozen=("fc1.bias",), optimizer=ADAMW, hidden=8, seed=0, extra_output=True) -> Artifacts:
    """x [batch, 4] -> Gemm -> Relu -> Gemm -> logits [batch, 3] -> mean cross-entropy with int64 labels.

    d logits = (softmax - onehot) / batch; dW = d^T a; db = sum d; da = d W; dh = da * (h > 0).
    """
    rng = np.random.default_rng(seed)
    shapes = {"fc1.weight": (hidden, 4), "fc1.bias": (hidden,), "fc2.weight": (3, hidden), "fc2.bias": (3,)}
    parameters = {n: (rng.standard_normal(s) * 0.5).astype(np.float32) for n, s in shapes.items()}
    trainable = [n for n in parameters if n not in frozen]
    labels = {"count": 3, "ignore_index": IGNORE}
    outputs = ["loss", "logits"] if extra_output else ["loss"]
    manifest = make_manifest(
        [{"name": "x", "dtype": "float32", "shape": ["batch", 4]}],
        [{"name": "labels", "dtype": "int64", "shape": ["batch"], "class_labels": labels}],
        outputs,
        parameters,
        trainable,
        optimizer=optimizer,
    )

    def node(kind, inputs, outputs, **attributes):
        return helper.make_node(kind, inputs.split(), outputs.split(), **attributes)

    forward = [
        node("Gemm", "x fc1.weight fc1.bias", "h", transB=1),
        node("Relu", "h", "a"),
        node("Gemm", "a fc2.weight fc2.bias", "logits", transB=1),
        node("SoftmaxCrossEntropyLoss", "logits labels", "loss", ignore_index=IGNORE),
    ]
    gradients = {
        "fc2.weight": [node("Gemm", "d a", "fc2.weight_grad", transA=1)],
        "fc2.bias": [node("ReduceSum", "d axis0", "fc2.bias_grad", keepdims=0)],
        "fc1.weight": [node("Gemm", "dh x", "fc1.weight_grad", transA=1)],
        "fc1.bias": [node("ReduceSum", "dh axis0", "fc1.bias_grad", keepdims=0)],
    }
    backward = [
        node("Softmax", "logits", "probabilities", axis=1),
        node("OneHot", "labels classes onoff", "onehot"),
        node("Sub", "probabilities onehot", "difference"),
        node("Shape", "labels", "n_int"),
        node("Cast", "n_int", "n", to=TensorProto.FLOAT),
        node("Div", "difference n", "d"),
        node("MatMul", "d fc2.weight", "da"),
        node("Greater", "h zero", "active"),
        node("Where", "active da zero", "dh"),
        *(n for name in trainable for n in gradients[name]),
    ]
    constants = [
        numpy_helper.from_array(np.array([0], np.int64), "axis0"),
        numpy_helper.from_array(np.array(3, np.int64), "classes"),
        numpy_helper.from_array(np.array([0, 1], np.float32), "onoff"),
        constant("zero", 0.0),
    ]
    inputs = [info("x", TensorProto.FLOAT, ["batch", 4]), info("labels", TensorProto.INT64, ["batch"])]
    inputs += [info(n, a) for n, a in parameters.items()]
    results = [info("loss", TensorProto.FLOAT, []), info("logits", TensorProto.FLOAT, ["batch", 3])][
        : len(outputs)
    ]
    grads = [info(f"{n}_grad", parameters[n]) for n in trainable]
    return Artifacts(
        training=model(forward + backward, inputs, results + grads, manifest, constants),
        evaluation=model(forward, inputs, results, manifest),
        optimizer=None if optimizer is None else optimizer_model(manifest, parameters),
        manifest=manifest,
        parameters=parameters,
        statistics={},
    )


def reference_mlp(parameters, x, labels):
    """Returns loss, logits and gradients of the MLP in float64."""
    w1, b1, w2, b2 = (
        parameters[n].astype(np.float64) for n in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
    )
    h = x @ w1.T + b1
    a = np.maximum(h, 0)
    logits = a @ w2.T + b2
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    rows = np.arange(len(x))
    loss = -np.log(p[rows, labels]).mean()
    d = p.copy()
    d[rows, labels] -= 1
    d /= len(x)
    dh = (d @ w2) * (h > 0)
    return (
        loss,
        logits,
        {"fc1.weight": dh.T @ x, "fc1.bias": dh.sum(0), "fc2.weight": d.T @ a, "fc2.bias": d.sum(0)},
    )


def reference_adamw(parameters, gradients, moments, step, learning_rate, weight_decay=0.01):
    """One AdamW step in Hugging Face's form, in place, in float64."""
    for name, gradient in gradients.items():
        m, v = moments.setdefault(name, [np.zeros_like(gradient), np.zeros_like(gradient)])
        m[...] = 0.9 * m + 0.1 * gradient
        v[...] = 0.999 * v + 0.001 * gradient**2
        rate = learning_rate * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        u = parameters[name] - rate * m / (np.sqrt(v) + 1e-6)
        parameters[name] = u - learning_rate * weight_decay * u


def batchnorm(momentum=0.9) -> Artifacts:
    """y = BatchNorm(x [batch, 3, 2]) * a; loss = mean((y - t)^2), a trainable, scale and bias frozen.

    da[c] = sum over batch and length of 2/size (y - t) * normalised.
    """
    rng = np.random.default_rng(1)
    parameters = {
        "a": rng.standard_normal((1, 3, 1)).astype(np.float32),
        "bn.weight": rng.uniform(0.5, 1.5, 3).astype(np.float32),
        "bn.bias": rng.standard_normal(3).astype(np.float32),
    }
    statistics = {
        "bn.mean": rng.standard_normal(3).astype(np.float32),
        "bn.var": rng.uniform(1, 2, 3).astype(np.float32),
    }
    tensor = {"dtype": "float32", "shape": ["batch", 3, 2]}
    manifest = make_manifest(
        [{"name": "x", **tensor}], [{"name": "t", **tensor}], ["loss"], parameters, ["a"], statistics, SGD
    )
    bn = ["x", "bn.weight", "bn.bias", "bn.mean", "bn.var"]
    updated = ["bn.mean_updated", "bn.var_updated"]
    tail = parse_nodes("""
        y = Mul(norm, a)  difference = Sub(y, t)  square = Mul(difference, difference)
        loss = ReduceMean <keepdims = 0> (square)""")
    backward = parse_nodes("""
        n_int = Size(square)  n = Cast <to = 1> (n_int)  factor = Div(two, n)
        dy = Mul(difference, factor)  terms = Mul(dy, norm)
        a_grad = ReduceSum <keepdims = 1> (terms, axes)""")
    train = helper.make_node("BatchNormalization", bn, ["norm", *updated], momentum=momentum, training_mode=1)
    infer = helper.make_node("BatchNormalization", bn, ["norm"], momentum=momentum)
    inputs = [info(n, TensorProto.FLOAT, ["batch", 3, 2]) for n in "xt"]
    inputs += [info(n, a) for n, a in {**parameters, **statistics}.items()]
    outputs = [info("loss", TensorProto.FLOAT, [])]
    gradient = [info("a_grad", parameters["a"]), *(info(u, TensorProto.FLOAT, [3]) for u in updated)]
    constants = [constant("two", 2.0), numpy_helper.from_array(np.array([0, 2], np.int64), "axes")]
    return Artifacts(
        training=model([train, *tail, *backward], inputs, outputs + gradient, manifest, constants),
        evaluation=model([infer, *tail], inputs, outputs, manifest),
        optimizer=optimizer_model(manifest, parameters),
        manifest=manifest,
        parameters=parameters,
        statistics=statistics,
    )


def scaled(dtype, **unused: np.ndarray) -> Artifacts:
    """loss = mean((x * w - t)^2) with w [4] of `dtype`, computed in float32 between casts; dw likewise.

    Further parameters are frozen and used by nothing.
    """
    w = np.array([0.5, -1.0, 2.0, 0.25]).astype(dtype)
    parameters = {"w": w, **unused}
    tensor = {"dtype": "float32", "shape": ["batch", 4]}
    manifest = make_manifest(
        [{"name": "x", **tensor}], [{"name": "t", **tensor}], ["loss"], parameters, ["w"]
    )
    code = info("w", w).type.tensor_type.elem_type
    forward = parse_nodes("""
        w32 = Cast <to = 1> (w)  y = Mul(x, w32)  difference = Sub(y, t)
        square = Mul(difference, difference)  loss = ReduceMean <keepdims = 0> (square)""")
    backward = [
        helper.make_node("Size", ["square"], ["n_int"]),
        helper.make_node("Cast", ["n_int"], ["n"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["two", "n"], ["factor"]),
        helper.make_node("Mul", ["difference", "factor"], ["dy"]),
        helper.make_node("Mul", ["dy", "x"], ["terms"]),
        helper.make_node("ReduceSum", ["terms", "axes"], ["dw"], keepdims=0),
        helper.make_node("Cast", ["dw"], ["w_grad"], to=code),
    ]
    inputs = [info(n, TensorProto.FLOAT, ["batch", 4]) for n in "xt"]
    inputs += [info(n, a) for n, a in parameters.items()]
    outputs = [info("loss", TensorProto.FLOAT, [])]
    constants = [constant("two", 2.0), numpy_helper.from_array(np.array([0], np.int64), "axes")]
    return Artifacts(
        training=model(forward + backward, inputs, [*outputs, info("w_grad", w)], manifest, constants),
        evaluation=model(forward, inputs, outputs, manifest),
        optimizer=None,
        manifest=manifest,
        parameters=parameters,
        statistics={},
    )


def lookup(rows=6) -> Artifacts:
    """loss = mean(table[ids]), ids [batch] unchecked; d table[i] = (how often i occurs) / batch."""
    parameters = {"table": np.arange(rows, dtype=np.float32)}
    ids = {"name": "ids", "dtype": "int64", "shape": ["batch"]}
    manifest = make_manifest([ids], [], ["loss"], parameters, ["table"], optimizer=SGD)
    forward = parse_nodes("rows = Gather(table, ids)  loss = ReduceMean <keepdims = 0> (rows)")
    backward = parse_nodes(
        "hits = OneHot(ids, depth, onoff)  table_grad = ReduceMean <keepdims = 0> (hits, axis0)"
    )
    inputs = [info("ids", TensorProto.INT64, ["batch"]), info("table", parameters["table"])]
    outputs = [info("loss", TensorProto.FLOAT, [])]
    constants = [
        numpy_helper.from_array(np.array(rows, np.int64), "depth"),
        numpy_helper.from_array(np.array([0], np.int64), "axis0"),
        numpy_helper.from_array(np.array([0, 1], np.float32), "onoff"),
    ]
    gradient = info("table_grad", parameters["table"])
    return Artifacts(
        training=model(forward + backward, inputs, [*outputs, gradient], manifest, constants),
        evaluation=model(forward, inputs, outputs, manifest),
        optimizer=optimizer_model(manifest, parameters),
        manifest=manifest,
        parameters=parameters,
        statistics={},
    )
