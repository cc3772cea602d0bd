"""Einsums of tensors: MTTKRP, TTM chains, transforms of integrals, decompositions.

The peers are `torch.compile` of gather, multiply and `index_add`, einsum in steps, opt_einsum on the dense tensor, and
other libraries' decompositions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from math import prod
from typing import Any

import common
import opt_einsum
import torch
from common import mttkrp_equation, mttkrp_reference

import sparsetc as stc
from instead_rows.calls import plain_and_compiled, versioned
from instead_rows.operands import distinct, generator, normal, of_data, scattered, uber
from instead_rows.row import CPU, GPU, LIMIT, Call, Row, Task

# -- MTTKRP -----------------------------------------------------------------------------------------------------------


def gathered(
    values: torch.Tensor, coords: torch.Tensor, factors: list[torch.Tensor], mode: int, size: int
) -> torch.Tensor:
    """MTTKRP by gather, multiply, `index_add`; `factors` has one of every mode."""
    product = values[:, None]
    for m, factor in enumerate(factors):
        if m != mode:
            product = product * factor[coords[m]]
    return product.new_zeros(size, product.shape[1]).index_add(0, coords[mode], product)


def mttkrp(tensor: Callable[[], stc.SparseTensor], rank: int, mode: int) -> Task:
    """A kernel that is held."""
    x = tensor()
    factors = common.factors(x, rank)
    others = [f for m, f in enumerate(factors) if m != mode]
    kernel = stc.compile(mttkrp_equation(x.order, mode), x, *others, precision="highest")
    arguments = x.values, x.coords, factors, mode, x.shape[mode]
    instead = plain_and_compiled("gather, multiply, index_add", gathered, *arguments)
    if common.DEVICE == "cpu" and find_spec("numba"):
        instead["a loop of numba"] = by_numba(x, factors, mode)
    return Task(lambda: kernel(*others), instead, lambda: mttkrp_reference(x, factors, mode))


def by_numba(x: stc.SparseTensor, factors: list[torch.Tensor], mode: int) -> Call:
    """MTTKRP as one would write it by hand: a loop over nonzeros, and one over columns."""
    import numba

    others = [m for m in range(x.order) if m != mode]
    lines = (
        f"def loop(values, c, {', '.join(f'f{m}' for m in range(x.order))}, out):",
        "    for n in range(values.size):",
        f"        value, row = values[n], out[c[{mode}, n]]",
        *(f"        row{m} = f{m}[c[{m}, n]]" for m in others),
        "        for r in range(row.size):",
        f"            row[r] += value * {' * '.join(f'row{m}[r]' for m in others)}",
    )
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)
    loop = numba.njit(fastmath=True)(names["loop"])
    arrays = [t.numpy() for t in (x.values, x.coords, *factors)]

    def call() -> torch.Tensor:
        out = torch.zeros_like(factors[mode])
        loop(*arrays, out.numpy())
        return out

    return call


# -- one mode contracted ----------------------------------------------------------------------------------------------


def last_mode(tensor: Callable[[], stc.SparseTensor], *width: int) -> Task:
    """The last mode contracted with a vector (TTV), or with a matrix of so many columns (TTM); the others stay."""
    x = tensor()
    letters, columns = common.letters(x.order), "r"[: len(width)]
    b = normal(x.shape[-1], *width)
    kernel = stc.compile(f"{letters},{letters[-1]}{columns}->{letters[:-1]}{columns}", x, b, output="sparse")
    fibers, row = distinct(x.coords[:-1], x.shape[:-1])

    def summed(values: torch.Tensor, column: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = values.view(-1, *[1] * len(width)) * b[column]
        return product.new_zeros(fibers.shape[1], *width).index_add(0, row, product)

    arguments = x.values, x.coords[-1], b
    doubles = x.values.double(), x.coords[-1], b.double()
    instead = plain_and_compiled("gather, multiply, index_add", summed, *arguments)
    return Task(lambda: kernel(b).values, instead, lambda: summed(*doubles))


# -- TTM chains -------------------------------------------------------------------------------------------------------


def in_steps(
    values: torch.Tensor, steps: list[tuple[torch.Tensor, torch.Tensor, int]], matrices: list[torch.Tensor]
) -> torch.Tensor:
    """Contract mode after mode: every step adds a mode of ranks at the end."""
    for (column, row, size), matrix in zip(steps, matrices, strict=True):
        rows = matrix[column].view(len(column), *[1] * (values.dim() - 1), matrix.shape[1])
        product = values[..., None] * rows
        values = product.new_zeros(size, *product.shape[1:]).index_add(0, row, product)
    return values


def steps_of(x: stc.SparseTensor, order: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """For each step: the index into its matrix, the row of the result that it adds to, and how many rows there are."""
    coords, left = x.coords, list(range(x.order))
    steps: list[tuple[torch.Tensor, torch.Tensor, int]] = []
    for mode in order:
        place = left.index(mode)
        left.pop(place)
        column, rest = coords[place], torch.cat((coords[:place], coords[place + 1 :]))
        if len(left) == 1:
            steps.append((column, rest[0], x.shape[left[0]]))
        else:
            coords, row = distinct(rest, [x.shape[m] for m in left])
            steps.append((column, row, coords.shape[1]))
    return steps


def ttmc(tensor: Callable[[], stc.SparseTensor], mode: int, rank: int) -> Task:
    """All modes but one contracted with a matrix each."""
    x = tensor()
    letters, ranks = common.letters(x.order), "abcdef"[: x.order]
    others = [m for m in range(x.order) if m != mode]
    matrices = {m: normal(x.shape[m], rank, seed=m) for m in others}
    terms = [letters, *(letters[m] + ranks[m] for m in others)]
    result = letters[mode] + "".join(ranks[m] for m in others)
    kernel = stc.compile(f"{','.join(terms)}->{result}", x, *matrices.values(), precision="highest")

    def by_hand(order: Sequence[int], dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
        axes = [1 + order.index(m) for m in others]
        return x.values.to(dtype), steps_of(x, order), [matrices[m].to(dtype) for m in order], axes

    def in_order(values: Any, steps: Any, step_matrices: Any, axes: Sequence[int]) -> torch.Tensor:
        return in_steps(values, steps, step_matrices).permute(0, *axes)

    backwards = others[::-1]  # the longest mode of Uber first, which leaves the fewest fibers
    instead: dict[str, Call] = {}
    for order in (backwards, [backwards[0], *others[:-1]]):
        instead |= plain_and_compiled(f"steps by hand, modes {order}", in_order, *by_hand(order))
    instead |= last_dense(x, matrices, mode, backwards)
    expected = by_hand(backwards, torch.float64)
    return Task(lambda: kernel(*matrices.values()), instead, lambda: in_order(*expected))


def last_dense(x: stc.SparseTensor, matrices: dict[int, torch.Tensor], mode: int, order: list[int]) -> dict[str, Call]:
    """The chain in steps whose last is a dense product, over all of the last mode and the one that is kept."""
    *before, last = order
    left = sorted((last, mode))
    sizes = [x.shape[m] for m in left]
    kept, _ = distinct(x.coords[left], sizes)
    place = kept[0] * sizes[1] + kept[1]
    ranks = {m: "abcdef"[m] for m in order}
    letters = common.letters(x.order)
    semi = "".join(letters[m] for m in left) + "".join(ranks[m] for m in before)
    equation = f"{semi},{letters[last]}{ranks[last]}->{letters[mode]}{''.join(sorted(ranks.values()))}"

    def chain(values: torch.Tensor, steps: Any, step_matrices: list[torch.Tensor]) -> torch.Tensor:
        fibers = in_steps(values, steps, step_matrices)
        dense = fibers.new_zeros(prod(sizes), *fibers.shape[1:]).index_copy(0, place, fibers)
        return torch.einsum(equation, dense.view(*sizes, *fibers.shape[1:]), matrices[last])

    arguments = x.values, steps_of(x, before), [matrices[m] for m in before]
    return plain_and_compiled(f"steps by hand, modes {order}, the last dense", chain, *arguments)


# -- transforms -------------------------------------------------------------------------------------------------------

TRANSFORM = "pqrs,pi,qj,rk,sl->ijkl"


def transform(size: int, share: float, dtype: torch.dtype) -> Task:
    """The 4-index transform of integrals, of which a share is stored."""
    dense = normal(*[size] * 4, dtype=dtype)
    dense *= torch.rand(dense.shape, generator=generator(1), device=common.DEVICE) < share
    matrices = [normal(size, size, dtype=dtype, seed=seed) for seed in range(2, 6)]
    x = stc.SparseTensor.from_dense(dense)
    kernel = stc.compile(TRANSFORM, x, *matrices, output="dense", precision="highest")
    shapes = [tuple(t.shape) for t in (dense, *matrices)]
    planned = opt_einsum.contract_expression(TRANSFORM, *shapes, optimize="optimal")

    def by_steps() -> torch.Tensor:
        out = dense
        for matrix in matrices:  # the first mode goes, the one it becomes comes last
            out = torch.tensordot(out, matrix, ([0], [0]))
        return out

    instead = {
        f"{versioned('opt_einsum')} on the dense tensor": lambda: planned(dense, *matrices, backend="torch"),
        "tensordot in steps": by_steps,
    }
    doubles = [t.double() for t in (dense, *matrices)]
    return Task(lambda: kernel(*matrices), instead, lambda: torch.einsum(TRANSFORM, *doubles), LIMIT[dtype])


def half_transform(size: int, share: float) -> Task:
    """Two of the four indices transformed, as by which correlated energies begin."""
    equation = "pqrs,rk,sl->pqkl"
    dense = normal(*[size] * 4)
    dense *= torch.rand(dense.shape, generator=generator(1), device=common.DEVICE) < share
    matrices = [normal(size, size, seed=seed) for seed in (2, 3)]
    x = stc.SparseTensor.from_dense(dense)
    kernel = stc.compile(equation, x, *matrices, output="dense", precision="highest")
    planned = opt_einsum.contract_expression(equation, *(tuple(t.shape) for t in (dense, *matrices)))
    instead = {f"{versioned('opt_einsum')} on the dense tensor": lambda: planned(dense, *matrices, backend="torch")}
    doubles = [t.double() for t in (dense, *matrices)]
    return Task(lambda: kernel(*matrices), instead, lambda: torch.einsum(equation, *doubles))


def network(rank: int) -> Task:
    """A tensor with three cores that share letters, a tensor train without its first core."""
    x = uber()
    equation, letters = "ijkl,jAB,kBC,lC->iA", "ABC"
    sizes = dict(zip("ijkl", x.shape, strict=True)) | dict.fromkeys(letters, rank)
    cores = [normal(*(sizes[c] for c in term), seed=n) / 4 for n, term in enumerate(equation[:-4].split(",")[1:])]
    kernel = stc.compile(equation, x, *cores, precision="highest")

    def cores_first(values: torch.Tensor, coords: torch.Tensor, cores: Sequence[torch.Tensor]) -> torch.Tensor:
        """Two cores become one, a nonzero's product has its row, and the last core is a row for each nonzero."""
        row, *others = coords
        both = torch.einsum("jAB,kBC->jkAC", cores[0], cores[1])
        rows = values[:, None] * torch.einsum("nAC,nC->nA", both[others[0], others[1]], cores[2][others[2]])
        return rows.new_zeros(x.shape[0], rank).index_add(0, row, rows)

    doubles = x.values.double(), x.coords, [core.double() for core in cores]
    instead = plain_and_compiled("two cores first, gather, index_add", cores_first, x.values, x.coords, cores)
    return Task(lambda: kernel(*cores), instead, lambda: cores_first(*doubles))


# -- decompositions ---------------------------------------------------------------------------------------------------

SWEEPS = 5


def als(coords: torch.Tensor, values: torch.Tensor, shape: Sequence[int], start: list[torch.Tensor]) -> torch.Tensor:
    """The model's values, as `at` takes them, after sweeps of CP-ALS by gather and `index_add`."""
    factors = [f.clone() for f in start]
    for _ in range(SWEEPS):
        for mode, size in enumerate(shape):
            grams = [f.T @ f for m, f in enumerate(factors) if m != mode]
            right = gathered(values, coords, factors, mode, size)
            factors[mode] = torch.linalg.lstsq(prod(grams[1:], start=grams[0]), right.T).solution.T
    return at(coords, factors)


def at(coords: torch.Tensor, factors: Sequence[torch.Tensor], weights: Any = 1.0) -> torch.Tensor:
    """Values of a model at every 64th of some coordinates; all of them would take four times as long as our sweeps."""
    rows = [f[c] for f, c in zip(factors, coords[:, ::64], strict=True)]
    return (prod(rows[1:], start=rows[0]) * weights).sum(-1)


def cp(tensor: Callable[[], stc.SparseTensor], rank: int) -> Task:
    """Sweeps of CP-ALS from the same start, all of a call: planning what is not kept, and the sweeps."""
    x = tensor()
    start = [torch.rand(n, rank, generator=generator(m), device=common.DEVICE) for m, n in enumerate(x.shape)]

    def ours() -> torch.Tensor:
        model = stc.decomposition.cp_als(x, rank, init=start, n_iter_max=SWEEPS, tol=0)
        return at(x.coords, model.factors, model.weights)

    instead: dict[str, Call] = {"gather, multiply, index_add": lambda: als(x.coords, x.values, x.shape, start)}
    if common.DEVICE == "cpu" and find_spec("pyttb"):
        instead[versioned("pyttb")] = by_pyttb(x, start)
    if common.DEVICE == "cpu" and find_spec("tensorly") and prod(x.shape) < 1e6:
        instead[f"{versioned('tensorly')} on the dense tensor"] = by_tensorly(x, start)
    doubles = [f.double() for f in start]
    return Task(ours, instead, lambda: als(x.coords, x.values.double(), x.shape, doubles), 2e-3)


def by_pyttb(x: stc.SparseTensor, start: list[torch.Tensor]) -> Call:
    """The sweeps of pyttb, in its float64."""
    import pyttb

    tensor = pyttb.sptensor(x.coords.T.numpy(), x.values.double().numpy()[:, None], x.shape)

    def call() -> torch.Tensor:
        first, threads = pyttb.ktensor([f.double().numpy().copy() for f in start]), torch.get_num_threads()
        model = pyttb.cp_als(tensor, start[0].shape[1], stoptol=0, maxiters=SWEEPS, init=first, printitn=0)[0]
        torch.set_num_threads(threads)  # it starts threads of numba, which change torch's count for good
        return at(x.coords, [torch.as_tensor(f) for f in model.factor_matrices], torch.as_tensor(model.weights))

    return call


def by_tensorly(x: stc.SparseTensor, start: list[torch.Tensor]) -> Call:
    """The sweeps of tensorly on the dense tensor."""
    import tensorly

    dense = x.to_dense()
    weights = torch.ones(start[0].shape[1])

    def call() -> torch.Tensor:
        with tensorly.backend_context("pytorch"):
            first = (weights, [f.clone() for f in start])
            model = tensorly.decomposition.parafac(dense, len(weights), init=first, n_iter_max=SWEEPS, tol=0)
        return at(x.coords, model.factors, model.weights)

    return call


GUANINE, UBER = "guanine_TEvv_3d", "uber_amj_4d"
SKEWED = partial(scattered, (2000, 3000, 4000), 400_000, skew=3.0)
UNIFORM = partial(scattered, (30_000, 40_000, 50_000), 400_000)
SMALL = partial(scattered, (60, 50, 40), 6000)
EVENTS = partial(scattered, (24, 7, 300, 500, 20), 60_000, skew=4.0)
CRIME = partial(scattered, (60, 24, 77, 32), 150_000, skew=1.5)
SIX = partial(scattered, (20, 15, 30, 10, 8, 12), 100_000, skew=2.0)
DOUBLE, SINGLE = torch.float64, torch.float32

ROWS = [
    *(Row(f"Uber (23 days), mode {m}, R 32", "MTTKRP", partial(mttkrp, uber, 32, m)) for m in range(4)),
    *(Row(f"Uber (23 days), mode {m}, R 16", "MTTKRP", partial(mttkrp, uber, 16, m), CPU) for m in range(4)),
    *(
        Row(f"{name}, mode {m}, R 32", "MTTKRP", partial(mttkrp, partial(of_data, name), 32, m), GPU, (name,))
        for name, order in ((GUANINE, 3), (UBER, 4))
        for m in range(order)
    ),
    *(
        Row(f"{name}, mode {m}, R {rank}", "MTTKRP", partial(mttkrp, tensor, rank, m), CPU)
        for rank in (32, 16)
        for name, tensor, order in (
            ("skewed 2000 x 3000 x 4000, 400 K nonzeros", SKEWED, 3),
            ("uniform 30 K x 40 K x 50 K, 400 K nonzeros", UNIFORM, 3),
            ("events of 5 modes, 60 K nonzeros", EVENTS, 5),
        )
        for m in range(order)
    ),
    *(
        Row(f"{name}, last mode, {what}", "one mode", partial(last_mode, tensor, *width), CPU)
        for name, tensor in (
            ("Uber (23 days)", uber),
            ("skewed 2000 x 3000 x 4000, 400 K nonzeros", SKEWED),
            ("uniform 30 K x 40 K x 50 K, 400 K nonzeros", UNIFORM),
        )
        for what, width in (("TTV", ()), ("TTM, 16 columns", (16,)))
    ),
    Row("Uber (23 days), mode 3, ranks 16", "TTM chain", partial(ttmc, uber, 3, 16)),
    Row("Uber (23 days), mode 3, ranks 8", "TTM chain", partial(ttmc, uber, 3, 8)),
    Row("uber_amj_4d, mode 3, ranks 16", "TTM chain", partial(ttmc, partial(of_data, UBER), 3, 16), GPU, (UBER,)),
    Row("uber_amj_4d, mode 3, ranks 8", "TTM chain", partial(ttmc, partial(of_data, UBER), 3, 8), GPU, (UBER,)),
    *(
        Row(f"Uber (23 days), mode {m}, ranks {r}", "TTM chain", partial(ttmc, uber, m, r))
        for m, r in ((0, 4), (3, 32))
    ),
    *(
        Row(f"{name}, mode {m}, ranks {r}", "TTM chain", partial(ttmc, tensor, m, r))
        for name, tensor, m, r in (
            ("skewed 2000 x 3000 x 4000, 400 K nonzeros", SKEWED, 0, 16),
            ("like Chicago's crimes, 150 K nonzeros", CRIME, 3, 8),
            ("events of 5 modes, 60 K nonzeros", EVENTS, 0, 8),
            ("events of 5 modes, 60 K nonzeros", EVENTS, 4, 16),
            ("6 modes, 100 K nonzeros", SIX, 0, 4),
            ("6 modes, 100 K nonzeros", SIX, 5, 8),
        )
    ),
    Row("three cores of ranks 8 that share letters, Uber (23 days)", "network", partial(network, 8)),
    Row("4 indices, 20^4, 39 % filled, float32", "transform", partial(transform, 20, 0.39, SINGLE)),
    Row("4 indices, 20^4, 39 % filled, float64", "transform", partial(transform, 20, 0.39, DOUBLE)),
    Row("4 indices, 40^4, 2 % filled, float32", "transform", partial(transform, 40, 0.02, SINGLE)),
    Row("4 indices, 24^4, 13 % filled, float32", "transform", partial(transform, 24, 0.13, SINGLE)),
    Row("4 indices, 41^4, 26 % filled, float32", "transform", partial(transform, 41, 0.26, SINGLE)),
    Row("4 indices, 60^4, 2 % filled, float32", "transform", partial(transform, 60, 0.02, SINGLE)),
    Row("4 indices, 60^4, .1 % filled, float32", "transform", partial(transform, 60, 0.001, SINGLE)),
    Row("2 of 4 indices, 24^4, 13 % filled, float32", "transform", partial(half_transform, 24, 0.13)),
    Row("2 of 4 indices, 40^4, 2 % filled, float32", "transform", partial(half_transform, 40, 0.02)),
    Row("CP-ALS, Uber (23 days), R 16, 5 sweeps", "decomposition", partial(cp, uber, 16)),
    Row("CP-ALS, 60 x 50 x 40, 5 % filled, R 16, 5 sweeps", "decomposition", partial(cp, SMALL, 16)),
]
