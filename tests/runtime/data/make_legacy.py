"""Makes the ODTC files of this directory, with onnxruntime-training-cpu 1.19.2, onnx 1.16 and Python 3.11.

The network is that of `handmade.mlp()`: names and shapes are the same, so the checkpoints fit its hand-made
models. `legacy.npz` holds what the old package says is in `legacy_full`, the training data, and the
parameters after three more steps; with `sgd_` before the names, the same of `legacy_sgd`.
"""

import os
import tempfile

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HERE = os.path.dirname(os.path.abspath(__file__))
SHAPES = {"fc1.weight": (8, 4), "fc1.bias": (8,), "fc2.weight": (3, 8), "fc2.bias": (3,)}


def main() -> None:
    rng = np.random.default_rng(3)
    initial = {n: (rng.standard_normal(s) * 0.5).astype(np.float32) for n, s in SHAPES.items()}
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["x", "fc1.weight", "fc1.bias"], ["h"], transB=1),
            helper.make_node("Relu", ["h"], ["a"]),
            helper.make_node("Gemm", ["a", "fc2.weight", "fc2.bias"], ["logits"], transB=1),
        ],
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(a, n) for n, a in initial.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8)
    onnx.checker.check_model(model)
    x, labels = rng.standard_normal((6, 4)).astype(np.float32), np.array([0, 1, 2, 2, 1, 0])
    adamw = train(model, "AdamW", x, labels, "legacy_full")
    sgd = train(model, "SGD", x, labels, "legacy_sgd")
    np.savez_compressed(
        os.path.join(HERE, "legacy.npz"),
        x=x,
        labels=labels,
        **adamw,
        **{f"sgd_{name}": array for name, array in sgd.items()},
    )


def train(model, optimizer_type, x, labels, full) -> dict[str, np.ndarray]:
    """Writes the checkpoint `full` after three steps; returns the parameters then and three steps later."""
    from onnxruntime.training import api, artifacts  # not where the tests run

    work = tempfile.mkdtemp()
    artifacts.generate_artifacts(
        model,
        requires_grad=["fc1.weight", "fc2.weight", "fc2.bias"],
        frozen_params=["fc1.bias"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType[optimizer_type],
        artifact_directory=work,
        nominal_checkpoint=True,
    )
    os.replace(os.path.join(work, "nominal_checkpoint"), os.path.join(HERE, "legacy_nominal"))
    state = api.CheckpointState.load_checkpoint(os.path.join(work, "checkpoint"))
    module = api.Module(os.path.join(work, "training_model.onnx"), state)
    optimizer = api.Optimizer(os.path.join(work, "optimizer_model.onnx"), module)

    def steps(prefix: str) -> dict[str, np.ndarray]:
        for _ in range(3):
            module(x, labels)
            optimizer.step()
            module.lazy_reset_grad()
        return {f"{prefix}/{name}": np.array(parameter.data) for name, parameter in state.parameters}

    before = steps("before")
    state.properties["epoch"] = 7
    state.properties["best"] = 0.25
    state.properties["name"] = "größe"
    if optimizer_type == "AdamW":
        api.CheckpointState.save_checkpoint(state, os.path.join(HERE, "legacy_plain"))
    api.CheckpointState.save_checkpoint(state, os.path.join(HERE, full), include_optimizer_state=True)
    return before | steps("after")


if __name__ == "__main__":
    main()
