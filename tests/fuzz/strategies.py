"""Cases, drawn by hypothesis: `cases` is a strategy of any kind of them.

Half of the equations are any letters on any operand; the others have factors along the modes of a sparse operand, as
people write them. The simplest choice comes first wherever something is sampled, for hypothesis shrinks towards it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from random import Random
from string import ascii_letters
from typing import Any, TypeVar

import torch
from fuzz.calls import coordinates, implicit
from fuzz.case import CIRCUMSTANCES, HUGE, MEMORY, SPARSE, Case, Operand
from hypothesis import assume
from hypothesis import strategies as st
from reference import Term, join

T = TypeVar("T")
Place = tuple[int, ...]
Draw = Callable[[st.SearchStrategy[Any]], Any]
KINDS = ("einsums", "gradients", "contractions")
FLOATS = ("float32", "float64", "float32", "float64", "float16", "bfloat16")
OTHERS = ("complex64", "complex128", "int8", "int16", "int32", "int64")
LEARNED = ("float64", "float32", "float64", "complex128", "complex64")
ONE = ("auto", "auto", "coo", "fiber", "rows", "coo+rows", "fiber+rows", "hls", "window", "1-sa", "mm-csf", "dense")
MANY = ("auto", "auto", "scalar", "dense", "bcb", "bcb+scalar", "plan_bcb", "plan_bcb")
CALLED = ("plan_hls", "plan_window", "plan_1sa", "split")
SPLITTING = ("rows", "split", "coo+rows", "fiber+rows", "window", "plan_window", "1-sa", "plan_1sa")
"""Plans that need a result with some, not all, of the sparse operand's letters."""
THRESHOLDS = (0, 1, 2, 3, 4, 9, 1000)
WINDOWS = {"height": (1, 3, 4, 16, 33), "width": (1, 2, 5, 16, 64), "threshold": THRESHOLDS}
REQUESTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "plan_hls": {"threshold": THRESHOLDS},
    "plan_window": WINDOWS,
    "plan_1sa": {"tau": (1, 20, 50, 80, 100), "strip": (1, 2, 3, 64), **WINDOWS},
    "plan_bcb": {"storage": ("whole", "bitmap"), "threshold": (1, 2, 3), "formats": (("bcb", "coo"), ("coo", "bcb"))},
}
"""What calls that make plans may name."""
ROWS = 2**26
"""Rows of a result, at most."""
PATTERNS = ("random", "skewed", "full", "slice", "fiber", "block", "one", "corners", "diagonal", "empty")


@lru_cache(maxsize=4096, typed=True)
def of(*options: T) -> st.SearchStrategy[T]:
    """One of these; kept, for a strategy takes longer to make than a draw."""
    return st.sampled_from(options)


def one_in(n: int) -> st.SearchStrategy[bool]:
    """True so often; False is simpler."""
    return of(*[False] * (n - 1), True)


def shuffled(draw: Draw, items: Sequence[T]) -> list[T]:
    """The items in any order, of one draw."""
    left, number, found = [*items], draw(of(*range(720))), []
    while left:
        number, at = divmod(number, len(left))
        found.append(left.pop(at))
    return found


def subset(draw: Draw, letters: Sequence[str], most: int = 52) -> list[str]:
    """Some letters, in any order."""
    return shuffled(draw, letters)[: draw(of(*range(min(most, len(letters)) + 1)))] if letters else []


# -- equations --------------------------------------------------------------------------------------------------------


def equation(draw: Draw, sparse: int) -> tuple[list[str], str]:
    """Letters of the operands, the sparse ones first, and of the output."""
    start, step = draw(of(*range(52))), draw(of(1, 5, 31))
    pool = [ascii_letters[(start + n * step) % 52] for n in range(30)]
    terms: list[str] = []
    for n in range(sparse):
        order = draw(of(1, 2, 2, 2, 3, 3, 3, 3, 4, 4, *[5, 6, 7, 8] * (sparse == 1)))
        own = subset(draw, sorted(set("".join(terms))), min(3, order))
        own = shuffled(draw, [*own, *pool[8 * n : 8 * n + order - len(own)]])
        terms.append("".join(draw(of(*own[:-1])) for _ in own) if order > 1 and draw(one_in(6)) else "".join(own))
    known, new = list(dict.fromkeys("".join(terms))), pool[-3:]
    count = draw(of(2, 0, 1, 2, 1, 3, 4))
    if draw(st.booleans()):  # MTTKRP, TTM chains, sampled products, products with vectors, and what lies between
        modes, ranks = shuffled(draw, known), draw(of(*new[:1], "", "".join(new)))
        along = [(mode, draw(of(*ranks)) if ranks else "") for mode in modes[:count]]
        dense = [rank + mode if draw(one_in(3)) else mode + rank for mode, rank in along]
        output = [*modes[count:], *subset(draw, modes[:count], draw(of(0, 0, 4))), *dict.fromkeys(r for _, r in along)]
        output = [c for c in output if c and not draw(one_in(6))]
        return [*terms, *dense], "".join(shuffled(draw, output) if draw(one_in(3)) else output)
    dense = []
    for _ in range(count):
        found = [draw(of(*known, *new)) for _ in range(draw(of(1, 0, 1, 2, 2, 2, 3, 4)))]
        dense.append("".join(found if draw(one_in(7)) else dict.fromkeys(found)))
    output = subset(draw, sorted({*known, *"".join(dense)}))
    return [*terms, *dense], "".join(dict.fromkeys([*known, *output]) if draw(one_in(5)) else output)


def sizes_of(draw: Draw, work: int, terms: list[str], sparse: int, output: str) -> dict[str, int]:
    """A size for each letter: mostly small, some of them 0 or 1, one larger than any dense operand's."""
    letters, large = list(dict.fromkeys("".join(terms))), (8, 9, 15, 16, 17, 31, 33, 40, 64, 70)
    few = (2, 3, 1, 4, 5, 6, 7, *(large if draw(st.booleans()) else ()))
    sizes = {c: draw(of(*few)) for c in letters}
    if draw(one_in(25)):
        sizes[draw(of(*letters))] = 0
    known, dense = set("".join(terms[:sparse])), terms[sparse:]
    for own, limit in ((output, work // 2), ({*letters} - known, work // 20), *((t, work // 12) for t in dense)):
        while prod(sizes[c] for c in set(own)) > limit:
            sizes[max(sorted(own), key=sizes.__getitem__)] //= 2
    alone = sorted(known - set("".join(dense)) - set(output))
    if alone and draw(one_in(16)):
        sizes[draw(of(*alone))] = draw(of(300, 70_000, 2**20, 2**31 + 5, 2**40))
    elif draw(one_in(7)):  # two operands of one kind and order get one shape, so that one tensor can be both
        groups = ((t, u) for own in (terms[:sparse], dense) for t, u in itertools.combinations(own, 2))
        first, second = next(((t, u) for t, u in groups if len(t) == len(u)), ("", ""))
        for a, b in [*zip(first, second, strict=True)] * len(first):  # until a letter of both is settled
            sizes[a] = sizes[b] = min(sizes[a], sizes[b])
    return sizes


# -- operands ---------------------------------------------------------------------------------------------------------


def scattered(name: str, shape: Place, most: int, r: Random) -> list[Place]:
    """Coordinates of a pattern, duplicates possible."""
    at, mode = [r.randrange(size) for size in shape], r.randrange(len(shape))
    side = max(1, int((most / 2) ** (1 / len(shape))))
    whole, one = [range(size) for size in shape], [range(a, a + 1) for a in at]
    boxes = {
        "full": whole,
        "one": one,
        "slice": [*whole[:mode], one[mode], *whole[mode + 1 :]],
        "fiber": [*one[:mode], whole[mode], *one[mode + 1 :]],
        "block": [range(a, min(size, a + side)) for a, size in zip(at, shape, strict=True)],
    }
    ends = {"corners": (0, -1), "diagonal": range(min(*shape, most, most)), "empty": ()}
    if name in ends:
        return [tuple(n % size for size in shape) for n in ends[name]]
    if name in boxes and prod(map(len, boxes[name])) <= most:
        return [*itertools.product(*boxes[name])]
    count, power = max(1, min(most, prod(shape) // r.choice((1, 2, 3, 8)))), 3 if name == "skewed" else 1
    return [tuple(own[int(r.random() ** power * len(own))] for own in boxes.get(name, whole)) for _ in range(count)]


def nonzeros(draw: Draw, term: str, shape: Place, most: int, unique: bool) -> tuple[Place, ...]:
    """Coordinates of one or two patterns, sorted or not, some of them again; the last few of the first so many."""
    names, r = (*PATTERNS, *["diagonal"] * 8 * (len(set(term)) < len(term))), Random(draw(of(*range(50))))
    name, other, end, kept = (draw(one) for one in (of(*names), of("empty", *names), upto(most), upto(2 * most)))
    order = draw(of("sorted", "any", "again"))
    if 0 in shape:
        return ()
    places = (scattered(name, shape, most, r) + scattered(other, shape, most // 3, r))[: end or None][-kept or None :]
    if order == "again" and places:
        places = (places + r.choices(places, k=r.randint(1, len(places))))[-most:]
    places = list(dict.fromkeys(places)) if unique else places
    r.shuffle(places) if order != "sorted" else places.sort()
    return tuple(places)


upto = lru_cache(lambda most: st.integers(0, most))


def operand(draw: Draw, case: Case, term: str, sizes: dict[str, int], most: int) -> Operand:
    """An operand, sparse if it may have so many nonzeros, laid out and given in some way."""
    integer, dtype, shape = case.dtype.startswith("int"), getattr(torch, case.dtype), tuple(sizes[c] for c in term)
    kind = "limits" if draw(one_in(4 if integer else 20)) else draw(of("ones", "uniform", "uniform", "uniform"))
    learned = (case.kind == "gradients" or (not integer and draw(one_in(20)))) and draw(st.booleans())
    learned &= most > 0 or max(shape, default=0) <= HUGE
    found = Operand(term, shape, (kind, draw(of(*range(50))), 0), learned=learned)
    if most:
        modes = draw(of(1, 2)) if len(shape) > 2 and max(shape[-2:]) < 9 and draw(one_in(16)) else 0
        unique = case.dtype == "int8" or (integer and kind == "limits")  # whose sums it may not hold
        places = nonzeros(draw, term, shape[: len(shape) - modes], most, unique)
        found = replace(found, nonzeros=places, dense_modes=modes)
    elif draw(one_in(8)):
        ones = subset(draw, sorted(set(term)))
        found = replace(found, shape=tuple(1 if c in ones else n for c, n in zip(term, shape, strict=True)))
    if max(found.value_shape, default=0) <= HUGE and draw(one_in(3)):
        found = replace(found, memory=draw(of(*(m for m in MEMORY if found.given(MEMORY[m][0], dtype, case.device)))))
    if most and draw(one_in(3)):
        forms = (form for form in SPARSE if found.formed(form, dtype, case.device))
        found = replace(found, form=draw(of("uncoalesced", *forms)))
    return found


# -- options ----------------------------------------------------------------------------------------------------------


def plan(draw: Draw, case: Case) -> str:
    """A plan's name, or a call that makes one."""
    name = draw(of(*(MANY if case.several else (*ONE, *CALLED))))
    if name in SPLITTING and not 0 < len({*case.output} & {*case.sparse_letters}) < len(case.sparse_letters):
        name = draw(of("coo", "fiber", "hls", "rows"))
    if name == "split":  # two parts, of two kernels
        long, threshold = draw(of("coo", "fiber")), draw(of(1, 2, 3, 8))
        parts = f"tuple(stc.compile({{plain}}, plan=p).plan.parts[0] for p in ({long!r}, 'rows'))"
        return f"stc.plans.Plan('{long}+rows', {parts}, False, 'run_length', (('threshold', {threshold}),))"
    if name not in REQUESTS:
        return name
    sides = {c: (1, 2, 4) for c in case.sparse_letters if name == "plan_bcb"}
    options = [(o, known) for o, known in (REQUESTS[name] | sides).items() if o != "formats" or len(case.operands) == 2]
    return f"stc.plans.{name}({', '.join(f'{o}={draw(of(*known))!r}' for o, known in options if draw(st.booleans()))})"


def notation_fits(case: Case) -> bool:
    """Whether the notation means the case's equation."""
    letters = [*(o.letters for o in case.operands), case.output]
    blocks = ["".join(c for c in term if c in case.ellipsis) for term in letters]
    written = all(block in term and case.ellipsis.endswith(block) for block, term in zip(blocks, letters, strict=True))
    whole = case.ellipsis in blocks[:-1] and case.ellipsis == blocks[-1]
    return (not case.ellipsis or (written and whole)) and (case.notation != "implicit" or implicit(case) == case.output)


def circumstance_fits(case: Case) -> bool:
    """Whether a case can be called in its circumstance."""
    name, flags = case.circumstance, case.flags
    first, learned = next(o for o in case.operands if o.sparse), any(o.learned for o in case.operands)
    plain = first.memory in ("plain", "transposed", "offset", "padded")
    fine = {
        "own": "own" in SPARSE[first.form][0] and not first.dense_modes,
        "changed": plain and not learned and all(o.same_as is None for o in case.operands),
        "copied": not learned,
        "cpu": case.device == "cpu" and case.dtype != "bfloat16",
        "threads": (case.backend != "triton" or case.device != "cpu") and not case.memory_limit,
    }
    coords = name != "coordinates" or first.form in ("tensor", "uncoalesced")
    return coords and ("graph" in flags or case.kind != "gradients") and all(fine.get(flag, True) for flag in flags)


def shared(operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
    """Operands of which one is another, where two can be."""
    for (m, other), (n, o) in itertools.combinations(enumerate(operands), 2):
        plain = all(len(set(t.letters)) == len(t.letters) and not (t.dense_modes or t.learned) for t in (o, other))
        if plain and o.sparse == other.sparse and o.shape == other.shape:
            return (*operands[:n], replace(other, letters=o.letters, same_as=m), *operands[n + 1 :])
    return operands


@st.composite
def cases(draw: Draw, kind: str, backend: str = "torch", device: str = "cpu") -> Case:
    """A case of one of `KINDS`; of the triton backend on the CPU, in its interpreter, a smaller one."""
    interpreted = backend == "triton" and device == "cpu"
    work = 6_000 if interpreted else 60_000 if device == "cpu" else 500_000
    several = draw(of(1, 1, 2, 3)) if kind == "gradients" else 1 if kind == "einsums" else draw(of(2, 2, 3))
    terms, output = equation(draw, several)
    sizes = sizes_of(draw, work, terms, several, output)
    dtype = draw(of(*LEARNED) if kind == "gradients" else of(*FLOATS, *OTHERS[: 6 if draw(st.booleans()) else 0]))
    if interpreted:  # it has no products of bfloat16; generated torch programs run complex ones
        dtype = {"bfloat16": "float32", "complex64": "float64", "complex128": "float64"}.get(dtype, dtype)
    case = Case(kind, (), output, dtype, backend=backend, device=device, second=kind == "gradients" and draw(one_in(4)))
    most = int(work**0.5 / 2) * (6 if several == 1 and draw(one_in(10)) else 1)
    operands = [operand(draw, case, t, sizes, most if n < several else 0) for n, t in enumerate(terms)]
    huge = [c for c, size in sizes.items() if size >= 2**40]  # what could be made whole would fill the memory
    if huge and draw(st.booleans()):
        memory, size = draw(of(("plain", 1), ("expanded", sizes[huge[0]])))
        operands.append(Operand(huge[0], (size,), ("uniform", 0, 0), memory=memory))
    known = set("".join(terms[:several]))
    where = [Term(o.letters[: at.shape[0]], at[0], at) for o in operands if (at := coordinates(o)) is not None]
    assume(join(where).count * prod(n for c, n in sizes.items() if c not in known) <= work)  # products of the reference
    assume(prod(sizes[c] for c in output if c in known) <= ROWS)  # which the reference has dense
    if kind == "gradients" and not any(o.learned for o in operands):
        operands[0] = replace(operands[0], learned=True, form="tensor")
    if case.second:  # which sparse tensors of torch have not
        operands = [replace(o, form=o.form if "own" in SPARSE[o.form][0] else "tensor") for o in operands]
    if kind != "gradients" and draw(one_in(5)):  # NaN and infinities
        at = draw(of(*range(len(operands))))
        operands[at] = replace(operands[at], values=(*operands[at].values[:2], draw(of(1, 2, 5))))
    operands = shuffled(draw, operands) if draw(st.booleans()) else operands
    case = _optioned(draw, replace(case, operands=tuple(operands)), interpreted)
    if draw(st.booleans()):
        case = replace(case, operands=shared(case.operands))
    if draw(one_in(3)):
        block = "".join(subset(draw, case.letters, 2))
        others = itertools.product(("plain", "implicit", "spaced", "list", "sublists"), ("", block))
        fitting = [replace(case, notation=n, ellipsis=e) for n, e in others if not e or n not in ("list", "sublists")]
        case = draw(of(*filter(notation_fits, fitting)))
    if draw(st.booleans()):
        fitting = [replace(case, circumstance=name) for name in CIRCUMSTANCES if name != "crowd" or draw(one_in(3))]
        case = draw(of(*filter(circumstance_fits, fitting)))
    plain = all(o.same_as is None and "own" in SPARSE[o.form][0] and MEMORY[o.memory][0] == "" for o in case.operands)
    if case.circumstance == "autocast" and "float" in dtype and plain and "Plan(" not in case.plan:
        types = ("float32", "float64", "float16", *["bfloat16"] * (not interpreted))  # which autocast allows to differ
        case = replace(case, operands=tuple(replace(o, dtype=draw(of("", *types))) for o in case.operands))
    return case


def _optioned(draw: Draw, case: Case, interpreted: bool) -> Case:
    kept = {*case.output} & {*case.sparse_letters}
    case = replace(
        case,
        plan=plan(draw, case),
        form=draw(of("auto", "auto", "dense", *["sparse"] * bool(kept))),
        deterministic=draw(one_in(5)),
        precision="" if interpreted else draw(of("", "", "", "highest", "high", "medium")),
        memory_limit=draw(of(10**6, 20_000, 2_000)) if draw(one_in(20)) else 0,
    )
    if interpreted and any(name in case.plan for name in ("hls", "window", "1sa", "1-sa")):  # tiles take seconds
        few = (o.nonzeros and o.nonzeros[: max(2, 20 // len(o.shape) ** 2)] for o in case.operands)
        case = replace(case, operands=tuple(replace(o, nonzeros=n) for o, n in zip(case.operands, few, strict=True)))
    return case
