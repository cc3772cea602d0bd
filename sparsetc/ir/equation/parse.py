"""Parsing of equations: user's text -> `Bound`, level 1.

In: an equation in the grammar of `torch.einsum`, with the shapes of its operands and which of them are sparse. Out: a
`Bound`, where the output is explicit, every dimension of an ellipsis has a letter of its own, and every index has its
full size. :meth:`Bound.shape` is then the shape to expand a dense operand to.

What can be written::

    equation  ::=  term ("," term)* ["->" term]      # spaces anywhere, but not inside "->" and "..."
    term      ::=  (letter | "...")*                 # at most one "...": the dimensions that have no letter
    letter    ::=  "a" | ... | "z" | "A" | ... | "Z"

Without "->" the output is the ellipsis, then the letters that appear once, "A" before "Z" before "a" before "z".
Sizes of 1 broadcast, by letter and in an ellipsis, in dense operands only: a broadcast sparse operand would be n
copies of it, which nobody asked to be stored. An ellipsis that the output leaves out is summed.

A parse is cached by text, shapes and which operands are sparse.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from string import ascii_letters, ascii_uppercase
from typing import Any

from sparsetc.errors import EquationError, ShapeError, point_at
from sparsetc.ir.equation.einsum import Bound, Einsum
from sparsetc.support import Ints, Names, outside

ELLIPSIS = "..."
LABEL = re.compile(r"\.\.\.|[^ ]")
_SUBLIST_LETTERS = ascii_uppercase + ascii_uppercase.lower()  # torch: 0 is A, 26 is a


def parse(text: str, shapes: Sequence[Sequence[int]], sparse: Sequence[bool]) -> Bound:
    """Parse ``text`` for operands of these shapes.

    Args:
        text: an equation; see the grammar above.
        shapes: the shape of each operand.
        sparse: for each operand, whether it is sparse; at least one is.

    Raises:
        EquationError: the text cannot be read, or does not fit the number or the dimensions of the operands.
        ShapeError: two operands disagree on the size of an index.
    """
    if not isinstance(text, str):
        raise EquationError(f"the equation is a {type(text).__name__}; expected a string such as 'ijk,jr,kr->ir'")
    if len(shapes) != len(sparse):
        raise ValueError(f"found {len(shapes)} shapes and {len(sparse)} sparse flags; expected one each an operand")
    return _parse(text, tuple(tuple(map(int, shape)) for shape in shapes), tuple(map(bool, sparse)))


def parse_arguments(args: Sequence[Any]) -> tuple[str, tuple[Any, ...]]:
    """The equation and the operands, from any of the three ways in which `torch.einsum` takes them.

    ``(equation, x, b)``, ``(equation, [x, b])`` or the sublist form ``(x, [0, 1], b, [1, 2], [0, 2])``.
    """
    if not args:
        raise EquationError("einsum was given nothing; expected an equation, then its operands")
    if not isinstance(args[0], str):
        return parse_sublist(args)
    operands = tuple(args[1:])
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    return args[0], operands


def parse_sublist(args: Sequence[Any]) -> tuple[str, tuple[Any, ...]]:
    """The equation and the operands of the sublist form ``(x, [0, 1, 2], b, [1, 3], ..., [0, 3])``.

    Integers 0..25 are written as A..Z and 26..51 as a..z, as torch does; a list may hold one Ellipsis. A list left over
    at the end is the output.
    """
    operands, sublists = tuple(args[: len(args) // 2 * 2 : 2]), list(args[1::2])
    terms = [_sublist_term(sub, f"the list after operand {p + 1}") for p, sub in enumerate(sublists)]
    text = ",".join(terms)
    if len(args) % 2:
        text += "->" + _sublist_term(args[-1], "the output's list")
    return text, operands


def _sublist_term(sublist: Any, where: str) -> str:
    if not isinstance(sublist, list | tuple):
        raise EquationError(
            f"{where} is a {type(sublist).__name__}; expected an equation first, or operands that alternate with lists "
            "of integers, as in einsum(x, [0, 1], b, [1, 2], [0, 2])"
        )
    for item in sublist:
        if item is not Ellipsis and (
            isinstance(item, bool) or not isinstance(item, Integral) or int(item) not in range(52)
        ):
            raise EquationError(f"{where}, {list(sublist)}, holds {item!r}; expected integers in 0..51 or Ellipsis")
    return "".join(ELLIPSIS if item is Ellipsis else _SUBLIST_LETTERS[int(item)] for item in sublist)


@dataclass(frozen=True)
class _ParsedTerm:
    """One term as it stands in the text: its labels, letters or one "...", and where each of them starts."""

    labels: Names
    at: Ints
    start: int
    end: int

    @property
    def letters(self) -> Names:
        return tuple([x for x in self.labels if x != ELLIPSIS])

    def covered(self, ndim: int) -> int:
        """Return the number of dimensions that the ellipsis of this term stands for."""
        return ndim - len(self.letters) if ELLIPSIS in self.labels else 0

    def spelled(self, ellipsis: Names, count: int) -> Names:
        """The labels, with the last ``count`` letters of ``ellipsis`` in place of "..."."""
        names = tuple(ellipsis[len(ellipsis) - count :])
        return tuple([i for x in self.labels for i in (names if x == ELLIPSIS else (x,))])


@lru_cache(maxsize=4096)
def _parse(text: str, shapes: tuple[Ints, ...], sparse: tuple[bool, ...]) -> Bound:
    terms, output = _read(text)
    _check_operands(text, terms, shapes)
    if not any(sparse):
        message = "no operand is sparse; expected at least one. Use torch.einsum for dense operands"
        raise EquationError(point_at(text, 0, message, terms[-1].end))
    counts = [term.covered(len(shape)) for term, shape in zip(terms, shapes, strict=True)]
    ellipsis = _ellipsis_letters(text, terms, max(counts))
    inputs = tuple(term.spelled(ellipsis, count) for term, count in zip(terms, counts, strict=True))
    if output is None:
        letters = [i for t in terms for i in t.letters]
        result = ellipsis + tuple(i for i in sorted(set(letters)) if letters.count(i) == 1)
    else:
        result = output.spelled(ellipsis, len(ellipsis))
    e = Einsum(inputs, result, tuple(p for p, is_sparse in enumerate(sparse) if is_sparse), text)
    return Bound.of(e, _sizes(e, terms, shapes))


def _read(text: str) -> tuple[list[_ParsedTerm], _ParsedTerm | None]:
    """The terms of the inputs, and of the output if it is written."""
    arrow = text.find("->")
    if arrow >= 0 and (second := text.find("->", arrow + 2)) >= 0:
        raise EquationError(point_at(text, second, "found a second '->'; expected one output", 2))
    stop = len(text) if arrow < 0 else arrow
    terms, start = [], 0
    for piece in text[:stop].split(","):
        terms.append(_read_term(text, start, start + len(piece)))
        start += len(piece) + 1
    if arrow < 0:
        return terms, None
    if (comma := text.find(",", arrow)) >= 0:
        raise EquationError(point_at(text, comma, "found ',' after '->'; expected one output"))
    output = _read_term(text, arrow + 2, len(text))
    _check_output(text, terms, output)
    return terms, output


def _read_term(text: str, start: int, end: int) -> _ParsedTerm:
    labels: list[str] = []
    at: list[int] = []
    for label in LABEL.finditer(text, start, end):
        _check_label(text, label.start(), label[0], labels)
        labels.append(label[0])
        at.append(label.start())
    return _ParsedTerm(tuple(labels), tuple(at), start, end)


def _check_label(text: str, position: int, label: str, before: Sequence[str]) -> None:
    if label == ELLIPSIS:
        if ELLIPSIS in before:
            raise EquationError(point_at(text, position, "found a second '...' in a term; expected at most one", 3))
    elif label == ".":
        raise EquationError(point_at(text, position, "found '.' outside an ellipsis; an ellipsis is written '...'"))
    elif label in "->":
        raise EquationError(point_at(text, position, f"found {label!r} alone; the arrow is written '->'"))
    elif label not in ascii_letters:
        message = f"found {label!r}; expected indices a-z or A-Z, ',', '...', '->' and spaces"
        raise EquationError(point_at(text, position, message))


def _check_output(text: str, terms: Sequence[_ParsedTerm], output: _ParsedTerm) -> None:
    letters = {i for term in terms for i in term.letters}
    for q, (i, at) in enumerate(zip(output.labels, output.at, strict=True)):
        if i not in letters and i != ELLIPSIS:  # which without one in the inputs stands for no dimension, as in torch
            message = f"the output has index {i!r}, which no operand has; expected one of {''.join(sorted(letters))!r}"
            raise EquationError(point_at(text, at, message))
        if i in output.labels[:q]:
            raise EquationError(point_at(text, at, f"the output has index {i!r} more than once; remove one"))


def _check_operands(text: str, terms: Sequence[_ParsedTerm], shapes: Sequence[Ints]) -> None:
    if len(terms) != len(shapes):
        message = f"found {len(shapes)} operands for {len(terms)} terms; expected one operand a term"
        raise EquationError(point_at(text, 0, message, terms[-1].end))
    for p, (term, shape) in enumerate(zip(terms, shapes, strict=True)):
        letters = len(term.letters)
        ndim = len(shape)
        at_least = ELLIPSIS in term.labels
        if ndim < letters or (ndim > letters and not at_least):
            advice = "give each dimension an index" + ("" if at_least or ndim < letters else ", or write '...'")
            message = (
                f"operand {p + 1} has {ndim} dimensions, shape {shape}; expected {'at least ' if at_least else ''}"
                f"{letters}, one for each index of its term: {advice}"
            )
            start, length = min(term.at, default=term.start), len(text[term.start : term.end].strip())
            raise EquationError(point_at(text, start, message, length))


def _ellipsis_letters(text: str, terms: Sequence[_ParsedTerm], count: int) -> Names:
    used = {i for term in terms for i in term.letters}
    if len(used) + count > len(ascii_letters):
        message = f"found {len(used)} indices and an ellipsis of {count} dimensions; expected at most 52 together"
        raise EquationError(point_at(text, text.index(ELLIPSIS), message, 3))
    return outside(ascii_letters, used)[:count]


_Place = tuple[int, int, str, int]
"""A dimension: the operand, the size, the label in the text, and where that starts."""


def _sizes(e: Einsum, terms: Sequence[_ParsedTerm], shapes: Sequence[Ints]) -> dict[str, int]:
    """Return the full size of each index. Every place of an index has this size, or is a dense dimension of size 1."""
    places: dict[str, list[_Place]] = {}
    for p, (term, names, shape) in enumerate(zip(terms, e.inputs, shapes, strict=True)):
        count = term.covered(len(shape))
        spots = [s for s in zip(term.labels, term.at, strict=True) for _ in range(count if s[0] == ELLIPSIS else 1)]
        for i, n, (label, at) in zip(names, shape, spots, strict=True):
            places.setdefault(i, []).append((p, n, label, at))
    return {i: _agreed_size(e, where) for i, where in places.items()}


def _agreed_size(e: Einsum, places: Sequence[_Place]) -> int:
    def said(place: _Place) -> str:
        return f"{'the ellipsis of ' if place[2] == ELLIPSIS else ''}operand {place[0] + 1}"

    full = next((place for place in places if place[1] != 1), places[0])
    for place, before in zip(places, (places[0], *places), strict=False):
        operand, size, label, at = place
        within = before[0] == operand and before[1] != size
        if size not in (1, full[1]) or within:
            other = before if within else full
            message = f"{said(place)} has size {size} at index {label!r}; expected {other[1]}, as {said(other)} has: "
            raise ShapeError(point_at(e.text, at, f"{message}an index has one size", len(label)))
        if size != full[1] and operand in e.sparse:
            message = (
                f"{said(place)}, which is sparse, has size 1 at {label!r}; expected {full[1]}, as {said(full)} has: "
                "only dense operands broadcast. Take that slice of it instead"
            )
            raise (EquationError if label == ELLIPSIS else ShapeError)(point_at(e.text, at, message, len(label)))
    return full[1]
