"""A case that fails -> a smaller one that fails alike.

In: a case and a function that says how a case fails. Out: a case from which nothing more can be taken away, or the
smallest that was found in the time given. Greedy: of the simpler cases of one kind the first that fails alike is
taken, until none does, then those of the next kind; and all kinds again until none helps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Any, TypeVar

from sparsetc.testing.build import implicit
from sparsetc.testing.case import Case, DrawnOperand, DrawnValues, PlanCall
from sparsetc.testing.draw import circumstance_fits, notation_fits
from sparsetc.testing.equations import HUGE
from sparsetc.testing.forms import ARRAYS, MEMORY, SPARSE

Failure = str
Part = TypeVar("Part", Case, DrawnOperand)
Simplify = Callable[[Case], Iterator[Case]]


def shrunk(case: Case, wanted: Failure, failure: Callable[[Case], Failure | None], seconds: float = 20.0) -> Case:
    """The smallest case found that fails as this one does.

    Args:
        case: one that fails.
        wanted: the kind of its failure.
        failure: the kind of failure of a case; None where it does not fail.
        seconds: after which no more is tried.
    """
    deadline = time.monotonic() + seconds
    tried = {case}
    before = None
    while before != case and time.monotonic() < deadline:
        before = case
        for simplify in SIMPLIFICATIONS:
            case = _simplified(case, simplify, lambda c: failure(c) == wanted, tried, deadline)
    return case


def _simplified(
    case: Case, simplify: Simplify, fails: Callable[[Case], bool], tried: set[Case], deadline: float
) -> Case:
    """The case after all simplifications of one kind that leave it failing."""
    progress = True
    while progress:
        progress = False
        for simpler in simplify(case):
            if time.monotonic() > deadline:
                return case
            if simpler in tried or not valid(simpler):
                continue
            tried.add(simpler)
            if fails(simpler):
                case, progress = simpler, True
                break
    return case


def valid(case: Case) -> bool:
    """Whether a case means an einsum that can be called."""
    known = case.letters
    if not any(o.sparse for o in case.operands) or not set(case.output) <= set(known):
        return False
    if case.kind == "contractions" and not case.several:
        return False
    if case.kind == "gradients" and not any(o.learned for o in case.operands):
        return False
    if case.form == "sparse" and not set(case.output) & set(case.sparse_letters):
        return False
    if case.notation == "implicit" and implicit(case) != case.output:
        return False
    for n, o in enumerate(case.operands):
        if o.same_as is not None:
            other = case.operands[o.same_as] if o.same_as < n else None
            if other is None or replace(o, letters=other.letters, same_as=None) != other:
                return False
    return notation_fits(case) and circumstance_fits(case) and all(operand_fits(case, o) for o in case.operands)


def operand_fits(case: Case, operand: DrawnOperand) -> bool:
    """Whether an operand can have its layout and form, and every size of 1 that it has can stand."""
    memory, dtype = {**MEMORY, **ARRAYS}[operand.memory], case.dtype_of(operand)
    if not memory.fits(operand.value_shape, dtype) or prod(memory.base(operand.value_shape, dtype)[0]) > HUGE:
        return False
    sizes = case.sizes
    if any(n != sizes[c] and (operand.sparse or n != 1) for c, n in zip(operand.letters, operand.shape, strict=True)):
        return False
    form = SPARSE[operand.form]
    shape, modes = operand.shape, operand.dense_modes
    return not operand.sparse or form.fits(shape, case.torch_dtype, case.device, modes, operand.learned)


def _with(case: Case, n: int, operand: DrawnOperand) -> Case:
    return replace(case, operands=(*case.operands[:n], operand, *case.operands[n + 1 :]))


def _without_operands(case: Case) -> Iterator[Case]:
    for n in range(len(case.operands)):
        left = (*case.operands[:n], *case.operands[n + 1 :])
        letters = {c for o in left for c in o.letters}
        if left:
            yield replace(case, operands=left, output="".join(c for c in case.output if c in letters))


def _without_letters(case: Case) -> Iterator[Case]:
    for c in case.output:
        yield replace(case, output=case.output.replace(c, ""))
    for c in case.letters:
        operands = tuple(_dropped(o, c) for o in case.operands)
        if all(operands):
            ellipsis = case.ellipsis.replace(c, "")
            left = tuple(o for o in operands if o is not None)
            yield replace(case, operands=left, output=case.output.replace(c, ""), ellipsis=ellipsis)
    for n, o in enumerate(case.operands):
        for mode in range(len(o.letters)):
            smaller = _without_mode(o, mode)
            if smaller is not None:
                found = _with(case, n, smaller)
                yield replace(found, output="".join(c for c in case.output if c in found.letters))


def _dropped(operand: DrawnOperand, letter: str) -> DrawnOperand | None:
    found: DrawnOperand | None = operand
    while found is not None and letter in found.letters:
        found = _without_mode(found, found.letters.index(letter))
    return found


def _without_mode(o: DrawnOperand, mode: int) -> DrawnOperand | None:
    if o.dense_modes or (o.sparse and len(o.letters) == 1):
        return None
    nonzeros = None if o.nonzeros is None else tuple((*p[:mode], *p[mode + 1 :]) for p in o.nonzeros)
    if nonzeros is not None and o.nonzeros is not None and len(set(o.nonzeros)) == len(o.nonzeros):
        nonzeros = tuple(dict.fromkeys(nonzeros))  # merged ones are not made duplicates
    letters, shape = o.letters[:mode] + o.letters[mode + 1 :], (*o.shape[:mode], *o.shape[mode + 1 :])
    return replace(o, letters=letters, shape=shape, nonzeros=nonzeros)


def _each(whole: Part, **plain: Any) -> Iterator[Part]:
    """A case, or an operand, with one of its fields made plain at a time."""
    for name, value in plain.items():
        yield replace(whole, **{name: value})


def _plainer(case: Case) -> Iterator[Case]:
    yield replace(case, circumstance="plain")
    if case.circumstance not in ("plain", "twice"):
        yield replace(case, circumstance="twice")
    yield replace(case, notation="plain", ellipsis="")
    yield from _each(case, ellipsis="", second=False, plan=PlanCall())
    if not case.several and case.plan.name not in ("auto", "coo"):
        yield replace(case, plan=PlanCall("coo"))
    for left in range(len(case.plan.arguments) if case.plan.call else 0):
        yield replace(case, plan=replace(case.plan, arguments=case.plan.arguments[:left]))
    yield from _each(case, deterministic=False, precision="", memory_limit=0, form="auto", dtype="float32")
    if case.dtype != "float32":
        yield replace(case, dtype="float64")
    for n, o in enumerate(case.operands):
        for plainer in _each(o, memory="plain", form="tensor", learned=False, same_as=None, dtype=""):
            yield _with(case, n, plainer)
        if o.dense_modes:
            yield _with(case, n, _sparsely(o))


def _sparsely(o: DrawnOperand) -> DrawnOperand:
    """Dense modes left out."""
    split = len(o.shape) - o.dense_modes
    return replace(o, letters=o.letters[:split], shape=o.shape[:split], dense_modes=0)


def _halved(case: Case) -> Iterator[Case]:
    """Half of a letter's size, and the nonzeros that lie there."""
    for c, size in sorted(case.sizes.items(), key=lambda pair: -pair[1]):
        if size > 2:
            operands = (_sized(_below(o, c, size // 2), c, size // 2, size) for o in case.operands)
            yield replace(case, operands=tuple(operands))


def _below(o: DrawnOperand, letter: str, size: int) -> DrawnOperand:
    """The operand without the nonzeros whose coordinate of a letter is not below a size."""
    modes = _modes(o, letter)
    if o.nonzeros is None or not modes:
        return o
    return replace(o, nonzeros=tuple(p for p in o.nonzeros if all(p[m] < size for m in modes)))


def _fewer_nonzeros(case: Case) -> Iterator[Case]:
    for n, o in enumerate(case.operands):
        if not o.nonzeros:
            continue
        step = len(o.nonzeros)
        while step:
            for start in range(0, len(o.nonzeros), step):
                yield _with(case, n, replace(o, nonzeros=o.nonzeros[:start] + o.nonzeros[start + step :]))
            step //= 2


def _smaller(case: Case) -> Iterator[Case]:
    for n, o in enumerate(case.operands):
        for mode, size in enumerate(o.shape):
            if not o.sparse and size == 1 != case.sizes[o.letters[mode]]:
                yield _with(case, n, _sized(o, o.letters[mode], case.sizes[o.letters[mode]], 1))
    for c, size in case.sizes.items():
        low = 1 + max((p[m] for o in case.operands for m in _modes(o, c) for p in o.nonzeros or ()), default=0)
        for smaller in dict.fromkeys((1, 2, low, size // 2, size - 1)):
            if low <= smaller < size:
                yield replace(case, operands=tuple(_sized(o, c, smaller, size) for o in case.operands))
        if low == size and size > 1:
            yield from _moved_down(case, c, size)


def _modes(o: DrawnOperand, letter: str) -> list[int]:
    """Modes with coordinates that have the letter."""
    return [m for m in range(len(o.letters) - o.dense_modes) if o.letters[m] == letter and o.sparse]


def _sized(o: DrawnOperand, letter: str, size: int, old: int) -> DrawnOperand:
    shape = tuple(size if c == letter and n == old else n for c, n in zip(o.letters, o.shape, strict=True))
    return replace(o, shape=shape)


def _moved_down(case: Case, letter: str, size: int) -> Iterator[Case]:
    """The coordinates of a letter numbered without gaps."""
    used = sorted({p[m] for o in case.operands for m in _modes(o, letter) for p in o.nonzeros or ()})
    if len(used) == size:
        return
    number = {at: n for n, at in enumerate(used)}
    operands = []
    for o in case.operands:
        modes = _modes(o, letter)
        if o.nonzeros is not None and modes:
            o = replace(
                o, nonzeros=tuple(tuple(number[v] if m in modes else v for m, v in enumerate(p)) for p in o.nonzeros)
            )
        operands.append(_sized(o, letter, max(1, len(used)), size))
    yield replace(case, operands=tuple(operands))


def _simple_values(case: Case) -> Iterator[Case]:
    for n, o in enumerate(case.operands):
        for values in (DrawnValues("ones"), DrawnValues("counting")):
            if o.values.kind not in ("ones", "counting") and not o.values.specials:
                yield _with(case, n, replace(o, values=values))
        if o.values.specials:
            yield _with(case, n, replace(o, values=replace(o.values, specials=0)))
            if o.values.specials > 1:
                yield _with(case, n, replace(o, values=replace(o.values, specials=1)))
            if o.values.kind != "ones":
                yield _with(case, n, replace(o, values=replace(o.values, kind="ones")))


def _renamed(case: Case) -> Iterator[Case]:
    """The usual letters, one at a time."""
    for c in case.letters:
        if c not in "ijklmnrstuvw":
            for plain in "ijklmn" if c in case.sparse_letters else "rstuvw":
                if plain not in case.letters:
                    yield _relettered(case, c, plain)
                    break


def _relettered(case: Case, old: str, new: str) -> Case:
    operands = tuple(replace(o, letters=o.letters.replace(old, new)) for o in case.operands)
    plan = replace(case.plan, arguments=tuple((new if k == old else k, v) for k, v in case.plan.arguments))
    output, ellipsis = case.output.replace(old, new), case.ellipsis.replace(old, new)
    return replace(case, operands=operands, output=output, ellipsis=ellipsis, plan=plan)


SIMPLIFICATIONS: tuple[Simplify, ...] = (
    _without_operands,
    _halved,
    _fewer_nonzeros,
    _plainer,
    _without_letters,
    _smaller,
    _simple_values,
    _renamed,
)
"""Kinds of simpler cases, what takes most away first."""
