"""Every lowering: outputs and gradients in ONNX Runtime against eager PyTorch in float64, static and dynamic shapes."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onnxtrain.ortmodule._torch import bounds_pass_gradients, isolates_recompiles
from onnxtrain.ortmodule.lowering._functional_graph import _decompositions
from onnxtrain.ortmodule.lowering._table import COMPLEX_LOWERINGS, LOWERINGS, lower
from ortmodule import aten_cases
from ortmodule.aten_case import Case
from ortmodule.elementwise import INTEGERS, ONE, TWO
from ortmodule.side_by_side import assert_no_differences, batches
from ortmodule.waiting import waiting

CASES: dict[str, list[Case]] = {
    module.name: importlib.import_module(f"ortmodule.aten_cases.{module.name}").CASES
    for module in pkgutil.iter_modules(aten_cases.__path__)
}
SIZES = {False: 32, True: 8}
"""Number of cases compiled as one function; many symbols make PyTorch's algebra of them slow."""


def _passed_over(case: Case, dynamic: bool) -> bool:
    # PyTorch 2.15 passes gradients where a bound is no number; docs/reference/ortmodule.md says so.
    if case.name == "clamp_nan_bounds" and not bounds_pass_gradients:
        return True
    # Dynamo 2.12 fails at it: it runs in PyTorch.
    return dynamic and not isolates_recompiles and case.name == "binary_cross_entropy_weight"


def _parameters() -> list[Any]:
    found = []
    for module, cases in CASES.items():
        for dynamic, size in SIZES.items():
            chosen = [c for c in cases if (c.dynamic or not dynamic) and not _passed_over(c, dynamic)]
            for count, batch in enumerate(batches(chosen, size)):
                kind = "dynamic" if dynamic else "static"
                marks = [pytest.mark.thorough] if dynamic and count % 8 else []
                found.append(pytest.param(batch, dynamic, id=f"{module}-{count}-{kind}", marks=marks))
    return found


@pytest.mark.torch
@pytest.mark.parametrize(("cases", "dynamic"), _parameters())
def test_lowerings_match_eager(cases: list[Case], dynamic: bool) -> None:
    assert_no_differences(cases, dynamic=dynamic)


WITHOUT_A_CASE = {
    "tests/ortmodule/test_random_ops.py": (
        "aten.bernoulli.p aten.randint_like.default cauchy geometric log_normal normal_functional "
        "rrelu_with_noise_functional onnxtrain.bernoulli_like"
    ),
    "errors of the data: tests/ortmodule/test_assertions.py, test_data_dependent.py": (
        "_assert_async _functional_assert_async onnxtrain.check_errors onnxtrain.size"
    ),
    "sizes: tests/ortmodule/test_symbolic.py": "sym_is_contiguous sym_numel sym_size",
    "functionalized graphs alone have it; the cases of the op that is called cover it": (
        "_native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training _neg_view "
        "_reshape_alias _unsafe_index _unsafe_index_put alias diagonal_scatter empty_strided lift new_empty_strided "
        "onnxtrain.einsum unsafe_split_with_sizes _cholesky_solve_helper _embedding_bag_forward_only _fused_rms_norm "
        "prims.convert_element_type prims.copy_strided prims.fmax prims.fmin"
    ),
    "eager PyTorch writes it in other ops, of which this test sees the calls; its cases exist": (
        "avg_pool1d contiguous log_softmax matmul positive reshape softmax special_digamma special_erfc "
        "special_erfinv true_divide aten.where.Scalar aten.where.ScalarOther "
        "aten.where.ScalarSelf onnxtrain.attention onnxtrain.recurrent_layer"
    ),
    "tests/ortmodule/test_huggingface.py": "_grouped_mm transformers.grouped_mm_fallback",
}
"""Ops that have a lowering and that no case calls in eager mode, by the reason or their place."""


class _Calls(TorchDispatchMode):
    """Records the ops that PyTorch calls, e.g. "aten.add" and "aten.add.Tensor", also for `add_`."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op, _, overload = str(func).replace("_copy", "").rpartition(".")
        # In a functional graph `x.add_(1)` is aten.add, but `x << 1` is aten.__lshift__.
        op = op if op.endswith("__") else op.removesuffix("_")
        self.ops |= {op, f"{op}.{overload}"}
        return func(*args, **(kwargs or {}))


CASES_OF = {
    "arithmetic": "pointwise",
    "resizing": "pooling",
    "searching": "order",
    "symbolic": "creation",
    "view_writes": "indexing",
}
"""Families of lowerings whose cases are in a file of another name."""


def _case_file(lowering: Any) -> str:
    family = lowering.__module__.rpartition(".")[2]
    return f"tests/ortmodule/aten_cases/{CASES_OF.get(family, family)}.py"


def test_every_family_of_lowerings_has_a_file_of_cases() -> None:
    lacking = sorted(
        f"{function.__module__}: add {_case_file(function)}, or name the file of its cases in CASES_OF"
        for function in {f.__module__: f for f in {**LOWERINGS, **COMPLEX_LOWERINGS}.values()}.values()
        if function.__module__.startswith("onnxtrain.ortmodule.lowering.aten.")
        and not (Path(__file__).parent / "aten_cases" / Path(_case_file(function)).name).is_file()
    )
    assert lacking == []


@pytest.mark.torch
def test_every_lowering_is_reached() -> None:
    decomposed = {str(overload) for overload in _decompositions()}
    decomposed |= {name.rpartition(".")[0] for name in decomposed}
    unreached = sorted(
        f'{name}: PyTorch decomposes it first; delete "{name.split(".")[1]}" from _DECOMPOSED in '
        "src/onnxtrain/ortmodule/lowering/_functional_graph.py"
        for name in LOWERINGS.keys() | COMPLEX_LOWERINGS.keys()
        if name in decomposed
    )
    if unreached:
        pytest.fail("\n".join(["never called:", *unreached]), pytrace=False)


@pytest.mark.torch
def test_every_lowering_has_a_case() -> None:
    with _Calls() as calls:
        # A case without elements compares nothing.
        for case in itertools.chain(*(cases for family, cases in CASES.items() if family != "empty")):
            case.fn(*case.sample(torch.float32))
    # Names without a dot are Python operators on sizes, e.g. "floordiv".
    missing = {name for name in LOWERINGS if "." in name} - calls.ops
    excused = {op if "." in op else f"aten.{op}" for ops in WITHOUT_A_CASE.values() for op in ops.split()}

    def excuses(name: str) -> set[str]:
        return {name, name.rpartition(".")[0]} & excused

    lacking = sorted(name for name in missing if not excuses(name))
    if lacking:
        lines = [f"{name}: add a case that calls it to {_case_file(LOWERINGS[name])}" for name in lacking]
        pytest.fail("\n".join(["missing:", *lines]), pytrace=False)
    assert excused - set().union(*map(excuses, missing)) == set(), (
        "these have a case, or no lowering any more: delete them from WITHOUT_A_CASE"
    )


NOT_DRAWN = (
    """div.Scalar div.Scalar_mode floor_divide.Scalar positive.default sub.Scalar true_divide.Tensor"""
)
"""Overloads that eager PyTorch writes as others, so that the test below doesn't see them."""

WITHOUT_TAG = """_prelu_kernel.default binary_cross_entropy.default binary_cross_entropy_with_logits.default
floor_divide.Scalar floor_divide.default glu.default hardswish.default huber_loss.default log_sigmoid_forward.default
logit.default masked_fill.Tensor mse_loss.default smooth_l1_loss.default special_entr.default"""
"""Elementwise ops that PyTorch does not tag as pointwise."""


@pytest.mark.torch
def test_every_elementwise_lowering_is_drawn() -> None:
    """Elementwise are the ops that PyTorch tags as pointwise, and those of `WITHOUT_TAG`."""
    with _Calls() as calls:
        for table, arguments in (
            (ONE, [torch.ones(2)]),
            (TWO, [torch.ones(2)] * 2),
            (INTEGERS, [torch.ones(2).long()] * 2),
        ):
            for function in table.values():
                function(*arguments)
    untagged = {f"aten.{name}" for name in WITHOUT_TAG.split()}
    assert untagged <= LOWERINGS.keys()
    elementwise = {name for name in LOWERINGS if name in untagged or _is_tagged(name)}
    not_drawn = {f"aten.{name}" for name in NOT_DRAWN.split()}
    lacking = []
    for name in sorted(elementwise - calls.ops - not_drawn):
        op = name.split(".")[1]
        lacking.append(
            f'{name}: add a function "{op}" to ONE, TWO or INTEGERS in tests/ortmodule/elementwise.py, then run '
            f"pytest -q tests/ortmodule/test_*special_points.py -k {op}"
        )
    if lacking:
        pytest.fail("\n".join(["missing:", *lacking]), pytrace=False)
    assert not_drawn <= elementwise - calls.ops, (
        "delete from NOT_DRAWN what is drawn, or has no lowering any more"
    )


def _is_tagged(name: str) -> bool:
    """True if PyTorch tags an overload with this name as pointwise, or any of an op without overload."""
    domain, _, rest = name.partition(".")
    op, _, overload = rest.partition(".")
    packet = getattr(torch.ops.aten, op, None) if domain == "aten" else None
    if packet is None:
        return False
    overloads = [overload] if overload else packet.overloads()
    return any(torch.Tag.pointwise in getattr(packet, each).tags for each in overloads)


def test_lowered_ops_exist() -> None:
    named = [name.split(".") for name in {*LOWERINGS, *COMPLEX_LOWERINGS} if name.startswith("aten.")]
    # The table has the names of copying variants without `_copy`.
    unknown = [op for _, op, *_ in named if not any(hasattr(torch.ops.aten, o) for o in (op, f"{op}_copy"))]
    assert unknown == []


def test_misspelt_overloads_are_refused() -> None:
    with pytest.raises(
        AssertionError, match=r"no aten.max_unpool3d.defualt; the overloads .* are default, out"
    ):
        lower("aten.max_unpool3d.defualt")(lambda low: None)


def test_ops_that_wait_are_listed() -> None:
    ops = waiting("pool")
    assert "aten.fractional_max_pool2d.default" in ops
    assert not [op for op in ops if "max_unpool" in op or "out" in op.split(".")]


def test_case_names_are_unique() -> None:
    names = [case.name for cases in CASES.values() for case in cases]
    assert len(set(names)) == len(names)
