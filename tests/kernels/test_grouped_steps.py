"""Steps of many parameters in one call: the bits of one call per parameter, by the kernel and by the body."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from kernels.against_body import needs_kernels
from onnxtrain.functions import COMPOSITES
from onnxtrain.functions.optimizer import ELEMENTWISE_STEPS, steps
from onnxtrain.fusion.grouped_steps import MOST_PARAMETERS, GroupStepsPass, SplitStepsPass
from onnxtrain.optimizers import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    ClipGradNorm,
    Lion,
    Optimizer,
    ParameterGroup,
    ParameterSpec,
    RMSprop,
    build_optimizer_model,
)
from onnxtrain.runtime.kernels import function_names, register_kernels

OPTIMIZERS = {
    "AdamSteps": Adam(),
    "AdamWSteps": AdamW(),
    "ClippedAdamSteps": Adam(clip_grad=ClipGradNorm(0.5)),
    "ClippedAdamWSteps": AdamW(clip_grad=ClipGradNorm(0.5)),
    "SGDSteps": SGD(),
    "MomentumSteps": SGD(momentum=0.9, weight_decay=0.1),
    "NesterovSteps": SGD(momentum=0.9, nesterov=True),
    "AdagradSteps": Adagrad(),
    "LionSteps": Lion(),
    "RMSpropSteps": RMSprop(),
    "RMSpropMomentumSteps": RMSprop(momentum=0.9),
    "CenteredRMSpropSteps": RMSprop(centered=True),
    "CenteredRMSpropMomentumSteps": RMSprop(centered=True, momentum=0.9),
}
# The sum exceeds one thread's part, and parts begin in the middle of a parameter.
SHAPES = ((3, 17), (1,), (), (0, 4), (90, 401), (15,), (16,), (5, 7, 1, 1), (4, 1), (40001,), (2, 3, 1, 1))
each_step = pytest.mark.parametrize("name", OPTIMIZERS)


def _specs(shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[ParameterSpec]:
    return [ParameterSpec(f"p{index}", "float32", shape) for index, shape in enumerate(shapes)]


def _built(optimizer: Optimizer, *, split: bool, specs: list[ParameterSpec] | None = None) -> ir.Model:
    model = build_optimizer_model(optimizer, specs or _specs())
    if split:
        SplitStepsPass()(model)
    return model


def _session(model: ir.Model, *, native: bool, threads: int = 1) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    serialized = ir.to_proto(model).SerializeToString()
    if native:
        register_kernels(options, function_names(serialized))
    return ort.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])


def _feeds(session: ort.InferenceSession) -> dict[str, np.ndarray]:
    """Returns random tensors, among them values that are not finite, -0.0 and denormals."""
    rng = np.random.default_rng(1)
    feeds = {"learning_rate": np.array(0.01, np.float32), "step": np.array(7, np.int64)}
    for value in session.get_inputs():
        if value.name not in feeds:
            array = rng.standard_normal(value.shape).astype(np.float32)
            if "momentum" in value.name:
                array = np.asarray(np.abs(array))
            elif value.name.endswith("_grad") and array.size > 20:
                array.flat[3:9] = [np.nan, np.inf, -np.inf, -0.0, 1e-42, 3e38]
            feeds[value.name] = array
    return {value.name: feeds[value.name] for value in session.get_inputs()}


def _results(session: ort.InferenceSession) -> dict[str, np.ndarray]:
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, _feeds(session)), strict=True))


def _assert_equal_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        np.testing.assert_array_equal(value.view(np.int32), other[name].view(np.int32), err_msg=name)


def test_every_step_is_here() -> None:
    assert {name.removesuffix("s") for name in OPTIMIZERS} == set(ELEMENTWISE_STEPS)


@pytest.mark.sample(every=2)
@needs_kernels
@each_step
@pytest.mark.parametrize("threads", [1, 2])
def test_kernel_gives_the_bits_of_one_call_per_parameter(name: str, threads: int) -> None:
    grouped = _built(OPTIMIZERS[name], split=False)
    assert any(node.op_type.startswith(name) for node in grouped.graph)
    together = _results(_session(grouped, native=True, threads=threads))
    apart = _results(_session(_built(OPTIMIZERS[name], split=True), native=True))
    _assert_equal_bits(together, apart)


@each_step
def test_body_gives_the_bits_of_one_call_per_parameter(name: str) -> None:
    together = _results(_session(_built(OPTIMIZERS[name], split=False), native=False))
    apart = _results(_session(_built(OPTIMIZERS[name], split=True), native=False))
    _assert_equal_bits(together, apart)


@needs_kernels
@each_step
def test_in_place(name: str) -> None:
    session = _session(_built(OPTIMIZERS[name], split=False), native=True, threads=2)
    expected = _results(session)
    values = {key: ort.OrtValue.ortvalue_from_numpy(array) for key, array in _feeds(session).items()}
    binding = session.io_binding()
    for key, value in values.items():
        binding.bind_ortvalue_input(key, value)
    for key in expected:
        binding.bind_ortvalue_output(key, values[key.removesuffix("_updated")])
    session.run_with_iobinding(binding)
    _assert_equal_bits({key: values[key.removesuffix("_updated")].numpy() for key in expected}, expected)


def test_groups_have_one_step_one_set_of_scalars_and_at_most_sixteen_parameters() -> None:
    specs = _specs(((3,),) * 40)
    optimizer = AdamW(
        groups=[ParameterGroup("p1*", learning_rate_scale=0.1), ParameterGroup("p2", optimizer=SGD())]
    )
    model = _built(optimizer, split=False, specs=specs)
    counts = sorted((node.op_type, len(node.outputs)) for node in model.graph if "Step" in node.op_type)
    # p1, p10, ..., p19: 11 parameters; p2 alone; 28 others. Every AdamW step has three outputs.
    assert counts == [
        ("AdamWSteps0_float", 3 * MOST_PARAMETERS),
        ("AdamWSteps1_float", 3 * (28 - MOST_PARAMETERS)),
        ("AdamWSteps2_float", 3 * 11),
        ("SGDStep_float", 1),
    ]
    assert {node.op_identifier() for node in model.graph if node.domain == "onnxtrain"} == set(
        model.functions
    )


def test_a_step_that_depends_on_another_is_not_merged_with_it() -> None:
    model = _built(SGD(), split=False, specs=_specs(((3,),)))
    (node,) = (node for node in model.graph if node.op_type == "SGDStep_float")
    again = ir.Node(node.domain, node.op_type, [node.outputs[0], *node.inputs[1:]], num_outputs=1)
    again.outputs[0].name, again.outputs[0].type = "twice", node.outputs[0].type
    model.graph.append(again)
    model.graph.outputs.append(again.outputs[0])
    assert not GroupStepsPass()(model).modified


# Inputs that no pass writes, but a file may have: names of the inputs, number of outputs, and the error.
MALFORMED = {
    "part of a parameter": (["r", "w", "g", "w"], 1, "whole parameters"),
    "too few outputs": (["r", "w", "g", "w", "g"], 1, "whole parameters"),
    "too many outputs": (["r", "w", "g"], 2, "whole parameters"),
    "gradient of another shape": (["r", "w", "g", "w", "r"], 2, "one shape"),
    "several learning rates": (["w", "w", "g"], 1, "one number"),
    "no gradient": (["r", "w", "", "w", "g"], 2, "SGDSteps0_float"),
}


@needs_kernels
@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_calls_are_refused(case: str) -> None:
    names, outputs, message = MALFORMED[case]
    y = [f"y{index}" for index in range(outputs)]
    graph = helper.make_graph(
        [helper.make_node("SGDSteps0_float", names, y, domain="onnxtrain")],
        "malformed",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None] * (n != "r")) for n in "rwg"],
        [helper.make_empty_tensor_value_info(name) for name in y],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("onnxtrain", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    register_kernels(options)
    feeds = {"r": np.ones((), np.float32), "w": np.ones(5, np.float32), "g": np.ones(5, np.float32)}
    with pytest.raises(Exception, match=message):
        ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, feeds)


def test_the_names_say_which_step_and_how_many_parameters() -> None:
    step = COMPOSITES["AdamWStep"]
    op = steps(step, 3)
    assert op.name == "AdamWSteps"
    assert op.inputs[: len(step.inputs) - 4] == step.inputs[4:]
    assert op.inputs[-4:] == ("w2", "g2", "m2", "v2")
