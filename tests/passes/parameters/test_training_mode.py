from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from onnxtrain.passes import TrainingModePass, canonicalize, load_model, to_proto
from passes._models import build, info, normal, run, running_statistics

X = normal(4, 3, 5)
TENSORS = {
    "scale": normal(3),
    "bias": normal(3, seed=1),
    "mean": normal(3, seed=2),
    "var": np.abs(normal(3, seed=3)),
}
EPSILON, MOMENTUM = 1e-3, 0.7


def batch_norm(outputs: tuple[str, ...] = ("y",), **attributes) -> ir.Model:
    node = helper.make_node(
        "BatchNormalization",
        ["x", *TENSORS],
        outputs,
        name="bn",
        epsilon=EPSILON,
        momentum=MOMENTUM,
        **attributes,
    )
    named = [info(name, ["N", 3, 5] if name == "y" else [3]) for name in outputs if name]
    return canonicalize(load_model(build([node], [info("x", ["N", 3, 5])], named, TENSORS)))


def expose_statistics(model: ir.Model) -> onnx.ModelProto:
    model.graph.outputs.extend(after for _, after in running_statistics(model))
    return to_proto(model)


def normalised(mean, var):
    shape = (1, 3, 1)
    scaled = (X - mean.reshape(shape)) / np.sqrt(var.reshape(shape) + EPSILON)
    return scaled * TENSORS["scale"].reshape(shape) + TENSORS["bias"].reshape(shape)


MEAN, VAR = X.mean(axis=(0, 2)), X.var(axis=(0, 2))
TRAINED = [
    normalised(MEAN, VAR),
    TENSORS["mean"] * MOMENTUM + MEAN * (1 - MOMENTUM),
    TENSORS["var"] * MOMENTUM + VAR * (1 - MOMENTUM),
]
INFERRED = normalised(TENSORS["mean"], TENSORS["var"])


def assert_close(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_batch_norm_to_training_follows_the_formula_of_the_specification():
    model = batch_norm()
    assert TrainingModePass(batch_norm="training")(model).modified
    pairs = [(before.name, after.name) for before, after in running_statistics(model)]
    assert pairs == [("mean", "mean_updated"), ("var", "var_updated")]
    assert all(after.shape == ir.Shape([3]) for _, after in running_statistics(model))
    assert_close(run(expose_statistics(model), {"x": X}), TRAINED)
    assert not TrainingModePass(batch_norm="training")(model).modified


def test_training_export_that_omits_the_statistics_gets_them():
    model = batch_norm(training_mode=1)
    TrainingModePass(batch_norm="training")(model)
    assert_close(run(expose_statistics(model), {"x": X}), TRAINED)


def test_names_of_statistics_do_not_collide():
    nodes = [
        helper.make_node("BatchNormalization", ["x", *TENSORS], ["h"]),
        helper.make_node("BatchNormalization", ["h", *TENSORS], ["mean_updated"]),
    ]
    proto = build(nodes, [info("x", ["N", 3, 5])], [info("mean_updated", ["N", 3, 5])], TENSORS)
    model = canonicalize(load_model(proto))
    TrainingModePass(batch_norm="training")(model)
    assert [after.name for _, after in running_statistics(model)] == [
        "mean_updated_2",
        "var_updated",
        "mean_updated_3",
        "var_updated_2",
    ]
    onnx.checker.check_model(to_proto(model))


def test_batch_norm_to_inference_and_back():
    model = batch_norm()
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    assert not TrainingModePass(batch_norm="inference")(model).modified
    TrainingModePass(batch_norm="training")(model)
    TrainingModePass(batch_norm="inference")(model)
    assert_close(run(to_proto(model), {"x": X}), [INFERRED])
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_statistics_that_are_graph_outputs_are_passed_through_in_inference():
    model = batch_norm(("y", "new_mean", "new_var"), training_mode=1)
    assert TrainingModePass(batch_norm="inference")(model).modified
    result = to_proto(model)
    onnx.checker.check_model(result)
    assert [value.name for value in result.graph.output] == ["y", "new_mean", "new_var"]
    assert_close(run(result, {"x": X}), [INFERRED, TENSORS["mean"], TENSORS["var"]])


def test_statistics_that_are_used_are_replaced_in_inference():
    nodes = [
        helper.make_node(
            "BatchNormalization", ["x", *TENSORS], ["y", "m", "v"], epsilon=EPSILON, training_mode=1
        ),
        helper.make_node("Neg", ["m"], ["z"]),
    ]
    model = canonicalize(load_model(build(nodes, [info("x", ["N", 3, 5])], [info("z", [3])], TENSORS)))
    TrainingModePass(batch_norm="inference")(model)
    assert_close(run(to_proto(model), {"x": X}), [-TENSORS["mean"]])


def dropout(opset: int = 21, mode: bool | None = None, ratio: float = 0.5) -> ir.Model:
    tensors = {"ratio": np.float32(ratio)}
    inputs = ["x", "ratio"]
    attributes = {}
    if opset < 12:
        inputs, tensors, attributes = ["x"], {}, {"ratio": ratio}
    if mode is not None:
        inputs.append("mode")
        tensors["mode"] = np.array(mode)
    node = helper.make_node("Dropout", inputs, ["y"], name="drop", **attributes)
    shape = ["N", 3, 5]
    return canonicalize(
        load_model(build([node], [info("x", shape)], [info("y", shape)], tensors, opset=opset))
    )


def kept(model: ir.Model) -> float:
    return float((run(to_proto(model), {"x": np.ones((2000, 3, 5), np.float32)})[0] != 0).mean())


@pytest.mark.parametrize(("opset", "mode"), [(9, None), (13, None), (13, False), (21, False), (21, True)])
def test_dropout_both_ways(opset, mode):
    model = dropout(opset, mode, ratio=0.25)
    TrainingModePass(dropout="training")(model)
    assert kept(model) == pytest.approx(0.75, abs=0.02)
    assert not TrainingModePass(dropout="training")(model).modified
    TrainingModePass(dropout="inference")(model)
    assert kept(model) == 1.0
    assert not TrainingModePass(dropout="inference")(model).modified


def test_dropout_without_ratio_gets_the_default():
    node = helper.make_node("Dropout", ["x"], ["y"])
    shape = ["N", 3, 5]
    model = canonicalize(load_model(build([node], [info("x", shape)], [info("y", shape)])))
    TrainingModePass(dropout="training")(model)
    assert kept(model) == pytest.approx(0.5, abs=0.02)


def test_dropout_in_a_subgraph():
    drop = helper.make_graph(
        [helper.make_node("Dropout", ["x"], ["d"])], "then", [], [info("d", ["N", 3, 5])]
    )
    other = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["i"])], "else", [], [info("i", ["N", 3, 5])]
    )
    node = helper.make_node("If", ["c"], ["y"], then_branch=drop, else_branch=other)
    proto = build([node], [info("x", ["N", 3, 5])], [info("y", ["N", 3, 5])], {"c": np.array(True)})
    model = canonicalize(load_model(proto))
    TrainingModePass(dropout="training")(model)
    assert kept(model) == pytest.approx(0.5, abs=0.02)


def test_as_exported_changes_nothing():
    model = dropout(mode=True)
    assert not TrainingModePass()(model).modified
    assert kept(model) == pytest.approx(0.5, abs=0.02)


def test_wrong_mode():
    with pytest.raises(
        ValueError, match="batch_norm='train': choose one of 'as_exported', 'training', 'inference'"
    ):
        TrainingModePass(batch_norm="train")  # type: ignore[arg-type]


def test_old_opset():
    proto = build([helper.make_node("Relu", ["x"], ["y"])], [info("x", [1])], [info("y", [1])], opset=13)
    with pytest.raises(ir.passes.PreconditionError, match="opset 14"):
        TrainingModePass()(load_model(proto))
