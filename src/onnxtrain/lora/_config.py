"""Defines `LoraConfig`: which linear layers get an adapter, of which rank and scale."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from typing import Any, Literal

from onnxtrain._settings import integers_to_floats, require

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class LoraConfig:
    r"""Describes adapters as `peft.LoraConfig` (0.21) does: names, meanings and defaults are PEFT's.

    A layer `y = x Wᵀ` with an adapter computes `y = x Wᵀ + scaling · dropout(x) Aᵀ Bᵀ`, where A is [r, in] and B is
    [out, r], and only A and B are trained (LoRA, Hu et al. 2021, equation 3).

    Attributes:
        r: rank of the adapters, at least 1, e.g. 8.
        lora_alpha: numerator of the scaling, e.g. 16. The scaling is `lora_alpha / r`.
        target_modules: "all-linear" for all linear layers but the output layer of a language model; a list of names,
            e.g. ["q_proj", "v_proj"], of which each matches modules of that name and modules whose path ends with it;
            or a regular expression that the whole path has to match, e.g. r".*layers\.[01]\..*q_proj".
        lora_dropout: probability by which elements of the adapters' inputs are dropped in training, 0 <= p < 1.
        use_rslora: True for the scaling `lora_alpha / sqrt(r)` of rank-stabilised LoRA.
        rank_pattern: other ranks by module, e.g. {"layers.0.self_attn.q_proj": 16}. A key is a name or a regular
            expression that the end of the path has to match.
        alpha_pattern: other values of `lora_alpha` by module, with keys as in `rank_pattern`.
        exclude_modules: modules without an adapter, as a list or a regular expression, as in `target_modules`.
        init_lora_weights: True draws A from U(-1/sqrt(in), 1/sqrt(in)), "gaussian" from N(0, 1/r²); B is zero, so that
            the model computes at first what it did before. False draws B from U(-1/sqrt(r), 1/sqrt(r)), for tests.
        seed: start of the random numbers, an integer from 0 on.

    Raises:
        GraphBuildError: a field has an invalid value.

    Example:
        >>> LoraConfig(r=8, target_modules=["q_proj", "v_proj"]).scaling("model.layers.0.self_attn.q_proj")
        2.0
    """

    r: int = 8
    lora_alpha: float = 16.0
    target_modules: str | Sequence[str] = ALL_LINEAR
    lora_dropout: float = 0.0
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] | None = None
    alpha_pattern: Mapping[str, float] | None = None
    exclude_modules: str | Sequence[str] | None = None
    init_lora_weights: bool | Literal["gaussian"] = True
    seed: int = 0

    def __post_init__(self) -> None:
        integers_to_floats(self)
        # PEFT makes sets of lists. The settings are written as JSON, which has none.
        for name in ("target_modules", "exclude_modules"):
            choice = getattr(self, name)
            if isinstance(choice, AbstractSet):
                object.__setattr__(self, name, tuple(sorted(choice, key=str)))
        require(self, "r", _is_rank, "an integer of at least 1")
        require(self, "lora_alpha", _is_alpha, "a positive number")
        require(self, "target_modules", _is_choice, '"all-linear", a list of names, or a regular expression')
        require(self, "lora_dropout", lambda p: 0 <= p < 1, "a probability, 0 <= p < 1")
        require(self, "use_rslora", lambda flag: isinstance(flag, bool), "True or False")
        require(
            self,
            "rank_pattern",
            _all_values(_is_rank),
            "a mapping from regular expressions to integers of at least 1",
        )
        require(
            self,
            "alpha_pattern",
            _all_values(_is_alpha),
            "a mapping from regular expressions to positive numbers",
        )
        require(
            self,
            "exclude_modules",
            lambda c: c is None or _is_choice(c),
            "a list of names or a regular expression",
        )
        require(
            self,
            "init_lora_weights",
            lambda kind: isinstance(kind, bool) or kind == "gaussian",
            'True, False or "gaussian" (the other initialisations of PEFT change the base weights)',
        )
        require(self, "seed", lambda seed: type(seed) is int and seed >= 0, "an integer from 0 on")

    def rank(self, module: str) -> int:
        """Returns the rank of the adapter of a module, e.g. of "model.layers.0.mlp.up_proj"."""
        return int(_by_pattern(self.rank_pattern, module, self.r))

    def scaling(self, module: str) -> float:
        """Returns the factor by which the product of a module's A and B is multiplied."""
        rank = self.rank(module)
        alpha = float(_by_pattern(self.alpha_pattern, module, self.lora_alpha))
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def names(self, module: str) -> bool:
        """Says if `target_modules` names a module; always False for "all-linear", which names none."""
        return self.target_modules != ALL_LINEAR and matches(self.target_modules, module)

    def excludes(self, module: str) -> bool:
        """Says if `exclude_modules` names a module."""
        return self.exclude_modules is not None and matches(self.exclude_modules, module)

    def to_peft(self, modules: Sequence[str]) -> dict[str, Any]:
        """Returns the content of PEFT's `adapter_config.json`.

        Args:
            modules: paths of all modules that have an adapter; they become `target_modules`, as "all-linear" would
                choose others in another framework.
        """
        # PEFT refuses unknown settings with a warning only; the seed is no setting of its.
        settings = asdict(self)
        del settings["seed"]
        return settings | {
            "peft_type": "LORA",
            "task_type": None,
            "bias": "none",
            "inference_mode": True,
            "target_modules": sorted(modules),
            "exclude_modules": None,
            "rank_pattern": {module: self.rank(module) for module in modules if self.rank(module) != self.r},
            "alpha_pattern": dict(self.alpha_pattern or {}),
        }


def _is_rank(value: object) -> bool:
    # True is an int to isinstance.
    return type(value) is int and value >= 1


def _is_alpha(value: Any) -> bool:
    return not isinstance(value, bool) and 0 < value < math.inf


def _is_choice(choice: Any) -> bool:
    if isinstance(choice, str):
        return bool(choice) and _is_expression(choice)
    return len(choice) > 0 and all(isinstance(name, str) and name for name in choice)


def _is_expression(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _all_values(holds: Any) -> Any:
    def are_valid(patterns: Any) -> bool:
        return patterns is None or (
            isinstance(patterns, Mapping)
            and all(isinstance(key, str) and _is_expression(key) for key in patterns)
            and all(holds(value) for value in patterns.values())
        )

    return are_valid


def matches(choice: str | Sequence[str], module: str) -> bool:
    """Says if a regular expression matches the whole path, or a name of a list is its end."""
    # As PEFT: a text is a regular expression, a list holds names.
    if isinstance(choice, str):
        return re.fullmatch(choice, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in choice)


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Returns the value of the first pattern that matches the end of a path, else the default."""
    for pattern, value in (patterns or {}).items():
        if matches_end(pattern, module):
            return value
    return default


def matches_end(pattern: str, module: str) -> bool:
    """Says if a key of `rank_pattern` or `alpha_pattern` is for a module."""
    # PEFT's own rule: the key may be a path, its end, or a regular expression.
    return re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
