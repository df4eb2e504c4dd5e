"""Makes external text, such as names in a received model, safe to show on a terminal, in a log or on a web page."""

from __future__ import annotations

import logging


def printable(text: object) -> str:
    r"""Returns a text on a single line, with all non-printable characters (`str.isprintable`) escaped as in `repr`.

    Such characters can clear the screen, set the terminal's title or write to the clipboard (ESC, C1), reverse the text
    that follows (bidirectional marks), fake a line of this program's output (line breaks), or be impossible to encode
    (surrogates). The function is idempotent.

    >>> print(printable("fc\x1b[2J\u202e.weight"))
    fc\x1b[2J\u202e.weight
    """
    text = str(text)
    # Fast path: nearly all texts are printable.
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def get_logger(name: str = "onnxtrain") -> logging.Logger:
    """Returns the logger called `name`, with a filter that makes its messages printable before any handler sees them.

    Log messages quote names from external files. The package calls this function instead of `logging.getLogger`,
    because a filter on the logger `onnxtrain` would not see the messages of its children, such as `onnxtrain.flower`.
    """
    logger = logging.getLogger(name)
    # Adding the same filter again has no effect.
    logger.addFilter(escape_record)
    return logger


def escape_record(record: logging.LogRecord) -> bool:
    """Logging filter that makes a record's message printable, and lets all records pass."""
    record.msg, record.args = printable(record.getMessage()), None
    return True
