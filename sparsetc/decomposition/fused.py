"""The sweep of `als.py` in few launches: three a mode beside its MTTKRP, and two more, for most take less than a gap.

In: the equations of a whole tensor, of a rank whose matrices a program keeps in registers. Out: the same sweep.
`als.py` and `linear.py` say in torch what each launch computes; `linear_kernels.py` has the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparsetc.codegen.launch import FUSED
from sparsetc.decomposition.als import Equations, Sweep
from sparsetc.decomposition.linear import INVERSE_RANK, LEAST_SQUARES, Update, inverse_of_product, warps_of, width_of
from sparsetc.device.profile import machine_of

PROGRAMS = 128
"""Programs of a least-squares step at most, a power of two: about one a multiprocessor of a large GPU."""
BLOCK = 16
"""Rows that such a program has at a time: the fewest of which a Gram matrix is a `tl.dot`; of 32, registers spill."""
STAGES = 2
"""Blocks that such a program has under way; more take registers and shared memory that some GPUs lack."""
ADVANCE_ROWS = 65_536
"""Rows of a factor up to which its step is one launch. Above, the launches of torch are little of its time, and its
products use the GPU better. Not measured."""
ADVANCE_RANKS = {torch.float32: 64, torch.float64: 32}
"""The largest rank of which a program of the step keeps two matrices and a sum of them in registers."""
CHUNK = 32
"""Numbers that a program sums over those of the step."""
SCALED = 2048
"""Numbers of a factor that a program scales at a time."""


def sweep_of(
    equations: Equations, factors: Sequence[torch.Tensor], free: Sequence[int], update: Update, l2_reg: float
) -> Sweep:
    """A sweep over static buffers, in few launches where there are kernels for it."""
    if update is LEAST_SQUARES and serves(factors):
        return FusedSweep(equations, factors, free, l2_reg)
    return Sweep(equations, factors, free, update, l2_reg)


def serves(factors: Sequence[torch.Tensor]) -> bool:
    """Whether factors are on a GPU, of a rank whose H one program keeps in registers."""
    return factors[0].is_cuda and factors[0].shape[1] <= INVERSE_RANK


class FusedSweep(Sweep):
    """A sweep of one H of all rows by least squares: what is tiny in it is a kernel a step.

    Attributes:
        _inner: the inner product of X and the model.
    """

    def __init__(
        self, equations: Equations, factors: Sequence[torch.Tensor], free: Sequence[int], l2_reg: float
    ) -> None:
        super().__init__(equations, factors, free, LEAST_SQUARES, l2_reg)
        self._grams, self._norm = equations.grams, equations.norm
        self._inner = torch.zeros_like(self._norm)
        self._penalty = torch.full_like(self._norm, l2_reg) if l2_reg else None

    def _system(self, mode: int) -> tuple[torch.Tensor, ...]:
        return inverse_of_product(self._grams, self._factors[mode].dtype, mode, self._penalty)

    def _advance(self, mode: int, rhs: torch.Tensor, system: tuple[torch.Tensor, ...]) -> None:
        factor = self._factors[mode]
        if advances(factor):
            advance(factor, rhs, system, self._grams[mode], self._inner)
            self._equations.advanced(mode, self._inner if mode == self._free[-1] else None)
            return
        self._update.apply(factor, rhs, system)
        self._equations.updated(mode)
        if mode == self._free[-1]:
            self._inner.copy_(self._equations.inner(mode, rhs))

    def _finish(self, mode: int, rhs: torch.Tensor, system: tuple[torch.Tensor, ...]) -> None:
        scales = measure(self._grams, self._inner, self._norm, self._is_free, self.measures)
        modes, matrices = zip(*self._equations.scalable(self._free), strict=True)
        scale(matrices, modes, self._grams, scales)


def advances(factor: torch.Tensor) -> bool:
    """Whether a factor's step is one launch."""
    return factor.shape[0] <= ADVANCE_ROWS and factor.shape[1] <= ADVANCE_RANKS[factor.dtype]


def advance(
    factor: torch.Tensor, rhs: torch.Tensor, system: tuple[torch.Tensor, ...], gram: torch.Tensor, inner: torch.Tensor
) -> None:
    """`linear.step` of a contiguous factor; its Gram matrix and its inner product with B, into float64 buffers."""
    from sparsetc.decomposition import linear_kernels as kernels

    (rows, rank), width = factor.shape, width_of(factor.shape[1])
    programs = max(1, min(PROGRAMS, -(-rows // BLOCK)))
    grams = factor.new_empty(programs, rank, rank)
    inners = inner.new_empty(programs)
    with torch.cuda.device_of(factor):
        kernels.advance[(programs,)](
            factor, rhs.contiguous(), *system, grams, inners, rows, rank, width, BLOCK,
            num_warps=step_warps(width, machine_of(factor.device)), num_stages=STAGES, **FUSED,
        )  # fmt: skip
        size = rank * rank
        kernels.total[(-(-size // CHUNK),)](grams, inners, gram, inner, programs, size, PROGRAMS, CHUNK, **FUSED)


def measure(
    grams: torch.Tensor, inner: torch.Tensor, norm: torch.Tensor, is_free: torch.Tensor, fit: torch.Tensor
) -> torch.Tensor:
    """`linear.balancing`'s scales (order, rank), of the norms in Gram matrices; and `linear.fit_of`, into a buffer."""
    from sparsetc.decomposition import linear_kernels as kernels

    order, rank = grams.shape[:2]
    scales, width = grams.new_empty(order, rank), width_of(rank)
    with torch.cuda.device_of(grams):
        kernels.measure[(1,)](
            grams, inner, norm, is_free, fit, scales, rank, order, width, num_warps=warps_of(width), **FUSED
        )  # fmt: skip
    return scales


def scale(factors: Sequence[torch.Tensor], modes: Sequence[int], grams: torch.Tensor, scales: torch.Tensor) -> None:
    """Scale the columns of some modes' contiguous factors, and all Gram matrices as these, in place and in one launch.

    Args:
        factors: (rows, rank) each, of as many modes as are given.
        modes: whose factors these are.
        grams: (order, rank, rank) float64.
        scales: (order, rank) float64, which are 1 in the modes that are not given.
    """
    from sparsetc.decomposition import linear_kernels as kernels

    (order, rank), sizes = scales.shape, tuple(f.shape[0] for f in factors)
    width = width_of(rank)
    block = SCALED // width
    grid = (max(order, -(-max(sizes) // block)),)
    with torch.cuda.device_of(scales):
        kernels.scale[grid](tuple(factors), sizes, tuple(modes), grams, scales, order, rank, width, block)


def step_warps(width: int, machine: str) -> int:
    """Warps of a program of a least-squares step: of AMD's, of 64 threads, more have too few registers each."""
    return 4 if machine == "hip" else warps_of(width)
