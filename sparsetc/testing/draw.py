"""Random cases, each from one integer.

In: a kind (``"einsums"``, ``"gradients"`` or ``"contractions"``), a seed, the backend. Out: a `Case`; the same one
every time.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from random import Random
from typing import Any

import torch

import sparsetc as stc
from sparsetc.planner.registry import PLANS
from sparsetc.testing.build import coordinates, implicit
from sparsetc.testing.case import SPLIT, Case, DrawnOperand, DrawnValues, PlanCall
from sparsetc.testing.equations import HUGE, LARGE, SMALL, Bounds, Drawing, drawn_equation
from sparsetc.testing.forms import ARRAYS, CIRCUMSTANCES, MEMORY, SPARSE
from sparsetc.testing.reference import Term, join
from sparsetc.testing.scatter import SCATTERS, duplicated, scattered

FLOATS = ("float32", "float32", "float32", "float64", "float64", "float16", "bfloat16")
OTHERS = ("complex64", "complex128", "int8", "int16", "int32", "int64")
LEARNED = ("float64", "float64", "float64", "float32", "float32", "complex128", "complex64")
NAMED = (
    *("auto", "auto", "auto", "coo", "fiber", "rows", "split", "coo+rows", "fiber+rows", "hls", "plan_hls", "plan_hls"),
    *("window", "plan_window", "plan_window", "1-sa", "plan_1sa", "plan_1sa", "mm-csf", "mm-csf", "dense"),
)
ONE = tuple(name for name in NAMED if name in ("auto", SPLIT, *PLANS) or hasattr(stc, name))
"""Of these plans, and functions that make some, those that there are."""
SPLITTING = ("rows", "split", "coo+rows", "fiber+rows", "window", "plan_window", "1-sa", "plan_1sa")
"""Plans that need a result with some, not all, of the sparse operand's letters."""
MANY = ("auto", "auto", "auto", "scalar", "dense", "bcb", "bcb+scalar", "plan_bcb", "plan_bcb")
KINDS = ("einsums", "gradients", "contractions")


def draw(kind: str, seed: int, backend: str = "torch", device: str = "cpu") -> Case:
    """The case of a kind and a seed.

    Args:
        kind: one of `KINDS`.
        seed: any integer.
        backend: ``"torch"`` or ``"triton"``; Triton's interpreter, on the CPU, gets smaller cases.
        device: where operands live.
    """
    r = Random(f"{kind} {seed}")
    interpreted = backend == "triton" and device == "cpu"
    bounds = SMALL if interpreted else Bounds() if device == "cpu" else LARGE
    sparse = _sparse_operands(r, kind)
    drawing = drawn_equation(r, bounds, sparse)
    dtype = r.choice(LEARNED) if kind == "gradients" else r.choice((*FLOATS, r.choice(OTHERS), r.choice(OTHERS)))
    if interpreted and dtype == "bfloat16":  # the interpreter has no products of it
        dtype = "float32"
    if interpreted and dtype.startswith("complex"):  # generated torch programs run these
        dtype = "float64"
    operands = tuple(
        _sparse(r, term, drawing, bounds, dtype) if is_sparse else _dense(r, term, drawing, dtype)
        for term, is_sparse in zip(drawing.terms, drawing.sparse, strict=True)
    )
    operands = (*operands, *_broadcast(r, drawing, dtype))
    case = Case(kind, operands, drawing.output, dtype, backend=backend, device=device, seed=seed)
    case = _optioned(r, within(case, bounds.work))
    case = _learning(r, case)
    case = _fewer_tiles(case)
    for step in (_specials, _laid_out, _shared, _noted, _circumstanced, _mixed):
        case = step(r, case)
    return case


def _sparse_operands(r: Random, kind: str) -> int:
    if kind == "gradients":
        return r.choice((1, 1, 1, 1, 2, 2, 3))
    return 1 if kind == "einsums" else r.choice((2, 2, 2, 3))


# -- operands ---------------------------------------------------------------------------------------------------------


def _values(r: Random, dtype: str) -> DrawnValues:
    integer = dtype.startswith("int")
    return DrawnValues("limits" if r.random() < (0.3 if integer else 0.05) else "uniform", r.randrange(10**6))


def _sparse(r: Random, term: str, drawing: Drawing, bounds: Bounds, dtype: str) -> DrawnOperand:
    shape = tuple(drawing.sizes[c] for c in term)
    name = r.choice(("random", "random", "skewed", "skewed", "blocks", *SCATTERS))
    if len(set(term)) < len(term) and r.random() < 0.5:
        name = "diagonal"
    modes = r.choice((1, 2)) if r.random() < 0.05 and len(shape) > 2 and max(shape[-2:]) < 9 else 0
    values = _values(r, dtype)
    most = bounds.nonzeros * (6 if drawing.sparse.count(True) == 1 and r.random() < 0.1 else 1)
    places = scattered(name, shape[: len(shape) - modes], most, r)
    # Duplicates may not add up to more than an integer type holds.
    if dtype == "int8" or (dtype.startswith("int") and values.kind == "limits"):
        places = list(dict.fromkeys(places))
    elif r.random() < 0.2:
        places = duplicated(places, most, r)
    return DrawnOperand(term, shape, values, nonzeros=tuple(places), dense_modes=modes)


def _dense(r: Random, term: str, drawing: Drawing, dtype: str) -> DrawnOperand:
    ones = {c for c in term if r.random() < 0.06}
    shape = tuple(1 if c in ones else drawing.sizes[c] for c in term)
    return DrawnOperand(term, shape, _values(r, dtype))


def _broadcast(r: Random, drawing: Drawing, dtype: str) -> tuple[DrawnOperand, ...]:
    """A dense operand along a letter that is too large for any, where there is one: of stride 0, or of size 1."""
    huge = [c for c, size in drawing.sizes.items() if size > HUGE]
    if not huge or r.random() < 0.4:
        return ()
    (letter,) = huge
    if drawing.sizes[letter] < 2**40:  # what could be made whole would fill the memory
        return ()
    if r.random() < 0.5:
        return (DrawnOperand(letter, (1,), _values(r, dtype)),)
    return (DrawnOperand(letter, (drawing.sizes[letter],), _values(r, dtype), "expanded"),)


def within(case: Case, work: int) -> Case:
    """The case with fewer nonzeros, where the reference would form more than so many products."""
    while True:
        free = prod(size for letter, size in case.sizes.items() if letter not in case.sparse_letters)
        if _entries(case) * free <= work:
            return case
        most = max(len(o.nonzeros or ()) for o in case.operands)
        operands = [
            replace(o, nonzeros=o.nonzeros[: len(o.nonzeros) // 2]) if o.nonzeros and len(o.nonzeros) == most else o
            for o in case.operands
        ]
        case = replace(case, operands=tuple(operands))


def _entries(case: Case) -> int:
    if not case.several:
        return max(len(o.nonzeros or ()) for o in case.operands)
    terms = []
    for o in case.operands:
        if (where := coordinates(o)) is not None:
            letters = o.letters[: len(o.letters) - o.dense_modes]
            terms.append(Term(letters, torch.zeros(where.shape[1]), where))
    return join(terms).count


# -- options ----------------------------------------------------------------------------------------------------------


def _optioned(r: Random, case: Case) -> Case:
    kept = any(c in case.sparse_letters for c in case.output)
    return replace(
        case,
        memory_limit=r.choice((2_000, 20_000, 10**6)) if r.random() < 0.05 else 0,
        plan=_plan(r, case),
        form=r.choice(("auto", "auto", "dense", *(["sparse"] if kept else []))),
        precision=r.choice(("", "", "", "highest", "high", "medium")) if not _interpreted(case) else "",
        deterministic=r.random() < 0.2,
    )


def _fewer_tiles(case: Case) -> Case:
    """The case with few nonzeros where they make tiles: the interpreter takes seconds for one of high order."""
    if not _interpreted(case) or not any(name in case.plan.name for name in ("hls", "window", "1sa", "1-sa")):
        return case
    operands = (
        o if o.nonzeros is None else replace(o, nonzeros=o.nonzeros[: max(2, 20 // len(o.shape) ** 2)])
        for o in case.operands
    )
    return replace(case, operands=tuple(operands))


def _interpreted(case: Case) -> bool:
    return case.backend == "triton" and case.device == "cpu"


def _plan(r: Random, case: Case) -> PlanCall:
    name = r.choice(MANY if case.several else ONE)
    kept = set(case.output) & set(case.sparse_letters)
    if name in SPLITTING and not 0 < len(kept) < len(case.sparse_letters):
        name = r.choice(("coo", "fiber", "hls", "rows"))
    if name == SPLIT:
        return PlanCall(SPLIT, (("long", r.choice(("coo", "fiber"))), ("threshold", r.choice((1, 2, 3, 8)))))
    if not name.startswith("plan_"):
        return PlanCall(name)
    given: dict[str, Any] = {}
    if name in ("plan_window", "plan_1sa"):
        return PlanCall(name, _windows(r, name), True)
    if name == "plan_hls":
        return PlanCall(name, (("threshold", r.choice((0, 1, 2, 4, 9))),), True)
    if r.random() < 0.3:
        given["storage"] = r.choice(("whole", "bitmap"))
    if r.random() < 0.4:
        given["threshold"] = r.choice((1, 2, 3))
    if r.random() < 0.1 and len(case.operands) == 2:
        given["formats"] = r.choice((("bcb", "coo"), ("coo", "bcb")))
    side = r.choice((1, 2, 4))
    clash = ("storage", "threshold", "formats")
    given |= {c: side for c in sorted(case.sparse_letters) if c not in clash and r.random() < 0.7}
    return PlanCall(name, tuple(given.items()), True)


def _windows(r: Random, name: str) -> tuple[tuple[str, int], ...]:
    """Some of what a request for windows may name."""
    sizes = {"height": (1, 3, 4, 16, 33), "width": (1, 2, 5, 16, 64), "threshold": (0, 1, 2, 3, 5, 1000)}
    similar = {"tau": (1, 20, 50, 80, 100), "strip": (1, 2, 3, 64)} if name == "plan_1sa" else {}
    return tuple((option, r.choice(known)) for option, known in (similar | sizes).items() if r.random() < 0.6)


def _learning(r: Random, case: Case) -> Case:
    if case.kind != "gradients":
        if case.dtype.startswith("int") or r.random() < 0.9:
            return case
        return replace(case, operands=tuple(replace(o, learned=_learnable(case, o, r, 0.5)) for o in case.operands))
    while not any(o.learned for o in case.operands):
        case = replace(case, operands=tuple(replace(o, learned=_learnable(case, o, r, 0.6)) for o in case.operands))
    return replace(case, second=r.random() < 0.25)


def _learnable(case: Case, o: DrawnOperand, r: Random, chance: float) -> bool:
    """Whether gradients flow to an operand, drawn; never where its gradient would be of a size that nothing has."""
    return r.random() < chance and (o.sparse or all(case.sizes[c] <= HUGE for c in o.letters))


def _specials(r: Random, case: Case) -> Case:
    if case.kind == "gradients" or r.random() < 0.8:
        return case
    operands = list(case.operands)
    at = r.randrange(len(operands))
    values = replace(operands[at].values, specials=r.choice((1, 2, 5)))
    operands[at] = replace(operands[at], values=values)
    return replace(case, operands=tuple(operands))


# -- how it is given --------------------------------------------------------------------------------------------------


def _laid_out(r: Random, case: Case) -> Case:
    return replace(case, operands=tuple(_given(r, case, o) for o in case.operands))


def _given(r: Random, case: Case, o: DrawnOperand) -> DrawnOperand:
    dtype = case.torch_dtype
    shape = o.value_shape
    if max(shape, default=0) > HUGE:
        return o
    if r.random() < 0.35:
        names = [n for n, m in MEMORY.items() if m.fits(shape, dtype)]
        o = replace(o, memory=r.choice(names))
    elif not o.sparse and not o.learned and r.random() < 0.03 and case.device == "cpu":
        names = [n for n, m in ARRAYS.items() if m.fits(shape, dtype)]
        o = replace(o, memory=r.choice(names)) if names else o
    if o.nonzeros is None:
        return o
    duplicates = len(set(o.nonzeros)) < len(o.nonzeros)
    forms = [
        n
        for n, f in SPARSE.items()
        if f.fits(o.shape, dtype, case.device, o.dense_modes, o.learned) and not (duplicates and f.unique)
    ]
    if o.memory in ("conj", "negative") or case.second:  # torch's own have no such bits, nor second derivatives
        forms = [n for n in forms if not n.startswith(("torch", "scipy"))]
    chance = r.random()
    form = "tensor" if chance < 0.6 else "uncoalesced" if chance < 0.8 else r.choice(forms)
    return replace(o, form=form)


def _shared(r: Random, case: Case) -> Case:
    """One object in the place of two operands that could be."""
    for n, o in enumerate(case.operands):
        for before in range(n):
            other = case.operands[before]
            fits = o.sparse == other.sparse and o.shape == other.shape and other.same_as is None
            if fits and not (o.learned or other.learned) and r.random() < 0.5:
                same = replace(other, letters=o.letters, same_as=before)
                if any(len(set(t.letters)) < len(t.letters) or t.dense_modes for t in (o, other)):
                    continue
                return replace(case, operands=(*case.operands[:n], same, *case.operands[n + 1 :]))
    return case


def _noted(r: Random, case: Case) -> Case:
    """Another notation of the same equation, where there is one."""
    chance = r.random()
    if chance < 0.6:
        return case
    block = "".join(r.sample(case.letters, min(len(case.letters), r.choice((1, 1, 2)))))
    candidates = [
        replace(case, notation="implicit"),
        replace(case, notation="implicit", ellipsis=block),
        replace(case, ellipsis=block),
        replace(case, notation="spaced", ellipsis=block),
        replace(case, notation="spaced"),
        replace(case, notation="list"),
        replace(case, notation="sublists"),
    ]
    r.shuffle(candidates)
    return next(filter(notation_fits, candidates))


def notation_fits(case: Case) -> bool:
    """Whether the notation means the case's equation."""
    if case.ellipsis:
        full = False
        for letters in (*(o.letters for o in case.operands), case.output):
            own = [c for c in letters if c in case.ellipsis]
            suffix = case.ellipsis[len(case.ellipsis) - len(own) :]
            if "".join(own) != suffix or suffix not in letters:
                return False
            full |= suffix == case.ellipsis
        if not full or (case.output and not set(case.ellipsis) <= set(case.output)) or not case.output:
            return False
    return case.notation != "implicit" or implicit(case) == case.output


def _circumstanced(r: Random, case: Case) -> Case:
    if r.random() < 0.5:
        return case
    name = r.choice([n for n in CIRCUMSTANCES if circumstance_fits(replace(case, circumstance=n))])
    slow = name == "crowd" and r.random() < 0.8
    return case if slow else replace(case, circumstance=name)


def _mixed(r: Random, case: Case) -> Case:
    """Operands of different float types, where autocast allows them."""
    plain = all(o.same_as is None and (not o.sparse or o.form in ("tensor", "uncoalesced")) for o in case.operands)
    plain &= case.plan.name != SPLIT  # which is made outside of the circumstance
    if case.circumstance != "autocast" or not case.torch_dtype.is_floating_point or not plain or r.random() < 0.4:
        return case
    types = ["float32", "float64", "float16"] + ([] if _interpreted(case) else ["bfloat16"])
    laid_out = ["plain" if max(o.value_shape, default=0) <= HUGE else o.memory for o in case.operands]
    operands = [replace(o, dtype=r.choice(types), memory=m) for o, m in zip(case.operands, laid_out, strict=True)]
    return replace(case, operands=tuple(operands))


def circumstance_fits(case: Case) -> bool:
    """Whether a case can be called in its circumstance."""
    c = CIRCUMSTANCES[case.circumstance]
    first = next(o for o in case.operands if o.sparse)
    learned = any(o.learned for o in case.operands)
    forms = ("tensor", "uncoalesced", "lists", "numpy", "moved")
    name = case.circumstance
    checks = (
        name == "autocast" or not any(o.dtype for o in case.operands),
        name not in ("threads", "crowd") or not _interpreted(case),  # Triton's interpreter runs in one thread
        name != "array" or (case.device == "cpu" and case.dtype != "bfloat16"),
        name != "data" or case.device == "cpu",  # on a GPU torch's count of changes is believed
        name != "coordinates" or first.form in ("tensor", "uncoalesced"),
        c.gradients or case.kind != "gradients",
        not c.own or (first.form in forms and not first.dense_modes),
        not (c.copies and learned),
        name != "crowd" or not case.memory_limit,
        not c.changes or all(o.same_as is None for o in case.operands),
        not c.changes or (first.memory in ("plain", "transposed", "offset", "padded") and not learned),
    )
    return all(checks)
