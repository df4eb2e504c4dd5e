"""Makes the ODTC files of this directory, with onnxruntime-training-cpu 1.19.2, onnx 1.16 and Python 3.11.

The network is that of `handmade.mlp()`: names and shapes are the same, so the checkpoints fit its hand-made
models. `legacy.npz` holds what the old package says is in `legacy_full`, the training data, and the
parameters after three more steps.
"""

import os
import tempfile

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HERE = os.path.dirname(os.path.abspath(__file__))
SHAPES = {"fc1.weight": (8, 4), "fc1.bias": (8,), "fc2.weight": (3, 8), "fc2.bias": (3,)}


def main() -> None:
    from onnxruntime.training import api, artifacts  # not where the tests run

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
    work = tempfile.mkdtemp()
    artifacts.generate_artifacts(
        model,
        requires_grad=["fc1.weight", "fc2.weight", "fc2.bias"],
        frozen_params=["fc1.bias"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=work,
        nominal_checkpoint=True,
    )
    os.replace(os.path.join(work, "nominal_checkpoint"), os.path.join(HERE, "legacy_nominal"))
    state = api.CheckpointState.load_checkpoint(os.path.join(work, "checkpoint"))
    module = api.Module(os.path.join(work, "training_model.onnx"), state)
    optimizer = api.Optimizer(os.path.join(work, "optimizer_model.onnx"), module)
    x, labels = rng.standard_normal((6, 4)).astype(np.float32), np.array([0, 1, 2, 2, 1, 0])

    def train(steps: int) -> dict[str, np.ndarray]:
        for _ in range(steps):
            module(x, labels)
            optimizer.step()
            module.lazy_reset_grad()
        return {name: np.array(parameter.data) for name, parameter in state.parameters}

    before = train(3)
    state.properties["epoch"] = 7
    state.properties["best"] = 0.25
    state.properties["name"] = "größe"
    api.CheckpointState.save_checkpoint(state, os.path.join(HERE, "legacy_plain"))
    api.CheckpointState.save_checkpoint(
        state, os.path.join(HERE, "legacy_full"), include_optimizer_state=True
    )
    after = train(3)
    np.savez_compressed(
        os.path.join(HERE, "legacy.npz"),
        x=x,
        labels=labels,
        **{f"before/{n}": a for n, a in before.items()},
        **{f"after/{n}": a for n, a in after.items()},
    )


if __name__ == "__main__":
    main()
