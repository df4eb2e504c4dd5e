"""Makes external text, such as names in a received model, safe to print on a terminal, in a log or on a page."""

from __future__ import annotations

import logging


def printable(text: object) -> str:
    r"""Returns a text on a single line, with all characters escaped for which `str.isprintable` is False.

    Such characters clear screens, set titles and fill clipboards (ESC, C1), reverse the text that follows
    (bidirectional marks), begin a line that seems to come from this program (line breaks), or cannot be encoded
    (surrogates). They are escaped as in `repr`. Escaping twice is the same as escaping once.

    >>> print(printable("fc\x1b[2J\u202e.weight"))
    fc\x1b[2J\u202e.weight
    """
    text = str(text)
    # Fast path: nearly all texts are printable.
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def escape_record(record: logging.LogRecord) -> bool:
    """Makes the message of a log record printable. A logging filter that accepts all records."""
    record.msg, record.args = printable(record.getMessage()), None
    return True
