"""Adapters in a graph compute, and are trained, as LoRA in PyTorch."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

from lora.models import TOKENS, exported, in_bits, net, products, run, with_adapters
from onnxtrain import api
from onnxtrain.artifacts import generate_artifacts
from onnxtrain.errors import GraphBuildError
from onnxtrain.lora import LoraConfig, adapter_model, add_lora, copy_module_names, target_names

pytestmark = pytest.mark.torch

NAMES = ["up", "0", "2", "lm_head"]


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return exported(net(), torch.from_numpy(TOKENS))


def adapters_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {i.name: onnx.numpy_helper.to_array(i) for i in model.graph.initializer if ".lora_" in i.name}


def trained(directory: Path, losses: int = 20) -> tuple[api.CheckpointState, api.Module, api.Optimizer]:
    state = api.CheckpointState.load_checkpoint(directory / "checkpoint")
    module = api.Module(directory / "training_model.onnx", state, directory / "eval_model.onnx")
    return state, module, api.Optimizer(directory / "optimizer_model.onnx", module)


def test_names_are_those_of_the_modules(model: onnx.ModelProto) -> None:
    assert target_names(model) == NAMES


@pytest.mark.parametrize(("feed_forward", "expected"), [("fc1", "dense"), ("gate_proj", "o_proj")])
def test_names_in_files_of_genais_builder_are_those_of_pytorch(feed_forward: str, expected: str) -> None:
    # The builder writes `o_proj` for the output layer of attention. PyTorch has `dense` in Phi, which has an `fc1`.
    layers = {
        f"model.layers.{n}.{name}.MatMul": (4, 4)
        for n in (0, 1)
        for name in ("attn.o_proj", f"mlp.{feed_forward}")
    }
    model = products(layers)
    assert target_names(model) == [expected, feed_forward]
    assert sorted(adapters_of(add_lora(model, LoraConfig(r=1, target_modules=[expected])))) == [
        f"model.layers.{n}.self_attn.{expected}.lora_{letter}.weight" for n in (0, 1) for letter in "AB"
    ]


def test_names_in_files_of_checkpoints_that_were_quantized_before_are_those_of_pytorch() -> None:
    # The builder keeps the weights of GPTQ and AWQ as they are, and names them otherwise than those that it rounds.
    names = [f"model.layers.0.{name}" for name in ("attn.q_proj", "attn.o_proj", "mlp.up_proj")]
    model = in_bits(products({f"{name}.MatMul": (32, 32) for name in names}), 4, 32)
    for tensor in model.graph.initializer:
        tensor.name = tensor.name.replace(".MatMul.weight_Q4", ".MatMulNBits.qweight")
    for node in model.graph.node:
        node.input[:] = [name.replace(".MatMul.weight_Q4", ".MatMulNBits.qweight") for name in node.input]
    onnx.checker.check_model(model)
    assert target_names(model) == ["q_proj", "o_proj", "up_proj"]
    assert [name.rpartition(".lora_A")[0] for name in adapters_of(add_lora(model, LoraConfig(r=1)))][::2] == [
        name.replace("attn", "self_attn") for name in names
    ]


def test_a_quantized_file_takes_the_module_names_of_its_float_file(model: onnx.ModelProto) -> None:
    quantized = in_bits(model, 4)
    # The quantizer writes new nodes, without the notes of PyTorch's exporter.
    assert not set(NAMES) & set(target_names(quantized))
    named = copy_module_names(quantized, model)
    assert target_names(named) == NAMES
    assert [*adapters_of(add_lora(named, LoraConfig(r=1)))] == [
        *adapters_of(add_lora(model, LoraConfig(r=1)))
    ]
    assert np.array_equal(run(named, tokens=TOKENS), run(quantized, tokens=TOKENS))
    # Given to another model, no layer of which is the same, nothing would be named.
    with pytest.raises(
        GraphBuildError, match=r"the quantized model has 4 layers, the other 1\. Pass the float model"
    ):
        copy_module_names(quantized, products({"fc": (3, 2)}))


class Tokens(CalibrationDataReader):
    def __init__(self) -> None:
        self.batches = iter([{"tokens": TOKENS + k} for k in range(5)])

    def get_next(self) -> dict[str, np.ndarray] | None:  # type: ignore[override]
        return next(self.batches, None)


@pytest.mark.filterwarnings("ignore")  # of the quantizer
@pytest.mark.parametrize("form", list(QuantFormat))
def test_the_output_layer_of_a_language_model_in_integers_gets_no_adapter(
    form: QuantFormat, model: onnx.ModelProto, tmp_path: Path
) -> None:
    """QLinearMatMul has no note of its module: the output layer is known by the size of the vocabulary."""
    onnx.save(model, tmp_path / "float.onnx")
    quantize_static(tmp_path / "float.onnx", tmp_path / "int8.onnx", Tokens(), quant_format=form)
    quantized = onnx.load(tmp_path / "int8.onnx")
    assert len([*adapters_of(add_lora(quantized, LoraConfig(r=1)))]) == 2 * 3
    named = copy_module_names(quantized, model)
    assert target_names(named) == NAMES
    assert [*adapters_of(add_lora(named, LoraConfig(r=1)))] == [
        *adapters_of(add_lora(model, LoraConfig(r=1)))
    ]
    # It gets one if it is named.
    assert len(adapters_of(add_lora(named, LoraConfig(r=1, target_modules=["lm_head"])))) == 2


def test_classes_as_many_as_an_embedding_has_rows_are_no_words() -> None:
    """An output layer has a row of numbers for each sample: adapters of it are wanted."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (int64[n] color) => (float[n, 2] y)
        <float[2, 3] table = {1, 2, 3, 4, 5, 6}, float[3, 2] fc = {1, 2, 3, 4, 5, 6}>
        { x = Gather(table, color)  y = MatMul(x, fc) }"""
    )
    assert [*adapters_of(add_lora(model, LoraConfig(r=1)))] == ["fc.lora_A.weight", "fc.lora_B.weight"]


def test_initial_adapters_change_nothing(model: onnx.ModelProto) -> None:
    changed = add_lora(model, LoraConfig(r=4))
    assert np.array_equal(run(changed, tokens=TOKENS), run(model, tokens=TOKENS))
    weights = adapters_of(changed)
    assert list(weights) == [
        f"{path}.lora_{letter}.weight" for path in ("up", "blocks.0", "blocks.2") for letter in "AB"
    ]
    for name, array in weights.items():
        assert array.dtype == np.float32
        assert array.any() == (".lora_A." in name)
    a = weights["blocks.0.lora_A.weight"]
    assert a.shape == (64, 4)
    assert np.abs(a).max() <= 1 / 8
    # The deviation of the uniform distribution in (-1/8, 1/8).
    assert a.std() == pytest.approx(1 / 8 / np.sqrt(3), rel=0.1)


def test_the_seed_decides_the_initial_weights(model: onnx.ModelProto) -> None:
    first, again, other = (adapters_of(add_lora(model, LoraConfig(r=2, seed=seed))) for seed in (3, 3, 4))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["up.lora_A.weight"], other["up.lora_A.weight"])


def test_gaussian_weights_have_the_deviation_of_peft() -> None:
    model = products({"fc": (400, 50)})
    a = adapters_of(add_lora(model, LoraConfig(r=50, init_lora_weights="gaussian")))["fc.lora_A.weight"]
    assert a.std() == pytest.approx(1 / 50, rel=0.05)


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=3, lora_alpha=5, target_modules=NAMES, init_lora_weights=False),
        LoraConfig(r=4, lora_alpha=1, use_rslora=True, target_modules=r".*\.\d|up", init_lora_weights=False),
        LoraConfig(
            target_modules=NAMES,
            exclude_modules=["blocks.2"],
            rank_pattern={"up": 2, r"blocks\.\d": 5},
            alpha_pattern={"lm_head": 3},
            init_lora_weights=False,
        ),
    ],
    ids=["alpha", "rank-stabilised", "patterns"],
)
def test_gradients_and_steps_are_those_of_pytorch(
    model: onnx.ModelProto, config: LoraConfig, tmp_path: Path
) -> None:
    generate_artifacts(model, loss="mse", optimizer="sgd", artifact_directory=tmp_path, lora=config)
    state, module, optimizer = trained(tmp_path)
    reference = net().double()
    layers = with_adapters(reference, {name: p.data.copy() for name, p in state.parameters}, config)
    sgd = torch.optim.SGD([p for layer in layers.values() for p in (layer.a, layer.b)], lr=1e-3)
    optimizer.set_learning_rate(1e-3)
    target = np.random.default_rng(0).normal(size=(2, 3, 11)).astype(np.float32)
    for _ in range(5):
        sgd.zero_grad()
        expected = torch.nn.functional.mse_loss(
            reference(torch.from_numpy(TOKENS)), torch.from_numpy(target).double()
        )
        expected.backward()
        assert float(module(TOKENS, target)) == pytest.approx(expected.item(), rel=1e-5)
        for path, layer in layers.items():
            for letter, parameter in (("A", layer.a), ("B", layer.b)):
                gradient = state.parameters[f"{path}.lora_{letter}.weight"].grad
                scale = parameter.grad.abs().max().item()
                assert np.abs(gradient - parameter.grad.numpy()).max() <= 1e-5 * scale
        sgd.step()
        optimizer.step()
        module.lazy_reset_grad()
    assert set(layers) == {name.rpartition(".lora_")[0] for name, _ in state.parameters}


@pytest.mark.parametrize(("bits", "block_size", "symmetric"), [(4, 16, True), (4, 32, False), (8, 32, True)])
def test_a_quantized_base_is_trained_as_its_dequantized_weights(
    bits: int, block_size: int, symmetric: bool, tmp_path: Path
) -> None:
    base = in_bits(products({"fc1": (40, 32), "fc2": (32, 10)}), bits, block_size, symmetric)
    config = LoraConfig(r=2, init_lora_weights=False)
    assert target_names(base) == ["fc1", "fc2"]
    generate_artifacts(base, loss="mse", artifact_directory=tmp_path, lora=config)
    state = api.CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = api.Module(tmp_path / "training_model.onnx", state)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 40)).astype(np.float32), rng.normal(size=(6, 10)).astype(np.float32)
    loss = float(module(x, y))
    # The rows of the dequantized weight are what the quantized layer makes of unit vectors, before Tanh.
    hidden = torch.from_numpy(x).double()
    leaves = {}
    for name, size in (("fc1", 40), ("fc2", 32)):
        weight = torch.from_numpy(run(layer_alone(base, name), x=np.eye(size, dtype=np.float32))).double()
        pair = [torch.tensor(state.parameters[f"{name}.lora_{k}.weight"].data.copy()).double() for k in "AB"]
        leaves |= {f"{name}.lora_{k}.weight": t.requires_grad_() for k, t in zip("AB", pair, strict=True)}
        hidden = torch.tanh(hidden @ weight + config.scaling(name) * hidden @ pair[0] @ pair[1])
    expected = torch.nn.functional.mse_loss(hidden, torch.from_numpy(y).double())
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for name, leaf in leaves.items():
        difference = np.abs(state.parameters[name].grad - leaf.grad.numpy()).max()
        assert difference <= 1e-5 * leaf.grad.abs().max().item()


def layer_alone(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """The quantized layer of that name alone, with float activations."""
    node = next(
        node for node in model.graph.node if node.op_type == "MatMulNBits" and node.input[1].startswith(name)
    )
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.input[0], copy.output[0] = "x", "y"
    kept = [a for a in copy.attribute if a.name != "accuracy_level"]
    del copy.attribute[:]
    copy.attribute.extend(kept)
    graph = onnx.helper.make_graph(
        [copy],
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, None)],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [i for i in model.graph.initializer if i.name in node.input],
    )
    return onnx.helper.make_model(graph, opset_imports=model.opset_import, ir_version=10)


def test_no_warning_says_that_the_exporter_has_lost_the_quantized_weights(
    model: onnx.ModelProto, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "onnxtrain"):
        generate_artifacts(
            in_bits(model, 4), loss="causal_lm", lora=LoraConfig(r=1), artifact_directory=tmp_path
        )
    assert not [record.getMessage() for record in caplog.records]


def test_further_parameters_are_trained_beside_the_adapters(model: onnx.ModelProto, tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["up"])
    generate_artifacts(
        model, requires_grad=["blocks.0.bias"], loss="mse", artifact_directory=tmp_path, lora=config
    )
    state = api.CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    assert {name for name, _ in state.parameters} == {"up.lora_A.weight", "up.lora_B.weight", "blocks.0.bias"}


def test_a_model_that_has_adapters_trains_them_alone(model: onnx.ModelProto, tmp_path: Path) -> None:
    changed = add_lora(model, LoraConfig(r=2, target_modules=["up"]))
    generate_artifacts(changed, loss="mse", artifact_directory=tmp_path)
    state = api.CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    assert [name for name, _ in state.parameters] == ["up.lora_A.weight", "up.lora_B.weight"]


def test_dropout_acts_on_the_input_of_the_adapter_in_training_alone(tmp_path: Path) -> None:
    model = products({"fc": (8, 8)})
    config = LoraConfig(r=8, lora_alpha=8, lora_dropout=0.5, init_lora_weights=False)
    generate_artifacts(
        model, loss="mse", artifact_directory=tmp_path, lora=config, additional_output_names=["fc_act"]
    )
    state = api.CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = api.Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    weight = onnx.numpy_helper.to_array(model.graph.initializer[0])
    a, b = (state.parameters[f"fc.lora_{k}.weight"].data.copy() for k in "AB")
    x, y = np.eye(8, dtype=np.float32), np.zeros((8, 8), np.float32)
    module.eval()
    assert np.allclose(module(x, y)[1], np.tanh(weight + a @ b), atol=1e-5)
    module.train()
    # Of a unit vector the adapter sees zero or, as dropout scales what it keeps, twice of it.
    delta = np.arctanh(np.clip(module(x, y)[1], -1 + 1e-7, 1 - 1e-7)) - weight
    kept = np.abs(delta - 2 * a @ b).max(1) < 1e-2
    dropped = np.abs(delta).max(1) < 1e-2
    assert (kept ^ dropped).all()


def test_convolutions_of_kernel_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 1, stride=2), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3)
    )
    x = torch.randn(2, 3, 9, 9)
    model = exported(layers, x)
    assert target_names(model) == ["0"]
    config = LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    changed = add_lora(model, config)
    a, b = (torch.tensor(array) for array in adapters_of(changed).values())
    assert (a.shape, b.shape) == ((2, 3, 1, 1), (8, 2, 1, 1))
    conv = torch.nn.functional.conv2d
    hidden = layers[0](x) + config.scaling("0") * conv(conv(x, a, stride=2), b)
    expected = layers[2](torch.relu(hidden)).detach().numpy()
    assert np.allclose(run(changed, tokens=x.numpy()), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r": 0}, "r is 0"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": 0}, "lora_alpha is 0"),
        ({"lora_dropout": 1}, "lora_dropout is 1"),
        ({"target_modules": []}, "target_modules is"),
        ({"target_modules": "("}, "target_modules is '('"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"rank_pattern": {"up": 0}}, "rank_pattern is"),
        (
            {"rank_pattern": {"(": 2}},
            "rank_pattern is {'(': 2}; it must be a mapping from regular expressions",
        ),
        ({"alpha_pattern": [2.0]}, "alpha_pattern is [2.0]; it must be a mapping from regular expressions"),
        ({"target_modules": {"up", 1}}, "target_modules is"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(GraphBuildError, match=re.escape(message)):
        LoraConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoraConfig(target_modules=["up", "q_proj"]), "no layer is named 'q_proj'"),
        (LoraConfig(target_modules=["embedding"]), "no layer is named 'embedding'"),
        (LoraConfig(target_modules="nothing"), "leave no layer; the layers are up, blocks.0"),
        (LoraConfig(target_modules=["up"], exclude_modules=["up"]), "leave no layer"),
        (
            LoraConfig(target_modules=["up"], rank_pattern={"0": 2}),
            "'0' of rank_pattern matches none of the chosen layers",
        ),
    ],
)
def test_targets_that_are_not_there_are_refused(
    model: onnx.ModelProto, config: LoraConfig, message: str
) -> None:
    with pytest.raises(GraphBuildError, match=message):
        add_lora(model, config)


def test_names_may_be_a_set(model: onnx.ModelProto) -> None:
    """As in PEFT, which makes a set of a list."""
    of_a_set = add_lora(model, LoraConfig(target_modules={"up", "0"}))
    assert of_a_set == add_lora(model, LoraConfig(target_modules=["0", "up"]))


def test_other_settings_than_a_configuration_are_refused(model: onnx.ModelProto, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="lora is a dict; pass a LoraConfig"):
        generate_artifacts(model, loss="mse", artifact_directory=tmp_path, lora={"r": 4})  # type: ignore[arg-type]


@pytest.mark.parametrize("op", ["Round", "Shape"])
def test_an_adapter_that_gets_no_gradient_is_refused(op: str, tmp_path: Path) -> None:
    """Silently untrained, it would be saved and deployed as it was drawn."""
    model = products({"lost": (8, 6), "fc": (6, 4)})
    (node,) = (node for node in model.graph.node if node.output == ["lost_act"])
    node.op_type = "Round"
    config = LoraConfig(r=2)
    if op == "Shape":
        # The layer counts rows only.
        node.op_type, rows = "Shape", node.output[0]
        node.output[0] = "dims"
        dims = onnx.helper.make_node("ConstantOfShape", ["dims"], [rows])
        model.graph.node.insert(2, dims)
    options = {"loss": "mse", "artifact_directory": tmp_path, "lora": config}
    with pytest.raises(
        GraphBuildError, match="no gradient flows from the loss 'loss' to the adapters of lost: "
    ):
        generate_artifacts(model, **options)
    # So of a model that has its adapters already, but not of parameters that are named.
    with_adapters = add_lora(model, config)
    with pytest.raises(GraphBuildError, match="the adapters of lost: "):
        generate_artifacts(with_adapters, **options | {"lora": None})
    generate_artifacts(
        with_adapters, **options | {"lora": None, "requires_grad": ["fc.lora_*", "lost.lora_*"]}
    )
    generate_artifacts(model, **options | {"lora": LoraConfig(r=2, exclude_modules=["lost"])})
    if op == "Round":
        generate_artifacts(model, **options, straight_through=True)


def test_a_second_set_of_adapters_is_refused(model: onnx.ModelProto) -> None:
    with pytest.raises(GraphBuildError, match="already has adapters"):
        add_lora(add_lora(model, LoraConfig()), LoraConfig())


def test_a_model_without_linear_layers_is_refused() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[2] x, float[2] w) => (float[2] y) { y = Mul(x, w) }'
    )
    with pytest.raises(GraphBuildError, match="has no linear layer"):
        add_lora(model, LoraConfig())


@pytest.mark.parametrize("typed", [True, False], ids=["typed", "untyped"])
def test_a_float16_model_has_float32_adapters(typed: bool) -> None:
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=shape).astype(np.float16) for shape in ((8, 16), (16, 4))]
    arrays = [onnx.numpy_helper.from_array(w, f"fc{i}.weight") for i, w in enumerate(weights)]
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "fc0.weight"], ["hidden"]),
        onnx.helper.make_node("Relu", ["hidden"], ["act"]),
        onnx.helper.make_node("MatMul", ["act", "fc1.weight"], ["y"]),
    ]
    kind = onnx.TensorProto.FLOAT16
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info("x", kind, ["n", 8])],
        [onnx.helper.make_tensor_value_info("y", kind, ["n", 4])],
        arrays,
        value_info=[onnx.helper.make_tensor_value_info("act", kind, ["n", 16])] if typed else [],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    config = LoraConfig(r=2, init_lora_weights=False, lora_alpha=2)
    changed = add_lora(model, config)
    x = rng.normal(size=(3, 8)).astype(np.float16)
    value = x.astype(np.float64)
    held = {name: array.astype(np.float64) for name, array in adapters_of(changed).items()}
    for i, weight in enumerate(weights):
        delta = held[f"fc{i}.lora_A.weight"] @ held[f"fc{i}.lora_B.weight"]
        value = value @ (weight.astype(np.float64) + delta)
        value = np.maximum(value, 0) if i == 0 else value
    assert np.allclose(run(changed, x=x), value, atol=0.02 * np.abs(value).max())
    inputs = adapter_model(model, config).graph.input[1:]
    assert {value.type.tensor_type.elem_type for value in inputs} == {kind}
    assert run(adapter_model(model, config), x=x).tobytes() == run(model, x=x).tobytes()


ACTIVATIONS = {
    "none": "y = Identity(s)",
    "Gelu": 'y = Gelu <approximate="tanh"> (s)',
    # As PyTorch's exporter writes "gelu" below opset 20, with two orders of its factors.
    "erf": "d = Div(s, root) e = Erf(d) f = Add(e, one) g = Mul(s, f) y = Mul(g, half)",
    "erf, half first": "d = Div(s, root) e = Erf(d) f = Add(e, one) g = Mul(s, half) y = Mul(g, f)",
    "erf, half last": "d = Div(s, root) e = Erf(d) f = Add(e, one) g = Mul(f, half) y = Mul(s, g)",
    "erf of a product": "d = Mul(s, inverse) e = Erf(d) f = Add(e, one) g = Mul(s, f) y = Mul(g, half)",
    # As it writes the "gelu_new" of Phi.
    "tanh": "a = Mul(s, half) p = Pow(s, three) b = Mul(p, c) d = Add(s, b) e = Mul(d, k) f = Tanh(e) g = Add(f, one)"
    " y = Mul(a, g)",
    "two readers": "g = Gelu(s) t = Tanh(s) y = Add(g, t)",
}
CONSTANTS = {
    "root": 2**0.5, "inverse": 0.5**0.5, "one": 1, "half": 0.5, "three": 3, "c": 0.044715, "k": (2 / np.pi) ** 0.5,
}  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias_first", [False, True])
def test_a_quantized_layer_with_a_bias_computes_the_same_bits_without_an_adapter(
    bias_first: bool, activation: str
) -> None:
    """ONNX Runtime makes one node of MatMulNBits, or a Gelu, and the Add of a bias, which an adapter must not part."""
    rng = np.random.default_rng(0)
    base = in_bits(products({"fc": (128, 96)}), 4, 32)
    product, _ = base.graph.node
    # As genai's builder writes it: activations are rounded to int8.
    product.attribute.append(onnx.helper.make_attribute("accuracy_level", 4))
    sum_ = "Add(bias, fc_out)" if bias_first else "Add(fc_out, bias)"
    behind = onnx.parser.parse_graph(
        f"g (float[n, 96] fc_out) => (float[n, 96] y) {{ s = {sum_} {ACTIVATIONS[activation]} }}"
    )
    behind.node[-1].output[0] = base.graph.output[0].name
    del base.graph.node[1:]
    base.graph.node.extend(behind.node)
    bias = rng.normal(size=96).astype(np.float32)
    arrays = {"bias": bias} | {name: np.float32(value) for name, value in CONSTANTS.items()}
    base.graph.initializer.extend(onnx.numpy_helper.from_array(a, name) for name, a in arrays.items())
    config = LoraConfig(r=2, init_lora_weights=False)
    x = rng.normal(size=(64, 128)).astype(np.float32)
    assert run(adapter_model(base, config), x=x).tobytes() == run(base, x=x).tobytes()
    if activation == "none":
        changed = add_lora(base, config)
        a, b = adapters_of(changed).values()
        assert np.allclose(run(changed, x=x) - run(base, x=x), config.scaling("fc") * x @ a @ b, atol=1e-4)


@pytest.mark.parametrize(("bits", "block_size"), [(3, 32), (4, 24), (4, 8)])
def test_bits_and_blocks_that_are_not_known_are_refused(bits: int, block_size: int, tmp_path: Path) -> None:
    model = in_bits(products({"fc": (48, 32), "fc2": (32, 8)}), 4, 32)
    (product,) = (node for node in model.graph.node if node.output == ["fc_out"])
    for attribute in product.attribute:
        attribute.i = {"bits": bits, "block_size": block_size}.get(attribute.name, attribute.i)
    message = f"has {bits} bits in blocks of {block_size}; onnxruntime supports 2, 4 and 8 bits"
    with pytest.raises(GraphBuildError, match=message):
        generate_artifacts(model, loss="mse", artifact_directory=tmp_path, lora=LoraConfig(r=1))
    assert not list(tmp_path.iterdir())
    # Other layers get theirs.
    assert len(adapters_of(add_lora(model, LoraConfig(r=1, target_modules=["fc2"])))) == 2


def ordered(bits: int, zero_point: int | None = None) -> onnx.ModelProto:
    """Two layers, the first of which has rows in an order of their own, as files of GPTQ have."""
    model = in_bits(products({"fc": (64, 32), "fc2": (32, 8)}), bits, 32, symmetric=zero_point is None)
    (product,) = (node for node in model.graph.node if node.output == ["fc_out"])
    order = np.random.default_rng(0).permutation(np.repeat(np.int32([0, 1]), 32))
    model.graph.initializer.append(onnx.numpy_helper.from_array(order, "order"))
    if zero_point is not None:
        packed = np.full((32, 1), zero_point * 17, np.uint8)
        model.graph.initializer.append(onnx.numpy_helper.from_array(packed, "zero_points"))
    del product.input[3:]
    product.input.extend(["" if zero_point is None else "zero_points", "order"])
    return model


@pytest.mark.parametrize("zero_point", [None, 8])
def test_rows_in_an_order_of_their_own(zero_point: int | None, tmp_path: Path) -> None:
    base = ordered(4, zero_point)
    rng = np.random.default_rng(0)
    x, target = (rng.normal(size=(5, n)).astype(np.float32) for n in (64, 8))
    config = LoraConfig(r=2, init_lora_weights=False)
    generate_artifacts(base, loss="mse", optimizer="sgd", artifact_directory=tmp_path, lora=config)
    state, module, _ = trained(tmp_path)
    loss = float(module(x, target))
    # The finite difference along the signs of the gradients is the sum of their sizes.
    changed = add_lora(base, config)
    names = [*adapters_of(changed)]
    assert len(names) == 4

    def loss_at(step: float) -> float:
        moved = onnx.ModelProto()
        moved.CopyFrom(changed)
        for tensor in moved.graph.initializer:
            if tensor.name in names:
                array = onnx.numpy_helper.to_array(tensor) + step * np.sign(
                    state.parameters[tensor.name].grad
                )
                tensor.CopyFrom(onnx.numpy_helper.from_array(array.astype(np.float32), tensor.name))
        return float(((run(moved, x=x).astype(np.float64) - target) ** 2).mean())

    assert loss == pytest.approx(loss_at(0), rel=1e-6)
    slope = sum(np.abs(state.parameters[name].grad).sum() for name in names)
    assert (loss_at(1e-4) - loss_at(-1e-4)) / 2e-4 == pytest.approx(slope, rel=1e-3)


@pytest.mark.parametrize(
    ("bits", "zero_point", "fault"),
    [
        (2, None, "weights of 2 bits"),
        (8, None, "weights of 8 bits"),
        (4, 7, "packed zero points other than 8"),
    ],
)
def test_rows_in_an_order_that_onnxruntime_misreads_are_refused(
    bits: int, zero_point: int | None, fault: str
) -> None:
    base = ordered(bits, zero_point)
    for function in (add_lora, adapter_model):
        with pytest.raises(GraphBuildError, match=rf"{fault} with g_idx.*desc_act=False.*exclude_modules"):
            function(base, LoraConfig(r=1))
    assert len(adapters_of(add_lora(base, LoraConfig(r=1, exclude_modules=["fc"])))) == 2
