"""PyTorch's tools around modules work on an ORTModule as on the plain module."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from onnxtrain.ortmodule import ORTModule, ORTModuleTorchModelException
from ortmodule.scenarios import batch


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 5)
        self.fc2 = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.tanh(self.fc1(x)))


def pair() -> tuple[Mlp, Mlp]:
    """A plain module, and an ORTModule with equal parameters."""
    plain = Mlp()
    return plain, ORTModule(copy.deepcopy(plain))


def gradients(model: nn.Module) -> dict[str, Any]:
    model(batch()).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_gradients(actual: nn.Module, expected: nn.Module) -> None:
    mine, theirs = gradients(actual), gradients(expected)
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, 0.01),
        lambda p: torch.optim.LBFGS(p, 0.1),
    ],
    ids=["SGD", "AdamW", "LBFGS"],
)
def test_optimizers_of_pytorch_train_it(optimizer: Any) -> None:
    plain, model = pair()
    for current in (plain, model):
        step = optimizer(current.parameters())
        for _ in range(3):

            def closure(current: nn.Module = current, step: Any = step) -> torch.Tensor:
                step.zero_grad()
                loss = current(batch()).square().mean()
                loss.backward()
                return loss

            step.step(closure)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-6)


def test_clip_grad_norm() -> None:
    plain, model = pair()
    gradients(plain), gradients(model)
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (plain, model)]
    torch.testing.assert_close(norms[1], norms[0])
    torch.testing.assert_close(model.fc1.weight.grad, plain.fc1.weight.grad)


def test_vector_of_parameters() -> None:
    plain, model = pair()
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 2, model.parameters())
    torch.testing.assert_close(model.fc1.weight, plain.fc1.weight * 2)


def test_parametrization_of_a_child_and_of_the_root() -> None:
    class Symmetric(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.triu() + x.triu(1).mT

    plain, model = pair()
    model(batch())
    for current in (plain, model):
        parametrizations.weight_norm(current.fc1)
    assert_same_gradients(model, plain)
    root, wrapped = nn.Linear(4, 4), ORTModule(nn.Linear(4, 4))
    wrapped.load_state_dict(root.state_dict())
    for current in (root, wrapped):
        parametrize.register_parametrization(current, "weight", Symmetric())
    assert parametrize.is_parametrized(wrapped)
    assert_same_gradients(wrapped, root)
    parametrize.remove_parametrizations(wrapped, "weight")
    assert list(wrapped.state_dict()) == ["bias", "weight"]


def test_pruned_weights_get_the_same_gradients() -> None:
    from torch.nn.utils import prune

    plain, model = pair()
    for current in (plain, model):
        prune.l1_unstructured(current.fc1, "weight", amount=0.5)
    assert_same_gradients(model, plain)


def test_lazy_modules_are_materialised() -> None:
    model = ORTModule(nn.Sequential(nn.LazyLinear(3), nn.Tanh()))
    assert model(batch()).shape == (3, 3)
    assert type(model.module[0]) is nn.Linear


def test_functional_call_replaces_parameters() -> None:
    plain, model = pair()
    values = {name: torch.full_like(value, 0.1) for name, value in plain.named_parameters()}
    expected = torch.func.functional_call(plain, values, (batch(),))
    torch.testing.assert_close(torch.func.functional_call(model, values, (batch(),)), expected)
    torch.testing.assert_close(model(batch()), plain(batch()))


def test_stack_module_state() -> None:
    models = [pair()[1] for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    assert parameters["fc1.weight"].shape == (3, 5, 4)
    assert buffers == {}


def test_averages_of_weights_are_those_of_the_plain_module() -> None:
    plain, model = pair()
    averages = [torch.optim.swa_utils.AveragedModel(m) for m in (plain, model)]
    for current, average in zip((plain, model), averages, strict=True):
        with torch.no_grad():
            for parameter in current.parameters():
                parameter.add_(1)
        average.update_parameters(current)
    assert list(averages[0].state_dict()) == list(averages[1].state_dict())
    torch.testing.assert_close(averages[1](batch()), averages[0](batch()))


def test_as_a_child_of_a_plain_module() -> None:
    plain, model = pair()
    outer, reference = nn.Sequential(model, nn.Linear(2, 2)), nn.Sequential(plain, nn.Linear(2, 2))
    assert list(outer.state_dict()) == list(reference.state_dict())
    outer.load_state_dict(reference.state_dict())
    assert outer.double() is outer
    assert model.fc1.weight.dtype == torch.float64
    outer.float().eval()
    assert not model.module.training
    assert_same_gradients(outer, reference)


def test_as_a_child_of_an_ortmodule_and_of_a_compiled_module() -> None:
    plain, model = pair()
    reference = nn.Sequential(plain, nn.Linear(2, 2))
    outer = ORTModule(nn.Sequential(model, copy.deepcopy(reference[1])))
    assert list(outer.state_dict()) == list(reference.state_dict())
    assert_same_gradients(outer, reference)
    compiled = torch.compile(nn.Sequential(model, reference[1]), backend="eager")
    torch.testing.assert_close(compiled(batch()), reference(batch()))


def test_global_hooks_run_once_per_module() -> None:
    logs: list[list[str]] = []
    for current in pair():
        logs.append(log := [])
        handles = [
            nn.modules.module.register_module_forward_pre_hook(
                lambda m, a: log.append(f"pre {type(m).__name__}")
            ),
            nn.modules.module.register_module_forward_hook(
                lambda m, a, o: log.append(f"post {type(m).__name__}")
            ),
        ]
        try:
            current(batch())
            log.append("forward")
            current.forward(batch())
        finally:
            for handle in handles:
                handle.remove()
    assert logs[1] == logs[0]


def test_a_hook_may_read_the_model_itself() -> None:
    """As DeepSpeed's does, which Dynamo captures with the module."""
    plain, model = pair()
    seen = []

    class Engine:
        def __init__(self, module: nn.Module) -> None:
            self.module = module
            module.register_forward_pre_hook(self.before, with_kwargs=True)

        def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            seen.append(self.module.training)
            return args, kwargs

    engines = [Engine(plain), Engine(model)]
    assert_same_gradients(model, plain)
    for engine in engines:
        engine.module.eval()
    torch.testing.assert_close(model(batch()), plain(batch()))
    assert True in seen
    assert False in seen
    assert model.report().runs_in_onnxruntime


@contextlib.contextmanager
def group_of_one(folder: Path) -> Iterator[None]:
    """Make a process group of this process alone."""
    store = torch.distributed.FileStore(str(folder / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_distributed_data_parallel(tmp_path: Path) -> None:
    plain, model = pair()
    with group_of_one(tmp_path):
        parallel = nn.parallel.DistributedDataParallel(model)
        assert [name for name, _ in parallel.named_parameters()] == [
            f"module.{name}" for name, _ in plain.named_parameters()
        ]
        gradients(parallel)
        # A reducer that outlives its process group can wait for the group's thread with the GIL in its hand.
        del parallel
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=1e-5, atol=1e-6)


def test_around_distributed_data_parallel(tmp_path: Path) -> None:
    """`module` is what it is without ORTModule, and no warning says otherwise."""
    plain, _ = pair()
    with group_of_one(tmp_path):
        parallel = nn.parallel.DistributedDataParallel(plain)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = ORTModule(ORTModule(parallel))
        assert model.module is plain
        assert isinstance(model, nn.parallel.DistributedDataParallel)
        assert list(model.state_dict()) == list(parallel.state_dict())
        gradients(model)
        # Unwrapped to the DistributedDataParallel, and not to the module inside of it.
        assert next(type(root) for root in model.modules()) is nn.parallel.DistributedDataParallel
        assert model.report().runs_in_onnxruntime
        del parallel, model


def test_parameters_that_deepspeed_has_partitioned_are_refused() -> None:
    """Marked as ZeRO stage 3 marks them; benchmarks/distributed/deepspeed_zero.py runs DeepSpeed itself."""
    _, model = pair()
    name, parameter = next(model.named_parameters())
    parameter.ds_id = 0
    with pytest.raises(ORTModuleTorchModelException, match=f"ZeRO stage 3 .*{name}.* Use stage 1 or 2"):
        model(batch())


def test_many_models_of_one_class() -> None:
    """Each has its own graphs, and none runs into Dynamo's limits of recompilations of one function."""
    torch._dynamo.config.accumulated_recompile_limit = 8  # wherever the process got to, ORTModule lifts it
    for _ in range(12):
        plain, model = pair()
        assert_same_gradients(model, plain)
        assert len(model.report()) == 1


def test_layers_after_a_graph_break_in_a_container_are_captured() -> None:
    """Also when there are more of them than Dynamo compiles of one function by default."""
    widths = [4, *range(5, 17)]
    net = nn.Sequential(*[nn.Linear(a, b) for a, b in pairwise(widths)])
    net[0].register_forward_hook(
        lambda module, args, out: logging.getLogger("onnxtrain.tests").debug("break")
    )
    model = ORTModule(net)
    torch.testing.assert_close(model(batch()), net(batch()))
    assert model.report().runs_in_onnxruntime
    assert sum(graph.forward_nodes for graph in model.report()) >= len(net)


@pytest.mark.parametrize("policy", ["onnxruntime", "partly"])
def test_parameters_that_are_swapped_on_conversion(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return torch.polygamma(1, y.abs() + 1) if policy == "partly" else y

    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    plain = Net()
    model = ORTModule(copy.deepcopy(plain))
    before = list(model.parameters())
    x = torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of polygamma
        model(x).square().sum().backward()
        (gradient,) = torch.autograd.grad(model(x).sum(), model.fc1.weight, create_graph=True)
        gradient.square().sum().backward()
        with torch.no_grad():
            model.eval()(x)
        model.zero_grad()
        gc.collect()  # Dynamo leaves graphs in cycles
        model.double()
        assert [id(parameter) for parameter in model.parameters()] == [id(parameter) for parameter in before]
        model(x.double()).square().sum().backward()
    plain.double()(x.double()).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
