"""Rules by which an einsum of operands in blocks, or with dense modes, is run as another one.

In: a `Request`. Out: a `Rewrite`.

`blocks` gives the einsum of blocks, in which each letter of a block's mode becomes two: i is that of positions in a
block, and another, I if it is free, that of blocks. Operands in blocks are entries with dense modes there; coordinates
of nonzeros are divided, dense operands have two dimensions for one. Blocks that meet in a letter with different sides
are cut into blocks of the sides' greatest common divisor. A side of 1 needs no second letter.

`entries` makes one or two sparse operands with dense modes (more are a `Path`), ``X[i,j,h]`` and ``Y[j,k,h]``, a
pattern of ones with the numbers of entries as its first modes, and their values dense operands. ``X[i,j,h]`` is
``P[n,i,j] V[n,h]``; a product with Y is ``T[n,m,i,k] V[n,h] W[m,h]``, where T has an element for each pair of entries
that meet. So nothing is expanded, and dense modes are letters of a row.

`parts` cuts a letter j that entries sum into two: j, the position in a part, and another for the part, which becomes a
mode of the pattern.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import gcd, prod

import torch
from torch import Tensor

from sparsetc.contraction.request import SPARE, Change, Patterns, Put, Request, Rewrite, Take
from sparsetc.errors import EquationError, OutOfMemoryError
from sparsetc.ir.equation.einsum import Bound, Einsum, distinct
from sparsetc.ir.plan import requested
from sparsetc.options import Options
from sparsetc.planner.registry import by_nonzeros
from sparsetc.support import Ints, Names, among, outside
from sparsetc.tensor import coords as crd
from sparsetc.tensor.blocks import Blocks, inside_only, joined, split
from sparsetc.tensor.pattern import Pattern, lasting
from sparsetc.tensor.sparse_tensor import SparseTensor

# -- operands in blocks -----------------------------------------------------------------------------------------------

LAST = 64
"""Least side of a block for copying tf32 operands with the summed positions last: Hopper's matrix instruction reads
both sides along the sum, and other orders reach its shared memory 4 bytes at a time."""


Cut = dict[str, tuple[str, int]]
"""For each letter that is cut, which then numbers positions within a block, the letter of blocks, and their side."""


def _term(cut: Cut, letters: Iterable[str]) -> Names:
    """Return the letters with a letter for blocks before each one that is cut."""
    return tuple(d for c in letters for d in ((cut[c][0], c) if c in cut else (c,)))


def _sides(cut: Cut, letters: Iterable[str]) -> Ints:
    """The side of each letter; 0 where it is not cut."""
    return tuple(cut[c][1] if c in cut else 0 for c in letters)


def _divided(letters: Names, bound: Bound, cut: Cut, last: Sequence[str] = ()) -> tuple[Names, Change | None]:
    """A dense operand's letters in the einsum of blocks, some of them last, and how it is made of the operand."""
    term, sides = _term(cut, letters), _sides(cut, letters)
    order = sorted(range(len(term)), key=lambda n: term[n] in last)
    moved = order if last else None
    change = partial(_table, sides, bound.extents(letters), moved) if any(sides) else None
    return tuple([term[n] for n in order]), change


def blocks(r: Request) -> Rewrite | None:
    """The einsum of blocks, where an operand is in blocks.

    Raises:
        EquationError: there are not letters enough.
    """
    if not any(x.blocksize for x in r.sparse):
        return None
    bound, sparse = r.bound, r.sparse
    e, like = bound.einsum, r.like
    expands = by_nonzeros(requested(r.settings.plan))
    cut = {} if expands else _letters_to_cut(e, sparse)
    sides = {c: side for c, (_, side) in cut.items()}
    sizes = bound.by_index | sides | {block: -(-bound.by_index[c] // side) for c, (block, side) in cut.items()}
    # Letters of long blocks that a dot sums.
    tf32 = like.dtype == torch.float32 and r.settings.effective_precision() == "high"
    long = [c for c, side in sides.items() if tf32 and side >= LAST and c not in e.output]
    inputs = list[Names]()
    take = list[Take]()
    inner = list[SparseTensor | Tensor]()
    coordinates, widths = set[str](), set[str]()
    for p, (letters, operand) in enumerate(zip(e.inputs, r.operands, strict=True)):
        change: Change | None
        if isinstance(operand, SparseTensor):
            pattern, rows, columns, change = _cut(operand, letters, bound, cut)
            inputs.append((*rows, *columns))
            coordinates.update(rows)
            widths.update(columns)
            pattern = pattern.of_ones if operand.pattern.ones else pattern
            inner.append(SparseTensor._make(pattern, like.expand(pattern.nnz, *(sizes[c] for c in columns))))
        else:
            once = letters == distinct(letters)
            term, change = _divided(letters, bound, cut, among(letters, long) if once else ())
            inputs.append(term)
            inner.append(like.expand([sizes[c] for c in term]))
        take.append(((p,), change))
    # What is contracted by nonzeros has coordinates of all letters.
    whole = expands or (len(sparse) > 1 and not widths)
    output, form = _term(cut, e.output), "dense"
    put: Put = partial(_pushed, partial(joined, sides=_sides(cut, e.output), sizes=bound.output_shape))
    if r.has_pattern():
        first = next(o.pattern for o in inner if isinstance(o, SparseTensor))
        output, rows_of_result, put = _in_blocks(bound, cut, set(output) if whole else coordinates, first)
        form = "sparse" if rows_of_result else "dense"
    inner_bound = Bound.of(Einsum(tuple(inputs), output, e.sparse, e.text), sizes)
    of = " x ".join(f"{c}={side}" for c, side in sides.items())
    name = f"blocks of {of}" if of else "positions in blocks as coordinates"
    request = replace(r, bound=inner_bound, operands=inner, form=form, in_blocks=not expands)
    return Rewrite(name, request, take, put)


def _letters_to_cut(e: Einsum, operands: Sequence[SparseTensor]) -> Cut:
    """The letters that operands in blocks ask to be cut.

    Raises:
        EquationError: there are not letters enough.
    """
    sides: dict[str, int] = {}
    for p, x in zip(e.sparse, operands, strict=True):
        for letter, side in zip(e.inputs[p], x.blocksize, strict=False):  # dense modes have none
            sides[letter] = gcd(sides.get(letter, 0), side)
    sides = {c: side for c, side in sides.items() if side > 1}
    spare = e.spare
    if len(spare) < len(sides) + len(e.sparse) + SPARE:
        raise EquationError(
            f'"{e.text}" has {len(e.indices)} indices; {len(sides)} of them, of operands in blocks, are taken '
            f"apart into two, and {len(e.sparse) + SPARE} more number blocks, gradients and batches, which passes "
            "the 52 letters there are; take expand_dense() of the operands in blocks"
        )
    swapped = {c: c.swapcase() for c in sides if c.swapcase() in spare}
    others = (c for c in spare if c not in swapped.values())
    return {c: (swapped.get(c) or next(others), side) for c, side in sides.items()}


def _cut(x: SparseTensor, letters: Names, bound: Bound, cut: Cut) -> tuple[Pattern, Names, Names, Change | None]:
    """A sparse operand's pattern in the einsum of blocks, letters of coordinates and of dense modes, and its values."""
    modes, dense = letters[: x.sparse_order], letters[x.sparse_order :]
    sides, sizes = _sides(cut, dense), bound.extents(dense)
    blocks = x.pattern.blocks
    if blocks is None:
        divided = x.pattern.divided(_sides(cut, modes))
        return divided, _term(cut, modes), _term(cut, dense), partial(split, sides=sides, sizes=sizes, first=1)
    smaller = tuple(side or 1 for side in _sides(cut, modes))
    pattern, source = x.pattern.cut(smaller)
    with lasting():
        masks = blocks.masks(x.coords)
    rows = tuple(cut[c][0] if c in cut else c for c in modes)
    as_it_is = source is None and 1 not in smaller and not masks and not any(sides)
    change = None if as_it_is else partial(_cut_values, blocks, smaller, source, masks, sides, sizes)
    return pattern, rows, (*among(modes, cut), *_term(cut, dense)), change


def _cut_values(
    blocks: Blocks,
    smaller: Ints,
    source: Tensor | None,
    masks: Sequence[Tensor],
    sides: Sequence[int],
    sizes: Sequence[int],
    values: Tensor,
) -> Tensor:
    """Return an operand's values cut into blocks, laid out as entries with dense modes."""
    values = blocks.cut_values(inside_only(values, masks), smaller, source)
    positions = [side for side in smaller if side > 1]
    if 1 in smaller:
        values = values.reshape(values.shape[0], *positions, *values.shape[1 + len(smaller) :])
    return split(values, sides, sizes, 1 + len(positions))


def _table(sides: Sequence[int], sizes: Sequence[int], order: list[int] | None, operand: Tensor) -> Tensor:
    """A dense operand with two dimensions for each that is cut, in another order if one is given."""
    table = split(operand, sides, sizes)
    return table if order is None else table.permute(order)


def _in_blocks(bound: Bound, cut: Cut, known: set[str], inner_first: Pattern) -> tuple[Names, bool, Put]:
    """The output of the einsum of blocks, coordinates first; whether there are any, and the pattern of the result.

    The result is in blocks along the letters that have coordinates of blocks alone. A letter without coordinates, in
    front of one that has some, is a block as wide as its mode; those behind are dense modes.

    Args:
        bound: the einsum as written.
        cut: the letters that are cut.
        known: letters with coordinates.
        inner_first: the pattern of the first sparse operand in the einsum of blocks.
    """
    e = bound.einsum
    rows = [among(_term(cut, [c]), known) for c in e.output]  # two make one coordinate, none is 0
    del rows[1 + max((n for n, letters in enumerate(rows) if letters), default=0) :]
    sides = []
    for c, letters in zip(e.output, rows, strict=False):
        side = cut[c][1] if c in cut and len(letters) == 1 else 1
        sides.append(side if letters else max(1, bound.by_index[c]))
    lying = Blocks(tuple(sides), bound.extents(e.output[: len(rows)]))
    width = outside(_term(cut, e.output), known)

    def put(patterns: Patterns, other: Pattern | None, empty: bool) -> tuple[Pattern, Change]:
        """The operand's own pattern where its blocks are the result's, one each; without coordinates one entry."""
        (first, *others) = patterns
        count = 1 if other is None else other.nnz
        if empty or 0 in lying.shape:
            count = 0
        lines = iter(() if other is None else other.coords.unbind())
        coords = []
        for letters in rows:
            row = next(lines)[:count] if letters else torch.zeros(count, dtype=torch.long, device=first.device)
            coords.append(row * cut[letters[1]][1] + next(lines)[:count] if len(letters) > 1 else row)
        single, coalesced = all(side == 1 for side in lying.sides), other is None or other.is_coalesced
        pattern = Pattern(torch.stack(coords), lying.grid, coalesced, None if single else lying)
        if other is inner_first and pattern.blocks == first.blocks:
            pattern = first
        else:
            pattern = first.known((e.inputs, e.output, e.sparse, bound.sizes, "blocks"), pattern, others)
        return pattern, partial(_in_shape, pattern.values_shape(bound.output_shape[len(rows) :]))

    return (*(d for letters in rows for d in letters), *width), any(rows), put


def _pushed(push: Change, *_: object) -> tuple[None, Change]:
    return None, push


def _in_shape(shape: Ints, values: Tensor) -> Tensor:
    """The values of a result in blocks; where no entries are left, the other einsum's may be one number, 0."""
    return (values.flatten()[:0] if 0 in shape else values).reshape(shape)


# -- entries with dense modes -----------------------------------------------------------------------------------------

SHARE = 4
"""Pairs of entries that meet may take the memory limit divided by this. Not measured."""


def entries(r: Request) -> Rewrite | None:
    """The einsum of the entries of operands with dense modes; its last operands are their values.

    None where dense modes have to be expanded: too few letters are spare, a sparse result keeps dense modes alone, or
    the pairs of entries take too much memory.

    Raises:
        OutOfMemoryError: dense modes are positions in blocks, and the pairs of these take too much memory.
    """
    if by_nonzeros(requested(r.settings.plan)) or not any(x.dense_order for x in r.sparse):
        return None
    bound, sparse = r.bound, r.sparse
    e = bound.einsum
    terms = [(e.inputs[p], x.sparse_order) for p, x in zip(e.sparse, sparse, strict=True)]
    coordinates, widths = [term[:order] for term, order in terms], [term[order:] for term, order in terms]
    kept = any(c in t for c in e.output for t in coordinates)
    numbers = tuple(e.spare[: len(sparse)])
    on_pattern, rows = r.has_pattern(), coordinates[0]
    # Rows of the einsum are the operand's entries.
    on_own_rows = on_pattern and len(sparse) == 1 and e.output[: len(rows)] == rows and not _is_empty(sparse[0])
    output = e.output[len(rows) :] if on_own_rows else e.output
    used = {c for t in (output, *e.tables, *widths) for c in t}
    letters = distinct(c for t in coordinates for c in t if c in used)
    pattern = None
    if len(e.spare) >= len(sparse) + SPARE and (kept or r.form != "sparse"):
        pattern = _pattern(sparse, coordinates, letters, r.settings)
    if pattern is None and r.in_blocks:
        device = sparse[0].device
        raise OutOfMemoryError(
            f'the pairs of blocks that meet in "{e.text}" would take more than a quarter of the '
            f"{r.settings.memory_on(device):,} bytes that are free on {device}; raise the limit with "
            "sparsetc.options(memory_limit=...), or cut an operand into parts and add up their results"
        )
    if pattern is None:
        return None
    like = r.like
    ones = SparseTensor._make(pattern, like.expand(pattern.nnz))
    elsewhere = {c for t in e.tables for c in t}
    # Values of 1 at each nonzero say nothing where other terms have their letters.
    read = [n for n, x in enumerate(sparse) if not x.pattern.ones or {*widths[n]} - elsewhere]
    values = [like.expand(sparse[n]._values.shape) for n in read]
    inputs = ((*numbers, *letters), *e.tables, *((numbers[n], *widths[n]) for n in read))
    einsum = Einsum(inputs, (*numbers, *letters, *output) if on_own_rows else output, (0,), e.text)
    sizes = bound.by_index | {n: x.nnz for n, x in zip(numbers, sparse, strict=True)}
    operands: list[SparseTensor | Tensor] = [ones, *(o for o in r.operands if not isinstance(o, SparseTensor)), *values]
    inner = Bound.of(einsum, sizes)
    request = replace(r, bound=inner, operands=operands, form="sparse" if on_pattern else "dense", in_blocks=False)
    take: list[Take] = [((), None), *(((p,), None) for p in e.dense)]
    for n, stand_in in zip(read, values, strict=True):
        take.append(((), partial(torch.ones_like, stand_in)) if sparse[n].pattern.ones else ((e.sparse[n],), None))
    put: Put | None = (lambda patterns, other, empty: (patterns[0], None)) if on_own_rows else None
    return Rewrite(f"entries numbered {', '.join(numbers)}", request, take, put)


def _pattern(
    sparse: Sequence[SparseTensor], terms: Sequence[Names], letters: Names, settings: Options
) -> Pattern | None:
    """Numbers of entries, or of pairs that meet, and their coordinates of some letters; kept with the first pattern.

    An operand whose entries have no elements has no nonzeros, so no entry of it takes part. None where pairs take too
    much memory.
    """
    first, *others = (x.pattern for x in sparse)
    key = ("entries", tuple(terms), letters, any(map(_is_empty, sparse)), *map(weakref.ref, others))
    pattern = first.cache.get(key)
    if pattern is None:
        with lasting():
            most = settings.memory_on(first.device) // (SHARE * 8 * (2 + len(letters)))
            numbers = _taking_part(sparse, terms, most)
            if numbers is None:
                return None
            patterns = (first, *others)
            sizes = [x.nnz for x in sparse]
            lines = [torch.arange(sizes[0], device=first.device) if n is None else n for n in numbers]
            for letter in letters:
                n = next(n for n, t in enumerate(terms) if letter in t)
                mode = terms[n].index(letter)
                lines.append(crd.picked(patterns[n].coords[mode], numbers[n]))
                sizes.append(patterns[n].shape[mode])
            pattern = Pattern(torch.stack(lines), tuple(sizes), True)
            pattern.ones = True
            pattern = first.cache.put(key, pattern, needs=others)
    return pattern  # type: ignore[no-any-return]


def _is_empty(x: SparseTensor) -> bool:
    """Return True if a dense mode has size 0: there may be entries, but none has an element."""
    return 0 in x._values.shape[1:]


def _taking_part(sparse: Sequence[SparseTensor], terms: Sequence[Names], most: int) -> list[Tensor | None] | None:
    """Return (n,) ascending numbers of one operand's entries, on the diagonal of repeated letters; None for all.

    Of two operands the numbers of both entries of every pair that agrees in shared letters, in lexicographic order. No
    entries where they are empty. None where there are more pairs than `most`.
    """
    entries = [
        torch.arange(0, device=x.device) if _is_empty(x) else crd.on_diagonal(letters, x.coords)
        for x, letters in zip(sparse, terms, strict=True)
    ]
    if len(sparse) == 1:
        return entries
    shared = among(distinct(terms[0]), terms[1])
    x, y = (
        [crd.picked(one.coords[letters.index(c)], at) for c in shared]
        for one, letters, at in zip(sparse, terms, entries, strict=True)
    )
    n, m = (one.nnz if at is None else at.numel() for one, at in zip(sparse, entries, strict=True))
    sizes = [sparse[0].pattern.shape[terms[0].index(c)] for c in shared]
    pairs = crd.meeting(*crd.joint_keys(x, y, sizes, sparse[0].coords, (n, m)), most)
    return pairs and [one if at is None else at[one] for one, at in zip(pairs, entries, strict=True)]


# -- long blocks ------------------------------------------------------------------------------------------------------

PART = 64
"""Positions a step sums of long blocks; half as many in float32 at "highest" for entries of at most `ROWS` rows.

Two buffers of a step's loads then leave room for more columns, or another program
(`benchmarks/results/given_blocks_parts.json`)."""
ROWS = 64
COLUMNS = 1024
"""Fewest columns for which blocks are cut: with fewer a program waits for each step, and longer steps are fewer."""


def parts(r: Request) -> Rewrite | None:
    """Cut long blocks, along the letters they sum, into parts, each an entry of its own; tables are unchanged."""
    e, sizes = r.bound.einsum, r.bound.by_index
    if len(e.sparse) > 1 or len(e.dense) != 2 or r.settings.effective_backend(r.sparse[0].device).at_once:
        return None
    (x,), (position,) = r.sparse, e.sparse
    coordinates = e.inputs[position]
    tables = sorted(e.tables, key=lambda table: coordinates[0] not in table)
    rows, columns = (prod(sizes[c] for c in t if c in e.output and c not in coordinates) for t in tables)
    if not x.pattern.ones or (columns < COLUMNS and coordinates[0] not in e.output):
        return None
    exact = r.like.dtype == torch.float32 and r.settings.effective_precision() == "highest"
    size = PART // 2 if exact and rows <= ROWS else PART
    summed = {*tables[0]} & {*tables[1]} - {*e.output, *coordinates}
    long = [c for c in tables[0] if c in summed and sizes[c] > size and sizes[c] % PART == 0]
    spare = e.spare
    if not long or len(spare) < len(long) + SPARE:
        return None
    cut = {c: (part, size) for c, part in zip(long, spare, strict=False)}
    counts = {part: sizes[c] // size for c, (part, _) in cut.items()}
    pattern = x.pattern.expanded(tuple(counts.values())).of_ones
    inputs = [_divided(letters, r.bound, cut) for letters in e.inputs]
    inputs[position] = (*coordinates, *counts), None
    einsum = Einsum(tuple([letters for letters, _ in inputs]), e.output, e.sparse, e.text)
    bound = Bound.of(einsum, sizes | dict.fromkeys(long, size) | counts)
    operands: list[SparseTensor | Tensor] = [r.like.expand(bound.shape(p)) for p in range(len(inputs))]
    operands[position] = SparseTensor._make(pattern, r.like.expand(pattern.nnz))
    take: list[Take] = [((p,) if p != position else (), change) for p, (_, change) in enumerate(inputs)]
    return Rewrite(f"{size} positions of {', '.join(long)} a step", replace(r, bound=bound, operands=operands), take)
