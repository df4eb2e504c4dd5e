"""Context managers and mode switches of PyTorch around statements, some of which raise.

The placeholders are those of `Writer.fill`.
"""

from __future__ import annotations

from ortmodule.fuzz.writer import Unfit, Writer

__all__ = ["write_context", "write_raising_line", "write_switch"]

_CONTEXTS = (
    "torch.no_grad()",
    "torch.enable_grad()",
    "torch.set_grad_enabled(False)",
    "torch.set_grad_enabled(True)",
    "torch.set_grad_enabled(self.training)",
    "torch.inference_mode()",
    "torch.inference_mode(False)",
    "torch.autocast('cpu', dtype=torch.bfloat16)",
    "torch.autocast('cpu', dtype=torch.float16)",
    "torch.autocast('cpu', enabled=False)",
    "torch.autocast('cpu', dtype=torch.bfloat16, cache_enabled=False)",
    "torch.random.fork_rng(devices=[])",
    "torch.autograd.graph.save_on_cpu()",
    "torch.autograd.graph.saved_tensors_hooks(packed, unpacked)",
    "torch.autograd.graph.disable_saved_tensors_hooks('not here')",
    "torch.autograd.set_multithreading_enabled(False)",
    "torch.autograd.forward_ad.dual_level()",
    "torch.profiler.record_function('part')",
    "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)",
    "torch.backends.mkldnn.flags(enabled=False)",
    "torch.device('cpu')",
    "default_dtype(torch.float64)",
    "default_dtype(torch.bfloat16)",
    "deterministic()",
    "contextlib.nullcontext()",
    "contextlib.suppress(KeyError)",
)

_DATA_DEPENDENT = (
    "torch.zeros(4)[{n}.reshape(-1)[:1].abs() % 5]",
    "torch.zeros(4)[({x}.detach().sum() * 7).long() % 5]",
    "torch.zeros(4).index_select(0, ({x}.detach().sum() * 7).long().reshape(1) % 5)",
    "F.embedding(({x}.detach().sum() * 7).long().reshape(1) % 5, torch.ones(4, 2))",
    "torch.linalg.cholesky(torch.eye(2) * {x}.detach().sum())",
    "torch.vmap(lambda i: torch.zeros(4)[i])(({x}.detach().sum() * 7).long().reshape(1) % 5)",
    "if {x}.sum().item() > 0.3: raise ValueError('too large')",
    "if {x}.detach().mean() > 0.1: raise KeyError('too large')",
    "assert {x}.detach().sum() < 0.3, 'too large'",
    "torch._check(bool({x}.detach().sum() < 0.3), lambda: 'too large')",
    "if {x1}.shape[0] == 3: raise ZeroDivisionError('of this size')",
    "if not self.training: raise NotImplementedError('training only')",
    "{x} + torch.ones(5 if {x}.detach().sum() > 0.3 else 1, 1, 1, 1, 1, 1, 1)[..., 0].reshape(-1)[:1]",
)
_ALWAYS = (
    "{x1} @ torch.ones(17, 3)",
    "{x1}.index_select(0, torch.tensor([99]))",
    "{x1}.view(-1, 17, 19, 23)",
    "raise RuntimeError('never')",
    "{}[{x}.dim() + 90]",
    "next(iter([]))",
    "self.missing",
    "{x}.sum(7)",
)


def write_context(writer: Writer) -> bool:
    """Writes a context manager around a block, which may end in an error, caught in the forward or not."""
    from ortmodule.fuzz.statements import write_block

    if writer.depth > 1:
        return False
    headers = [f"with {writer.choose.choice(_CONTEXTS)}:"]
    caught = writer.odds(0.3)
    if caught:
        headers.insert(0, "try:")
    elif writer.odds(0.25):
        headers.append(f"with {writer.choose.choice(_CONTEXTS)}:")
    if any("autocast" in header for header in headers):
        writer.features.add("autocast")
    before = len(writer.body)
    depth = writer.depth
    writer.nest(headers, lambda: write_block(writer))
    if len(writer.body) == before:
        return False
    if caught or writer.odds(0.5):
        write_raising_line(writer, depth + len(headers), always=caught and writer.odds(0.4))
        if not caught:
            writer.features.add("may raise")
    if caught:
        margin = "    " * depth
        kinds = writer.choose.choice(["Exception", "(RuntimeError, LookupError, ValueError)"])
        if kinds != "Exception":
            writer.features.add("may raise")
        writer.body += [f"{margin}except {kinds}:", f"{margin}    caught = 1"]
        if writer.odds(0.3):
            writer.body += [f"{margin}finally:", f"{margin}    caught = 2"]
    return True


def write_switch(writer: Writer) -> bool:
    """Writes a mode that is switched by a function, and often switched back."""
    from ortmodule.fuzz.statements import write_block

    if writer.depth > 1 or "threads" in writer.features:
        return False
    first, manager, last = writer.choose.choice(_SWITCHES)
    margin = "    " * writer.depth
    writer.body.append(f"{margin}{first}")
    with writer.value(manager):
        writer.nest([], lambda: write_block(writer))
    if writer.odds(0.3):
        write_raising_line(writer, writer.depth, always=False)
        writer.features.add("may raise")
    if writer.odds(0.7):
        writer.body.append(f"{margin}{last}")
    return True


_SWITCHES = (
    ("torch.set_grad_enabled(False)", "torch.no_grad()", "torch.set_grad_enabled(True)"),
    ("torch.set_grad_enabled(self.training)", "torch.enable_grad()", "torch.set_grad_enabled(True)"),
    ("torch.manual_seed(5)", "torch.random.fork_rng(devices=[])", "torch.manual_seed(6)"),
    (
        "generator = torch.get_rng_state()",
        "torch.random.fork_rng(devices=[])",
        "torch.set_rng_state(generator)",
    ),
    (
        "torch.use_deterministic_algorithms(True)",
        "deterministic()",
        "torch.use_deterministic_algorithms(False)",
    ),
    (
        "torch.set_default_dtype(torch.float64)",
        "default_dtype(torch.float64)",
        "torch.set_default_dtype(FLOAT)",
    ),
)


def write_raising_line(writer: Writer, depth: int, always: bool) -> None:
    """Writes a line that raises for some data, or for all, without running it."""
    writer.takes_empty = False
    try:
        text = writer.fill(writer.choose.choice(_ALWAYS if always else _DATA_DEPENDENT))
    except Unfit:
        text = "raise ValueError('too large')"
    finally:
        writer.takes_empty = True
    margin = "    " * depth
    if writer.odds(0.3):
        counter = next((name for name in writer.tensors if name == "self.b0"), None)
        writer.body += [f"{margin}{counter}.add_(1)"] if counter else []
    plain = text.startswith(("if ", "assert ", "raise ", "torch._check", "next("))
    writer.body.append(f"{margin}{text}" if plain else f"{margin}_ = {text}")
