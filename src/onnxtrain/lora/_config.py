"""Defines `LoraConfig`, which selects the linear layers to adapt, and sets the rank and scaling of each adapter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from onnxtrain._settings import integers_to_floats, require
from onnxtrain.errors import GraphBuildError
from onnxtrain.lora._patterns import LONGEST, MOST, Matcher, is_plain, problem_of, shortened, with_any_parent

ALL_LINEAR = "all-linear"

# Far above any useful rank; a typo would otherwise use up all memory.
_MOST_RANK = 65_536


@dataclass(frozen=True)
class LoraConfig:
    r"""Configures LoRA adapters. Names, meanings and defaults are those of `peft.LoraConfig` (0.21).

    Two defaults differ: `target_modules` is "all-linear", where PEFT looks up the type of the model, and `seed`, which
    PEFT does not have, is 0.

    A layer `y = x Wᵀ` with an adapter computes `y = x Wᵀ + scaling · dropout(x) Aᵀ Bᵀ`, where A is [r, in] and B is
    [out, r], and only A and B are trained (LoRA, Hu et al. 2021, equation 3).

    Attributes:
        r: rank of the adapters, at least 1, e.g. 8.
        lora_alpha: numerator of the scaling, e.g. 16 (default: 8). The scaling is `lora_alpha / r`.
        target_modules: "all-linear" for all linear layers except convolutions and the output layer of a language model;
            a list of names, e.g. ["q_proj", "v_proj"], each of which matches modules whose path is the name or ends
            with it; or a regular expression that must match the whole path, e.g. r".*layers\.[01]\..*q_proj".
        lora_dropout: Dropout probability for the inputs of the adapters in training, 0 <= p < 1.
        use_rslora: True for the scaling `lora_alpha / sqrt(r)` of rank-stabilized LoRA.
        rank_pattern: ranks of modules that do not use `r`, e.g. {"layers.0.self_attn.q_proj": 16}. A key is a name or a
            regular expression that must match the end of the path.
        alpha_pattern: alphas of modules that do not use `lora_alpha`, with keys as in `rank_pattern`.
        exclude_modules: modules without an adapter, as a list or a regular expression, as in `target_modules`.
        init_lora_weights: True draws A from U(-1/sqrt(in), 1/sqrt(in)), "gaussian" from N(0, 1/r²); B is zero, so that
            the model's initial outputs are unchanged. False also draws B, from U(-1/sqrt(r), 1/sqrt(r)), for tests.
        seed: seed of the random initial values, a non-negative integer.

    Raises:
        GraphBuildError: a field has an invalid value.

    Example:
        >>> LoraConfig(r=8, target_modules=["q_proj", "v_proj"]).scaling("model.layers.0.self_attn.q_proj")
        1.0
    """

    r: int = 8
    lora_alpha: float = 8.0
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
        # PEFT converts lists to sets, which JSON does not support.
        for name in ("target_modules", "exclude_modules"):
            choice = getattr(self, name)
            if isinstance(choice, AbstractSet):
                object.__setattr__(self, name, tuple(sorted(choice, key=str)))
        require(self, "r", _is_rank, f"an integer from 1 to {_MOST_RANK}")
        require(self, "lora_alpha", _is_alpha, "a positive number")
        require(self, "target_modules", _is_choice, '"all-linear", a list of names, or a regular expression')
        require(self, "lora_dropout", lambda p: 0 <= p < 1, "a probability, 0 <= p < 1")
        require(self, "use_rslora", lambda flag: isinstance(flag, bool), "True or False")
        require(
            self,
            "rank_pattern",
            _all_values(_is_rank),
            f"a mapping from regular expressions to integers from 1 to {_MOST_RANK}",
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
            'True, False or "gaussian" (the other initializations of PEFT change the base weights)',
        )
        require(self, "seed", lambda seed: type(seed) is int and seed >= 0, "a non-negative integer")
        self._check_expressions()

    def _check_expressions(self) -> None:
        """Raises GraphBuildError for regular expressions that are invalid, too many, too long or too slow."""
        length = 0
        for name in ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str) and len(value) > MOST:
                raise GraphBuildError(
                    f"making LoraConfig: {name} has {len(value):,} entries; give at most {MOST:,}"
                )
            ends = isinstance(value, Mapping)
            for text in [value] if isinstance(value, str) else value if ends else ():
                if len(text) <= LONGEST and is_plain(text):
                    continue
                length += len(text)
                problem = (
                    f"makes the regular expressions {length:,} characters long, more than the limit of {LONGEST:,}"
                    if length > LONGEST
                    else problem_of(with_any_parent(text) if ends else text)
                )
                if problem:
                    kind = "mapping from regular expressions" if ends else "regular expression"
                    raise GraphBuildError(
                        f"making LoraConfig: {name} is {shortened(value)}; it must be a {kind}, and {shortened(text)} "
                        f"{problem}"
                    )

    @cached_property
    def _matcher(self) -> Matcher:
        return Matcher()

    def rank(self, module: str) -> int:
        """Returns the rank of a module's adapter; `module` is the path, e.g. "model.layers.0.mlp.up_proj"."""
        return int(self._by_pattern(self.rank_pattern, module, self.r))

    def scaling(self, module: str) -> float:
        """Returns the scaling of a module's adapter: alpha / r, or alpha / sqrt(r) with `use_rslora`."""
        rank = self.rank(module)
        alpha = float(self._by_pattern(self.alpha_pattern, module, self.lora_alpha))
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def names(self, module: str) -> bool:
        """True if `target_modules` selects a module by name or regular expression; False for "all-linear"."""
        return self.target_modules != ALL_LINEAR and self._matches(self.target_modules, module)

    def excludes(self, module: str) -> bool:
        """True if `exclude_modules` excludes a module."""
        return self.exclude_modules is not None and self._matches(self.exclude_modules, module)

    def matches_end(self, pattern: str, module: str) -> bool:
        """True if `pattern`, a key of `rank_pattern` or `alpha_pattern`, matches the end of a module's path."""
        return self._matcher.matches_end(pattern, module)

    def _matches(self, choice: str | Sequence[str], module: str) -> bool:
        # As in PEFT, a string is a regular expression for the whole path, and a list contains names.
        if isinstance(choice, str):
            return self._matcher.full_match(choice, module)
        return any(is_named(name, module) for name in choice)

    def _by_pattern(self, patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
        """Returns the value of the first pattern that matches the end of a path, or else the default."""
        return next(
            (value for key, value in (patterns or {}).items() if self.matches_end(key, module)), default
        )

    def to_peft(self, modules: Sequence[str]) -> dict[str, Any]:
        """Returns the content of PEFT's `adapter_config.json`.

        Args:
            modules: paths of all modules with an adapter; they become `target_modules`, because "all-linear" might
                select different modules in another framework.
        """
        # PEFT warns about unknown settings such as the seed.
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
    # True is an int for isinstance.
    return type(value) is int and 1 <= value <= _MOST_RANK


def _is_alpha(value: Any) -> bool:
    return not isinstance(value, bool) and 0 < value < math.inf


def _is_choice(choice: Any) -> bool:
    return len(choice) > 0 and (
        isinstance(choice, str) or all(isinstance(name, str) and name for name in choice)
    )


def _all_values(holds: Any) -> Any:
    def are_valid(patterns: Any) -> bool:
        return patterns is None or (
            isinstance(patterns, Mapping)
            and all(isinstance(key, str) for key in patterns)
            and all(holds(value) for value in patterns.values())
        )

    return are_valid


def is_named(name: str, module: str) -> bool:
    """True if `name` is a module's path or the last components of the path, e.g. "attn.q_proj"."""
    return module == name or module.endswith(f".{name}")
