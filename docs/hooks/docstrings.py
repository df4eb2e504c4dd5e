"""Makes Markdown of docstrings before griffe parses them, for the reference of the site.

Docstrings are written for readers of the code: they hold doctests without a fence, and roles of Sphinx. Markdown would
show a doctest as a quotation, and `[...]` in its output as a link.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

DOCTEST = re.compile(r"^( *)>>> .*(?:\n\1 *\S.*)*", re.MULTILINE)
ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc):`~?([^`]+)`")
LITERAL_MARK = re.compile(r"^( *)::\n|(?<=\w)::$", re.MULTILINE)


def to_markdown(text: str) -> str:
    """Fences the doctests of a docstring and replaces Sphinx's roles and marks of literal blocks."""
    text = LITERAL_MARK.sub(lambda mark: "" if mark[0].endswith("\n") else ":", text)
    text = ROLE.sub(r"`\1`", text)

    def fence(doctest: re.Match[str]) -> str:
        # The last line without indentation says where an indented doctest stands.
        heading = re.findall(r"^\S.*", text[: doctest.start()], re.MULTILINE)[-1:]
        if doctest[1] and heading == ["Examples:"]:
            return doctest[0]  # griffe fences the doctests of this section
        indent = doctest[1] if heading == ["Example:"] else ""
        lines = ["```pycon", *textwrap.dedent(doctest[0]).splitlines(), "```"]
        return "\n".join(indent + line for line in lines)

    return DOCTEST.sub(fence, text)


class MarkdownDocstrings(griffe.Extension):
    """Rewrites the docstring of every object that griffe loads."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrites one docstring in place."""
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)
