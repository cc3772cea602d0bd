"""What more ranks would give: the time of an MTTKRP and of a sweep of CP-ALS on P ranks, from measured rates.

In: a tensor's sizes, a number of ranks, and `Rates`. Out: seconds, and bytes that a rank holds. ``python
benchmarks/distributed_model.py`` prints the table of `docs/guides/distributed.md`, which has the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2, prod

from sparsetc.distributed.cut import Grid, grids

WORD = 4
"""Bytes of an element of a factor: float32."""


@dataclass(frozen=True)
class Rates:
    """What one rank does in a second, and what a message costs.

    Attributes:
        nonzeros: nonzeros of an MTTKRP at `rank` a second.
        memory: bytes a second that updates of factor rows read and write.
        link: bytes a second that a rank sends to others in its node.
        network: bytes a second that a rank sends to ranks of other nodes.
        latency: seconds of one step of a collective operation, of which it has log2 of its ranks.
        node: ranks of a node.
        passes: how often a sweep reads or writes each row that a rank owns.
        block_passes: how often a sweep reads or writes each row of a rank's ranges, beside the MTTKRP.
        imbalance: the most nonzeros of a rank over the mean.
    """

    nonzeros: float
    memory: float
    link: float
    network: float
    latency: float
    rank: int = 32
    node: int = 8
    passes: float = 10.0
    block_passes: float = 2.0
    imbalance: float = 1.15


@dataclass(frozen=True)
class TensorSize:
    """The sizes of a tensor."""

    name: str
    shape: tuple[int, ...]
    nnz: int


@dataclass(frozen=True)
class SweepCost:
    """What a sweep of CP-ALS takes on each rank, in seconds, and what it holds, in bytes.

    Attributes:
        rows: updates of rows that a rank owns.
        sent: factor rows, to the ranks that own them and back.
        waits: steps of collective operations.
        nbytes: a packed copy for each mode, and blocks of factors with what is made of them.
    """

    grid: Grid
    mttkrp: float
    rows: float
    sent: float
    waits: float
    nbytes: float

    @property
    def seconds(self) -> float:
        """All of it, nothing overlapped."""
        return self.mttkrp + self.rows + self.sent + self.waits


H200 = Rates(nonzeros=7.4e10, memory=3.0e12, link=2.36e11, network=4.0e10, latency=2.2e-5)
"""Rates of H200s: nonzeros, link and latency by `benchmarks/results/distributed_1.json` and `distributed_2.json` (like
nell-2, NCCL over NVLink); memory and network are assumed."""

AMAZON = TensorSize("amazon", (4_821_207, 1_774_269, 1_805_187), 1_741_809_018)
REDDIT = TensorSize("reddit", (8_211_298, 176_962, 8_116_559), 4_687_474_081)
"""Sizes as FROSTT (frostt.io) publishes them."""
NELL_2 = TensorSize("like nell-2", (12_092, 9_184, 28_818), 72_166_771)
"""What was measured on one and two GPUs."""


def rows_of(tensor: TensorSize, grid: Grid, mode: int) -> float:
    """Rows of a mode's range, were all of one length."""
    return tensor.shape[mode] / grid[mode]


def sharing(grid: Grid, mode: int) -> int:
    """Ranks that have the same range of a mode."""
    return prod(grid) // grid[mode]


def mttkrp(tensor: TensorSize, grid: Grid, mode: int, rates: Rates) -> float:
    """Seconds of one MTTKRP, its rows summed over the ranks that share them."""
    local = tensor.nnz * rates.imbalance / prod(grid) / rates.nonzeros
    return local + _collective(tensor, grid, mode, rates) + rates.latency * _steps(sharing(grid, mode))


def sweep(tensor: TensorSize, ranks: int, rates: Rates) -> SweepCost:
    """A sweep over all modes, on the grid that sends the fewest rows."""
    modes = range(len(tensor.shape))
    grid = grids(ranks, tensor.shape, list(modes), False)[0]
    width = rates.rank * WORD
    own = sum(rows_of(tensor, grid, m) / sharing(grid, m) for m in modes) * width
    blocks = sum(rows_of(tensor, grid, m) for m in modes) * width
    local = len(modes) * tensor.nnz * rates.imbalance / ranks
    steps = sum(2 * _steps(sharing(grid, m)) + 2 * _steps(ranks) for m in modes) + 2 * _steps(ranks)
    return SweepCost(
        grid,
        local / rates.nonzeros,
        (own * rates.passes + blocks * rates.block_passes) / rates.memory,
        2 * sum(_collective(tensor, grid, m, rates) for m in modes),
        steps * rates.latency,
        local * (WORD * len(modes)) + 4 * blocks,
    )


def _collective(tensor: TensorSize, grid: Grid, mode: int, rates: Rates) -> float:
    """Seconds in which the rows of a range are sent to the ranks that own them, or come from them."""
    ranks = sharing(grid, mode)
    sent = rows_of(tensor, grid, mode) * rates.rank * WORD * (ranks - 1) / ranks
    return sent / (rates.link if prod(grid) <= rates.node else rates.network)


def _steps(ranks: int) -> int:
    return ceil(log2(ranks))


def table(
    tensors: Sequence[TensorSize] = (AMAZON, REDDIT), counts: Sequence[int] = (8, 64, 1024), rates: Rates = H200
) -> str:
    """Sweeps as a table of Markdown. The efficiency is one rank's time by this model over the time of all ranks."""
    lines = ["| tensor | GPUs | grid | GB each | MTTKRPs ms | rows ms | sent ms | waits ms | sweep ms | efficiency |"]
    lines.append("|---" * 10 + "|")
    for tensor in tensors:
        for ranks in counts:
            one = sweep(tensor, ranks, rates)
            least = sweep(tensor, 1, rates).seconds / ranks
            grid = " x ".join(map(str, one.grid[:-1]))
            times = " | ".join(f"{1e3 * t:.2f}" for t in (one.mttkrp, one.rows, one.sent, one.waits, one.seconds))
            lines.append(
                f"| {tensor.name} | {ranks:,} | {grid} | {one.nbytes / 1e9:.1f} | {times} | {least / one.seconds:.0%} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
