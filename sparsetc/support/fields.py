"""Whether the fields of a dataclass hold what their annotations say: for records that users write by hand.

In: an instance. Out: the first field that holds something else, in words; nothing is converted.
"""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

LONGEST = 60
"""Characters of a value that a message quotes."""


def misfit(record: Any, sequences: tuple[type, ...] = (tuple,)) -> str:
    """What is wrong with the first field that is not as annotated; empty where there is none.

    Args:
        record: an instance of a dataclass whose fields are annotated with classes, tuples, unions and `Any`.
        sequences: the classes that may stand for a tuple.
    """
    own: Any = type(record)
    for name, (written, kind) in _kinds(own).items():
        value = getattr(record, name)
        if not _fits(value, kind, sequences):
            return f"{own.__name__}.{name} must be {written}, found {repr(value)[:LONGEST]}"
    return ""


@lru_cache(maxsize=16)
def _kinds(record: Any) -> dict[str, tuple[Any, Any]]:
    """The annotation of each field, as it is written and as it is meant."""
    meant = get_type_hints(record)
    return {field.name: (field.type, meant[field.name]) for field in fields(record)}


def _fits(value: object, kind: Any, sequences: tuple[type, ...]) -> bool:
    if kind is Any:
        return True
    own = get_args(kind)
    if get_origin(kind) is tuple:
        if not isinstance(value, sequences):
            return False
        items: tuple[object, ...] = tuple(value)  # type: ignore[arg-type]
        kinds = own[:1] * len(items) if own[-1] is Ellipsis else own
        return len(items) == len(kinds) and all(_fits(v, k, sequences) for v, k in zip(items, kinds, strict=True))
    if get_origin(kind) is UnionType:
        return any(_fits(value, k, sequences) for k in own)
    return isinstance(value, kind)
