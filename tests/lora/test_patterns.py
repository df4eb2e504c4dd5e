"""Regular expressions of adapters: matched as `re.fullmatch` does, and in bounded time for any expression."""

from __future__ import annotations

import contextlib
import json
import random
import re
from pathlib import Path
from typing import Any

import onnx
import pytest

from lora.models import products
from onnxtrain.errors import AdapterMismatchError, GraphBuildError
from onnxtrain.lora import LoraConfig, add_lora, load_adapter, merge, save_adapter
from onnxtrain.lora._patterns import MOST, STEPS, Matcher, problem_of, with_any_parent

MODULES = [f"model.layers.{i}.self_attn.{name}_proj" for i in range(12) for name in "qkvo"]
# Of LLaMA-Factory, ms-swift, unsloth and PEFT's own documentation.
KNOWN = [
    r".*\.layers\.[01]\..*q_proj",
    r"^(?!.*(vision|lm_head)).*\.(?:q_proj|v_proj)$",
    r"model\.layers\.(0|1|[5-9])\.self_attn\.[qk]_proj",
    r"(?:.*?(?:language|text|model).*?(?:self_attn|attention).*?(?:q_proj|k_proj))"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:o_proj|v_proj)))",
    r"(?i)MODEL\..*\.Q_proj",
    r"(.*(self_attn|LlamaAttention).*(q_proj|o_proj)$)",
    r".*(?<!k)_proj",
]
EVIL = [
    r"(a+)+$", r"(a|aa)+$", r"(a*)*b", r"(a|a?)+b", r"(.*)*x", "(.*)*" * 100 + "b", r"(.*?a)*?b", r"(x+x+)+y",
    r"([a-z_.0-9]+)+!", "(?:a|a)" * 100 + "b", "(a?){50}a{50}b", "(a?){1000000}b", "(a{1000}){1000}", "a{1000000}",
    "((a{1,1000}){1,1000}){1,1000}b", "(" * 100 + "a*" + ")*" * 100 + "b", "(" * 300 + "a*" + ")*" * 300 + "b",
    "(?=(a+)+b)" * 50 + ".*", "(?=.*" * 40 + "b" + ")" * 40, "(?!(?!(a+)+b))" * 20, "(?<=a)(?<!b)" * 100 + "(a*)*b",
    "(?i:[a-\uffff])" * 300, "|".join(["a*"] * 900), ".*" * 300 + "b", "(a*|b*)*" * 100 + "c", r"(\w+\.?)+!",
    ".{1,9}" * 3000, r"(?:(?!b).)*b", "(?:(?:.*)?.*)*b", "(?:a{0,500}){0,500}b", "((a{0,9}){0,9}){0,9}b" * 100,
]  # fmt: skip
REFUSED = {
    r"(a+)\1+b": "GROUPREF",
    r"(?P<x>a*)(?P=x)*b": "GROUPREF",
    r"(a)?(?(1)b|c)": "GROUPREF_EXISTS",
    r"(?>a+)+b": "ATOMIC_GROUP",
    r"(a++)+b": "POSSESSIVE_REPEAT",
    "a{99999999999}": "the repetition number is too large",
    "(" * 5000 + "a" + ")" * 5000: "is nested too deeply",
    "(a*)*" * 1_000_000: "5,000,000 characters",
    "a" * 10_000_000: "10,000,000 characters",
    "[": "unterminated character set",
}


@pytest.mark.parametrize("pattern", KNOWN)
def test_expressions_in_use_match_as_in_python(pattern: str) -> None:
    config = LoraConfig(target_modules=pattern, exclude_modules=pattern)
    expected = [re.fullmatch(pattern, module) is not None for module in MODULES]
    assert [config.names(module) for module in MODULES] == expected
    assert [config.excludes(module) for module in MODULES] == expected
    assert any(expected)


@pytest.mark.parametrize("pattern", ["q_proj", r"layers\.1\..*", "layers.1.self_attn.q_proj", ".*1.*k_proj"])
def test_keys_of_patterns_match_ends_as_in_peft(pattern: str) -> None:
    config = LoraConfig(r=8, rank_pattern={pattern: 3})
    expected = [8 if re.fullmatch(rf"(.*\.)?({pattern})", module) is None else 3 for module in MODULES]
    assert [config.rank(module) for module in MODULES] == expected


def random_expression(rng: random.Random, depth: int) -> str:
    leaves = ["a", "b", r"\.", "A", "1", ".", r"\w", r"\d", "[ab]", "[^a]", "[a-c.]", r"\W", "é", "\n"]
    places = [r"\b", r"\B", "^", "$", r"\A", r"\Z", "(?<=a)", "(?<!ab)", "(?<=[ab])"]
    groups = ["(%s)", "(?:%s)", "(?=%s)", "(?!%s)", "(?i:%s)", "(?s:%s)", "(?-i:%s)", "(?m:%s)", "(?a:%s)"]
    options = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        text = ""
        for _ in range(rng.randint(0, 4)):
            if rng.random() < 0.2:
                text += rng.choice(places)
                continue
            part = rng.choice(leaves)
            if depth and rng.random() < 0.5:
                group = rng.choice(groups)
                part = group % random_expression(rng, depth - 1)
                if group in ("(?=%s)", "(?!%s)"):
                    text += part
                    continue
            if rng.random() < 0.4:
                part += rng.choice(["*", "+", "?", "*?", "+?", "??", "{2}", "{0,2}", "{1,3}?", "{2,}"])
            text += part
        options.append(text)
    return "|".join(options)


def test_random_expressions_match_as_in_python() -> None:
    rng = random.Random(20)
    found = []
    for _ in range(400):
        pattern = rng.choice(["", "(?i)", "(?s)", "(?m)"]) + random_expression(rng, 3)
        assert problem_of(pattern) is None, pattern
        matcher = Matcher()
        for _ in range(8):
            text = "".join(rng.choice("aabbcA._1\né") for _ in range(rng.randint(0, 8)))
            found.append(re.fullmatch(pattern, text) is not None)
            assert matcher.full_match(pattern, text) == found[-1], (pattern, text)
            if not pattern.startswith("(?i)" if "(?i)" in pattern else ("(?s)", "(?m)")):
                expected = re.fullmatch(with_any_parent(pattern), text) is not None
                assert matcher.matches_end(pattern, text) == expected, (pattern, text)
    assert 200 < sum(found) < len(found) - 200


@pytest.mark.parametrize("pattern", EVIL, ids=[pattern[:20] for pattern in EVIL])
def test_evil_expressions_end(pattern: str) -> None:
    """Whatever the result: `re` takes minutes to years for most of them."""
    matcher = Matcher()
    with contextlib.suppress(GraphBuildError):
        for text in ["a" * 30, "a" * 60, *MODULES]:
            matcher.full_match(pattern, text)
            matcher.matches_end(pattern, text)


def test_too_many_steps_are_an_error() -> None:
    config = LoraConfig(exclude_modules="(?=.*" * 40 + "b" + ")" * 40)
    with pytest.raises(GraphBuildError, match=f"at most {STEPS:,} steps") as caught:
        [config.excludes(module) for module in MODULES]
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(("pattern", "message"), REFUSED.items(), ids=[pattern[:20] for pattern in REFUSED])
@pytest.mark.parametrize("name", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"])
def test_what_cannot_be_bounded_is_refused(pattern: str, message: str, name: str) -> None:
    value: Any = {pattern: 2} if name.endswith("_pattern") else pattern
    with pytest.raises(GraphBuildError, match=re.escape(message)) as caught:
        LoraConfig(**{name: value})
    assert name in str(caught.value)
    assert len(str(caught.value)) < 500


def test_lists_and_sums_of_expressions_are_bounded() -> None:
    with pytest.raises(GraphBuildError, match=r"rank_pattern has 50,001 entries; give at most 50,000"):
        LoraConfig(rank_pattern={f"a{i}": 1 for i in range(MOST + 1)})
    with pytest.raises(GraphBuildError, match=r"makes the regular expressions .* characters long"):
        LoraConfig(rank_pattern={f"(a{i:04})*": 1 for i in range(10_000)})


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    model = products({"self_attention_projection_q_proj": (6, 4)})
    onnx.save(model, tmp_path / "model.onnx")
    config = LoraConfig(r=2, target_modules=["self_attention_projection_q_proj"], init_lora_weights=False)
    save_adapter(add_lora(model, config), tmp_path / "adapter", "peft")
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exclude_modules": "([a-z_.0-9]+)+!"}, None),
        ({"target_modules": "([a-z_.0-9]+)+"}, None),
        ({"rank_pattern": {"([a-z_.0-9]+)+!": 4}}, None),
        ({"alpha_pattern": {"([a-z_.0-9]+)+!": 4}}, None),
        ({"exclude_modules": r"([a-z]+)\1!"}, "GROUPREF"),
        ({"exclude_modules": "|".join(["[a-z]*?x"] * 4000)}, None),
        ({"exclude_modules": "(" * 5000 + ")" * 5000}, "nested too deeply"),
        (
            {"rank_pattern": {".*" * 30_000 + f"b{i}": 4 for i in range(50)}},
            "makes the regular expressions .* characters long",
        ),
        ({"exclude_modules": "(?=.*" * 60 + "b" + ")" * 60}, None),
    ],
)
def test_a_received_adapter_cannot_hang_its_reader(
    adapter: Path, settings: dict[str, Any], message: str | None
) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    for use in (
        lambda: load_adapter(adapter, adapter.parent / "model.onnx"),
        lambda: merge(adapter.parent / "model.onnx", adapter),
    ):
        if message is None:
            use()
        else:
            with pytest.raises(AdapterMismatchError, match=message):
                use()
