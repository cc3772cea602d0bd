"""Small systems of alternating least squares as single kernels; `linear` says what they compute, and launches them.

In: Gram matrices, factors and right-hand sides. Out: an inverse; a factor, in place, and what is measured of it. In
torch each is many launches of next to no work: the inverse about fifteen, a nonnegative factor three a column and pass,
the fit and the scales thirty. The module is imported only where there is a GPU, or Triton's interpreter, for it imports
triton.

Nothing is added by atomics, so results are the same at every run.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["order", "skip"])
def invert(
    grams, penalty, own, inverse, pivots, order, skip, rank, share, WIDTH: tl.constexpr, LEAST: tl.constexpr
):  # fmt: skip
    """One program: the inverse of H with a share of its diagonal added, by sweeps; and H in its dtype.

    H is the elementwise product of (order, rank, rank) float64 matrices, all but the one numbered `skip`, and a penalty
    on its diagonal, a float64 scalar or None. It is scaled to a diagonal of ones first. No pivot is then below the
    share but by rounding, so nothing need be exchanged and nothing can fail. A sweep (Goodnight 1979) leaves a
    symmetric matrix symmetric, so a pivot's row is its column too; it goes through memory, `pivots` (rank + 1, WIDTH)
    float64, which takes a third of the time of a sum over threads (H200, rank 32: 15 against 51 us,
    `benchmarks/results/kernel_probes.json`). WIDTH is a power of two that the rank fits in, LEAST what is taken for 0
    on the diagonal.
    """
    line = tl.arange(0, WIDTH)
    row, column = line[:, None], line[None, :]
    at = row * rank + column
    inside = (row < rank) & (column < rank)
    h = tl.where(inside, 1.0, 0.0).to(tl.float64)
    for mode in range(order):
        h *= tl.load(grams + mode * rank * rank + at, mask=inside & (mode != skip), other=1)
    if penalty is not None:
        h += tl.where(inside & (row == column), tl.load(penalty), 0.0)
    tl.store(own + at, h, mask=inside)
    diagonal = tl.where(row == column, h, 0.0)
    beside, above = tl.sum(diagonal, 1)[:, None], tl.sum(diagonal, 0)[None, :]
    known = (beside > LEAST) & (above > LEAST)
    scale = tl.where(known, tl.sqrt(tl.where(known, beside, 1.0)) * tl.sqrt(tl.where(known, above, 1.0)), 1.0)
    a = tl.where(row == column, 1.0, tl.where(known, h / scale, 0.0))
    a += tl.where((row == column) & known, share, 0.0)  # in float64, unlike 1 + share
    tl.store(pivots + row * 0 + column, a, mask=row == 0)
    for k in range(rank):
        tl.debug_barrier()  # the row is there
        mine = pivots + k * WIDTH
        above, left, pivot = tl.load(mine + line)[None, :], tl.load(mine + line)[:, None], tl.load(mine + k)
        part = 1.0 / tl.where(pivot < share, share, pivot)  # which keeps NaN
        others = tl.where(column == k, left * part, a - left * (above * part))
        a = tl.where(row == k, tl.where(column == k, -part, above * part), others)
        tl.store(mine + WIDTH + row * 0 + column, a, mask=row == k + 1)
    tl.store(inverse + at, -a / scale, mask=inside)


@triton.jit
def update(
    factor, rhs, gram, rows, rank, passes,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, A_ROW: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Columns one by one, each the best nonnegative one for the others as they are.

    WIDTH is a power of two that the rank fits in, BLOCK the rows of a program, A_ROW whether each row has its own Gram
    matrix, LEAST what is taken for 0 on its diagonal.
    """
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < rank)[None, :]
    at = row[:, None] * rank + column[None, :]
    mine = tl.load(factor + at, mask=inside, other=0)
    wanted = tl.load(rhs + at, mask=inside, other=0)
    for _ in range(passes):
        for r in range(rank):
            if A_ROW:
                line = tl.load(gram + (row[:, None] * rank + r) * rank + column[None, :], mask=inside, other=0)
            else:
                line = tl.load(gram + r * rank + column, mask=column < rank, other=0)[None, :]
            here = column[None, :] == r
            diagonal = tl.sum(tl.where(here, line, 0), 1)
            old = tl.sum(tl.where(here, mine, 0), 1)
            step = (tl.sum(tl.where(here, wanted, 0), 1) - tl.sum(mine * line, 1)) / tl.where(
                diagonal > LEAST, diagonal, 1
            )
            new = old + tl.where(diagonal > LEAST, step, 0)
            new = tl.where(new < 0, 0, new)  # which keeps NaN
            mine = tl.where(here, new[:, None], mine)
    tl.store(factor + at, mine, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def advance(factor, rhs, own, inverse, grams, inners, rows, rank, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A least-squares step of a factor, and of each program's rows their Gram matrix and their products with B.

    The step is ``A += (B - A H) (H + D)^-1`` with the two matrices that `invert` gives. A program takes every block of
    BLOCK rows whose number leaves its own as a remainder. What it sums goes to `grams` (programs, rank, rank), of the
    factor's dtype, and to `inners` (programs,) float64. WIDTH is a power of two that the rank fits in.
    """
    program = tl.program_id(0)
    line = tl.arange(0, WIDTH)
    column = line[None, :]
    square = line[:, None] * rank + column
    within = (line[:, None] < rank) & (column < rank)
    h = tl.load(own + square, mask=within, other=0)
    back = tl.load(inverse + square, mask=within, other=0)
    gram = tl.zeros((WIDTH, WIDTH), dtype=factor.dtype.element_ty)
    inner = tl.zeros((WIDTH,), dtype=tl.float64)
    for block in range(program, tl.cdiv(rows, BLOCK), tl.num_programs(0)):
        row = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
        at = row * rank + column
        inside = (row < rows) & (column < rank)
        old = tl.load(factor + at, mask=inside, other=0)
        wanted = tl.load(rhs + at, mask=inside, other=0)
        residual = wanted - tl.dot(old, h, input_precision="ieee")
        new = old + tl.dot(residual, back, input_precision="ieee")
        tl.store(factor + at, new, mask=inside)
        gram += tl.dot(tl.trans(new), new, input_precision="ieee")
        inner += tl.sum((wanted * new).to(tl.float64), 0)
    tl.store(grams + program * rank * rank + square, gram, mask=within)
    tl.store(inners + program, tl.sum(inner, 0))


@triton.jit(do_not_specialize=["programs"])
def total(grams, inners, gram, inner, programs, size, LIMIT: tl.constexpr, CHUNK: tl.constexpr):
    """What the programs of `advance` summed, `size` numbers each, summed over all of them, in float64.

    A program sums CHUNK columns of `grams` (programs, size) into `gram` (size,), and the first of them `inners`
    (programs,) into the scalar `inner`. LIMIT is a power of two that the number of programs fits in.
    """
    one = tl.arange(0, LIMIT)
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = (one < programs)[:, None] & (at < size)[None, :]
    parts = tl.load(grams + one[:, None] * size + at[None, :], mask=inside, other=0)
    tl.store(gram + at, tl.sum(parts.to(tl.float64), 0), mask=at < size)
    if tl.program_id(0) == 0:
        tl.store(inner, tl.sum(tl.load(inners + one, mask=one < programs, other=0), 0))


@triton.jit
def measure(grams, inner, norm, is_free, fit, scales, rank, ORDER: tl.constexpr, WIDTH: tl.constexpr):
    """One program: a model's fit, and the scales that balance its factors' columns.

    All is float64 but `is_free` (ORDER,) bool: `grams` (ORDER, rank, rank), `scales` (ORDER, rank), and the scalars
    `inner` of X and the model, `norm` of X, and `fit`. WIDTH is a power of two that the rank fits in.
    """
    line = tl.arange(0, WIDTH)
    row, column = line[:, None], line[None, :]
    inside = (row < rank) & (column < rank)
    model = tl.where(inside, 1.0, 0.0).to(tl.float64)
    logs = tl.zeros((WIDTH,), dtype=tl.float64)  # of the free modes' norms
    alive = line < rank
    count = 0
    for mode in tl.static_range(ORDER):
        gram = grams + mode * rank * rank
        model *= tl.load(gram + row * rank + column, mask=inside, other=0)
        free = tl.load(is_free + mode) != 0
        norms = tl.sqrt(tl.load(gram + line * (rank + 1), mask=line < rank, other=1))
        alive = alive & ((norms > 0) | (not free))  # neither 0 nor NaN
        logs += tl.where(free & (norms > 0), tl.log(tl.where(norms > 0, norms, 1.0)), 0.0)
        count += free.to(tl.int32)
    length = tl.load(norm)
    error = length * length - 2 * tl.load(inner) + tl.sum(tl.sum(model, 1), 0)
    error = tl.where(error < 0, 0.0, error)  # which keeps NaN
    tl.store(fit, 1 - tl.sqrt(error) / tl.where(length == 0, 1.0, length))
    mean = tl.exp(logs / count)
    for mode in tl.static_range(ORDER):
        norms = tl.sqrt(tl.load(grams + mode * rank * rank + line * (rank + 1), mask=line < rank, other=1))
        changes = alive & (tl.load(is_free + mode) != 0)
        by = tl.where(changes, mean / tl.where(changes, norms, 1.0), 1.0)
        tl.store(scales + mode * rank + line, by, mask=line < rank)


@triton.jit(do_not_specialize=["order"])
def scale(factors, sizes, modes, grams, scales, order, rank, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply the columns of factors in place, each by its mode's row of the scales, and scale all Gram matrices so.

    `factors`, `sizes` and `modes` are tuples: the matrices, their numbers of rows and those of their modes. `grams`
    (order, rank, rank) and `scales` (order, rank) are float64. There are programs enough to have a Gram matrix each.
    """
    program = tl.program_id(0)
    line = tl.arange(0, WIDTH)
    row, column = line[:, None], line[None, :]
    if program < order:
        above = tl.load(scales + program * rank + column, mask=column < rank, other=1)
        beside = tl.load(scales + program * rank + row, mask=row < rank, other=1)
        at, inside = grams + program * rank * rank + row * rank + column, (row < rank) & (column < rank)
        tl.store(at, tl.load(at, mask=inside, other=0) * beside * above, mask=inside)
    for number in tl.static_range(len(factors)):
        by = tl.load(scales + modes[number] * rank + column, mask=column < rank, other=1)
        for block in range(program, tl.cdiv(sizes[number], BLOCK), tl.num_programs(0)):
            here = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
            known = (here < sizes[number]) & (column < rank)
            place = factors[number] + here * rank + column
            tl.store(place, tl.load(place, mask=known, other=0) * by, mask=known)
