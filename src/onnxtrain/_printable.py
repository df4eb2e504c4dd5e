"""Makes external text, such as names in a received model, safe to print on a terminal, in a log or on a page."""

from __future__ import annotations

import logging


def printable(text: object) -> str:
    r"""Returns a text on a single line; escapes all characters for which `str.isprintable` is False.

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


def get_logger(name: str = "onnxtrain") -> logging.Logger:
    """Returns the logger with this name, with a filter that makes its messages printable for all handlers.

    Log messages quote names from external files. The package calls this function instead of `logging.getLogger`,
    because a filter of the logger `onnxtrain` would not see the messages of its children, such as `onnxtrain.flower`.
    """
    logger = logging.getLogger(name)
    # Adding the same filter again has no effect.
    logger.addFilter(escape_record)
    return logger


def escape_record(record: logging.LogRecord) -> bool:
    """Makes the message of a log record printable. A logging filter that accepts all records."""
    record.msg, record.args = printable(record.getMessage()), None
    return True
