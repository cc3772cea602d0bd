"""What the tests of contraction trees share: plans with trees of a user's own, and tiles of any storage."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

import sparsetc as stc

SIZES = {"i": 7, "j": 20, "k": 6, "r": 5, "s": 16, "t": 3, "h": 8}


@dataclass(frozen=True)
class TreeCase:
    """An equation, how its operand is stored, and the tree that is lowered; none for that of the default rule."""

    equation: str
    format: str
    levels: str
    """Modes of the item, the lane and the leaf, as in ``0|1|2``."""
    tree: str = ""
    tile_sizes: tuple[tuple[str, int], ...] = ()
    tile_loops: tuple[str, ...] = ()
    sides: tuple[int, ...] = ()
    sequence: tuple[int, ...] = ()
    lanes: int = 16
    dot: bool = True
    output: str = "auto"
    density: float = 0.05

    def __str__(self) -> str:
        sides = f" {'x'.join(map(str, self.sides))}" if self.sides else ""
        return f"{self.format} {self.levels}{sides} {self.equation} {self.tree or 'by the rule'}"

    def operands(self) -> tuple[stc.SparseTensor, list[torch.Tensor]]:
        """The sparse operand, float64, with an empty row and a full one; and the dense ones."""
        g = torch.Generator().manual_seed(0)
        first, *terms = self.equation.split("->")[0].split(",")
        shape = tuple(SIZES[c] for c in first)
        chosen = torch.rand(shape, generator=g) < self.density
        chosen[0], chosen[1, ..., :3] = False, True
        coords = chosen.nonzero().T
        x = stc.SparseTensor(coords, torch.randn(coords.shape[1], generator=g, dtype=torch.float64), shape)
        return x, [torch.randn([SIZES[c] for c in t], generator=g, dtype=torch.float64) for t in terms]

    def plan(self, backend: str = "triton") -> stc.plans.Plan:
        """The plan of one part."""
        first, *terms = self.equation.split("->")[0].split(",")
        item, lane, leaf = (tuple(map(int, level)) for level in self.levels.split("|"))
        params = tuple((f"side_{m}", side) for m, side in enumerate(self.sides))
        lanes = self.lanes if self.format == "fiber" else 1
        storage = stc.plans.Storage(item, lane, leaf, lanes, sequence=self.sequence, params=params)
        axes = sorted({c for t in terms for c in t if c not in first})
        least = 16 if backend == "triton" else 1
        blocks = tuple((c, max(least, 1 << (SIZES[c] - 1).bit_length())) for c in axes)
        tree = stc.plans.parse_tree(self.tree) if self.tree else None
        schedule = stc.plans.Schedule(blocks=blocks, dot=self.dot, lanes=self.lanes, tree=tree)
        schedule = replace(schedule, tile_sizes=self.tile_sizes, tile_loops=self.tile_loops)
        return stc.plans.Plan("trees", (stc.plans.Part(self.format, storage, schedule),))

    def kernel(self, backend: str = "triton") -> stc.Kernel:
        """The plan, compiled."""
        x, dense = self.operands()
        return stc.compile(self.equation, x, *dense, plan=self.plan(backend), backend=backend, output=self.output)

    def expected(self) -> torch.Tensor:
        """What dense operands give."""
        x, dense = self.operands()
        return torch.einsum(self.equation, x.to_dense(), *dense)


TTMC, MTTKRP, SAMPLED = "ijk,jr,ks->irs", "ijk,jr,kr->ir", "ijk,ir,jr,kr->ijk"
IN_TILE = (("i", 8), ("j", 16), ("k", 8))
TREES = (
    # Runs: other orders of products, sums over the lanes first or last, dots in place of multiplications.
    TreeCase(MTTKRP, "coo", "0||12", "sum[nonzero lane](C * (B * X))"),
    TreeCase(MTTKRP, "coo", "0||12", "sum[lane nonzero](X * B * C)"),
    TreeCase(TTMC, "coo", "0||12", "sum[nonzero](dot[lane](X * B, C))"),
    TreeCase(TTMC, "coo", "0||12", "sum[nonzero](dot[lane](C, B * X))"),
    TreeCase(TTMC, "coo", "0||12", "sum[nonzero lane](X * B * C)"),
    TreeCase(TTMC, "coo", "01||2", "sum[nonzero lane](X * B * C)"),
    TreeCase(TTMC, "coo", "01||2", "sum[nonzero lane](X * C) * B"),
    TreeCase("ijk,jr,kr,ir->i", "coo", "0||12", "sum[r](D * sum[nonzero lane](X * B * C))"),
    TreeCase("ijk,jr,kr,ir->i", "coo", "0||12", "sum[nonzero lane r](X * B * C * D)"),
    TreeCase(SAMPLED, "coo", "||012", "sum[r](X * (B * C) * D)"),
    TreeCase("ijh,jhr->ir", "coo", "0||12", "sum[nonzero lane](X * B)"),
    TreeCase("ij,ihr,jhs->irs", "coo", "0||1", "sum[nonzero lane](X * dot[h](B, C))"),
    TreeCase("ijk,ijht,khs->its", "coo", "0||12", "sum[nonzero](dot[lane h](X * B, C))"),
    TreeCase("ijk,ijht,khs->its", "coo", "0||12", "sum[nonzero](dot[h lane](B, C * X))"),
    TreeCase("ijk,ijht,khs->its", "coo", "0||12", "sum[nonzero lane h](X * B * C)"),
    TreeCase("ijk,ijht,khs->its", "coo", "0||12", lanes=4),
    TreeCase("ijk,ijkh,ihs->is", "coo", "0||12", "sum[nonzero lane](dot[h](X * B, C))"),
    TreeCase("ijk,ijkh,hs->ijks", "coo", "||012", "dot[h](X * B, C)"),
    TreeCase("ijk,ijkh,hs->ijks", "coo", "0||12", "dot[h](B, C) * X"),
    # Operands of no coordinate are multiplied by one another, and then by rows.
    TreeCase("ijk,r,s->krs", "coo", "0||12", "X * (B * C)"),
    TreeCase("ijk,r,s->irs", "coo", "0||12", "sum[nonzero lane](X) * (B * C)"),
    TreeCase("ijk,r,s->irs", "fiber", "0|1|2", "sum[block lane](sum[nonzero](X * (C * B)))"),
    TreeCase("ijk,r,s,jr->irs", "coo", "0||12", "sum[nonzero lane](X * (B * C) * D)"),
    TreeCase("ijk,r,s,jt->irst", "fiber", "0|1|2", "sum[block lane](sum[nonzero](X) * (B * C) * D)"),
    # Fibers: what they share is multiplied in before their sums or after.
    TreeCase(MTTKRP, "fiber", "0|1|2", "sum[nonzero block lane](X * B * C)"),
    TreeCase(MTTKRP, "fiber", "0|1|2", "sum[block lane](sum[nonzero](X * C) * B)"),
    TreeCase(MTTKRP, "fiber", "0|1|2", "sum[block](sum[lane](sum[nonzero](X * C) * B))"),
    TreeCase(TTMC, "fiber", "0|1|2", "sum[block](dot[lane](sum[nonzero](X * C), B))"),
    TreeCase("ijk,ir,kr->jr", "fiber", "0|1|2", "sum[nonzero](X * C * B)"),
    # Tiles: dots over other letters, in another order, of products with what is stored, or none at all.
    TreeCase(MTTKRP, "dense_tile", "0|12|", "sum[j tile](dot[k](C, X) * B)", IN_TILE[::2], ("j",), (8, 16, 8)),
    TreeCase(MTTKRP, "dense_tile", "0|12|", "sum[k tile](dot[j](B, X) * C)", IN_TILE[:2], ("k",), (8, 16, 8)),
    TreeCase(MTTKRP, "dense_tile", "0|12|", "sum[tile](dot[j k](B * C, X))", IN_TILE, (), (8, 16, 8)),
    TreeCase(MTTKRP, "dense_tile", "0|12|", "sum[tile](dot[j k](X, C * B))", IN_TILE, (), (8, 16, 8)),
    TreeCase(TTMC, "dense_tile", "0|12|", "sum[k tile](dot[j](B, X * C))", IN_TILE[:2], ("k",), (8, 16, 8)),
    TreeCase(MTTKRP, "dense_tile", "0|12|", "sum[j k tile](X * B * C)", IN_TILE[:1], ("j", "k"), (8, 4, 8)),
    TreeCase(MTTKRP, "dense_tile", "0|12|", "sum[j tile k](X * B * C)", IN_TILE[::2], ("j",), (8, 4, 8)),
    TreeCase(TTMC, "dense_tile", "0|12|", "sum[tile](dot[k](dot[j](B, X), C))", IN_TILE, (), (8, 16, 8)),
    TreeCase(
        TTMC, "dense_tile", "0|12|", "sum[tile](dot[j](dot[k](C, X), B))", (("i", 4), *IN_TILE[1:]), (), (8, 16, 8)
    ),
    TreeCase(TTMC, "dense_tile", "0|12|", "sum[k tile](dot[j](B, X) * C)", IN_TILE[:2], ("k",), (8, 16, 8)),
    TreeCase("ij,ir,jr->ij", "dense_tile", "0|1|", "X * dot[r](B, C)", (("i", 16), ("j", 16)), (), (16, 16)),
    TreeCase("ij,ir,jr->ij", "bitmap_tile", "0|1|", "dot[r](B, C) * X", (("i", 8), ("j", 16)), (), (8, 16)),
    TreeCase(SAMPLED, "dense_tile", "|012|", "X * dot[r](B * C, D)", IN_TILE, (), (8, 16, 8)),
    TreeCase("ij,jr,ir->ir", "bitmap_tile", "0|1|", "sum[tile](dot[j](B, X)) * C", (("i", 8), ("j", 16)), (), (8, 16)),
    TreeCase("ij,jr,ir->ir", "bitmap_tile", "0|1|", "C * sum[j tile](X * B)", (("i", 8), ("j", 4)), ("j",), (8, 16)),
)
KEYED = tuple(
    TreeCase(equation, format, levels, sides=sides, output=output, dot=dot)
    for equation, levels, sides, output, dot in (
        (SAMPLED, "0|12|", (4, 4, 4), "auto", True),
        (SAMPLED, "|012|", (3, 5, 2), "auto", False),
        (SAMPLED, "012||", (1, 24, 2), "sparse", True),
        ("ijk,i->jk", "0|12|", (3, 5, 4), "sparse", True),
        ("ijk,k->ij", "2|10|", (8, 4, 2), "dense", True),
        ("ijk,jr->ikr", "2|01|", (5, 24, 1), "auto", True),
        ("ijk,jr->kir", "|210|", (2, 16, 4), "dense", False),
        ("ijk,ir->ijkr", "1|02|", (3, 3, 5), "auto", True),
        ("ijk,ijr->kr", "|012|", (3, 5, 8), "auto", True),
        ("ij,ir,jr->ij", "1|0|", (5, 3), "auto", True),
        ("ij,ir,jr->ij", "01||", (16, 16), "sparse", True),
    )
    for format in ("dense_tile", "bitmap_tile")
)
