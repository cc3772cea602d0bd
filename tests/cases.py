"""What the tests of whole einsums share: patterns, operands, the matrix of operations and plans, and the comparison.

Nothing here imports triton, so that the interpreter's tests may set their environment first.
"""

from __future__ import annotations

import contextlib
import copyreg
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from reference import run, whole
from torch._C._dynamo import guards

import sparsetc as stc
from sparsetc.contraction.contraction import wrap
from sparsetc.ir.equation.einsum import Bound
from sparsetc.ir.equation.parse import parse
from sparsetc.ir.lower.default_tree import groups_of
from sparsetc.packing.base import sides_of
from sparsetc.planner.registry import PLANS
from sparsetc.tensor.dtypes import summed_dtype

TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
    torch.complex64: 1e-5,
    torch.complex128: 1e-13,
    torch.int8: 0.0,
    torch.int16: 0.0,
    torch.int32: 0.0,
    torch.int64: 0.0,
}
"""Of the error of an element, relative to the sum of the absolute values of its terms."""
SMALLEST = {torch.float16: 1e-6}
"""What an element may be off by besides: float16 has few exponents."""
TILED = tuple(name for name, method in PLANS.items() if "threshold" in method.options)
"""Plans that put nonzeros into tiles, each of which a single nonzero may take."""


# --- the ends of int64 ------------------------------------------------------------------------------------------------

LIMITS = (2**63 - 1, 2**63, -(2**63), -(2**63) - 1)
"""Integers at the ends of int64, and the first beyond."""
WIDE = (
    *((2**63 - 1,), (3577, (2**63 - 1) // 3577)),  # sizes multiply to 2**63 - 1
    *((2**31, 2**32), (2**21, 2**21, 2**21)),  # 2**63, as many numbers as int64 has from 0 on
    *((3, 2**62), (65535, (2**64 - 1) // 65535)),  # more, and 2**64 - 1
    *((2**31, 2**33), (2**33, 2**31), (2**62, 1, 4)),  # 2**64
    *((2**40, 2**40), (2**31, 2**33, 2**20), (2**20, 1, 2**62, 2**63 - 1), (2**24,) * 6),
)
"""Shapes whose linear index is about as large as int64 holds, or larger."""
every_wide_shape = pytest.mark.parametrize("shape", WIDE, ids=lambda shape: "x".join(map(str, shape)))


def fits(number: int) -> bool:
    """Whether int64 holds it."""
    return -(2**63) <= number < 2**63


def ends(shape: tuple[int, ...], seed: int = 0) -> list[tuple[int, ...]]:
    """Some ten different positions, in no order, each coordinate near an end or the middle of its mode."""
    random = Random(seed)
    near = [[at % n for at in (0, 1, n // 2 - 1, n // 2, n - 2, n - 1)] for n in shape]
    found = {tuple(map(random.choice, near)) for _ in range(12)}
    return random.sample(sorted(found), len(found))


# --- operands ---------------------------------------------------------------------------------------------------------


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small integers for integer types, else between -1 and 1."""
    g = generator(seed)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(-3, 4, shape, generator=g).to(dtype)
    real = torch.rand(shape, generator=g, dtype=torch.float64) * 2 - 1
    if dtype.is_complex:
        return torch.complex(real, torch.rand(shape, generator=g, dtype=torch.float64) * 2 - 1).to(dtype)
    return real.to(dtype)


def reduced(thing: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return what a pickle holds of a thing of the package: a function, and its arguments."""
    return copyreg.dispatch_table[type(thing)](thing)  # type: ignore[return-value]


def _empty(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    return torch.zeros((len(shape), 0), dtype=torch.int64)


def _one(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    return torch.tensor([[int(torch.randint(0, s, (1,), generator=g))] for s in shape])


def _dense(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    return torch.cartesian_prod(*(torch.arange(s) for s in shape)).reshape(-1, len(shape)).T


def _random(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    count = max(1, min(80, prod(shape) // 3))
    return torch.stack([torch.randint(0, s, (count,), generator=g) for s in shape])


def _skewed(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    """Most nonzeros at small coordinates: a few long rows and many short ones."""
    count = max(1, min(100, prod(shape) // 2))
    return torch.stack([(torch.rand(count, generator=g) ** 3 * s).long().clamp(max=s - 1) for s in shape])


def _slice(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    """Every position of one slice of the first mode."""
    at = int(torch.randint(0, shape[0], (1,), generator=g))
    return _dense((1, *shape[1:]), g) + torch.tensor([at] + [0] * (len(shape) - 1)).unsqueeze(1)


def _fiber(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    """Every position of one fiber of the last mode."""
    at = [int(torch.randint(0, s, (1,), generator=g)) for s in shape[:-1]]
    return torch.stack([*(torch.full((shape[-1],), a) for a in at), torch.arange(shape[-1])])


def _row(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    """All nonzeros in one row of the first mode, not all of the row."""
    coords = _random(shape, g)
    coords[0] = shape[0] - 1
    return coords


PATTERNS: dict[str, Callable[[tuple[int, ...], torch.Generator], torch.Tensor]] = {
    "empty": _empty,
    "one": _one,
    "dense": _dense,
    "random": _random,
    "skewed": _skewed,
    "slice": _slice,
    "fiber": _fiber,
    "row": _row,
}


def pattern(name: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """(order, nnz) coordinates, duplicates possible, in no order."""
    return PATTERNS["empty" if 0 in shape else name](shape, generator(seed))


def unique(coords: torch.Tensor) -> torch.Tensor:
    """Sorted lexicographically, without duplicates."""
    return torch.unique(coords, dim=1)


def random_sparse(
    shape: tuple[int, ...], name: str, dtype: torch.dtype, seed: int = 0, coalesce: bool = True
) -> stc.SparseTensor:
    """A tensor of a pattern; with ``coalesce=False`` in random order and with duplicates."""
    coords = pattern(name, shape, seed)
    if coalesce:
        coords = unique(coords)
    else:
        coords = coords.repeat(1, 2)
        coords = coords[:, torch.randperm(coords.shape[1], generator=generator(seed))]
    return stc.SparseTensor(coords, random_values((coords.shape[1],), dtype, seed + 1), shape, coalesce=coalesce)


# --- the comparison ---------------------------------------------------------------------------------------------------


def densified(x: torch.Tensor | stc.SparseTensor) -> torch.Tensor:
    """A result as a dense tensor in a type wide enough to sum duplicates in."""
    if isinstance(x, torch.Tensor):
        return widened(x)
    term = whole("", x.coords, widened(x.values))
    out = torch.zeros(x.shape, dtype=term.values.dtype, device=x.device)
    return out.index_put_(tuple(term.coords), term.values, accumulate=True)


def widened(x: torch.Tensor) -> torch.Tensor:
    wide = torch.complex128 if x.dtype.is_complex else torch.float64 if x.dtype.is_floating_point else torch.int64
    return x.detach().to(wide)


def bound_of(equation: str, operands: list[Any]) -> Bound:
    return parse(equation, [tuple(o.shape) for o in operands], [isinstance(o, stc.SparseTensor) for o in operands])


def magnitudes(x: torch.Tensor | stc.SparseTensor) -> torch.Tensor | stc.SparseTensor:
    """Absolute values, those of duplicates too."""
    if isinstance(x, torch.Tensor):
        return widened(x).abs()
    return stc.SparseTensor(x.coords, widened(x.values).abs(), x.shape, coalesce=False)


def assert_matches(
    result: torch.Tensor | stc.SparseTensor, equation: str, operands: list[Any], tolerance: float | None = None
) -> None:
    """The result has the right dtype and shape and is within tolerance of the float64 reference."""
    operands = [o.cpu() for o in operands]
    e = bound_of(equation, operands).einsum
    expected = run(e, *operands)
    x = operands[e.sparse[0]]
    plain_sum = len(operands) == 1 and e.contracted
    assert result.dtype == (summed_dtype(x.dtype) if plain_sum else x.dtype)
    assert tuple(result.shape) == tuple(expected.shape)
    actual = densified(result).cpu()
    if tolerance is None:
        tolerance = TOLERANCE[x.dtype]
    allowed = tolerance * run(e, *map(magnitudes, operands)) + SMALLEST.get(x.dtype, 0.0)
    wrong = ~((actual - expected).abs() <= allowed)  # so that NaN is wrong
    if bool(wrong.any()):
        worst = int(((actual - expected).abs() - allowed).nan_to_num(torch.inf).argmax())
        found, wanted, off = (t.reshape(-1)[worst].item() for t in (actual, expected, allowed))
        raise AssertionError(
            f"{equation}: {int(wrong.sum())} of {wrong.numel()} elements are off; the worst, element {worst}, is "
            f"{found}, expected {wanted} within {off}"
        )


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """What torch gives uninitialised is NaN, or a large integer: what a kernel leaves unwritten is seen."""
    places = [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")]
    places += [(guards, "_empty_strided_cuda")]
    with contextlib.ExitStack() as patches:
        for owner, name in places:
            patches.enter_context(mock.patch.object(owner, name, _filling(getattr(owner, name))))
        yield


def _filling(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = original(*args, **kwargs)
        if made.dtype == torch.bool or not made.numel() or made.device.type == "meta":
            return made
        memory = made.untyped_storage().nbytes() // made.element_size()  # less than its elements where these overlap
        with torch.no_grad():
            whole = made.as_strided((memory,), (1,), 0)
            whole.fill_(torch.nan if made.is_floating_point() or made.is_complex() else 77)
        return made

    return filled


# --- the matrix of operations -----------------------------------------------------------------------------------------

MODES = "ijklmn"


def mttkrp(order: int, mode: int) -> str:
    """``"ijk,jr,kr->ir"`` and its like."""
    letters = MODES[:order]
    return ",".join([letters, *(f"{c}r" for c in letters if c != letters[mode])]) + f"->{letters[mode]}r"


def ttmc(order: int, mode: int) -> str:
    """``"ijk,jr,ks->irs"`` and its like."""
    letters, ranks = MODES[:order], iter("rstu")
    factors = [c + next(ranks) for c in letters if c != letters[mode]]
    return ",".join([letters, *factors]) + f"->{letters[mode]}" + "".join(f[1] for f in factors)


OPERATIONS: dict[str, str] = {
    **{f"mttkrp-{order}-{mode}": mttkrp(order, mode) for order in (2, 3, 4, 5) for mode in range(order)},
    **{f"ttmc-{order}-{mode}": ttmc(order, mode) for order in (3, 4) for mode in range(order)},
    "spmv": "ij,j->i",
    "spmm": "ij,jr->ir",
    "spmm-transposed": "ij,ir->rj",
    "ttv-0": "ijk,i->jk",
    "ttv-2": "ijk,k->ij",
    "ttv-chain": "ijk,j,k->i",
    "ttm-0": "ijk,ir->jkr",
    "ttm-2": "ijk,kr->rij",
    "sddmm": "ij,ir,jr->ij",
    "sampled": "ijk,ir,jr,kr->ijk",
    "sampled-permuted": "ijk,ir,jr->kij",
    "reduction": "ijk->",
    "weighted-reduction": "ij,ir,jr->",
    "row-sum": "ijk->i",
    "projection": "ijk->ik",
    "scalar": "ij,->ij",
    "scalars": "ij,,jr,->ir",
    "dense-letters-only": "ij,r->ri",
    "shared-table": "ijk,jkr->ir",
    "semi-sparse": "ijk,jr,kr->ijr",
    "kept-factor": "ijk,ir,jr,kr->ir",
    "diagonal": "iij,jr->ir",
    "vector": "i,ir->r",
}

SIZES = {"i": 7, "j": 9, "k": 5, "l": 4, "m": 3, "r": 8, "s": 4, "t": 3, "u": 2}


@dataclass(frozen=True)
class Problem:
    """An einsum with its operands."""

    equation: str
    sizes: dict[str, int] = field(default_factory=lambda: SIZES, hash=False)
    pattern: str = "skewed"
    dtype: torch.dtype = torch.float32
    seed: int = 0
    coalesce: bool = True
    sparse: int = 0

    def operands(self, device: str = "cpu") -> list[Any]:
        terms = self.equation.split("->")[0].split(",")
        made: list[Any] = []
        for n, term in enumerate(terms):
            shape = tuple(self.sizes[c] for c in term)
            if n == self.sparse:
                made.append(random_sparse(shape, self.pattern, self.dtype, self.seed, self.coalesce))
            else:
                made.append(random_values(shape, self.dtype, self.seed + 10 * (n + 1)))
        return [o.to(device) for o in made]


CALLS = 1 if os.environ.get("TRITON_INTERPRET") == "1" else 2
"""The interpreter is slow, and what differs between calls, launches, is one for all programs."""


def check(
    problem: Problem, device: str = "cpu", tolerance: float | None = None, calls: int = CALLS, **settings: Any
) -> stc.Kernel:
    """Compile, call on poisoned memory, twice unless told, compare with the reference; returns the kernel."""
    operands = problem.operands(device)
    dense = [o for o in operands if isinstance(o, torch.Tensor)]
    kernel = stc.compile(problem.equation, *operands, **settings)
    with poisoned():
        for _ in range(calls):
            assert_matches(kernel(*dense), problem.equation, operands, tolerance)
    return kernel


def plan_names() -> list[str]:
    """Every plan whose formats its name says, and those that formats offer or are registered."""
    from sparsetc.planner.registry import PLANS

    registered = sorted(name for name, method in PLANS.items() if method.make)
    return [*dict.fromkeys(("coo", "fiber", "rows", "coo+rows", "fiber+rows", *registered))]


def longest_row(kernel: stc.Kernel) -> int:
    """Nonzeros of the longest output row."""
    from sparsetc.formats.fiber import row_lengths

    problem = kernel.step.problem
    return int(row_lengths(problem.counts.coords, problem.shape, problem.kept).max())


def two_parts(
    equation: str, operands: list[Any], long: str, fused: bool, threshold: int | None = None, **settings: Any
) -> stc.plans.Plan:
    """A plan of long rows (of only the longest, unless told) by one plan and of the others by ``rows``."""
    kernel = stc.compile(equation, *operands, plan=long, **settings)
    first = kernel.step.choice.plan.parts[0]
    second = stc.compile(equation, *operands, plan="rows", **settings).step.choice.plan.parts[0]
    second = replace(second, schedule=replace(second.schedule, warps=first.schedule.warps))
    second = replace(second, storage=replace(second.storage, max_fiber_len=0))
    limit = longest_row(kernel) if threshold is None else threshold
    return stc.plans.Plan(f"{long}+rows", (first, second), fused, "run_length", (("threshold", limit),))


def explicit_plan(
    format: str,
    levels: str,
    blocks: dict[str, int],
    *,
    lanes: int = 32,
    max_fiber_len: int = 0,
    max_item_nnz: int = 0,
    unroll: int = 1,
    warps: int = 1,
    precision: str = "",
    name: str = "explicit",
) -> stc.plans.Plan:
    """A plan of one part in which nothing is left to heuristics.

    Args:
        format: its name.
        levels: modes of the item, the lane and the leaf level, as in ``"0||12"``.
        blocks: size of the block of each dense letter.
        lanes: of the schedule, and of fibers in storage; words are narrow where there are several.
        max_fiber_len: of the storage.
        max_item_nnz: of the storage.
        unroll: of the schedule.
        warps: of the schedule.
        precision: of its dots; "" for no dots.
        name: of the plan.
    """
    item, lane, leaf = (tuple(map(int, level)) for level in levels.split("|"))
    width = lanes if format == "fiber" else 1
    storage = stc.plans.Storage(item, lane, leaf, width, max_fiber_len, max_item_nnz, narrow=lanes > 1)
    dot, own = bool(precision), tuple(blocks.items())
    schedule = stc.plans.Schedule(warps, own, dot, precision or "ieee", lanes=lanes, unroll=unroll)
    return stc.plans.Plan(name, (stc.plans.Part(format, storage, schedule),))


def joined(first: stc.plans.Plan, second: stc.plans.Plan, threshold: int, fused: bool = True) -> stc.plans.Plan:
    """One plan of the parts of two: long rows by the first."""
    parts = (*first.parts, *second.parts)
    return stc.plans.Plan(f"{first.name}+{second.name}", parts, fused, "run_length", (("threshold", threshold),))


def tile_plan(
    equation: str,
    operands: Sequence[stc.SparseTensor | torch.Tensor],
    backend: str,
    format: str = "dense_tile",
    warps: int = 1,
) -> stc.plans.Plan:
    """A plan of tiles alone, two tiles a work item; positions stored in mode order, or as the planner has them."""
    inputs, output = equation.split("->")
    letters, *terms = inputs.split(",")
    sizes = {c: n for t, o in zip(terms, operands[1:], strict=True) for c, n in zip(t, o.shape, strict=True)}
    least = 16 if backend == "triton" and operands[0].dtype.is_floating_point else 1  # dots take 16
    blocks = {c: max(least, 1 << (n - 1).bit_length()) for c, n in sizes.items() if c not in letters}
    kept = tuple(letters.index(c) for c in output if c in letters)
    others = tuple(m for m in range(len(letters)) if m not in kept)
    storage = stc.plans.Storage(kept, others, (), max_item_nnz=2 * 4096)
    if format.endswith("planned"):
        format = format.removesuffix(" planned")
        (x, *_) = operands
        shapes = [tuple(o.shape) for o in operands]
        bound = parse(equation, shapes, [True, *(False for _ in shapes[1:])])
        dots = not isinstance(x, stc.SparseTensor) or x.dtype.is_floating_point or x.dtype.is_complex
        storage = groups_of(bound, sides_of(x.shape), dots).storage(letters, 2 * 4096)
    return stc.plans.Plan("tiles", (stc.plans.Part(format, storage, stc.plans.Schedule(warps, tuple(blocks.items()))),))


def wrapped(kernel: stc.Kernel, rows: torch.Tensor) -> torch.Tensor | stc.SparseTensor:
    """The result of a kernel of one sparse operand, of the rows that its programs have added up."""
    return wrap(kernel.contraction, kernel.step.of_rows(rows), [kernel.operand.pattern])


def replayed(kernel: Any, dense: Sequence[torch.Tensor]) -> torch.Tensor:
    """What a call gives that a CUDA graph captured, once the dense operands have other values."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result: torch.Tensor = kernel(*dense)
    for n, operand in enumerate(dense):
        operand.copy_(random_values(tuple(operand.shape), operand.dtype, 100 + n))
    graph.replay()
    torch.cuda.synchronize()
    return result
