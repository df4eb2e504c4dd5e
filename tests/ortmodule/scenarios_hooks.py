"""Scenarios of hooks: on the model and on its children, before and after the first call, removed again."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ortmodule.scenarios import Versioned, attempt, batch, scenario

Log = list[Any]
CHILD = "layers.1"


def tags(log: Log, tag: str) -> Callable[..., None]:
    """A hook that only writes down that it ran, with what, and for which module."""

    def hook(module: nn.Module, *args: Any) -> None:
        log.append((tag, type(module).__name__, args))

    return hook


@scenario("register_forward_hook")
def forward_hooks(model: nn.Module) -> Any:
    """calls and arguments in order, on root and child; prepend, with_kwargs; before and after a call; removed."""
    log: Log = []
    child = model.get_submodule(CHILD)
    first = model.register_forward_hook(tags(log, "first"))
    child.register_forward_hook(tags(log, "child"))
    outs = [model(batch())]
    model.register_forward_hook(tags(log, "kwargs"), prepend=True, with_kwargs=True)
    late = child.register_forward_hook(tags(log, "late child"), prepend=True)
    outs.append(model(batch(), factor=2.0))
    first.remove()
    late.remove()
    outs.append(model(batch()))
    return outs, log


@scenario("register_forward_hook")
def forward_hooks_that_change_the_output(model: nn.Module) -> Any:
    """output and gradients are of the changed values."""
    seen = [model(batch())]
    model.register_forward_hook(lambda module, args, out: out * 2)
    model.get_submodule(CHILD).register_forward_hook(lambda module, args, out: (out + 1).relu())
    seen.append(model(batch()))
    seen[-1].sum().backward()
    return seen, {name: p.grad for name, p in model.named_parameters()}


@scenario("register_forward_hook")
def forward_hooks_that_are_always_called(model: nn.Module) -> Any:
    """with always_call it runs although forward raised."""
    log: list[str] = []
    model.register_forward_hook(
        lambda module, args, out: log.append(f"always {out is None}"), always_call=True
    )
    model.register_forward_hook(lambda module, args, out: log.append("only after success"))
    failed = isinstance(attempt(lambda: model(torch.ones(2, 7))), RuntimeError)
    return failed, list(log), model(batch()), len(log)


@scenario("register_forward_pre_hook")
def forward_pre_hooks(model: nn.Module) -> Any:
    """calls in order, on root and child; inputs changed; prepend, with_kwargs; before and after a call; removed."""
    log: Log = []
    child = model.get_submodule(CHILD)
    model.register_forward_pre_hook(tags(log, "first"))
    outs = [model(batch())]
    changed = model.register_forward_pre_hook(lambda module, args: (args[0] * 2,), prepend=True)
    model.register_forward_pre_hook(lambda module, args, kwargs: (args, {"factor": 3.0}), with_kwargs=True)
    child.register_forward_pre_hook(tags(log, "child"))
    outs.append(model(batch()))
    changed.remove()
    outs.append(model(batch()))
    return outs, log


@scenario("register_full_backward_hook")
def full_backward_hooks(model: nn.Module) -> Any:
    """gradients seen and replaced, on root and child, in order; prepend; before and after a call; removed."""
    log: Log = []
    child = model.get_submodule(CHILD)
    model.register_full_backward_hook(tags(log, "root"))
    child.register_full_backward_hook(tags(log, "child"))
    model(batch().requires_grad_()).sum().backward()
    handle = child.register_full_backward_hook(lambda module, gi, go: tuple(2 * g for g in gi), prepend=True)
    model(batch().requires_grad_()).sum().backward()
    doubled = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    handle.remove()
    model.zero_grad()
    model(batch().requires_grad_()).sum().backward()
    return log, doubled, {name: p.grad for name, p in model.named_parameters()}


@scenario("register_full_backward_pre_hook")
def full_backward_pre_hooks(model: nn.Module) -> Any:
    """gradients seen and replaced, on root and child, in order; prepend; before and after a call; removed."""
    log: Log = []
    child = model.get_submodule(CHILD)
    model.register_full_backward_pre_hook(tags(log, "root"))
    child.register_full_backward_pre_hook(tags(log, "child"))
    model(batch().requires_grad_()).sum().backward()
    handle = model.register_full_backward_pre_hook(lambda module, go: (3 * go[0],), prepend=True)
    model(batch().requires_grad_()).sum().backward()
    tripled = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    handle.remove()
    model.zero_grad()
    model(batch().requires_grad_()).sum().backward()
    return log, tripled, {name: p.grad for name, p in model.named_parameters()}


@scenario("register_backward_hook", make=lambda: nn.Linear(4, 2))
def legacy_backward_hook(model: nn.Module) -> Any:
    """calls of the deprecated hook; not to be mixed with full backward hooks; removed."""
    log: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        handle = model.register_backward_hook(lambda module, gi, go: log.append(type(module).__name__))
        model(batch()).sum().backward()
        mixed = attempt(lambda: model.register_full_backward_hook(lambda *args: None))
        handle.remove()
        model(batch()).sum().backward()
    return log, mixed, [p.grad for p in model.parameters()]


def note(module: nn.Module, log: list[str], *args: Any) -> str:
    """Describe the call of a hook of the state."""
    return f"{type(module).__name__} {log} {[sorted(a) if isinstance(a, dict) else a for a in args]}"


@scenario("register_state_dict_pre_hook", "register_state_dict_post_hook")
def state_dict_hooks(model: nn.Module) -> Any:
    """arguments in order, on root and child; entries added; removed."""
    log: Log = []

    def add(module: nn.Module, entries: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        log.append(("post", type(module).__name__, sorted(entries), prefix, sorted(metadata)))
        entries[prefix + "added"] = torch.ones(1)

    model.register_state_dict_pre_hook(
        lambda module, prefix, keep: log.append(("pre", type(module).__name__, prefix, keep))
    )
    handles = [model.register_state_dict_post_hook(add), model.norm.register_state_dict_post_hook(add)]
    first = model.state_dict(prefix="deep.")
    for handle in handles:
        handle.remove()
    return first, model.state_dict(keep_vars=True), log


@scenario(
    "register_load_state_dict_pre_hook", "register_load_state_dict_post_hook", make=lambda: Versioned(4, 2)
)
def load_state_dict_hooks(model: nn.Module) -> Any:
    """arguments in order; entries renamed before, missing keys forgiven after; removed."""
    log: Log = []

    def rename(module: nn.Module, entries: dict[str, Any], prefix: str, *rest: Any) -> None:
        log.append(("pre", type(module).__name__, prefix, sorted(entries), *rest[1:]))
        entries["weight"] = entries.pop("old_weight")

    def forgive(module: nn.Module, keys: Any) -> None:
        log.append(("post", type(module).__name__, list(keys.missing_keys), list(keys.unexpected_keys)))
        keys.missing_keys.clear()

    handles = [
        model.register_load_state_dict_pre_hook(rename),
        model.register_load_state_dict_post_hook(forgive),
    ]
    entries = {"old_weight": torch.ones(2, 4), "_extra_state": {"version": 7}}
    result = model.load_state_dict(entries)
    for handle in handles:
        handle.remove()
    return log, list(result), model.version, model.weight, attempt(lambda: model.load_state_dict(entries))
