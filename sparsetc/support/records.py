"""Records of plain data, and checks of fields and arguments against annotations.

In: records, states of them as files hold them. Out: records; of a field or an argument that is not as annotated, which
it is, in words. Nothing is converted. Of containers only a tuple's contents are looked at: a ``dict[str, Any]`` need
only be a dict. Users' plans, and streams' descriptions, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from functools import lru_cache
from inspect import signature
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from sparsetc.errors import FormatError

LONGEST = 60
"""Characters of a value that a message quotes."""

Made = TypeVar("Made")


class Record:
    """A dataclass of numbers, texts, other records and tuples of them, which is pickled as its fields."""

    @property
    def state(self) -> dict[str, Any]:
        """The fields by name; not ``__dict__``, to which another thread may be adding a cached property."""
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]


def from_state(record: type[Made], state: dict[str, Any]) -> Made:
    """Return a `Record` with the fields of a file. Raise `FormatError` unless all are known and of their types."""
    try:
        signature(record).bind(**state)
        fault = "" if plain(state.values()) else "it holds more than numbers and texts"
    except TypeError:
        fault = f"it has fields {', '.join(signature(record).parameters)}, found {quoted(state)}"
    except RecursionError:
        fault = "it is nested too deep"
    if not fault:
        restored = record(**state)
        fault = misfit(restored, (tuple, list))
        if not fault:
            return restored
    raise FormatError(f"a saved {record.__name__}: {fault}; it is damaged")


def plain(values: Iterable[object]) -> bool:
    """True if all values are numbers, texts, None, records, or tuples or lists of such."""
    for value in values:
        if isinstance(value, Record):
            value = tuple(value.state.values())
        if not (plain(value) if isinstance(value, tuple | list) else isinstance(value, int | float | str | None)):
            return False
    return True


def quoted(value: object) -> str:
    """The beginning of a value as a message quotes it; its type where it has no text, as numbers of 5,000 digits."""
    try:
        return repr(value)[:LONGEST]
    except (ValueError, RecursionError):
        return type(value).__name__


def misfit(record: Any, sequences: tuple[type, ...] = (tuple,)) -> str:
    """Return an error text about the first field with a value of the wrong type; empty if there is none.

    Args:
        record: an instance of a dataclass whose fields are annotated with classes, tuples, unions and `Any`.
        sequences: the classes that may stand for a tuple.
    """
    kind: Any = type(record)
    for field in fields(record):
        value = getattr(record, field.name)
        if not fits(value, _hints(kind)[field.name], sequences):
            return f"{kind.__name__}.{field.name} must be {field.type}, found {quoted(value)}"
    return ""


@lru_cache
def _hints(record: Any) -> dict[str, Any]:
    return get_type_hints(record)


def fits(value: object, kind: Any, sequences: tuple[type, ...] = (tuple,)) -> bool:
    """True if a value is an instance of its annotation."""
    if kind is Any:
        return True
    arguments = get_args(kind)
    if get_origin(kind) is tuple:
        if not isinstance(value, sequences):
            return False
        items: tuple[object, ...] = tuple(value)  # type: ignore[arg-type]
        kinds = arguments[:1] * len(items) if arguments[-1] is Ellipsis else arguments
        return len(items) == len(kinds) and all(fits(v, k, sequences) for v, k in zip(items, kinds, strict=True))
    if get_origin(kind) is UnionType:
        return any(fits(value, k, sequences) for k in arguments)
    return isinstance(value, get_origin(kind) or kind)
