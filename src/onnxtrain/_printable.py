"""Makes texts of others, such as names in a received model, safe to print: on a terminal, in a log, on a page."""

from __future__ import annotations

import logging


def printable(text: object) -> str:
    r"""Returns a text on one line, with all characters escaped that `str.isprintable` is False for.

    Such characters clear screens, set titles and fill clipboards (ESC, C1), reverse what follows (bidirectional marks),
    begin a line that seems to come from this program (line breaks), or cannot be encoded (surrogates). The escapes are
    those of `repr`. Escaping twice changes nothing.

    >>> print(printable("fc\x1b[2J\u202e.weight"))
    fc\x1b[2J\u202e.weight
    """
    text = str(text)
    # Nearly all texts are printable, and this question is answered at the speed of C.
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def escape_record(record: logging.LogRecord) -> bool:
    """Makes the message of a log record printable. A filter for loggers and handlers that lets all records pass."""
    record.msg, record.args = printable(record.getMessage()), None
    return True
