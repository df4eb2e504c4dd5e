"""Wrong models and options for `generate_artifacts`."""

from __future__ import annotations

import os

import numpy as np
import onnx
from onnx import TensorProto, helper

import models
from bad_input.bench import Bench, case, cases, corrupt, node, truncate
from onnxtrain import onnxblock
from onnxtrain.losses import MSELoss

cases(
    {
        "model file is missing": lambda b: b.generate(b.directory / "nowhere.onnx"),
        "model path is a directory": lambda b: b.generate(b.directory),
        "argument is not a model": lambda b: b.generate([1, 2]),
        "op type is not UTF-8": lambda b: b.generate(
            onnx.ModelProto.FromString(models.mlp().SerializeToString().replace(b"Tanh", b"T\xffnh"))
        ),
        "name in `requires_grad` is unknown": lambda b: b.generate(requires_grad=["w1", "w3"]),
        "name in `frozen_params` is unknown": lambda b: b.generate(frozen_params=["w3"]),
        "name in `additional_output_names` is unknown": lambda b: b.generate(
            additional_output_names=["probabilities"]
        ),
        "name in `additional_output_names` is already returned": lambda b: b.generate(
            additional_output_names=["logits", "logits"]
        ),
        "name in `loss_input_names` is unknown": lambda b: b.generate(loss_input_names=["probabilities"]),
        "name of a loss is unknown": lambda b: b.generate(loss="entropy"),
        "name of an optimizer is unknown": lambda b: b.generate(optimizer="adamx"),
        "name in `sparse_gradients` is not trained": lambda b: b.generate(sparse_gradients=["emb"]),
        "sparse gradient of a parameter that is not an embedding": lambda b: b.generate(
            sparse_gradients=["w1"]
        ),
        "sparse gradient of bfloat16": lambda b: b.generate(
            _embedding(TensorProto.BFLOAT16), loss="mse", sparse_gradients=["emb"]
        ),
        "optimizer does not support sparse gradients": lambda b: b.generate(
            _embedding(), sparse_gradients=["emb"]
        ),
        "SparseAdam without sparse gradients": lambda b: b.generate(optimizer="sparse_adam"),
        "block of `onnxblock` with sparse gradients": lambda b: b.generate(
            _embedding(), sparse_gradients=["emb"], optimizer=onnxblock.optim.SGD()
        ),
        "mapping instead of a list of names": lambda b: b.generate(requires_grad={"w1": True}),
        "parameter is both frozen and trained": lambda b: b.generate(
            requires_grad=["w1", "w2"], frozen_params=["w2"]
        ),
        "trained parameter is a running statistic": lambda b: b.generate(
            models.conv_bn(), requires_grad=["bn.mean"]
        ),
        "nothing is left to train": lambda b: b.generate(frozen_params=["w1", "b1", "w2", "b2"]),
        "model has no parameters": lambda b: b.generate(
            models.make_model([node("Neg", ["x"], ["y"])], {"x": ["b", 4]}, {"y": ["b", 4]}, {})
        ),
        "loss depends on no parameter": lambda b: b.generate(loss="mse", loss_input_names=["x"]),
        "loss is not a scalar": lambda b: b.generate(loss=MSELoss(reduction="none")),
        "`batch_norm` has an unknown value": lambda b: b.generate(batch_norm="train"),
        "library of custom ops is missing": lambda b: b.generate(
            custom_op_library=b.directory / "nowhere.so"
        ),
    }
)


@case("model file is truncated")
def _(bench: Bench) -> None:
    path = bench.model_file()
    truncate(path, lambda: bench.generate(path))


@case("model file is corrupt")
def _(bench: Bench) -> None:
    path = bench.model_file()
    corrupt(path, lambda: bench.generate(path))


@case("external data of the model is missing")
def _(bench: Bench) -> None:
    path = bench.model_file(external=True)
    (bench.directory / "weights.bin").unlink()
    bench.generate(path)


@case("external data of the model is truncated")
def _(bench: Bench) -> None:
    path = bench.model_file(external=True)
    os.truncate(bench.directory / "weights.bin", 100)
    bench.generate(path)


@case("external data lies outside the model's directory")
def _(bench: Bench) -> None:
    path = bench.model_file(external=True)
    path.write_bytes(path.read_bytes().replace(b"weights.bin", b"../weig.bin"))
    bench.generate(path)


@case("input contains strings")
def _(bench: Bench) -> None:
    model = models.mlp()
    texts = onnx.helper.make_tensor_value_info("word", onnx.TensorProto.STRING, ["batch"])
    model.graph.input.append(texts)
    encoding = {"domain": "ai.onnx.ml", "keys_strings": ["yes"], "values_floats": [1.0]}
    model.graph.node.append(node("LabelEncoder", ["word"], ["code"], **encoding))
    model.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 2))
    # Texts that neither the loss nor such a value reads do no harm.
    bench.generate(model, additional_output_names=["code"])


@case("tensor has less data than its shape needs")
def _(bench: Bench) -> None:
    model = models.mlp()
    next(t for t in model.graph.initializer if t.name == "w1").dims.append(2**31)
    bench.generate(model)


@case("opset is too new")
def _(bench: Bench) -> None:
    model = models.mlp()
    model.opset_import[0].version = 99
    bench.generate(model)


@case("opset is too old to be converted")
def _(bench: Bench) -> None:
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Pad", ["h"], ["y"], paddings=[0, 0, 0, 0])]
    model = models.make_model(
        nodes, {"x": ["b", 4]}, {"y": ["b", 3]}, {"w": np.ones((4, 3), np.float32)}, opset=1
    )
    bench.generate(model)


@case("graph is not valid ONNX")
def _(bench: Bench) -> None:
    model = models.mlp()
    model.graph.node[1].op_type = "Gemm"
    bench.generate(model)


@case("graph uses an undefined value")
def _(bench: Bench) -> None:
    model = models.mlp()
    model.graph.node[1].input[0] = "nothing"
    bench.generate(model)


@case("output of the graph is undefined")
def _(bench: Bench) -> None:
    model = models.mlp()
    model.graph.output[0].name = "nothing"
    bench.generate(model)


@case("op without a gradient")
def _(bench: Bench) -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Sampling", ["h", "b"], ["y"], name="act", domain="com.microsoft"),
    ]
    values = {"w": np.ones((4, 3), np.float32), "b": np.ones(3, np.float32)}
    model = models.make_model(nodes, {"x": ["n", 4]}, {"y": ["n", 3]}, values)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    bench.generate(model)


@case("random numbers in a loop with a parameter")
def _(bench: Bench) -> None:
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            node("Identity", ["go"], ["keep_going"]),
            node("RandomNormalLike", ["h"], ["noise"], name="draw"),
            node("Add", ["h", "noise"], ["noisy"]),
            node("MatMul", ["noisy", "w"], ["next"]),
        ],
        "body",
        [
            value("i", TensorProto.INT64, []),
            value("go", TensorProto.BOOL, []),
            value("h", TensorProto.FLOAT, ["b", 4]),
        ],
        [value("keep_going", TensorProto.BOOL, []), value("next", TensorProto.FLOAT, ["b", 4])],
    )
    bench.generate(
        models.make_model(
            [node("Loop", ["count", "", "x"], ["y"], name="repeat", body=body)],
            {"x": ["b", 4]},
            {"y": ["b", 4]},
            {"w": np.eye(4, dtype=np.float32), "count": np.array(3)},
        )
    )


@case("size that a gradient needs is symbolic")
def _(bench: Bench) -> None:
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [node("Identity", ["go"], ["keep_going"]), node("Unsqueeze", ["h", "axes"], ["next"])],
        "body",
        [
            value("i", TensorProto.INT64, []),
            value("go", TensorProto.BOOL, []),
            value("h", TensorProto.FLOAT, None),
        ],
        [value("keep_going", TensorProto.BOOL, []), value("next", TensorProto.FLOAT, None)],
    )
    nodes = [
        node("Loop", ["count", "", "x"], ["h"], body=body),
        node("Mul", ["h", "w"], ["scaled"]),
        node("MatMul", ["scaled", "h"], ["y"], name="head"),
    ]
    values = {"w": np.ones(4, np.float32), "count": np.array(3), "axes": np.array([0])}
    bench.generate(models.make_model(nodes, {"x": [4, 4]}, {"y": [4, 4]}, values))


def _embedding(dtype: int = TensorProto.FLOAT) -> onnx.ModelProto:
    table = helper.make_tensor("emb", dtype, [5, 3], np.ones(15, np.float32))
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["b"])
    logits = helper.make_tensor_value_info("logits", dtype, ["b", 3])
    graph = helper.make_graph(
        [node("Gather", ["emb", "ids"], ["logits"])], "embedding", [ids], [logits], [table]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@case("trained parameter is not floating point")
def _(bench: Bench) -> None:
    nodes = [node("Gather", ["x", "i"], ["g"], axis=1), node("MatMul", ["g", "w"], ["logits"])]
    values = {"i": np.array([0, 1]), "w": np.ones((2, 3), np.float32)}
    bench.generate(
        models.make_model(nodes, {"x": ["b", 4]}, {"logits": ["b", 3]}, values), requires_grad=["i"]
    )


@case("loss does not fit the output")
def _(bench: Bench) -> None:
    model = models.mlp()
    model.graph.node.append(node("ArgMax", ["logits"], ["class"], axis=1))
    bench.generate(model, loss_input_names=["class"])


@case("name of a parameter is reserved")
def _(bench: Bench) -> None:
    values = {"step": np.ones((4, 3), np.float32)}
    model = models.make_model(
        [node("MatMul", ["x", "step"], ["y"])], {"x": ["b", 4]}, {"y": ["b", 3]}, values
    )
    bench.generate(model)


@case("output directory is a file")
def _(bench: Bench) -> None:
    (bench.directory / "afile").touch()
    bench.generate(artifact_directory="afile")


@case("output directory cannot be created")
def _(bench: Bench) -> None:
    (bench.directory / "afile").touch()
    bench.generate(artifact_directory=bench.directory / "afile" / "deeper")


@case("attribute has a type that differs from the standard")
def _(bench: Bench) -> None:
    model = models.mlp()
    constant = helper.make_node("Constant", [], ["c"])
    constant.attribute.append(helper.make_attribute("value", 3))
    model.graph.node.insert(0, constant)
    bench.generate(model)
