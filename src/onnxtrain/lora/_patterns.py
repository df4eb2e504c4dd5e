"""Matches regular expressions from untrusted adapters in bounded time, unlike Python's `re`."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterator
from typing import Any

from onnxtrain.errors import GraphBuildError

# Parser and compiler of `re`, which have no public name; the grammar must be Python's, as in PEFT.
_parser, _compiler, _kind = (
    importlib.import_module(f"re._{name}") for name in ("parser", "compiler", "constants")
)

LONGEST = 1 << 16
"""Maximum number of characters of a key, and of all expressions of one configuration; tools write a few hundred."""

MOST = 50_000
"""Maximum number of entries of each list or mapping in a configuration.

A model with 60 blocks of 128 experts has 23,000 layers.
"""

STEPS = 2_000_000
"""Maximum total number of steps for one configuration: a few seconds. Matching 1,000 modules takes 60,000 steps."""

# Literals and dots only: `re` does not backtrack for them.
_PLAIN = re.compile(r"(?:[^\\^$*+?{}\[\]|()]|\\\W)*")
_CHARACTER_SETS = re.ASCII | re.LOCALE | re.UNICODE
_REPEATS = frozenset({_kind.MAX_REPEAT, _kind.MIN_REPEAT})
_LOOKS = frozenset({_kind.ASSERT, _kind.ASSERT_NOT})
# Nodes that match one character or a position; `re` itself finds where.
_LEAVES = frozenset({_kind.ANY, _kind.AT, _kind.FAILURE, _kind.IN, _kind.LITERAL, _kind.NOT_LITERAL})


class Matcher:
    """Matches the regular expressions of one configuration against module names without backtracking.

    `re` backtracks: matching `(a+)+b` against n letters "a" takes 2^n steps. For each part of an expression, this
    matcher instead computes the set of all positions where the part can end from the set of all positions where it can
    begin. A set is an integer with one bit per position. The results are the same as with `re.fullmatch`.
    """

    def __init__(self) -> None:
        self._left = STEPS
        self._known: dict[tuple[str, str], bool] = {}

    def full_match(self, pattern: str, text: str) -> bool:
        """True if an expression matches the whole text, as with `re.fullmatch`.

        Raises:
            GraphBuildError: this matcher has exceeded its limit of :data:`STEPS` steps in total, or the expression is
                nested too deeply.
        """
        if is_plain(pattern):
            return _compiled(pattern).fullmatch(text) is not None
        key = (pattern, text)
        if key not in self._known:
            self._known[key] = self._search(_parse(pattern), text)
        return self._known[key]

    def matches_end(self, pattern: str, text: str) -> bool:
        """True if an expression matches a module path, or a suffix of the path that follows a dot.

        For example, "fc1" matches "layers.0.fc1", but not "layers.0.old_fc1".

        Raises:
            GraphBuildError: this matcher has exceeded its limit of :data:`STEPS` steps in total, or the expression is
                nested too deeply.
        """
        if is_plain(pattern):
            return _compiled(with_any_parent(pattern)).fullmatch(text) is not None
        return self.full_match(with_any_parent(pattern), text)

    def _search(self, expression: _Expression, text: str) -> bool:
        run = _Run(expression, text, self._left - len(text) // 8)
        try:
            ends = run.sequence(expression.tree, 1, expression.tree.state.flags)
        except (_TooManySteps, RecursionError):
            raise GraphBuildError(
                f"matching the module {shortened(text)} with the regular expression {shortened(expression.pattern)} "
                f"takes too long: at most {STEPS:,} steps are allowed in total. Write the expression without "
                "nested repetitions, or name the modules in a list"
            ) from None
        finally:
            self._left = run.left
        return bool(ends >> len(text) & 1)


@functools.lru_cache(maxsize=MOST)
def is_plain(pattern: str) -> bool:
    """True if an expression has no special characters except dots, e.g. the path "layers.0.fc1"."""
    return _PLAIN.fullmatch(pattern) is not None


def with_any_parent(pattern: str) -> str:
    """Returns an expression that matches a path if `pattern` matches the path, or a suffix of it that follows a dot."""
    # PEFT's rule for keys of rank_pattern and alpha_pattern.
    return rf"(.*\.)?({pattern})"


def problem_of(pattern: str) -> str | None:
    """Returns the reason why a regular expression is not supported, e.g. "is nested too deeply", or None."""
    try:
        kinds = set(_kinds(_parse(pattern).tree))
    except (re.error, OverflowError) as error:
        return f"is not a regular expression: {error}"
    except RecursionError:
        return "is nested too deeply"
    others = sorted(map(str, kinds - _LEAVES - _REPEATS - _LOOKS - {_kind.BRANCH, _kind.SUBPATTERN}))
    return f"has parts that cannot be matched in bounded time ({', '.join(others)})" if others else None


def shortened(value: object) -> str:
    """Returns the `repr` of a value for a message, with an ellipsis if it is long."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:80]} ... {text[-30:]}"


@functools.lru_cache(maxsize=MOST)
def _compiled(pattern: str) -> re.Pattern[str]:
    # The cache of `re` itself has 512 entries.
    return re.compile(pattern)


class _Expression:
    """A parsed regular expression, with a cache of its leaves: nodes that match one character or a position.

    Attributes:
        pattern: the text of the expression.
        tree: the parse tree of `re`.
        leaves: cache of the leaves that `re` has compiled. Its keys are the `id` of a leaf and the flags of `re`.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.tree = _parser.parse(pattern)
        self.leaves: dict[tuple[int, int], re.Pattern[str]] = {}


@functools.lru_cache(maxsize=256)
def _parse(pattern: str) -> _Expression:
    return _Expression(pattern)


def _kinds(tree: Any) -> Iterator[Any]:
    """Yields the kinds of all nodes of a parsed expression."""
    for kind, value in tree:
        yield kind
        for part in _bodies(kind, value):
            yield from _kinds(part)


def _bodies(kind: Any, value: Any) -> list[Any]:
    if kind == _kind.BRANCH:
        return list(value[1])
    return [value[-1]] if kind == _kind.SUBPATTERN or kind in _REPEATS or kind in _LOOKS else []


class _TooManySteps(Exception):
    pass


class _Run:
    """Matches an expression against a text, with a limited number of steps."""

    def __init__(self, expression: _Expression, text: str, steps: int) -> None:
        self.left = steps
        self._expression = expression
        self._text = text
        self._places: dict[tuple[int, int], int] = {}
        self._letters: dict[str, int] = {}
        for position, letter in enumerate(text):
            self._letters[letter] = self._letters.get(letter, 0) | 1 << position
        self._known: dict[tuple[int, int, int], int] = {}

    def sequence(self, nodes: Any, starts: int, flags: int) -> int:
        """Returns the positions at which a sequence of nodes can end if it begins at one of `starts`.

        Sets of positions are integers with one bit per position; `flags` are the flags of `re`.
        """
        for node in nodes:
            if not starts:
                break
            # For a long name, operations on sets take proportionally longer.
            self._spend(1 + len(self._text) // 1024)
            if node[0] in _LEAVES:
                places, width = self._places_of(node, flags)
                starts = (starts & places) << width
            else:
                self._spend(4)
                starts = self._part(node, starts, flags)
        return starts

    def _part(self, node: Any, starts: int, flags: int) -> int:
        # Nested repetitions repeat the same sets. The parser has a single object for all `\b`, with any flags.
        key = (id(node), starts, flags)
        if key not in self._known:
            self._known[key] = self._composite(node, starts, flags)
        return self._known[key]

    def _spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise _TooManySteps

    def _composite(self, node: Any, starts: int, flags: int) -> int:
        kind, value = node
        if kind == _kind.BRANCH:
            return functools.reduce(int.__or__, (self.sequence(part, starts, flags) for part in value[1]))
        if kind == _kind.SUBPATTERN:
            _, added, removed, body = value
            kept = flags & ~_CHARACTER_SETS if added & _CHARACTER_SETS else flags
            return self.sequence(body, starts, (kept | added) & ~removed)
        if kind in _REPEATS:
            least, most, body = value
            return self._repeat(least, most, body, starts, flags)
        direction, body = value
        self._spend(starts.bit_length())
        positions = [p for p in range(starts.bit_length()) if starts >> p & 1]
        return sum(
            1 << p for p in positions if self._looks(direction, body, p, flags) == (kind == _kind.ASSERT)
        )

    def _repeat(self, least: int, most: int, body: Any, starts: int, flags: int) -> int:
        if least == 0 and most == _kind.MAXREPEAT and len(body) == 1 and body[0][0] in _LEAVES:
            places, width = self._places_of(body[0], flags)
            # The carry of the sum moves a start to the end of adjacent positions, as `.*` and `\w*` do.
            return starts | ((((starts & places) + places) ^ places) if width else 0)
        # The sets converge after at most as many repetitions as the text has characters.
        for _ in range(least):
            after = self.sequence(body, starts, flags)
            if after == starts:
                break
            starts = after
        reached = new = starts
        for _ in range(most - least):
            new = self.sequence(body, new, flags) & ~reached
            if not new:
                break
            reached |= new
        return reached

    def _looks(self, direction: int, body: Any, position: int, flags: int) -> bool:
        if direction > 0:
            return self.sequence(body, 1 << position, flags) != 0
        # `re` only allows a fixed width here.
        start = position - body.getwidth()[0]
        return start >= 0 and bool(self.sequence(body, 1 << start, flags) >> position & 1)

    def _places_of(self, leaf: Any, flags: int) -> tuple[int, int]:
        """Returns the positions at which a leaf matches, as a bit mask, and how many characters it consumes."""
        kind, value = leaf
        if kind == _kind.LITERAL and not flags & re.IGNORECASE:
            return self._letters.get(chr(value), 0), 1
        key = (id(leaf), flags)
        if key not in self._places:
            self._places[key] = self._find(leaf, flags)
        return self._places[key], 0 if kind == _kind.AT else 1

    def _find(self, leaf: Any, flags: int) -> int:
        # `re` enumerates the characters of a range for case-insensitive matches.
        items = leaf[1] if leaf[0] == _kind.IN else ()
        widths = [item[1][1] - item[1][0] for item in items if item[0] == _kind.RANGE]
        self._spend((len(self._text) + sum(widths)) // 8)
        compiled = self._expression.leaves.get((id(leaf), flags))
        if compiled is None:
            state = _parser.State()
            state.flags = flags
            compiled = _compiler.compile(_parser.SubPattern(state, [leaf]), flags)
            self._expression.leaves[id(leaf), flags] = compiled
        found = "".join("1" if compiled.match(self._text, p) else "0" for p in range(len(self._text), -1, -1))
        return int(found, 2)
