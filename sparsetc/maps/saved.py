"""Bodies and pairs as text, by which a program of `torch.export` computes a map in any process.

In: a body, its pairs and the options of a call. Out: JSON without names, which are made again from positions, and the
coordinates of a pattern. A function is saved as the operations that kernels have, a mask as what it was made with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sparsetc import masks
from sparsetc.contraction.kernel import SAVED
from sparsetc.contraction.request import placed
from sparsetc.errors import FormatError
from sparsetc.maps.body import SIDES, Body
from sparsetc.maps.elementwise import INPUT, TEXT, Elementwise, Ref
from sparsetc.maps.pairs import Pairs
from sparsetc.maps.task import Task
from sparsetc.maps.trace import Untraced, trace
from sparsetc.options import of_call
from sparsetc.support.checks import LONGEST
from sparsetc.support.entry import traced_by_modes
from sparsetc.tensor.blocks import Blocks
from sparsetc.tensor.pattern import Pattern

Text = list[Any]
"""Operations of a function, then the place of its result."""
INNER = ("own", "other", "shared")
"""Arguments of an inner function of a product."""


def described(task: Task) -> str:
    """Return a task as JSON; empty if kernels lack an operation, a mask is a table, or the plan is an object."""
    body, pairs, options, name = task
    tables = [*body.tables]
    names = [*body.products, *body.vectors]
    given = pairs.given
    if body.untraced or body.places:
        return ""
    try:
        inner = {of: [_text(function, INNER), body.shared.index(row)] for of, (function, row) in body.inner.items()}
        about = {
            "products": [[tables.index(table) for table in pair] for pair in body.products.values()],
            "vectors": [*body.vectors.values()],
            "map": _text(lambda *inputs: body.mapped(dict(zip(names, inputs, strict=True))), names),
            "inner": [inner.get(name) for name in body.products],
            "softmax": body.softmax,
            "table": None if body.table is None else tables.index(body.table),
            "stored": body.stored,
            "dropout": body.dropout,
            "pairs": _sizes(given) if isinstance(given, Pattern) else given,
            "fastest": pairs.fastest,
            "settings": {name: value for name in SAVED if (value := getattr(options, name)) is not None},
            "name": name,
        }
        return json.dumps(about, default=_mask_text)
    except (TypeError, Untraced):
        return ""


def _sizes(pattern: Pattern) -> dict[str, Any]:
    blocks = pattern.blocks
    return {"shape": pattern.shape} if blocks is None else {"shape": blocks.shape, "sides": blocks.sides}


def _mask_text(mask: Any) -> dict[str, Any]:
    """Return a mask as what it was made with, where it can be made again."""
    if not isinstance(mask, masks.Mask):
        raise TypeError
    return {"mask": mask.made}


def _text(function: Callable[..., Tensor], inputs: Sequence[str]) -> Text:
    traced = trace(lambda **named: {"z": function(*named.values())}, inputs)

    def argument(one: Any) -> Any:
        return [int(one)] if isinstance(one, Ref) else one

    operations = [
        [name, inputs.index(arguments[0])] if name == INPUT else [name, *map(argument, arguments)]
        for name, arguments in traced.operations
    ]
    return [*operations, argument(traced.outputs["z"])]


# -- read -------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _read(text: str) -> tuple[Body, Mapping[str, Any]]:
    """Return the body of a saved map, and all that was saved. Raise `FormatError` if it is damaged."""
    try:
        about: Mapping[str, Any] = json.loads(text, object_hook=_mask_or_mapping)
        products = {f"s{n}": (f"l{int(own)}", f"l{int(other)}") for n, (own, other) in enumerate(about["products"])}
        vectors = {f"v{n}": side for n, side in enumerate(about["vectors"])}
        body = Body(
            products=products,
            vectors=vectors,
            map=_function(about["map"], [*products, *vectors]),
            softmax=about["softmax"],
            table=None if about["table"] is None else f"l{int(about['table'])}",
            stored=about["stored"],
            dropout=float(about["dropout"]),
            inner={
                f"s{n}": (_positional(_function(inner[0], INNER)), f"r{int(inner[1])}")
                for n, inner in enumerate(about["inner"])
                if inner is not None
            },
        )
        given = about["pairs"]
        if isinstance(given, dict):
            placed_soundly = all(type(n) is int for n in [*given["shape"], *given.get("sides", [])])
        else:
            drawn = given if isinstance(given, list) else [given]
            placed_soundly = all(mask.dense(1).shape == (1, 1) for mask in drawn)
        one = torch.ones(1)
        sound = (
            placed_soundly
            and all(side in (*SIDES, "entries") for side in vectors.values())
            and 0 <= body.dropout <= 1
            and all(type(flag) is bool for flag in (body.softmax, body.stored, about["fastest"]))
            and set(about["settings"]) <= {*SAVED}
            and about["name"].isidentifier()
            and [*body.tables] == [f"l{n}" for n in range(len(body.tables))]
            and body.mapped(dict.fromkeys((*products, *vectors), one)).shape in ((1,), ())
            and all(function(*[one] * len(INNER)).shape == (1,) for function, _ in body.inner.values())
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError, FormatError):
        sound = False  # the trial calls raise what torch does of wrong arguments
    if not sound:
        raise FormatError(f"a program's node {text[:LONGEST]!r} is no map; the program is damaged")
    return body, about


def _mask_or_mapping(one: dict[str, Any]) -> Any:
    return masks._again(*one["mask"]) if "mask" in one else one


def _function(text: Text, inputs: Sequence[str]) -> Callable[..., Tensor]:
    """Return a function of named tensors from its operations."""

    def argument(one: Any) -> Any:
        return Ref(one[0]) if isinstance(one, list) else float(one)

    operations: list[Any] = []
    for name, *arguments in text[:-1]:
        if name == INPUT:
            operations.append((INPUT, (inputs[arguments[0]],)))
        elif name in TEXT:
            operations.append((name, tuple(map(argument, arguments))))
        else:
            raise ValueError
    function = Elementwise(tuple(operations), {"z": argument(text[-1])})
    return lambda **tensors: function.of(tensors)


def _positional(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *tensors: function(**dict(zip(INNER, tensors, strict=True)))


def read(text: str, tensors: Sequence[Tensor]) -> tuple[Task, list[Tensor]]:
    """Return a saved task, and its tensors without coordinates. Coordinates come last.

    A pattern is found again by them.

    Raises:
        FormatError: a text that is no map, or tensors of other sizes.
    """
    body, about = _read(text)
    given, device = about["pairs"], tensors[0].device
    of_entries = isinstance(given, dict)
    inputs = list(tensors[:-1] if of_entries else tensors)
    if len(inputs) != len(body.inputs):
        raise FormatError(f"a program's node {text[:LONGEST]!r} has {len(tensors)} tensors; the program is damaged")
    sides = {**body.tables, **{name: SIDES.index(side) for name, side in body.vectors.items() if side in SIDES}}
    sizes = {sides[name]: tensor.shape[1] for name, tensor in zip(body.inputs, inputs, strict=True) if name in sides}
    if of_entries:
        pattern = _pattern(given, tensors[-1])
        *stack, rows, columns = given["shape"]
        pairs = Pairs(pattern, (rows, columns), device, *([stack[0], about["fastest"]] if stack else []))
    elif isinstance(given, list):
        pairs = Pairs(tuple(given), (sizes[0], sizes[1]), device, len(given), about["fastest"])
    else:
        pairs = Pairs(given, (sizes[0], sizes[1]), device)
    for name, tensor in zip(body.inputs, inputs, strict=True):
        if name in sides and tensor.shape[1] != pairs.shape[sides[name]]:
            raise FormatError(f"a program's node {text[:LONGEST]!r} takes {pairs.shape}, found {tuple(tensor.shape)}")
        if body.vectors.get(name) == "entries" and not (of_entries and tensor.shape[1] == pattern.nnz):
            raise FormatError(f"a program's node {text[:LONGEST]!r} has another number of entries")
    return Task(body, pairs, of_call(about["settings"]), about["name"]), inputs


def _pattern(about: Mapping[str, Any], coords: Tensor) -> Pattern:
    shape, sides = tuple(about["shape"]), tuple(about.get("sides", ()))
    blocks = Blocks(sides, shape) if sides else None
    if traced_by_modes():  # coordinates hold no numbers
        return Pattern(coords, shape if blocks is None else blocks.grid, True, blocks)
    zeros = torch.zeros((), device=coords.device).expand(coords.shape[1], *sides)
    return placed(zeros, coords, shape, blocks is not None, True).pattern
