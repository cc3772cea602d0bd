"""What names may be: of formats, partitions, plans and operations, and of what a view promises.

In: names as an extension gives them. Out: nothing, or an error that says what is wrong. Formats and arrays are printed
into generated programs, so they are words that can be nothing but a name there; what is only shown to people is one
line of plain text.
"""

from __future__ import annotations

import keyword
from collections.abc import Container

from sparsetc.errors import SparsetcError
from sparsetc.ir.program.names import is_free

LONGEST = 80
"""Characters of a name."""


def check_identifier(name: object, kind: str, error: type[SparsetcError]) -> str:
    """The name; `error` unless it is an ASCII identifier, no keyword of Python and not longer than `LONGEST`."""
    if (
        not isinstance(name, str)
        or not (name.isascii() and name.isidentifier())
        or keyword.iskeyword(name)
        or len(name) > LONGEST
    ):
        raise error(
            f"the name of {kind} is printed into generated programs, so it must be letters, digits and underscores, no "
            f"word of Python's own and at most {LONGEST} characters; found {shown(name)}"
        )
    return name


def check_label(name: object, kind: str, error: type[SparsetcError]) -> str:
    """The name; `error` unless it is one line of printable characters without quotes, backslashes or outer spaces."""
    if (
        not isinstance(name, str)
        or not name.isprintable()
        or name != name.strip()
        or not 0 < len(name) <= LONGEST
        or set(name) & set("\"'\\")
    ):
        raise error(
            f"the name of {kind} must be one line of 1 to {LONGEST} printable characters without quotes and "
            f"backslashes; found {shown(name)}"
        )
    return name


def check_array(name: object, error: type[SparsetcError]) -> None:
    """Raise `error` unless an array of a view has a name that hides nothing else of a generated program."""
    word = check_identifier(name, "an array of a view", error)
    if not is_free(word):
        raise error(
            f"a view calls an array {word!r}, which means something else in generated programs; name it by two letters "
            'or more that say what it holds, as in "item_word"'
        )


def check_free(
    name: str, kind: str, own: Container[str], replace: bool, error: type[SparsetcError], by: object = None
) -> None:
    """Raise `error` where a name of the package's `own` would be taken unnoticed.

    Args:
        name: what is registered.
        kind: of thing, as the message calls it.
        own: names that the package itself gives meaning to.
        replace: whether the caller means to put something else in their place.
        error: class of the error.
        by: what is registered; the package's own things take their names freely.
    """
    module = getattr(by, "__module__", None) or ""
    if name in own and not replace and not f"{module}.".startswith("sparsetc."):
        raise error(
            f"{kind} {name!r} comes with sparsetc, and another of that name would take its place everywhere; choose "
            "another name, or register it with replace=True"
        )


def shown(name: object) -> str:
    return repr(name)[:LONGEST] if isinstance(name, str) else type(name).__name__
