"""Runs `onnxtrain plan`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from onnxtrain.artifacts import returned_outputs
from onnxtrain.cli._artifacts import check_loss, prepared
from onnxtrain.cli._command_options import PlanOptions
from onnxtrain.cli._declared import flag, flat, options_of
from onnxtrain.cli._options import parse_dims
from onnxtrain.cli._output import info, print_command, print_json, print_table, table
from onnxtrain.cli._recipe import chosen_recipe
from onnxtrain.errors import InputError
from onnxtrain.passes import canonicalize
from onnxtrain.planning import PlanChoice, memory_text, parse_memory, plan_training
from onnxtrain.planning._plan import RANKS


def run_command(options: PlanOptions) -> None:
    """Measures training configurations of a model, and prints them with the commands for the recommended configuration.

    Raises:
        InputError: no configuration fits in the memory budget.
    """
    # Parsed before the model is loaded, so that a wrong size is reported immediately.
    memory = parse_memory(options.memory)
    recipe = chosen_recipe(options)
    model = prepared(options.source, options.model, seed=0)
    loaded = canonicalize(model)
    check_loss(loaded, options.model.loss)
    plan = plan_training(
        model,
        memory,
        # Measured with the outputs that `onnxtrain artifacts` adds, because returned logits use memory.
        recipe=replace(recipe, additional_output_names=returned_outputs(loaded.graph, recipe)),
        batch_size=options.batch_size,
        dims=parse_dims(options.dim or ()),
        threads=options.threads,
        report=info,
        ranks=options.lora_rank or RANKS,
    )
    best = next((choice for choice in plan if choice.recommended), None)
    commands = (
        {} if best is None else {name: _command(name, options, best) for name in ("artifacts", "train")}
    )
    if options.json:
        choices = [asdict(choice) for choice in plan]
        print_json({"model": str(options.source), "memory": memory, "choices": choices, "commands": commands})
    else:
        _print(options, plan, memory)
        if best is not None:
            _print_recommendation(best, commands, memory)
    if best is None:
        raise InputError(
            f"no configuration to train '{options.source}' fits in {memory_text(memory)}: {_least(plan)}"
        )


def _print(options: PlanOptions, plan: Sequence[PlanChoice], memory: int) -> None:
    rows = [
        (
            choice.name,
            "yes" if choice.recompute else "",
            _peak(choice),
            "" if choice.seconds is None else f"{1000 * choice.seconds:.4g} ms",
            f"{choice.trained:,}",
            f"{choice.share:.2%}",
            "recommended" if choice.recommended else "yes" if choice.fits else "no",
        )
        for choice in plan
    ]
    columns = ("train", "recompute", "memory", "time per step", "parameters", "share", "fits")
    title = f"Ways to train {options.source.name} in {memory_text(memory)}"
    print_table(table(title, columns, rows, right=(2, 3, 4, 5)))
    for choice in plan:
        if choice.problem:
            print_table(f"{choice.name}: {choice.problem}")


def _peak(choice: PlanChoice) -> str:
    if choice.problem:
        return "cannot be trained"
    return memory_text(choice.peak) if choice.complete else f"more than {memory_text(choice.peak)}"


def _print_recommendation(best: PlanChoice, commands: dict[str, str], memory: int) -> None:
    way = ", with recomputation" if best.recompute else ""
    print_table(
        f"Recommended: {best.name}{way}, in {memory_text(best.peak)} of {memory_text(memory)}. Files for the device:"
    )
    print_command(f"    {commands['artifacts']}")
    print_table("Or train on this machine, where the process also holds what builds the models:")
    print_command(f"    {commands['train']}")


def _least(plan: Sequence[PlanChoice]) -> str:
    """Returns the end of an error message, with the least memory that a configuration needs and advice to reduce it."""
    complete = [choice for choice in plan if choice.complete]
    if not complete:
        return "each takes more than " + memory_text(min(choice.peak for choice in plan))
    least = min(complete, key=lambda choice: choice.peak)
    way = ", with recomputation" if least.recompute else ""
    return (
        f"the least ({least.name}{way}) takes {memory_text(least.peak)}. A smaller {flag('batch_size')} or "
        f"{flag('dim')} takes less"
    )


def _command(name: str, options: PlanOptions, choice: PlanChoice) -> str:
    """Returns the shell command that uses a configuration: `onnxtrain artifacts ...` or `onnxtrain train ...`.

    Args:
        name: "artifacts" or "train".
        options: options of `onnxtrain plan`, which the command repeats.
        choice: the configuration.
    """
    words: list[str] = ["onnxtrain", name, str(options.source)]
    if name == "train":
        words += ["--data", "FILE"]
    # The command repeats all options that the choice was measured with.
    values: dict[str, Any] = flat(options.model) | flat(options.optimizer)
    declared = {**options_of(type(options.model)), **options_of(type(options.optimizer))}
    chosen = {option: value for option, value in values.items() if value != declared[option].default}
    chosen["train"] = choice.requires_grad
    chosen["recompute"] = choice.recompute
    if choice.lora is not None:
        chosen["lora_rank"] = choice.lora.r
        # The only string is "all-linear", the default.
        if not isinstance(choice.lora.target_modules, str):
            chosen["lora_targets"] = list(choice.lora.target_modules)
    if name == "train":
        chosen |= {"batch_size": options.batch_size, "threads": options.threads}
    for option, value in chosen.items():
        if value is True:
            words.append(flag(option))
        elif value is not None and value is not False:
            for one in value if isinstance(value, list) else [value]:
                words += [flag(option), str(one)]
    return shlex.join(words)
