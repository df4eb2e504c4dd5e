"""Embeddings of which only the rows that are read get a gradient and are updated: against torch, and our dense ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import helper, numpy_helper

from onnxtrain import Trainer, api, onnxblock
from onnxtrain.errors import GraphBuildError, InputError, ModelLoadError
from onnxtrain.optimizers import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    ClipGradNorm,
    ClipGradValue,
    Lion,
    Muon,
    Optimizer,
    ParameterGroup,
    ParameterSpec,
    RMSprop,
    SparseAdam,
    build_optimizer_model,
)
from onnxtrain.runtime.device import parse_device
from onnxtrain.runtime.dtypes import BY_NAME
from onnxtrain.runtime.rows import RowGradient
from tolerances import NORM_RELATIVE, norm_relative_error
from training_run import Run

ROWS = 11
BATCHES = [[1, 4, 4, 9], [0, 4, 1, 1], [10, 10, 10, 10], [2, 3, 4, 0], [1, 4, 4, 9]]
RATES = [0.5, 0.4, 0.3, 0.2, 0.1]


def tables(
    rest: tuple[int, ...] = (3,),
    dtype: type = np.float32,
    *,
    reads: int = 1,
    rows: int = ROWS,
    extra: list[onnx.NodeProto] | None = None,
) -> onnx.ModelProto:
    """The mean of the squares of rows of `emb`, which is read so many times, plus a bias; the loss is its output.

    Args:
        rest: axes of the table behind the first.
        dtype: of all floats.
        reads: how often it is read: by `ids`, then by `ids_1`, ...
        rows: of the table.
        extra: nodes in front of `loss`, which read `squares` and give `total`.
    """
    rng = np.random.default_rng(0)
    values = {"emb": rng.normal(size=(rows, *rest)), "bias": rng.normal(size=rest)}
    names = ["ids", *(f"ids_{index}" for index in range(1, reads))]
    nodes = [
        node
        for index, name in enumerate(names)
        for node in (
            helper.make_node("Gather", ["emb", name], [f"rows_{index}"], name=f"read_{index}"),
            helper.make_node("Add", [f"rows_{index}", "bias"], [f"shifted_{index}"]),
            helper.make_node("Mul", [f"shifted_{index}"] * 2, [f"square_{index}"]),
            helper.make_node("ReduceSum", [f"square_{index}"], [f"sum_{index}"], keepdims=0),
        )
    ]
    nodes += [helper.make_node("Sum", [f"sum_{index}" for index in range(reads)], ["squares"])]
    nodes += extra or [helper.make_node("Identity", ["squares"], ["total"])]
    nodes += [helper.make_node("Mul", ["total", "scale"], ["loss"])]
    elements = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        nodes,
        "tables",
        [helper.make_tensor_value_info(name, onnx.TensorProto.INT64, ["n", "m"]) for name in names],
        [helper.make_tensor_value_info("loss", elements, [])],
        [numpy_helper.from_array(value.astype(dtype), name) for name, value in values.items()]
        + [numpy_helper.from_array(np.array(0.125, dtype), "scale")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def generate(folder: Path, model: onnx.ModelProto, optimizer: Any, **options: Any) -> Run:
    chosen: dict[str, Any] = {"sparse_gradients": ["emb"], "requires_grad": ["emb", "bias"]}
    return Run.generate(folder, model, optimizer=optimizer, **chosen | options)


def values(run: Run) -> dict[str, np.ndarray]:
    return {name: parameter.data.copy() for name, parameter in run.state.parameters}


def batch(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.int64).reshape(2, -1)


def step(run: Run, rate: float, *ids: np.ndarray) -> float:
    assert run.optimizer is not None
    run.optimizer.set_learning_rate(rate)
    return run.step(*ids)


def assert_close(found: np.ndarray, expected: np.ndarray, dtype: type) -> None:
    assert norm_relative_error(found, expected) < NORM_RELATIVE[np.dtype(dtype)]


# ---- against torch ----------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[Optimizer, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (SGD(), torch.optim.SGD),
    "adagrad": (
        Adagrad(lr_decay=0.1, initial_accumulator_value=0.5),
        lambda p, lr: torch.optim.Adagrad(p, lr, lr_decay=0.1, initial_accumulator_value=0.5),
    ),
    "sparse_adam": (SparseAdam(), torch.optim.SparseAdam),
    "sparse_adam-settings": (
        SparseAdam(betas=(0.5, 0.9), eps=1e-2),
        lambda p, lr: torch.optim.SparseAdam(p, lr, betas=(0.5, 0.9), eps=1e-2),
    ),
}


@pytest.fixture
def _checked() -> Iterator[None]:
    """PyTorch warns where nobody says whether sparse tensors are to be checked."""
    with torch.sparse.check_sparse_tensor_invariants(True):
        yield


@pytest.mark.usefixtures("_checked")
@pytest.mark.parametrize(
    ("dtype", "rest", "kernels"),
    [
        (np.float32, (3,), "auto"),
        (np.float32, (3,), "off"),
        (np.float32, (), "auto"),
        (np.float64, (1,), "auto"),
        (np.float64, (2, 3), "auto"),
    ],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_match_torch(
    name: str,
    dtype: type,
    rest: tuple[int, ...],
    kernels: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ONNXTRAIN_KERNELS", kernels)
    ours, theirs = OPTIMIZERS[name]
    model = tables(rest, dtype, reads=2)
    run = generate(tmp_path, model, ours, requires_grad=["emb"])
    start = numpy_helper.to_array(model.graph.initializer[0])
    bias = torch.tensor(numpy_helper.to_array(model.graph.initializer[1]))
    table = torch.nn.Parameter(torch.tensor(start.reshape(ROWS, -1)))
    optimizer = theirs([table], lr=0.1)
    others = BATCHES[1:] + BATCHES[:1]
    for ids, more, rate in zip(BATCHES, others, RATES, strict=True):
        loss = step(run, rate, batch(ids), batch(more))
        optimizer.param_groups[0]["lr"] = float(np.float32(rate))
        optimizer.zero_grad()
        reads = [
            torch.nn.functional.embedding(torch.tensor(batch(i)), table, sparse=True) for i in (ids, more)
        ]
        expected = sum(((r.reshape(2, 2, *rest) + bias) ** 2).sum() for r in reads) * 0.125
        expected.backward()
        assert table.grad is not None
        found = run.state.parameters["emb"].grad
        assert found is not None
        assert_close(found, table.grad.to_dense().numpy(), dtype)
        optimizer.step()
        assert_close(np.array(loss), expected.detach().numpy(), dtype)
    assert_close(values(run)["emb"], table.detach().numpy(), dtype)
    np.testing.assert_array_equal(values(run)["emb"][5:9], start[5:9])  # never read


def test_a_table_of_float16_loses_only_its_own_rounding(tmp_path: Path) -> None:
    wide = generate(tmp_path / "wide", tables(), SparseAdam(), requires_grad=["emb"])
    narrow = generate(tmp_path / "narrow", tables(dtype=np.float16), SparseAdam(), requires_grad=["emb"])
    for ids in BATCHES:
        step(wide, 0.1, batch(ids))
        step(narrow, 0.1, batch(ids))
    assert values(narrow)["emb"].dtype == np.float16
    assert_close(values(narrow)["emb"], values(wide)["emb"], np.float16)
    gradients = [run.state.parameters["emb"].grad for run in (narrow, wide)]
    assert gradients[0] is not None
    assert gradients[1] is not None
    assert gradients[0].dtype == np.float16
    assert_close(gradients[0], gradients[1], np.float16)


# ---- against dense gradients ------------------------------------------------------------------------------

CLIPPING = {
    "unclipped": None,
    "norm": ClipGradNorm(0.5),
    "large": ClipGradNorm(1e4),
    "value": ClipGradValue(0.1),
}


@pytest.mark.parametrize("clipping", CLIPPING.values(), ids=CLIPPING)
@pytest.mark.parametrize("kind", [SGD, Adagrad])
def test_sparse_and_dense_updates_are_the_same(kind: type[Optimizer], clipping: Any, tmp_path: Path) -> None:
    """Also of indices counted from the end, of two reads, and of gradients of two calls."""
    runs = [
        generate(tmp_path / str(n), tables(reads=2), kind(clip_grad=clipping), sparse_gradients=["em*"][:n])
        for n in (0, 1)
    ]
    for ids in BATCHES:
        for run in runs:
            run.module(batch(ids), batch([-1, -ROWS, 3, -3]))
            run.module(batch([4, 4]), batch([-1, 1]))
            step(run, 0.1, batch(ids), batch(ids))
    dense, sparse = map(values, runs)
    for name in dense:
        assert_close(sparse[name], dense[name], np.float32)
    gradients = [run.state.parameters["emb"].grad for run in runs]
    assert gradients[0] is not None
    assert gradients[1] is not None
    assert_close(gradients[1], gradients[0], np.float32)
    assert gradients[0].flags.writeable
    assert not gradients[1].flags.writeable


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"recompute": True}], ids=str)
def test_other_options_of_the_training_model(options: dict[str, Any], tmp_path: Path) -> None:
    runs = [
        generate(tmp_path / str(n), tables(), SGD(), sparse_gradients=["emb"][:n], **options) for n in (0, 1)
    ]
    for ids in BATCHES:
        for run in runs:
            step(run, 0.1, batch(ids))
    dense, sparse = map(values, runs)
    assert_close(sparse["emb"], dense["emb"], np.float32)


@pytest.mark.parametrize("optimizer", [SGD(), SparseAdam(clip_grad=ClipGradNorm(1.0))], ids=["sgd", "adam"])
def test_a_batch_that_reads_nothing_changes_nothing(optimizer: Optimizer, tmp_path: Path) -> None:
    run = generate(tmp_path, tables(), optimizer, requires_grad=["emb"])
    before = values(run)["emb"]
    empty = np.zeros((2, 0), np.int64)
    step(run, 0.1, empty)
    gradient = run.state.parameters["emb"].grad
    assert gradient is not None
    assert gradient.shape == before.shape
    assert not gradient.any()
    np.testing.assert_array_equal(values(run)["emb"], before)
    run.module(empty)
    step(run, 0.1, batch(BATCHES[0]))
    assert (values(run)["emb"] != before).any(axis=1).tolist() == [i in BATCHES[0] for i in range(ROWS)]


def test_a_resumed_run_equals_one_that_never_stopped(tmp_path: Path) -> None:
    optimizer = AdamW(weight_decay=0.1, groups=[ParameterGroup("emb", optimizer=SparseAdam())])
    run = generate(tmp_path, tables(), optimizer)
    for ids in BATCHES[:2]:
        step(run, 0.1, batch(ids))
    api.CheckpointState.save_checkpoint(run.state, tmp_path / "saved", include_optimizer_state=True)
    resumed = Run.open(tmp_path, tmp_path / "saved")
    for ids in BATCHES[2:]:
        for each in (run, resumed):
            step(each, 0.1, batch(ids))
    for name, value in values(run).items():
        np.testing.assert_array_equal(values(resumed)[name], value)
    run.module.eval()
    assert run.module(batch(BATCHES[0])) == resumed.module.eval()(batch(BATCHES[0]))
    run.module.export_model_for_inferencing(tmp_path / "exported.onnx", ["loss"])
    session = ort.InferenceSession(tmp_path / "exported.onnx")
    assert session.run(None, {"ids": batch(BATCHES[0])})[0] == run.module(batch(BATCHES[0]))


def test_many_repeated_reads_are_all_added_up() -> None:
    spec = ParameterSpec("w", "float32", (50, 4), sparse=True)
    model = onnx.load_from_string(_serialized(SGD(), spec))
    onnx.checker.check_model(model, full_check=True)
    rng = np.random.default_rng(0)
    ids, g = rng.integers(0, 50, 20_000), rng.integers(-8, 9, (20_000, 4)).astype(np.float32)
    feeds = {"learning_rate": np.float32(1.0), "step": np.int64(1), "w_grad": g, "w_grad_indices": ids}
    found = ort.InferenceSession(model.SerializeToString()).run(
        None, {n: np.asarray(v) for n, v in feeds.items()} | {"w": np.zeros((50, 4), np.float32)}
    )[0]
    expected = np.zeros((50, 4), np.float32)
    np.add.at(expected, ids, g)
    np.testing.assert_array_equal(found, -expected)


def _serialized(optimizer: Optimizer, *specs: ParameterSpec) -> bytes:
    return ir.to_proto(build_optimizer_model(optimizer, specs)).SerializeToString()


def test_outputs_bound_onto_their_inputs_are_written_in_their_rows_alone() -> None:
    spec = ParameterSpec("w", "float32", (1000, 8), sparse=True)
    session = ort.InferenceSession(_serialized(SparseAdam(), spec))
    names = ["w", "w_momentum0", "w_momentum1"]
    held = {name: ort.OrtValue.ortvalue_from_numpy(np.zeros((1000, 8), np.float32)) for name in names}
    binding = session.io_binding()
    for name, value in held.items():
        binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output(f"{name}_updated", value)
    binding.bind_cpu_input("learning_rate", np.array(0.5, np.float32))
    binding.bind_cpu_input("step", np.array(1))
    binding.bind_cpu_input("w_grad", np.ones((3, 8), np.float32))
    binding.bind_cpu_input("w_grad_indices", np.array([7, 999, 7]))
    session.run_with_iobinding(binding)
    for name, value in held.items():
        assert np.flatnonzero(value.numpy().any(axis=1)).tolist() == [7, 999], name
    np.testing.assert_allclose(held["w_momentum0"].numpy()[[7, 999], 0], [0.2, 0.1], rtol=1e-6)


def test_a_scaled_gradient_keeps_its_memory() -> None:
    """Views of ONNX Runtime's values do not keep arrays alive that the values were made from."""
    gradient = RowGradient(BY_NAME["float32"], (5, 2), parse_device("cpu"))
    rows, indices = np.ones((3000, 2), np.float32), np.arange(3000) % 5
    for _ in range(2):
        gradient.add(*map(ort.OrtValue.ortvalue_from_numpy, (rows, indices)))
        gradient.scale(0.5)
        others = [np.full(count, -1) for count in (3000, 6000) * 20]
    assert others
    np.testing.assert_array_equal(gradient.dense(), np.full((5, 2), 600 * 0.75))


# ---- the trainer ------------------------------------------------------------------------------------------


def test_the_trainer_trains_rows(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, ROWS, (13, 2))
    results = []
    for sparse in ([], "emb"):
        trainer = Trainer(
            tables(),
            None,
            SGD(),
            0.05,
            requires_grad=["emb", "bias"],
            clip_grad_norm=1.0,
            sparse_gradients=sparse,
            directory=tmp_path / str(len(sparse)),
        )
        trainer.fit(ids, epochs=3, batch_size=2, accumulate=3, verbose=False)
        results.append({name: parameter.data.copy() for name, parameter in trainer.parameters})
    for name, value in results[0].items():
        assert_close(results[1][name], value, np.float32)


# ---- the manifest -----------------------------------------------------------------------------------------


def test_the_manifest_says_so_in_version_2(tmp_path: Path) -> None:
    run = generate(tmp_path, tables((2, 3)), SGD())
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    entries = {entry["name"]: entry for entry in manifest["parameters"]}
    assert manifest["version"] == 2
    assert entries["emb"] == {
        "name": "emb",
        "dtype": "float32",
        "shape": [ROWS, 2, 3],
        "trainable": True,
        "gradient": "emb_grad",
        "gradient_indices": "emb_grad_indices",
    }
    assert "gradient_indices" not in entries["bias"]
    training, optimizer = (onnx.load(tmp_path / f"{name}_model.onnx") for name in ("training", "optimizer"))
    assert [value.name for value in training.graph.output] == [
        *("loss", "emb_grad", "bias_grad", "emb_grad_indices")
    ]
    shapes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*training.graph.output, *optimizer.graph.input)
    }
    assert shapes["emb_grad"] == ["emb_reads", 2, 3]
    assert shapes["emb_grad_indices"] == ["emb_reads"]
    assert [value.name for value in optimizer.graph.input][2:] == [
        *("emb", "emb_grad", "emb_grad_indices", "bias", "bias_grad")
    ]
    assert run.module.manifest.sparse[0].name == "emb"
    assert "EmbeddingGradient" not in str(training)


def test_without_sparse_gradients_the_manifest_is_as_ever(tmp_path: Path) -> None:
    generate(tmp_path, tables(), SGD(), sparse_gradients=None)
    text = (tmp_path / "manifest.json").read_text()
    assert json.loads(text)["version"] == 1
    assert "gradient_indices" not in text


# ---- what is refused --------------------------------------------------------------------------------------


def _reading_otherwise(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    return tables(extra=[*nodes, helper.make_node("Add", ["squares", "more"], ["total"])])


OTHER_READERS: dict[str, tuple[onnx.ModelProto, str]] = {
    "tied head": (
        _reading_otherwise(
            helper.make_node("MatMul", ["emb", "bias"], ["logits"], name="head"),
            helper.make_node("ReduceSum", ["logits"], ["more"], keepdims=0),
        ),
        r"'emb' cannot have a sparse gradient: its gradient comes from \w+, not only from Gather on axis 0; "
        r"the nodes that read it are Gather \('read_0'\), MatMul \('head'\)\. Leave it out of sparse_gradients",
    ),
    "another axis": (
        _reading_otherwise(
            helper.make_node("Constant", [], ["where"], value_ints=[0, 2]),
            helper.make_node("Gather", ["emb", "where"], ["columns"], axis=1, name="by_column"),
            helper.make_node("ReduceSum", ["columns"], ["more"], keepdims=0),
        ),
        r"its gradient comes from Transpose, .* Gather \('by_column'\)",
    ),
    "weight decay": (
        _reading_otherwise(helper.make_node("ReduceSumSquare", ["emb"], ["more"], keepdims=0)),
        r"its gradient comes from Mul, .* ReduceSumSquare",
    ),
}


@pytest.mark.parametrize(("model", "message"), OTHER_READERS.values(), ids=OTHER_READERS)
def test_tables_that_are_read_otherwise_are_refused(
    model: onnx.ModelProto, message: str, tmp_path: Path
) -> None:
    with pytest.raises(GraphBuildError, match=message):
        generate(tmp_path, model, SGD())
    generate(tmp_path, model, SGD(), sparse_gradients=[])


def test_names_that_are_not_trained_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        GraphBuildError,
        match=r"no trained parameter matches 'x.\*' of sparse_gradients; the trained",
    ):
        generate(tmp_path, tables(), SGD(), sparse_gradients=["x.*"])
    with pytest.raises(
        GraphBuildError,
        match="no trained parameter matches 'emb' of sparse_gradients; the trained parameters are bias",
    ):
        generate(tmp_path, tables(), SGD(), requires_grad=["bias"])
    with pytest.raises(TypeError, match="sparse_gradients is a int; pass a list of strings"):
        generate(tmp_path, tables(), SGD(), sparse_gradients=3)


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (
            AdamW(),
            "AdamW cannot update 'w': its moments and weight decay also update rows without a gradient",
        ),
        (Adam(), "Adam cannot update 'w': its moments"),
        (RMSprop(), "RMSprop cannot update 'w': its moments"),
        (Lion(), "Lion cannot update 'w': its moments"),
        (Muon(), "Muon cannot update 'w': its moments"),
        (SGD(momentum=0.9), "SGD cannot update 'w': momentum would move rows without a gradient too"),
        (SGD(momentum=0.9, weight_decay=0.1), "momentum and weight_decay would move rows"),
        (Adagrad(weight_decay=0.1), "Adagrad cannot update 'w': weight_decay would move rows"),
        (SGD(groups=[ParameterGroup("w", weight_decay=0.1)]), "weight_decay would move rows"),
    ],
)
def test_optimizers_that_move_all_rows_refuse_sparse_gradients(optimizer: Optimizer, why: str) -> None:
    remedy = (
        r".*, and the gradient of 'w' is sparse\. Make SparseAdam the optimizer of its group, "
        r"ParameterGroup\('w', optimizer=SparseAdam\(\)\), or leave it out of sparse_gradients"
    )
    with pytest.raises(GraphBuildError, match=why + remedy):
        build_optimizer_model(optimizer, [ParameterSpec("w", "float32", (5, 2), sparse=True)])


def test_sparse_adam_refuses_dense_gradients() -> None:
    message = (
        "SparseAdam cannot update 'w': its gradient is not sparse. Name it in sparse_gradients, or use Adam$"
    )
    with pytest.raises(GraphBuildError, match=message):
        build_optimizer_model(SparseAdam(), [ParameterSpec("w", "float32", (5, 2))])


def test_blocks_of_onnxblock_refuse_sparse_gradients(tmp_path: Path) -> None:
    with pytest.raises(GraphBuildError, match=r"blocks of onnxblock.optim take no sparse gradients"):
        generate(tmp_path, tables(), onnxblock.optim.SGD())


def test_models_of_sparse_and_dense_gradients_do_not_go_together(tmp_path: Path) -> None:
    run = generate(tmp_path / "sparse", tables(), SGD())
    generate(tmp_path / "dense", tables(), SGD(), sparse_gradients=[])
    with pytest.raises(ModelLoadError, match=r"trained or sparse in only one of the two.*: emb"):
        api.Optimizer(tmp_path / "dense" / "optimizer_model.onnx", run.module)


def test_indices_out_of_range_are_an_error(tmp_path: Path) -> None:
    run = generate(tmp_path, tables(), SGD())
    before = values(run)
    with pytest.raises(InputError, match="training step failed"):
        step(run, 0.1, batch([0, ROWS]))
    np.testing.assert_array_equal(values(run)["emb"], before["emb"])
