"""Scenarios of what a module owns: parameters, buffers, children, its state and how it is converted."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ortmodule.scenarios import Net, Versioned, attempt, batch, scenario, state


@scenario("T_destination", "call_super_init", "dump_patches")
def class_attributes(model: nn.Module) -> Any:
    """read from the model."""
    return str(model.T_destination), model.call_super_init, model.dump_patches


@scenario("forward", "__call__")
def output_and_gradients(model: nn.Module) -> Any:
    """output, gradients and running statistics, with keyword arguments, for two batch sizes, then in eval mode."""
    seen = []
    for rows in (3, 5):
        out = model(batch(rows), factor=2.0)
        out.square().mean().backward()
        seen.append((out, copy.deepcopy(state(model))))
    seen.append(model.eval()(batch()))
    seen.append(attempt(lambda: model(batch(), unknown=1)).__class__.__name__)
    return seen


@scenario("forward")
def forward_runs_no_hook(model: nn.Module) -> Any:
    """hooks of the model itself do not run, those of its children do."""
    log: list[str] = []
    model.register_forward_hook(lambda module, args, out: log.append("root"))
    model.norm.register_forward_hook(lambda module, args, out: log.append("norm"))
    return model.forward(batch()), model.forward(batch(), factor=3.0), log


@scenario("forward")
def forward_replaced(model: nn.Module) -> Any:
    """replaced by a wrapper around itself, and restored."""
    model(batch())
    original = model.forward
    model.forward = lambda x: original(x) + 1
    replaced = model(batch())
    del model.forward
    return replaced, model(batch()), "forward" in vars(model)


@scenario("apply")
def apply_visits(model: nn.Module) -> Any:
    """the modules that the function is called with, in order; returns self."""
    seen: list[nn.Module] = []
    return model.apply(seen.append) is model, seen


@scenario("train", "eval")
def modes(model: nn.Module) -> Any:
    """mode of every module; returns self."""
    seen = []
    for change in (model.eval, model.train, lambda: model.train(False), lambda: model.train(mode=True)):
        seen.append((change() is model, model.training, [m.training for m in model.modules()]))
    return seen, attempt(lambda: model.train("yes"))


@scenario("parameters", "named_parameters")
def parameters(model: nn.Module) -> Any:
    """names, objects and order, for every value of prefix, recurse and remove_duplicate."""
    assert next(model.parameters()) is dict(model.named_parameters())["frozen"] is model.frozen
    return (
        list(model.parameters()),
        list(model.parameters(recurse=False)),
        list(model.named_parameters()),
        list(model.named_parameters("deep", False)),
        list(model.named_parameters(prefix="deep", recurse=True, remove_duplicate=False)),
    )


@scenario("buffers", "named_buffers")
def buffers(model: nn.Module) -> Any:
    """names, objects and order, for every value of prefix, recurse and remove_duplicate."""
    assert dict(model.named_buffers())["shift"] is model.shift
    return (
        list(model.buffers()),
        list(model.buffers(recurse=False)),
        list(model.named_buffers()),
        list(model.named_buffers("deep", False)),
        list(model.named_buffers(prefix="deep", recurse=True, remove_duplicate=False)),
    )


@scenario("children", "named_children", "modules", "named_modules")
def modules(model: nn.Module) -> Any:
    """names, objects and order, for every value of memo, prefix and remove_duplicate."""
    return (
        list(model.children()),
        list(model.named_children()),
        list(model.modules()),
        list(model.named_modules()),
        list(model.named_modules(memo={model.norm}, prefix="deep")),
        list(model.named_modules(remove_duplicate=False)),
    )


@scenario("get_parameter", "get_buffer", "get_submodule")
def lookups(model: nn.Module) -> Any:
    """by dotted name; the errors for names that are not there."""
    targets = [
        "layers.1.weight",
        "norm.running_mean",
        "heads.mean",
        "frozen",
        "shift",
        "layers.7",
        "nope",
        "",
    ]
    finders = [model.get_parameter, model.get_buffer, model.get_submodule]
    return [[attempt(lambda: find(target)) for target in targets] for find in finders]  # noqa: B023


@scenario("set_submodule")
def replace_child(model: nn.Module) -> Any:
    """replaced, created and refused; the output changes."""
    before = model(batch())
    result = model.set_submodule("heads.mean", nn.Linear(4, 3, bias=False))
    nn.init.ones_(model.heads["mean"].weight)
    refused = attempt(lambda: model.set_submodule("nope.child", nn.ReLU(), strict=True))
    model.set_submodule("extra", nn.ReLU())
    return (
        before,
        result,
        model(batch()),
        refused,
        attempt(lambda: model.set_submodule("", nn.ReLU())),
        list(model.named_modules()),
    )


@scenario("register_buffer")
def new_buffer(model: nn.Module) -> Any:
    """persistent or not, replaced, refused; in the state."""
    results = [
        model.register_buffer("count", torch.ones(2)),
        model.register_buffer("tmp", None, persistent=False),
    ]
    model.register_buffer("shift", torch.ones(4))
    refused = [
        attempt(lambda: model.register_buffer("norm", None)),
        attempt(lambda: model.register_buffer("a.b", None)),
        attempt(lambda: model.register_buffer("text", "x")),
    ]
    return results, refused, list(model.named_buffers()), model.state_dict(), model(batch())


@scenario("register_parameter")
def new_parameter(model: nn.Module) -> Any:
    """added, replaced, refused; in the state and in the output."""
    before = model(batch())
    result = model.register_parameter("gain", nn.Parameter(torch.ones(2)))
    model.register_parameter("frozen", nn.Parameter(torch.full((4,), 2.0)))
    refused = [
        attempt(lambda: model.register_parameter("norm", None)),
        attempt(lambda: model.register_parameter("w", torch.ones(2))),
    ]
    return before, result, refused, list(model.named_parameters()), model(batch())


@scenario("register_module")
def new_child(model: nn.Module) -> Any:
    """added, replaced, refused; in names and output."""
    result = model.register_module("extra", nn.PReLU())
    model.register_module("again", nn.Identity())
    refused = [
        attempt(lambda: model.register_module("x", 3)),
        attempt(lambda: model.register_module("", None)),
    ]
    return result, refused, list(model.named_modules()), model.state_dict(), model(batch())


@scenario("state_dict")
def state_as_dict(model: nn.Module) -> Any:
    """keys, values, metadata; prefix, keep_vars and destination."""
    destination: dict[str, Any] = {"old": 1}
    same = model.state_dict(destination=destination, prefix="deep.") is destination
    plain = model.state_dict()
    return plain, dict(plain._metadata), model.state_dict(keep_vars=True), same, destination


@scenario("load_state_dict")
def load_state(model: nn.Module) -> Any:
    """strict or not, assign; keys returned and errors raised; values used by the next call."""
    before = model(batch())
    wanted = {name: torch.full_like(value, 0.25) for name, value in model.state_dict().items()}
    result = model.load_state_dict(wanted)
    after = model(batch())
    missing = {"nope": torch.ones(1), **{k: v for k, v in wanted.items() if k != "shift"}}
    refused = attempt(lambda: model.load_state_dict(missing))
    lenient = model.load_state_dict(missing, strict=False)
    doubled = {name: value * 2 for name, value in wanted.items()}
    model.load_state_dict(doubled, assign=True)
    assigned = model.shift is doubled["shift"]
    return before, list(result), after, refused, list(lenient), assigned, model(batch()), model.state_dict()


@scenario("get_extra_state", "set_extra_state", make=lambda: Versioned(4, 2))
def extra_state(model: nn.Module) -> Any:
    """saved and loaded with the state, and called directly."""
    saved = model.state_dict()
    model.version = 5
    later = model.get_extra_state()
    model.load_state_dict(saved)
    loaded = model.version
    return saved, later, loaded, model.set_extra_state({"version": 9}), model.version


@scenario("get_extra_state", "set_extra_state")
def no_extra_state(model: nn.Module) -> Any:
    """refused by a module without."""
    return attempt(model.get_extra_state), attempt(lambda: model.set_extra_state(1))


@scenario("extra_repr", "__repr__", make=lambda: nn.Sequential(Versioned(4, 2), nn.BatchNorm1d(2)))
def text(model: nn.Module) -> Any:
    """the text, for ORTModule between `ORTModule(` and `)`."""
    inner = repr(model).removeprefix("ORTModule(")
    return (
        inner if inner == repr(model) else inner.removesuffix(")"),
        model.extra_repr(),
        model[0].extra_repr(),
    )


@scenario("to")
def move(model: nn.Module) -> Any:
    """dtype, device, tensor; parameters stay the same objects; refused dtypes; returns self."""
    kept = model.frozen
    model(batch())
    same = model.to(torch.float64) is model.to(device="cpu") is model.to(batch().double()) is model
    refused = attempt(lambda: model.to(torch.int32))
    return same, kept is model.frozen, state(model), model(batch().double()), refused


@scenario("double", "float", "half", "bfloat16", "type")
def dtypes(model: nn.Module) -> Any:
    """dtype and values of every tensor, the next output; returns self."""
    model.eval()(batch())
    seen = []
    for change, dtype in (
        (model.double, torch.float64),
        (model.float, torch.float32),
        (lambda: model.type(torch.float64), torch.float64),
        (model.half, torch.float16),
        (model.bfloat16, torch.bfloat16),
        (lambda: model.type(dst_type=torch.float32), torch.float32),
    ):
        seen.append((change() is model, state(model)))
        if dtype.itemsize > 2:
            seen.append(model(batch().to(dtype)))
    return seen


@scenario("cpu", "cuda", "xpu", "ipu", "mtia")
def devices(model: nn.Module) -> Any:
    """tensors move to the device and self is returned; without the device, the same exception."""
    seen = [model.cpu() is model, state(model)]
    for name in ("cuda", "xpu", "ipu", "mtia"):
        moved = attempt(getattr(model, name))
        seen.append(moved.__class__ if isinstance(moved, Exception) else moved is model)
        seen.append([str(p.device) for p in model.parameters()])
        model.cpu()
    return seen


@scenario("to_empty")
def to_empty(model: nn.Module) -> Any:
    """shapes, dtypes and devices; recurse; returns self."""
    same = model.to_empty(device="meta") is model
    seen = [(n, p.shape, p.dtype, p.device) for n, p in model.named_parameters()]
    shallow = model.to_empty(device="cpu", recurse=False) is model
    return same, seen, shallow, [str(p.device) for p in model.parameters()]


@scenario("requires_grad_")
def freeze(model: nn.Module) -> Any:
    """flags and the gradients that follow from them; returns self."""
    seen = []
    for flag in (True, False, True):
        same = model.requires_grad_(flag) is model
        out = model(batch())
        seen.append((same, out))
        if out.requires_grad:
            out.sum().backward()
        seen.append({name: copy.deepcopy(p.grad) for name, p in model.named_parameters()})
        model.zero_grad()
    return seen


@scenario("zero_grad")
def clear_gradients(model: nn.Module) -> Any:
    """to None or to zero."""
    seen = []
    for arguments in ({}, {"set_to_none": False}, {"set_to_none": True}):
        model(batch()).sum().backward()
        seen += [
            model.zero_grad(**arguments),
            {n: copy.deepcopy(p.grad) for n, p in model.named_parameters()},
        ]
    return seen


@scenario("share_memory", make=lambda: nn.Linear(4, 2))
def shared(model: nn.Module) -> Any:
    """every tensor is in shared memory; returns self."""
    return model.share_memory() is model, state(model), model(batch())


@scenario("compile")
def compiled(model: nn.Module) -> Any:
    """returns None; output and gradients as before."""
    result = model.compile(backend="eager")
    model(batch()).sum().backward()
    return result, model(batch()), state(model)


@scenario("__getattr__", "__setattr__", "__delattr__")
def attributes(model: nn.Module) -> Any:
    """parameters, buffers, children and others are read, set, used, deleted; refused values and names."""
    model(batch())
    model.shift = torch.ones(4)
    model.late = torch.zeros(1)
    model.frozen = nn.Parameter(torch.zeros(4))
    model.extra = nn.ReLU()
    model.bare = batch()
    model.norm = nn.LayerNorm(4)
    refused = [
        attempt(lambda: setattr(model, "frozen", torch.ones(4))),
        attempt(lambda: setattr(model, "norm", 1)),
        attempt(lambda: model.nope),
        attempt(lambda: delattr(model, "nope")),
    ]
    used = model(batch())
    names = [list(model.named_modules()), state(model), "bare" in vars(model)]
    for name in ("extra", "late", "bare", "frozen"):
        delattr(model, name)
    gone = [hasattr(model, name) for name in ("extra", "late", "bare", "frozen")]
    return refused, used, names, gone, attempt(lambda: model(batch())).__class__.__name__


@scenario("__dir__")
def listing(model: nn.Module) -> Any:
    """every name; ORTModule adds `module`, `report` and `export_training_graph`."""
    return sorted({*dir(model)} - {"module", "report", "export_training_graph"})


@scenario("__getstate__", "__setstate__")
def raw_state(model: nn.Module) -> Any:
    """the dictionary that pickle stores, given to another module of the class."""
    other = Net()
    other.__setstate__(model.__getstate__())
    model.__setstate__({"added": 3, **model.__getstate__()})
    return sorted(model.__getstate__()), model.added, other.frozen is model.frozen, model(batch())
