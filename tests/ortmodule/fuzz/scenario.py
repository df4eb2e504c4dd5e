"""Scenarios of a module: calls in changing modes, shapes and flags, hooks, steps of an optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ortmodule.fuzz.writer import Writer

if TYPE_CHECKING:
    from ortmodule.fuzz.generate import Inputs

__all__ = ["write_scenario"]


def write_scenario(writer: Writer, inputs: Inputs, changing: bool) -> list[str]:
    """Returns the lines of a scenario; `changing` allows calls of other sizes than the first."""
    choose = writer.choose
    lines = _setup(writer)
    others = writer.odds(0.12)
    calls = choose.choice([1, 2, 2, 3])
    for call in range(calls):
        lines += _before(writer, call)
        lines += _others(writer, call) if others else []
        lines += _call(writer, inputs, call, changing)
        lines += _after(writer, call)
    lines.append("state(net, see)")
    return _in_threads(writer, lines)  # last, so that it moves no other draw of a seed


def _in_threads(writer: Writer, lines: list[str]) -> list[str]:
    """Makes some programs call the module, or run backward, in threads of their own."""
    if not writer.odds(0.15) or "threads" in writer.off:
        return lines
    calls, backwards = writer.choose.choice([(True, False), (False, True), (True, True)])
    moved = []
    for line in lines:
        if calls and line.startswith(
            "out = model("
        ):  # one inside of no_grad, which is a thread's own, is indented
            line = f"out = in_thread(lambda: {line.removeprefix('out = ')})"
        elif backwards and line == "see('loss', backward(out))":
            line = "see('loss', in_thread(lambda: backward(out)))"
        moved.append(line)
    return moved


def _setup(writer: Writer) -> list[str]:
    lines = []
    layers = [name.removeprefix("self.") for name in writer.layers]
    if layers and writer.odds(0.35):
        layer = writer.choose.choice(layers)
        lines.append(
            writer.choose.choice(
                [
                    f"net.{layer}.register_forward_hook(double_output)",
                    f"net.{layer}.register_forward_pre_hook(double_input)",
                    f"net.{layer}.register_full_backward_hook(halve_grad)",
                    f"net.{layer}.register_forward_hook(note())",
                ]
            )
        )
    if writer.odds(0.08):
        lines.append(
            writer.choose.choice(
                [
                    "net.register_forward_hook(double_output)",
                    "net.register_forward_pre_hook(note())",
                    "net.register_full_backward_hook(note())",
                ]
            )
        )
    if hasattr(writer.scope["self"], "p0") and writer.odds(0.12):
        lines.append("net.p0.register_hook(double_grad)")
    if list(writer.scope["self"].parameters()):
        lines.append("optimizer = torch.optim.SGD(net.parameters(), lr=0.1)")
    return lines


_MASKS = ("Dropout", "Dropout", "AlphaDropout", "FeatureAlphaDropout", "Dropout1d")


def _others(writer: Writer, call: int) -> list[str]:
    """Writes lines that wrap, call and drop other modules, which draw masks."""
    choose = writer.choose
    writer.features.add("draws")  # alpha dropout fills with numbers of the dtype

    def another() -> str:
        p, q = choose.choice(["0.1", "0.5", "0.7"]), choose.choice(["0.0", "0.2", "0.5", "0.9"])
        return f"wrapped(Masked({choose.choice(_MASKS)!r}, {p}, {q}))"

    lines = []
    if call == 0:
        lines.append(f"others = [{', '.join(another() for _ in range(choose.randint(1, 4)))}]")
    elif writer.odds(0.5):
        lines += [choose.choice(["others.pop()", "others.pop(0)"]), "gc.collect()"]
        lines.append(f"others.append({another()})")
    lines.append("torch.manual_seed(7)")
    for _ in range(choose.randint(1, 3)):
        place = choose.choice(["0", "-1", "len(others) // 2"])
        size = choose.choice(["2, 3, 4", "3, 2, 2", "2, 3, 4"])
        lines.append(f"see('other', others[{place}](randn({size})))")
    if call and writer.odds(0.3):
        lines += ["del model", "gc.collect()", "model = wrapped(net)"]
    return lines


def _before(writer: Writer, call: int) -> list[str]:
    """Write the lines that change modes or parameters before a call."""
    net: nn.Module = writer.scope["self"]
    lines = []
    if writer.odds(0.3 if call else 0.15):
        lines.append(writer.choose.choice(["net.eval()", "net.train()", "model.eval()", "model.train()"]))
    names = [name for name, _ in net.named_parameters()]
    if names and writer.odds(0.25 if call else 0.12):
        name = writer.choose.choice(names)
        lines.append(
            f"net.get_parameter({name!r}).requires_grad_({writer.choose.choice([False, False, True])})"
        )
    if call and names and writer.odds(0.1):
        lines.append("net.load_state_dict(halved(net.state_dict()))")
    if call and writer.layers and writer.odds(0.1):
        lines.append(
            f"net.{writer.choose.choice(writer.layers).removeprefix('self.')}.register_forward_hook(double_output)"
        )
    if call and names and writer.odds(0.06):
        lines.append("net.requires_grad_(False)")
    return lines


def _call(writer: Writer, inputs: Inputs, call: int, changing: bool) -> list[str]:
    choose = writer.choose
    sizes = dict(inputs.sizes)
    if changing and call and writer.odds(0.5):
        sizes["B"] = choose.choice([1, 2, 3, 4, 5, 5, 1, 0] if writer.odds(0.6) else [3, 4, 5])
    if changing and call and writer.odds(0.25):
        sizes["S"] = choose.choice([3, 4, 5, 6])
    lines = [f"B, S = {sizes['B']}, {sizes['S']}", f"torch.manual_seed({call + 1})"]
    for name, maker in inputs.makers.items():
        lines.append(f"{name} = {maker}")
        if name.startswith("x") and writer.odds(0.35):
            lines.append(f"{name}.requires_grad_()")
    if (
        "x1" in inputs.makers
        and inputs.makers["x1"] == inputs.makers["x0"]
        and writer.odds(0.08)
        and "overlap" not in writer.off
    ):
        lines.append("x1 = x0")
    arguments = list(inputs.makers)
    extra = [a for a in inputs.arguments if "=" in a]
    if extra and writer.odds(0.5):
        values = {
            "scale=2": "scale=3",
            "scale=0.5": "scale=0.7",
            "mask=None": "mask=True",
            "flag=True": "flag=False",
        }
        arguments.append(values[extra[0]])
    if writer.odds(0.1):
        arguments[0] = f"x0={arguments[0]}"
        arguments[1:] = [a if "=" in a else f"{a}={a}" for a in arguments[1:]]
    lines.append(f"inputs = dict({', '.join(f'{name}={name}' for name in inputs.makers)})")
    text = f"out = model({', '.join(arguments)})"
    if writer.odds(0.06):
        lines += ["with torch.no_grad():", f"    {text}"]
    else:
        lines.append(text)
    if "may raise" in writer.features:
        lines[-1] = lines[-1].replace("out = model(", "out = attempted(see, lambda: model(") + ")"
    return [
        *lines,
        "see('modes', modes())",
        "see('out', out)",
        "aliases(net, inputs, out, see)",
        "see('inputs', inputs)",
    ]


_FIRST_ORDER = ("use_reentrant=True", "weight_norm")
"""In programs whose gradient eager PyTorch (2.13) cannot differentiate, or differentiates wrongly (`gradgradcheck`)."""


def _lacks_second_derivatives(writer: Writer) -> bool:
    return any(word in line for line in (*writer.init, *writer.body) for word in _FIRST_ORDER)


def _after(writer: Writer, call: int) -> list[str]:
    lines = []
    if writer.odds(0.06):
        lines += [
            "if torch.is_tensor(out) and out.is_floating_point():",
            "    with torch.no_grad(): out.add_(1)",
            "see('inputs', inputs)",
        ]
        return [*lines, "state(net, see)"]
    if writer.odds(0.06) and not _lacks_second_derivatives(writer):
        lines.append("see('loss', backward(out, create_graph=True))")
        lines.append("backward([p.grad for p in net.parameters()])")
    elif writer.odds(0.1):  # of this call and the next
        return ["earlier = out"]
    elif writer.odds(0.1) and call:
        lines.append("see('loss', backward(out, vars().get('earlier')))")
    else:
        lines.append("see('loss', backward(out))")
    lines.append("gradients(net, inputs, see)")
    if list(writer.scope["self"].parameters()) and writer.odds(0.6):
        lines += ["optimizer.step()"]
        lines += ["optimizer.zero_grad()"] if writer.odds(0.8) else []
    if writer.odds(0.5):
        lines.append("state(net, see)")
    return lines
