"""Texts of others, made fit for journals, spans and terminals.

What users raise and name comes from anywhere: a file name that is no UTF-8 becomes a
text with lone surrogates, which no encoder takes, and an exception's `__str__` is code
that may raise. Whoever reports an end must not fail over how it is to be worded.
"""

from __future__ import annotations

import re
import traceback

__all__ = ["clean_text", "error_text", "error_trace", "one_line"]

# Controls (a terminal obeys them), line ends, marks that turn the direction of what follows, lone surrogates.
_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def clean_text(text: str) -> str:
    r"""Return a text that UTF-8 can hold: half of a surrogate pair is written as `\udcff`."""
    if text.isascii():
        return text
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def one_line(text: str) -> str:
    r"""Return a text as one line that does nothing to a terminal: what is not fit to be shown is written as `\x1b`."""
    return text if text.isprintable() else _UNFIT.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("ascii", "backslashreplace").decode() if ord(found[0]) > 0x7F else repr(found[0])[1:-1]


def error_text(error: BaseException, most: int = 4096) -> str:
    """Return what an exception says, at most so many characters; never raises.

    Args:
        error: anybody's exception.
        most: characters.
    """
    try:
        text = clean_text(str(error)[:most])
    except BaseException as broken:  # a user's `__str__` may raise anything, and the end must still be told
        return f"<{type(error).__name__}, whose text raised {type(broken).__name__}>"
    return text[:most]


def error_trace(error: BaseException, most: int) -> str:
    """Return the last characters of an exception's traceback; never raises."""
    try:
        return clean_text("".join(traceback.format_exception(error)))[-most:]
    except BaseException as broken:  # as above: notes, causes and groups are user objects too
        return f"<the traceback of a {type(error).__name__} cannot be written: {type(broken).__name__}>"
