"""Language models with a cache of keys and values, as onnxruntime-genai's model builder writes them, are trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import numpy_helper

from onnxtrain import Trainer, differentiate, generate_artifacts
from onnxtrain.errors import GraphBuildError, NoGradientRule
from runtimes import needs_opset
from tolerances import norm_relative_error
from training_run import Run

VOCABULARY, WIDTH, HEADS, SHARED, SIZE = 32, 64, 4, 2, 16
LAYERS = 2
RNG = np.random.default_rng(29)
IDS = RNG.integers(1, VOCABULARY, (3, 7))
MASK = np.ones_like(IDS)
LABELS = IDS.copy()
for _row, _length in ((1, 4), (2, 2)):
    IDS[_row, _length:] = MASK[_row, _length:] = 0
    LABELS[_row, _length:] = -100

SHAPES = {
    **{f"{k}.qkv": (WIDTH, (HEADS + 2 * SHARED) * SIZE) for k in range(LAYERS)},
    **{f"{k}.o": (HEADS * SIZE, WIDTH) for k in range(LAYERS)},
    "head": (WIDTH, VOCABULARY),
}
ANGLES = np.outer(np.arange(32), 0.6 ** np.arange(SIZE // 2)).astype(np.float32)
FLOATS = {
    "embedding": RNG.normal(size=(VOCABULARY, WIDTH)),
    **{f"{k}.norm": RNG.uniform(0.5, 1.5, WIDTH) for k in range(LAYERS + 1)},
}
FLOATS = {name: array.astype(np.float32) for name, array in FLOATS.items()}
CODES = {name: RNG.integers(0, 256, (n, -(-k // 32), 16)).astype(np.uint8) for name, (k, n) in SHAPES.items()}
SCALES = {
    name: RNG.uniform(0.01, 0.06, (n, -(-k // 32))).astype(np.float32) for name, (k, n) in SHAPES.items()
}
CACHES = [f"{k}.{part}" for k in range(LAYERS) for part in ("key", "value")]


def generation_model(*, level: int = 4, attention: str = "") -> onnx.ModelProto:
    """Embedding, two layers of attention, and a head; all products have int4 weights, qkv in one."""

    def product(x: str, name: str, y: str) -> str:
        k, n = SHAPES[name]
        return (
            f"{y} = com.microsoft.MatMulNBits<K={k}, N={n}, bits=4, block_size=32, accuracy_level={level}>"
            f'({x}, "{name}_codes", "{name}_scales")\n'
        )

    body = "x0 = Gather(embedding, input_ids)\n"
    body += 'n0 = SimplifiedLayerNormalization<axis=-1, epsilon=1e-06>(x0, "0.norm")\n'
    for k in range(LAYERS):
        body += product(f"n{k}", f"{k}.qkv", f"qkv{k}")
        body += f"""a{k}, "present.{k}.key", "present.{k}.value" =
            com.microsoft.GroupQueryAttention<num_heads={HEADS}, kv_num_heads={SHARED}, do_rotary=1>
            (qkv{k}, , , "past.{k}.key", "past.{k}.value", last, total, cos_cache, sin_cache)\n"""
        body += product(f"a{k}", f"{k}.o", f"o{k}")
        body += f"""n{k + 1}, mean{k}, deviation{k}, x{k + 1} =
            com.microsoft.SkipSimplifiedLayerNormalization<epsilon=1e-06>(x{k}, o{k}, "{k + 1}.norm")\n"""
    body += product(f"n{LAYERS}", "head", "logits")
    cache = [f'float[batch, {SHARED}, {{}}, {SIZE}] "{{}}.{name}"' for name in CACHES]
    past = ", ".join(text.format("past_length", "past") for text in cache)
    present = ", ".join(text.format("total_length", "present") for text in cache)
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        g (int64[batch, length] input_ids, int64[batch, total_length] attention_mask, {past})
            => (float[batch, length, {VOCABULARY}] logits, {present})
        <int64[1] one = {{1}}, int64 axis = {{1}}> {{
            sums = ReduceSum<keepdims=0>(attention_mask, one)
            before = Sub(sums, one)
            last = Cast<to=6>(before)
            shape = Shape(attention_mask)
            size = Gather<axis=0>(shape, axis)
            total = Cast<to=6>(size)
            {body}
        }}""")
    arrays = FLOATS | {"cos_cache": np.cos(ANGLES), "sin_cache": np.sin(ANGLES)}
    arrays |= {f"{name}_codes": array for name, array in CODES.items()}
    arrays |= {f"{name}_scales": array for name, array in SCALES.items()}
    for name, array in arrays.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def run(model: onnx.ModelProto, outputs: list[str], feeds: dict[str, np.ndarray]) -> list[Any]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    empty = np.zeros((len(feeds["input_ids"]), SHARED, 0, SIZE), np.float32)
    pasts = {value.name: empty for value in session.get_inputs() if value.name.startswith("past")}
    return session.run(outputs, pasts | feeds)


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    following = torch.from_numpy(LABELS)[:, 1:]
    return torch.nn.functional.cross_entropy(logits.double()[:, :-1].flatten(0, 1), following.flatten())


def torch_loss() -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of the float parameters in float64, with dequantized weights."""
    weights = {}
    for name, (k, n) in SHAPES.items():
        packed = CODES[name].astype(np.int64)
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(n, -1, 32) - 8
        weights[name] = torch.from_numpy(
            (codes * SCALES[name].astype(np.float64)[..., None]).reshape(n, -1)[:, :k]
        )
    leaves = {name: torch.from_numpy(array).double().requires_grad_() for name, array in FLOATS.items()}

    def norm(x: torch.Tensor, k: int) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (WIDTH,), leaves[f"{k}.norm"], eps=1e-6)

    cos, sin = (torch.from_numpy(f(ANGLES.astype(np.float64)))[: IDS.shape[1]] for f in (np.cos, np.sin))

    def turn(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    x = leaves["embedding"][torch.from_numpy(IDS)]
    for k in range(LAYERS):
        joint = (norm(x, k) @ weights[f"{k}.qkv"].T).unflatten(-1, (-1, SIZE)).transpose(1, 2)
        q, key, value = joint.split([HEADS, SHARED, SHARED], 1)
        key, value = (part.repeat_interleave(HEADS // SHARED, 1) for part in (turn(key), value))
        y = torch.nn.functional.scaled_dot_product_attention(turn(q), key, value, is_causal=True)
        x = x + y.transpose(1, 2).flatten(2) @ weights[f"{k}.o"].T
    loss = loss_of(norm(x, LAYERS) @ weights["head"].T)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return float(loss.detach()), {name: value.numpy() for name, value in zip(leaves, gradients, strict=True)}


@pytest.fixture(scope="module")
def reference() -> tuple[float, dict[str, np.ndarray]]:
    return torch_loss()


def levels(path: Path) -> list[int]:
    nodes = onnx.load(path).graph.node
    return [
        next((a.i for a in node.attribute if a.name == "accuracy_level"), 0)
        for node in nodes
        if node.op_type == "MatMulNBits"
    ]


def test_training_sees_whole_sequences_and_the_inference_model_keeps_its_cache(tmp_path: Path) -> None:
    generate_artifacts(generation_model(), loss="causal_lm", artifact_directory=tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    shapes = {entry["name"]: entry["shape"] for entry in manifest["inputs"] + manifest["targets"]}
    names = ("input_ids", "attention_mask", "labels")
    assert shapes == {name: ["batch", "length"] for name in names}
    assert manifest["outputs"] == ["loss"]
    assert manifest["inference"] == {
        "inputs": ["input_ids", "attention_mask", *(f"past.{name}" for name in CACHES)],
        "outputs": ["logits", *(f"present.{name}" for name in CACHES)],
    }
    assert {entry["name"] for entry in manifest["parameters"]} == set(FLOATS)
    # Shape inference knows all sizes: no gradient is summed over axes that are found at run time.
    nodes = onnx.load(tmp_path / "training_model.onnx").graph.node
    assert "NonZero" not in {node.op_type for node in nodes}


@pytest.mark.parametrize("window", [-1, 3])
def test_training_keeps_no_scores(tmp_path: Path, window: int) -> None:
    """Attention is the function for which there is a kernel, unless the file asks for more than that computes."""
    model = generation_model()
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            node.attribute.append(onnx.helper.make_attribute("local_window_size", window))
    generate_artifacts(model, loss="causal_lm", artifact_directory=tmp_path)
    written = onnx.load(tmp_path / "training_model.onnx")
    found = [node.op_type for node in written.graph.node]
    counts = [
        found.count(name) for name in ("CausalAttention_float", "CausalAttentionGradient_float", "Softmax")
    ]
    assert counts == ([LAYERS, LAYERS, 0] if window < 0 else [0, 0, LAYERS])


def test_a_cache_that_is_asked_for_stays(tmp_path: Path) -> None:
    outputs = [f"present.{name}" for name in CACHES[:2]]
    generate_artifacts(
        generation_model(), loss="causal_lm", artifact_directory=tmp_path, additional_output_names=outputs
    )
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [entry["name"] for entry in manifest["inputs"]] == [
        "input_ids", "attention_mask", *(f"past.{name}" for name in CACHES[:2]),
    ]  # fmt: skip


def test_float_activations_give_the_gradients_of_dequantized_weights(
    tmp_path: Path, reference: tuple[float, dict[str, np.ndarray]]
) -> None:
    run_ = Run.generate(tmp_path, generation_model(), loss="causal_lm")
    loss = float(run_.module(IDS, MASK, LABELS))
    expected, gradients = reference
    assert loss == pytest.approx(expected, rel=1e-6)
    for name, gradient in gradients.items():
        assert norm_relative_error(dict(run_.state.parameters)[name].grad, gradient) < 1e-5, name
    run_.module.eval()
    assert float(run_.module(IDS, MASK, LABELS)) == pytest.approx(expected, rel=1e-6)
    for name in ("training", "eval"):
        assert levels(tmp_path / f"{name}_model.onnx") == [0] * len(SHAPES)
    assert levels(tmp_path / "inference_model.onnx") == [4] * len(SHAPES)
    assert json.loads((tmp_path / "manifest.json").read_text())["activations"] == "float"


def test_deployed_activations_give_the_loss_of_the_file(
    tmp_path: Path, reference: tuple[float, dict[str, np.ndarray]]
) -> None:
    run_ = Run.generate(tmp_path, generation_model(), loss="causal_lm", activations="deployed")
    logits = run(generation_model(), ["logits"], {"input_ids": IDS, "attention_mask": MASK})[0]
    expected = float(loss_of(torch.from_numpy(logits)))
    # Far from that of float activations: what the kernel rounds to int8 counts.
    assert expected != pytest.approx(reference[0], rel=1e-5)
    assert float(run_.module(IDS, MASK, LABELS)) == pytest.approx(expected, rel=1e-6)
    # Straight through the rounding: close to the gradient of the float model, not zero.
    for name, gradient in reference[1].items():
        assert norm_relative_error(dict(run_.state.parameters)[name].grad, gradient) < 0.1, name
    run_.module.eval()
    assert float(run_.module(IDS, MASK, LABELS)) == pytest.approx(expected, rel=1e-6)
    for name in ("training", "eval", "inference"):
        assert levels(tmp_path / f"{name}_model.onnx") == [4] * len(SHAPES)
    assert json.loads((tmp_path / "manifest.json").read_text())["activations"] == "deployed"


@pytest.mark.parametrize("training", [True, False])
def test_models_with_deployed_activations_compute_the_bits_of_the_file(
    training: bool, tmp_path: Path
) -> None:
    """In another order of sums, numbers between two steps of int8 would be rounded the other way."""
    ids = np.random.default_rng(0).integers(1, VOCABULARY, (4, 24))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    settings = {"loss": "causal_lm", "loss_input_names": ["logits"], "additional_output_names": ["logits"]}
    run_ = Run.generate(tmp_path, generation_model(), activations="deployed", **settings)
    run_.module.train(training)
    _, logits = run_.module(*feeds.values(), ids)
    assert np.asarray(logits).tobytes() == run(generation_model(), ["logits"], feeds)[0].tobytes()


@pytest.mark.parametrize("activations", ["int8", None])
def test_other_activations_are_refused(activations: Any) -> None:
    with pytest.raises(ValueError, match=r"activations=.* is unknown; pass one of 'float'"):
        Trainer(generation_model(), "causal_lm", activations=activations)


def test_a_trained_model_generates_with_its_cache(tmp_path: Path) -> None:
    """Token by token it gives the logits that the trainer predicts for the whole sequence."""
    trainer = Trainer(generation_model(level=0), "causal_lm", learning_rate=1e-2)
    data = {"input_ids": IDS, "attention_mask": MASK}
    before = trainer.evaluate(data, LABELS)
    trainer.fit(data, LABELS, epochs=5)
    after = trainer.evaluate(data, LABELS)
    assert after["perplexity"] < before["perplexity"] / 2
    predicted = trainer.predict(data)
    assert isinstance(predicted, np.ndarray)
    trainer.export(tmp_path / "trained.onnx")
    trained = onnx.load(tmp_path / "trained.onnx")
    given = generation_model()
    assert [value.name for value in trained.graph.input] == [value.name for value in given.graph.input]
    assert [value.name for value in trained.graph.output] == [value.name for value in given.graph.output]
    np.testing.assert_allclose(run(trained, ["logits"], data)[0][:, 0], predicted[:, 0], rtol=1e-5, atol=1e-5)
    caches: dict[str, np.ndarray] = {}
    outputs = ["logits", *(f"present.{name}" for name in CACHES)]
    for place in range(IDS.shape[1]):
        feeds = {"input_ids": IDS[:1, place : place + 1], "attention_mask": MASK[:1, : place + 1]}
        logits, *values = run(trained, outputs, feeds | caches)
        caches = {f"past.{name}": value for name, value in zip(CACHES, values, strict=True)}
        np.testing.assert_allclose(logits[0, 0], predicted[0, place], rtol=1e-4, atol=1e-4)


def test_padding_has_no_effect() -> None:
    trainer = Trainer(generation_model(), "causal_lm")
    one = [trainer.evaluate({"input_ids": IDS[:1], "attention_mask": MASK[:1]}, LABELS[:1])["loss"]]
    more = [
        trainer.evaluate(
            {"input_ids": IDS[k : k + 1, :n], "attention_mask": MASK[k : k + 1, :n]}, LABELS[k : k + 1, :n]
        )["loss"]
        for k, n in ((1, 4), (2, 2))
    ]
    together = trainer.evaluate({"input_ids": IDS, "attention_mask": MASK}, LABELS)["loss"]
    assert together == pytest.approx(np.average(one + more, weights=[6, 3, 1]), rel=1e-5)


@needs_opset(23)
@pytest.mark.parametrize(
    "node",
    [
        "y, k, v = com.microsoft.MultiHeadAttention<num_heads=2, unidirectional=1>(h, h, h, , , , pk, pv)",
        "y, k, v = Attention<q_num_heads=2, kv_num_heads=2, is_causal=1>(h, h, h, , pk, pv)",
    ],
    ids=["MultiHeadAttention", "Attention"],
)
def test_other_attention_ops_lose_their_cache(node: str, tmp_path: Path) -> None:
    model = onnx.parser.parse_model(f"""
        <ir_version: 11, opset_import: ["": 23, "com.microsoft": 1]>
        g (float[b, n, 8] x, float[b, 2, p, 4] pk, float[b, 2, p, 4] pv)
            => (float[b, n, 8] y, float[b, 2, t, 4] k, float[b, 2, t, 4] v) {{
            h = MatMul(x, w)
            {node}
        }}""")
    weight = RNG.normal(size=(8, 8)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    x, target = (RNG.normal(size=(2, 5, 8)).astype(np.float32) for _ in range(2))
    run_ = Run.generate(tmp_path, model, loss="mse")
    loss = float(run_.module(x, target))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    empty = np.zeros((2, 2, 0, 4), np.float32)
    y = session.run(["y"], {"x": x, "pk": empty, "pv": empty})[0]
    assert loss == pytest.approx(float(np.square(y - target).mean()), rel=1e-5)
    assert np.abs(dict(run_.state.parameters)["w"].grad).max() > 0


def concat_model(past: str = "past", batch: str = "b", size: int | str = 4) -> onnx.ModelProto:
    """Attention in standard ops, with a cache that a Concat extends, as PyTorch's exporter writes it."""
    cache, all_keys = (f"float[{batch}, 2, {length}, {size}]" for length in ("p", "t"))
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21]>
        g (float[b, n, 8] x, {cache} {past}_key, {cache} {past}_value)
            => (float[b, n, 8] y, {all_keys} present_key, {all_keys} present_value)
        <int64[4] split = {{0, 0, 2, 4}}, int64[3] joined = {{0, 0, 8}}> {{
            h = MatMul(x, w)
            s = Reshape(h, split)
            new = Transpose<perm=[0, 2, 1, 3]>(s)
            present_key = Concat<axis=-2>({past}_key, new)
            present_value = Concat<axis=2>({past}_value, new)
            length = Shape<start=2, end=3>({past}_key)
            position = Cast<to=1>(length)
            query = Add(new, position)
            keys = Transpose<perm=[0, 1, 3, 2]>(present_key)
            scores = MatMul(query, keys)
            p = Softmax(scores)
            a = MatMul(p, present_value)
            back = Transpose<perm=[0, 2, 1, 3]>(a)
            y = Reshape(back, joined)
        }}""")
    model.graph.initializer.append(numpy_helper.from_array(RNG.normal(size=(8, 8)).astype(np.float32), "w"))
    return model


@pytest.mark.parametrize("size", [4, "kv_cache_dim"])
def test_a_cache_that_a_concat_extends_is_dropped(size: int | str, tmp_path: Path) -> None:
    """The builder of onnxruntime-genai leaves the size of a head open, which the new keys tell."""
    model = concat_model(size=size)
    trainer = Trainer(model, "mse", "sgd", directory=tmp_path / "run")
    assert [spec.name for spec in trainer.manifest.inputs] == ["x"]
    x, target = (RNG.normal(size=(2, 5, 8)).astype(np.float32) for _ in range(2))
    empty = np.zeros((2, 2, 0, 4), np.float32)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    y = session.run(["y"], {"x": x, "past_key": empty, "past_value": empty})[0]
    assert trainer.evaluate(x, target)["loss"] == pytest.approx(float(np.square(y - target).mean()), rel=1e-5)
    before = trainer.evaluate(x, target)["loss"]
    trainer.fit(x, target, epochs=5)
    assert trainer.evaluate(x, target)["loss"] < before
    trainer.export(tmp_path / "trained.onnx")
    names = [value.name for value in onnx.load(tmp_path / "trained.onnx").graph.input]
    assert names == ["x", "past_key", "past_value"]


def test_a_concat_of_other_inputs_is_no_cache() -> None:
    trainer = Trainer(concat_model("side"), "mse", loss_input_names="y")
    assert [spec.name for spec in trainer.manifest.inputs] == ["x", "side_key", "side_value"]


def test_a_cache_of_unknown_sizes_is_an_error() -> None:
    with pytest.raises(GraphBuildError, match=r"the input 'past_key' has shape .* without a cache"):
        Trainer(concat_model(batch="c"), "mse")


def test_what_cannot_be_trained_is_named() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        g (float[n, 64] x, float[n, 2] router, uint8[2, 64, 32] q, float[2, 64] s) => (float y) {
            h = Mul(x, gain)
            z = com.microsoft.QMoE<k=1, expert_weight_bits=4>(h, router, q, s, , q, s)
            y = ReduceSum<keepdims=0>(z)
        }""")
    model.graph.initializer.append(numpy_helper.from_array(np.ones(64, np.float32), "gain"))
    with pytest.raises(NoGradientRule, match="QMoE"):
        differentiate(model, of="y", wrt=["gain"])
