"""`plan_training`: measured memory is that of the training that it recommends, and wrong questions are refused."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import models
from fresh_process import python
from lora.models import in_bits
from onnxtrain import PlanChoice, generate_artifacts, plan_training
from onnxtrain.api import CheckpointState
from onnxtrain.errors import GraphBuildError, InputError, NothingToTrain
from onnxtrain.passes import canonicalize, load_model
from onnxtrain.planning import memory_text, parse_memory
from onnxtrain.planning._choices import list_choices, shortest_patterns

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="peak memory is read from /proc"
)
TOLERANCE = 0.15

# A training on a device as docs/reference/file-formats.md writes it, with other numbers than the dry run's.
TRAIN = """
import sys
import numpy as np
from pathlib import Path
from onnxtrain.api import CheckpointState, Module, Optimizer
folder = Path(sys.argv[1])
state = CheckpointState.load_checkpoint(folder / "checkpoint")
module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
optimizer = Optimizer(folder / "optimizer_model.onnx", module)
data = np.load(folder / "data.npz")
batch = [data[name] for name in data.files]
for _ in range(8):
    module(*batch)
    optimizer.step()
    module.lazy_reset_grad()
module.eval()
module(*batch)
CheckpointState.save_checkpoint(state, folder / "checkpoint", include_optimizer_state=True)
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


def peak_of_training(
    model: onnx.ModelProto, choice: PlanChoice, loss: str, folder: Path, **data: np.ndarray
) -> int:
    """Trains a choice in a process of its own; returns its peak memory in bytes."""
    generate_artifacts(
        model,
        loss=loss,
        optimizer="adamw",
        requires_grad=choice.requires_grad,
        lora=choice.lora,
        recompute=choice.recompute,
        artifact_directory=folder,
    )
    np.savez(folder / "data.npz", **data)
    return int(python("-c", TRAIN, folder).stdout) * 1024


def weights_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: (rng.normal(size=shape) / np.sqrt(max(np.prod(shape[1:]), 1))).astype(np.float32)
        for name, shape in shapes.items()
    }


def cnn(channels: int = 32) -> onnx.ModelProto:
    """x [batch, 3, 32, 32] -> four convolutions with ReLU, mean over the image, a linear layer of ten classes."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (channels, 10), "fc.bias": (10,)}
    nodes, last, width = [], "x", 3
    for k in range(4):
        shapes |= {f"conv{k}.weight": (channels, width, 3, 3), f"conv{k}.bias": (channels,)}
        nodes.append(
            helper.make_node("Conv", [last, f"conv{k}.weight", f"conv{k}.bias"], [f"c{k}"], pads=[1] * 4)
        )
        nodes.append(helper.make_node("Relu", [f"c{k}"], [f"r{k}"]))
        last, width = f"r{k}", channels
    nodes += [
        helper.make_node("GlobalAveragePool", [last], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["flat"]),
        helper.make_node("Gemm", ["flat", "fc.weight", "fc.bias"], ["logits"]),
    ]
    return models.make_model(
        nodes, {"x": ["batch", 3, 32, 32]}, {"logits": ["batch", 10]}, weights_of(shapes)
    )


def llama(width: int = 128, layers: int = 2, vocabulary: int = 2048) -> onnx.ModelProto:
    """A decoder with grouped-query attention, of which onnxruntime's quantizer has written the products in int4."""
    size, wide = width // 4, 3 * width
    projections = {"q_proj": (width, width), "k_proj": (width, width // 2), "v_proj": (width, width // 2)}
    rotary = f"do_rotary=1, num_heads=4, kv_num_heads=2, scale={size**-0.5}"
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (vocabulary, width)}
    body = "x0 = Gather(embed_tokens.weight, input_ids)\n"

    def product(x: str, name: str, shape: tuple[int, int], y: str) -> str:
        shapes[f"{name}.weight"] = shape
        return f"{y} = MatMul({x}, {name}.weight)\n"

    def norm(x: str, name: str, y: str) -> str:
        shapes[name] = (width,)
        return f"{y} = SimplifiedLayerNormalization<axis=-1, epsilon=1e-06>({x}, {name})\n"

    for k in range(layers):
        block = f"layers.{k}"
        body += norm(f"x{k}", f"{block}.input_layernorm.weight", f"n{k}")
        for name, shape in projections.items():
            body += product(f"n{k}", f"{block}.self_attn.{name}", shape, f"{name[0]}{k}")
        body += f"a{k} = com.microsoft.GroupQueryAttention<{rotary}>"
        body += f"(q{k}, k{k}, v{k}, , , last, total, cos_cache, sin_cache)\n"
        body += product(f"a{k}", f"{block}.self_attn.o_proj", (width, width), f"o{k}")
        body += f"y{k} = Add(x{k}, o{k})\n" + norm(
            f"y{k}", f"{block}.post_attention_layernorm.weight", f"m{k}"
        )
        body += product(f"m{k}", f"{block}.mlp.up_proj", (width, wide), f"u{k}")
        body += f"e{k} = Sigmoid(u{k})\ns{k} = Mul(u{k}, e{k})\n"
        body += (
            product(f"s{k}", f"{block}.mlp.down_proj", (wide, width), f"d{k}")
            + f"x{k + 1} = Add(y{k}, d{k})\n"
        )
    body += norm(f"x{layers}", "norm.weight", "end")
    body += product("end", "lm_head", (width, vocabulary), "logits")
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        g (int64[batch, length] input_ids, int64[batch, length] attention_mask)
            => (float[batch, length, {vocabulary}] logits)
        <int64[1] one = {{1}}, int64 axis = {{1}}> {{
            sums = ReduceSum<keepdims=0>(attention_mask, one)
            before = Sub(sums, one)
            last = Cast<to=6>(before)
            shape = Shape(attention_mask)
            count = Gather<axis=0>(shape, axis)
            total = Cast<to=6>(count)
            {quoted(body)}
        }}"""
    )
    angles = np.outer(np.arange(512), 0.6 ** np.arange(size // 2)).astype(np.float32)
    arrays = weights_of(shapes) | {"cos_cache": np.cos(angles), "sin_cache": np.sin(angles)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return in_bits(model, 4, block_size=32)


def quoted(text: str) -> str:
    """Puts names with dots into quotes, without which ONNX's parser does not take them."""
    return re.sub(r"(?<![\w.])((?:layers|embed_tokens|norm|lm_head)\.[\w.]+)", r'"\1"', text)


@needs_proc
@pytest.mark.thorough
def test_memory_of_an_image_network_is_that_of_the_training(tmp_path: Path) -> None:
    plan = plan_training(cnn(), "2GB", loss="cross_entropy", batch_size=128, ranks=(4,))
    (best,) = [choice for choice in plan if choice.recommended]
    assert best.name == "all parameters"
    assert not best.recompute
    rng = np.random.default_rng(1)
    images = rng.normal(size=(128, 3, 32, 32)).astype(np.float32)
    peak = peak_of_training(cnn(), best, "cross_entropy", tmp_path, x=images, labels=rng.integers(0, 10, 128))
    assert best.peak == pytest.approx(peak, rel=TOLERANCE)
    # The last layer keeps no activations, and the tolerance tells the two apart.
    (least,) = [choice for choice in plan if choice.name == "the last layer"]
    assert best.peak > 1.3 * least.peak


@needs_proc
@pytest.mark.thorough
def test_memory_of_a_language_model_in_int4_is_that_of_the_training(tmp_path: Path) -> None:
    model = llama()
    arguments: dict[str, Any] = {"loss": "causal_lm", "dims": {"length": 64}, "ranks": (8,)}
    plan = plan_training(model, "2GB", batch_size=8, **arguments)
    (best,) = [choice for choice in plan if choice.recommended]
    assert best.name == "LoRA of rank 8, all linear layers"
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 2048, (8, 64))
    data = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "labels": tokens}
    peak = peak_of_training(model, best, "causal_lm", tmp_path / "a", **data)
    assert best.peak == pytest.approx(peak, rel=TOLERANCE)
    (small, *_) = plan_training(
        model, "2GB", batch_size=1, frozen_params=["embed_tokens.weight"], **arguments
    )
    # Python and ONNX Runtime alone take two thirds of both.
    assert small.peak < best.peak / (1 + TOLERANCE)


@needs_proc
def test_a_training_that_needs_too_much_is_stopped() -> None:
    """Python and ONNX Runtime alone take more than four times 8 MB."""
    plan = plan_training(models.mlp(), "8MB", loss="cross_entropy", ranks=(1,))
    assert {(choice.peak, choice.seconds, choice.complete, choice.fits) for choice in plan} == {
        (32_000_000, None, False, False)
    }
    assert not any(choice.recommended for choice in plan)


@needs_proc
def test_the_arguments_of_a_choice_train_what_it_says(tmp_path: Path) -> None:
    model = models.mlp(hidden=16)
    lines: list[str] = []
    plan = plan_training(model, "1GB", loss="cross_entropy", ranks=(2,), steps=1, report=lines.append)
    assert [choice.name for choice in plan if not choice.recompute] == [
        "all parameters",
        "LoRA of rank 2, all linear layers",
        "the last layer",
        "biases and norms",
    ]
    assert lines[0] == "1 of 8: all parameters"
    elements = 4 * 16 + 16 + 16 * 3 + 3
    for place, choice in enumerate(plan):
        generate_artifacts(
            model,
            loss="cross_entropy",
            requires_grad=choice.requires_grad,
            lora=choice.lora,
            recompute=choice.recompute,
            artifact_directory=tmp_path / str(place),
        )
        state = CheckpointState.load_checkpoint(tmp_path / str(place) / "checkpoint")
        trained = [p for _, p in state.parameters if p.requires_grad]
        assert choice.trained == sum(np.asarray(p.data).size for p in trained)
        assert choice.share == choice.trained / elements
        assert choice.complete
        assert choice.seconds
    named = {choice.name: choice.requires_grad for choice in plan}
    assert named["the last layer"] == ["w2", "b2"]
    assert named["biases and norms"] == ["b*"]


def test_weights_in_int4_count_and_are_reached_by_adapters() -> None:
    model = llama(width=64, layers=1, vocabulary=128)
    listed = list_choices(model, canonicalize(load_model(model)), None, None, (4,))
    products = 64 * (64 + 32 + 32 + 64 + 192 + 192)
    norms = 3 * 64
    assert listed.elements == 128 * 64 + norms + products + 64 * 128
    found = {choice.name: choice for choice in listed.choices}
    assert list(found) == [
        "all float parameters",
        "LoRA of rank 4, all linear layers",
        "LoRA of rank 4, attention",
        "biases and norms",
    ]
    everywhere, attention = found["LoRA of rank 4, all linear layers"], found["LoRA of rank 4, attention"]
    assert everywhere.reached == products
    assert everywhere.trained == 4 * (2 * (64 + 64) + 2 * (64 + 32) + 2 * (64 + 192))
    assert attention.lora is not None
    assert attention.lora.target_modules == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert found["biases and norms"].trained == norms


def test_integer_products_count_and_are_reached_by_adapters() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        g (float[n, 4] x) => (float[n, 3] y) <float s = {0.1}, uint8 z = {128}, float[3] gain = {1, 2, 3}> {
            q = QuantizeLinear(x, s, z)
            p = QLinearMatMul(q, s, z, w, s, z, s, z)
            d = DequantizeLinear(p, s, z)
            y = Mul(d, gain)
        }""")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((4, 3), np.uint8), "w"))
    listed = list_choices(model, canonicalize(load_model(model)), None, None, (2,))
    assert listed.elements == 4 * 3 + 3
    assert [(choice.name, choice.trained, choice.reached) for choice in listed.choices] == [
        ("all float parameters", 3, 3),
        ("LoRA of rank 2, all linear layers", 2 * (4 + 3), 12),
    ]


@pytest.mark.thorough
def test_adapters_are_recommended_before_the_floats_of_an_int4_model() -> None:
    model = llama(width=64, layers=1, vocabulary=64)
    plan = plan_training(
        model, "2GB", loss="causal_lm", dims={"length": 4}, batch_size=1, ranks=(2, 4), steps=1
    )
    (best,) = [choice for choice in plan if choice.recommended]
    assert (best.name, best.recompute) == ("LoRA of rank 4, all linear layers", False)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MB", 512_000_000),
        ("512 mb", 512_000_000),
        ("1.5GiB", 3 << 29),
        ("800 MiB", 800 << 20),
        ("64k", 64_000),
        ("123", 123),
        (4096, 4096),
    ],
)
def test_sizes_of_memory(text: str | int, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["512 Mb?", "", "MB", "-5MB", "0", "1e9", "5 XB", "1,5GB", 0, -1, True])
def test_unreadable_sizes_are_refused(text: str | int) -> None:
    with pytest.raises(InputError, match=rf"memory is {re.escape(repr(text))}; write a number and a unit"):
        parse_memory(text)


def test_sizes_are_written_in_decimal_units() -> None:
    assert [memory_text(size) for size in (370_400_000, 1_250_000_000)] == ["370 MB", "1.25 GB"]


def test_patterns_match_no_other_parameter() -> None:
    names = ["a.0.norm.w", "a.1.norm.w", "fc.bias", "x[0].b"]
    patterns = shortest_patterns(names, [*names, "a.0.fc.w", "x0.c"])
    assert patterns == ["a.*.norm.w", "*.bias", "*.b"]
    assert shortest_patterns(["w1"], ["w1", "w2"]) == ["w1"]


def test_a_size_that_is_missing_or_unknown_is_an_error() -> None:
    model = llama(width=64, layers=1, vocabulary=64)
    with pytest.raises(InputError, match="the size of 'length', a dimension of 'input_ids', is needed"):
        plan_training(model, "1GB", loss="causal_lm")
    with pytest.raises(InputError, match="symbolic dimension 'lenght'; they have 'batch', 'length'"):
        plan_training(model, "1GB", loss="causal_lm", dims={"lenght": 4})


@needs_proc
def test_a_warning_is_given_once(caplog: pytest.LogCaptureFixture) -> None:
    """Each set of artifacts would repeat what an exporter has done to the model."""
    logger = logging.getLogger("onnxtrain")
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        logger.warning("folded")

    with pytest.raises(GraphBuildError, match="choosing a loss"):
        plan_training(models.mlp(), "1GB", loss="nonsense", ranks=(1,), report=report)
    assert len(lines) == 4
    assert [record.message for record in caplog.records] == ["folded"]
    logger.warning("folded")
    assert [record.message for record in caplog.records] == ["folded"] * 2


def test_a_batch_that_the_file_has_fixed_is_not_another_one() -> None:
    model = models.mlp()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    with pytest.raises(
        InputError, match="batch_size is 8, but the model has a fixed batch size of 2 for 'x'"
    ):
        plan_training(model, "1GB", loss="cross_entropy", batch_size=8)


def test_a_model_without_parameters_has_nothing_to_train() -> None:
    model = models.make_model(models.parse_nodes("y = Tanh(x)"), {"x": ["n", 3]}, {"y": ["n", 3]}, {})
    with pytest.raises(NothingToTrain, match="no parameter is left to train"):
        plan_training(model, "1GB", loss="mse")


def test_errors_of_the_loss_are_those_of_the_artifacts() -> None:
    with pytest.raises(GraphBuildError, match="choosing a loss: received 'nonsense'"):
        plan_training(models.mlp(), "1GB", loss="nonsense")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"optimizer": None}, "optimizer is None"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"steps": 0}, "steps is 0"),
    ],
)
def test_numbers_that_make_no_training_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan_training(models.mlp(), "1GB", **{"loss": "cross_entropy", **wrong})
