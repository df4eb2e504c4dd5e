"""An ORTModule is transparent to its module, copied and pickled with it, and refuses modules it cannot wrap."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable, Iterable, Sized
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import onnxtrain.errors
from onnxtrain.ortmodule import (
    ORTModule,
    ORTModuleDeviceException,
    ORTModuleFallbackException,
    ORTModuleInitException,
    ORTModuleIOError,
    ORTModuleONNXModelException,
    ORTModuleTorchModelException,
)
from ortmodule.eager import strict
from ortmodule.scenarios import Net, batch


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


class Base(nn.Module):
    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).sum()


class Custom(Base):
    """With methods of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.__secret = 3
        self.seen: list[str] = []

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return torch.tanh(self.fc(x)) * scale

    def score(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x
        return super().score(x) + self.__secret

    def frozen(self) -> Custom:
        self.requires_grad_(False)
        return self

    @property
    def width(self) -> int:
        return self.fc.out_features

    @staticmethod
    def double(x: int) -> int:
        return 2 * x

    @classmethod
    def made_by(cls) -> str:
        return cls.__name__

    def train(self, mode: bool = True) -> Custom:
        self.seen.append(f"train({mode})")
        return super().train(mode)


def counts_calls(model: nn.Module) -> list[int]:
    """Replaces the compiled call by one that counts; what runs elsewhere is not counted."""
    calls: list[int] = []
    held = object.__getattribute__(model, "_ort")
    call = held.call

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return call(*args, **kwargs)

    held.call = counted
    return calls


def test_the_module_is_the_original() -> None:
    net = Net()
    model = ORTModule(net)
    assert model.module is net
    assert isinstance(model, ORTModule)
    assert isinstance(model, nn.Module)
    assert isinstance(model, Net)
    assert type(model) is ORTModule
    assert model.__class__ is Net
    assert model.__doc__ == Net.__doc__
    assert vars(model) is vars(net)
    assert model != net
    assert not [name for name in vars(net) if "ort" in name]


def test_an_ortmodule_is_unwrapped() -> None:
    net = Net()
    assert ORTModule(ORTModule(net)).module is net


def test_names_have_no_prefix() -> None:
    net = Net()
    model = ORTModule(net)
    assert list(model.state_dict()) == list(net.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in net.named_modules()]
    assert next(iter(model.modules())) is net
    assert model.get_submodule("") is net


def test_methods_of_the_user_s_class_run_in_the_ortmodule() -> None:
    net = Custom()
    model = ORTModule(net)
    calls = counts_calls(model)
    x = batch()
    torch.testing.assert_close(model.score(x), net.score(x))
    assert calls == [1]
    assert net.last is x
    assert model.frozen() is model
    assert not net.fc.weight.requires_grad
    assert (model.width, model.double(4), model.made_by()) == (2, 8, "Custom")
    assert model.train(False) is model
    assert net.seen == ["train(False)"]
    assert not net.training


def test_signature_of_forward_is_the_user_s() -> None:
    net = Custom()
    model = ORTModule(net)
    assert inspect.signature(model.forward) == inspect.signature(net.forward)
    assert model.forward.__name__ == "forward"
    assert model.forward.__func__ is Custom.forward
    torch.testing.assert_close(model.forward(batch(), scale=2.0), net(batch(), 2.0))


def test_forward_wrapped_as_training_libraries_do() -> None:
    """accelerate: keeps model.forward, replaces it by a method around its function, and puts it back."""
    net = Custom()
    model = ORTModule(net)
    expected = net(batch())
    function = model.forward.__func__

    def plus_one(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return function(self, x) + 1

    model.kept = model.forward
    model.forward = plus_one.__get__(model)
    torch.testing.assert_close(model(batch()), expected + 1)
    assert net.forward.__self__ is net
    model.forward = model.kept
    torch.testing.assert_close(model(batch()), expected)
    copy.deepcopy(model)


def test_names_that_ortmodule_has_itself_are_announced() -> None:
    class Reporting(Custom):
        def report(self) -> str:
            return "mine"

        def summary(self) -> str:
            return self.report()

    with pytest.warns(UserWarning, match=r"Reporting defines 'report'.*model\.module\.report"):
        model = ORTModule(Reporting())
    assert len(model.report()) == 0
    assert model.module.report() == model.summary() == "mine"
    with pytest.raises(AttributeError, match=r"set model\.module\.module"):
        model.module = nn.ReLU()


def test_missing_attribute_says_whose() -> None:
    model = ORTModule(Net())
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'nope'"):
        model.nope  # noqa: B018
    assert not hasattr(model, "nope")


def test_dir_has_the_original_s_names_and_its_own() -> None:
    net = Custom()
    assert {*dir(ORTModule(net))} == {*dir(net), "module", "report", "export_training_graph"}


def test_repr_shows_that_it_is_wrapped() -> None:
    net = Net()
    assert repr(ORTModule(net)) == f"ORTModule({net!r})"


def test_sequential_has_length_items_and_iteration() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model = ORTModule(net)
    assert len(model) == 3
    assert bool(model)
    assert model[1] is net[1]
    assert list(model) == list(net)
    assert list(model[1:]) == list(net)[1:]
    model[1] = nn.ReLU()
    assert isinstance(net[1], nn.ReLU)
    assert model.append(nn.Tanh()) is model
    del model[3]
    torch.testing.assert_close(model(batch()), net(batch()))
    assert type(model).__name__ == "ORTModule"


def test_containers() -> None:
    layers = ORTModule(nn.ModuleList([nn.ReLU(), nn.Tanh()]))
    assert len(layers) == 2
    assert layers[-1] in layers
    table = ORTModule(nn.ModuleDict({"a": nn.ReLU()}))
    assert "a" in table
    assert list(table.keys()) == ["a"]
    values = ORTModule(nn.ParameterList([torch.ones(2)]))
    assert [name for name, _ in values.named_parameters()] == ["0"]
    assert values[0].shape == (2,)


def test_the_class_has_the_attributes_of_the_users_class() -> None:
    model = ORTModule(Custom())
    model.module.eval()
    assert type(model).score is Custom.score
    torch.testing.assert_close(type(model).score(model, batch()), model.score(batch()))
    assert not hasattr(type(model), "other")
    assert not hasattr(ORTModule, "score")
    assert not hasattr(type(ORTModule(nn.Sequential())), "score")


def test_a_module_without_length_has_none() -> None:
    model = ORTModule(Net())
    assert not isinstance(model, Sized | Iterable)
    assert not hasattr(model, "__len__")
    assert model
    with pytest.raises(TypeError):
        len(model)
    with pytest.raises(TypeError):
        iter(model)
    with pytest.raises(TypeError):
        model[0]


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize(
    "make", [Custom, lambda: nn.Sequential(nn.Linear(4, 2))], ids=["custom", "sequential"]
)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_independent(how: str, make: Any, called_before: bool) -> None:
    model = strict(make())
    if called_before:
        model(batch()).sum().backward()
    if how == "deepcopy":
        clone = copy.deepcopy(model)
    elif how == "pickle":
        clone = pickle.loads(pickle.dumps(model)) if make is Custom else pickle.loads(pickle.dumps(model, 2))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        clone = torch.load(file, weights_only=False)
    assert isinstance(clone, ORTModule)
    assert type(clone) is type(model)
    assert clone.module is not model.module
    assert repr(clone) == repr(model)
    torch.testing.assert_close(clone(batch()), model(batch()))
    clone(batch()).sum().backward()
    torch.optim.SGD(clone.parameters(), 0.1).step()
    assert not clone(batch()).equal(model(batch()))


def test_shallow_copy_shares_parameters() -> None:
    model = ORTModule(Custom())
    clone = copy.copy(model)
    assert isinstance(clone, ORTModule)
    assert clone.module is not model.module
    assert clone.fc is model.fc


def test_copies_of_a_module_that_refers_to_its_ortmodule() -> None:
    model = ORTModule(Custom())
    model.seen.append(model)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert clone.seen[0] is clone


def test_subclass() -> None:
    class Mine(ORTModule):
        def __init__(self, module: nn.Module, note: str) -> None:
            super().__init__(module)
            self.note = note

        def shout(self) -> str:
            return self.note.upper()

        def train(self, mode: bool = True) -> nn.Module:
            return super().train(not mode)

    model = Mine(nn.Sequential(nn.Linear(4, 2)), "loud")
    assert model.shout() == "LOUD"
    assert model.module.note == "loud"
    assert model.train() is model
    assert not model.training
    assert len(model) == 1
    assert copy.deepcopy(model).shout() == "LOUD"


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (3, "received 'int'"),
        (None, "received 'NoneType'"),
        (torch.tanh, "received 'builtin_function_or_method'"),
        (nn.Linear, "an instance of it"),
    ],
)
def test_what_is_not_a_module_is_refused(thing: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ORTModule(thing)


def test_modules_that_cannot_be_captured_are_refused() -> None:
    with pytest.raises(ORTModuleTorchModelException, match="DistributedDataParallel"):
        ORTModule(nn.DataParallel(nn.Linear(2, 2)))
    with pytest.raises(ORTModuleTorchModelException, match=r"torch\.compile"):
        ORTModule(torch.compile(nn.Linear(2, 2), backend="eager"))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_torchscript_is_refused() -> None:
    with pytest.raises(ORTModuleTorchModelException, match="TorchScript"):
        ORTModule(torch.jit.script(nn.Linear(2, 2)))


def test_data_parallel_of_it_is_refused() -> None:
    """With several devices DataParallel replicates the module in each call by this method."""
    with pytest.raises(ORTModuleTorchModelException, match="DataParallel"):
        ORTModule(nn.Linear(2, 2))._replicate_for_data_parallel()


def test_debug_options_are_checked() -> None:
    with pytest.raises(TypeError, match="debug_options must be DebugOptions or None, received dict"):
        ORTModule(nn.Linear(2, 2), {})


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (ORTModuleInitException, RuntimeError),
        (ORTModuleDeviceException, RuntimeError),
        (ORTModuleIOError, onnxtrain.errors.InputError),
        (ORTModuleTorchModelException, onnxtrain.errors.ModelError),
        (ORTModuleONNXModelException, onnxtrain.errors.ModelError),
    ],
)
def test_exceptions_belong_to_both_trees(kind: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(kind, ORTModuleFallbackException)
    assert issubclass(kind, onnxtrain.errors.OnnxTrainError)
    assert issubclass(kind, builtin)


class Scaled(nn.Linear):
    def __call__(self, x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return super().__call__(x) * factor


def test_a_call_of_the_class_itself() -> None:
    plain = Scaled(3, 2)
    model = ORTModule(plain)
    x = torch.randn(4, 3)
    torch.testing.assert_close(model(x, factor=3.0), plain(x, factor=3.0))
    torch.testing.assert_close(model(x), plain(x))
    assert model.report().runs_in_onnxruntime


def test_lazy_parameters_after_other_models_varied_the_sizes() -> None:
    torch.manual_seed(0)
    for size in (2, 3, 4):
        ORTModule(nn.Sequential(nn.Linear(size, size)))(torch.randn(size, size))
    first, second = torch.randn(7, 6), torch.randn(5, 6)
    results = []
    for wrap in (lambda module: module, ORTModule):
        torch.manual_seed(0)  # Dynamo puts the generator back to where it was before it made the parameters
        model = wrap(nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d()))
        results.append([model(first), model(second), *model.state_dict().values()])
    torch.testing.assert_close(results[1], results[0])


def traced(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.jit.trace(model, x)(x)


def scripted(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.jit.script(model)(x)


def exported(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    program = torch.export.export(model, (x,))
    assert list(program.state_dict) == ["weight", "bias"]
    return program.module()(x)


def rewritten(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return make_fx(model)(x)(x)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("tool", [traced, scripted, exported, rewritten])
@pytest.mark.parametrize("called_before", [False, True])
def test_tools_that_write_down_the_module(
    tool: Callable[[nn.Module, torch.Tensor], torch.Tensor], called_before: bool
) -> None:
    """They see the wrapped module, whether or not it has been called; calls still run in ONNX Runtime."""
    model = ORTModule(nn.Linear(3, 2))
    x = torch.randn(4, 3)
    if called_before:
        model(x)
    torch.testing.assert_close(tool(model, x), model.module(x))
    model(x)
    assert model.report().runs_in_onnxruntime


def test_tensors_without_memory() -> None:
    with FakeTensorMode():
        assert ORTModule(nn.Linear(3, 2))(torch.randn(4, 3)).shape == (4, 2)


def test_the_class_that_fully_shard_gives_is_refused() -> None:
    """`fully_shard` gives the module it shards a class of its own."""
    from torch.distributed.fsdp import FSDPModule

    model = ORTModule(nn.Linear(2, 2))
    with pytest.raises(ORTModuleTorchModelException, match=r"ORTModule\(fully_shard\(module\)\)"):
        model.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})
    assert isinstance(model, ORTModule)
