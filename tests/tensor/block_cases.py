"""Tensors in blocks for tests: random ones of any order and sides, and einsums of them by equation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import sparsetc as stc
from sparsetc.tensor.pattern import Pattern

SIZES = {"i": 5, "j": 6, "k": 7, "l": 4, "a": 3, "b": 8, "h": 3, "d": 2, "r": 4}

Spec = str | tuple[int, ...]
"""An operand: sides of its modes, with dense modes behind where there are fewer sides than modes; ``dense``, ``sparse``
or, with one dense mode, ``semi``."""

ONE: dict[str, tuple[Spec, ...]] = {
    "i->i": ((2,),),
    "i->": ((3,),),
    "i,ir->r": ((2,), "dense"),
    "ij,jr->ir": ((2, 3), "dense"),
    "ij,ir,jr->ij": ((2, 3), "dense", "dense"),
    "ij->ij": ((2, 3),),
    "ij->ji": ((2, 3),),
    "ij->i": ((2, 4),),
    "ij->j": ((2, 4),),
    "ij->": ((2, 4),),
    "ii->i": ((2, 2),),
    "ii->": ((2, 4),),
    "ii,ir->ir": ((6, 3), "dense"),
    "iji,jr->ir": ((2, 1, 4), "dense"),
    "iji->ji": ((2, 5, 2),),
    "ij,jr->irj": ((2, 3), "dense"),
    "ij,jr->rij": ((2, 3), "dense"),
    "ij,rj->ijr": ((2, 3), "dense"),
    "ijk,jr,kr->ir": ((2, 3, 2), "dense", "dense"),
    "ijk,ir,kr->jr": ((1, 3, 4), "dense", "dense"),
    "ijk,ir,jd->krd": ((2, 2, 7), "dense", "dense"),
    "ijk,k->ij": ((2, 3, 3), "dense"),
    "ijk,k->ji": ((2, 3, 3), "dense"),
    "ijkl,jr,kr,lr->ir": ((2, 3, 2, 1), "dense", "dense", "dense"),
    "ijkl,l->kji": ((2, 3, 2, 3), "dense"),
    "ijh,jr->ihr": ((2, 3), "dense"),
    "ijh,jhd->ihd": ((2, 3), "dense"),
    "ijh->hij": ((2, 3),),
    "ijh->h": ((2, 3),),
    "ijh->ijh": ((2, 3),),
    "ij,jjr->ir": ((2, 4), "dense"),
    "ij,r->ijr": ((2, 4), "dense"),
}
"""Equations of one operand in blocks."""

TWO: dict[str, tuple[Spec, ...]] = {
    "ij,jk->ik": ((2, 3), (3, 2)),
    "ij,jk->ki": ((2, 4), (6, 3)),
    "ijk,kab->ijab": ((2, 3, 2), (4, 3, 2)),
    "ij,ij->ij": ((2, 3), (2, 3)),
    "ij,ij->": ((2, 3), (2, 2)),
    "ij,ji->ij": ((2, 3), (4, 2)),
    "ii,ij->ji": ((2, 4), (2, 2)),
    "ij,ka->ijka": ((2, 3), (4, 3)),
    "ij,jk,kr->ir": ((2, 3), (3, 2), "dense"),
    "ij,jk->ijk": ((2, 3), (2, 7)),
    "ij,kj->j": ((2, 3), (3, 2)),
    "ijh,jkh->ikh": ((2, 3), (3, 2)),
    "ijh,jkd->ihkd": ((2, 3), (3, 2)),
}
"""Equations of two operands in blocks."""

MIXED: dict[str, tuple[Spec, ...]] = {
    "ij,jk->ik": ((2, 3), "sparse"),
    "ji,jk->ki": ("sparse", (3, 2)),
    "ij,ij->ij": ((2, 4), "sparse"),
    "ij,ij->ji": ("sparse", (2, 4)),
    "ij,ijk->k": ((2, 4), "sparse"),
    "ijk,ij->ijk": ("sparse", (2, 4)),
    "ij,kaj->ika": ((2, 4), "semi"),
    "ij,kja->aik": ((2, 4), "semi"),
    "ij,ikj->ikj": ((2, 4), "semi"),
    "ij,kaj,ar->rik": ((2, 4), "semi", "dense"),
    "ij,ij->": ((2, 4), "sparse"),
}
"""Equations of an operand in blocks and a sparse one that is not."""
MANY: dict[str, tuple[Spec, ...]] = {
    "ij,jk,kl->il": ((2, 3), (3, 2), "sparse"),
    "ij,jk,kl,lr->ir": ((2, 3), (3, 2), "sparse", "dense"),
    "ij,ij,ij->ij": ((2, 3), "sparse", (2, 3)),
    "ijh,jkh,kd->idh": ("semi", "semi", "sparse"),
    "ij,jk,ki,r->r": ((2, 3), (3, 2), (2, 2), "dense"),
    "ij,ij,kl->kl": ((2, 3), (2, 3), (2, 2)),
    "ij,jk,kl,la->ia": ((2, 3), (3, 2), "sparse", (2, 4)),
    "ij,jk,kl->lki": ((2, 3), "sparse", "sparse"),
    "ij,j,k->ik": ((2, 3), (3,), (2,)),
}
"""Equations of three sparse operands or more."""
CASES = {
    f"{kind} {equation}": (equation, specs)
    for kind, cases in (("one", ONE), ("two", TWO), ("mixed", MIXED), ("many", MANY))
    for equation, specs in cases.items()
}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator(seed))
    return torch.randint(-3, 4, shape, dtype=dtype, generator=generator(seed))


def zero_past_the_end(blocks: torch.Tensor, coords: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    for mode in range(coords.shape[0]):
        side = blocks.shape[1 + mode]
        inside = coords[mode].unsqueeze(1) * side + torch.arange(side) < shape[mode]
        blocks = blocks * inside.reshape([-1 if n == 0 else side if n == 1 + mode else 1 for n in range(blocks.ndim)])
    return blocks


def blocks_of(
    shape: tuple[int, ...], sides: tuple[int, ...], n: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Coordinates, most likely with duplicates, and blocks; the last modes are dense where sides are few."""
    grid = [-(-size // side) for size, side in zip(shape, sides, strict=False)]
    rows = [torch.randint(0, max(1, g), (n,), generator=generator(seed + m)) for m, g in enumerate(grid)]
    coords = torch.stack(rows)
    blocks = numbers((n, *sides, *shape[len(sides) :]), dtype, seed)
    return coords, zero_past_the_end(blocks, coords, shape).to(dtype)


def in_blocks(
    shape: tuple[int, ...],
    sides: tuple[int, ...],
    n: int,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    coalesce: bool = True,
) -> stc.SparseTensor:
    return stc.SparseTensor.from_blocks(*blocks_of(shape, sides, n, dtype, seed), shape, coalesce=coalesce)


def filled(blocks: torch.Tensor, coords: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The dense tensor of blocks, one block after the other."""
    order = coords.shape[0]
    sides = blocks.shape[1 : 1 + order]
    padded = [-(-n // s) * s for n, s in zip(shape, sides, strict=False)]
    whole = torch.zeros((*padded, *shape[order:]), dtype=blocks.dtype)
    for block, at in zip(blocks, coords.T.tolist(), strict=True):
        whole[tuple(slice(c * s, c * s + s) for c, s in zip(at, sides, strict=True))] += block
    return whole[tuple(slice(n) for n in shape)]


def operands_of(
    equation: str,
    specs: tuple[Spec, ...],
    n: int = 9,
    dtype: torch.dtype = torch.float64,
    coalesce: bool = True,
    sizes: dict[str, int] = SIZES,
) -> list[Any]:
    """Random operands of an equation."""
    made: list[Any] = []
    for seed, (term, spec) in enumerate(zip(equation.split("->")[0].split(","), specs, strict=True)):
        shape = tuple(sizes[c] for c in term)
        if spec == "dense":
            made.append(numbers(shape, dtype, seed))
        elif isinstance(spec, tuple):
            made.append(in_blocks(shape, spec, n, dtype, 100 * seed, coalesce))
        else:
            split = len(shape) - (spec == "semi")
            count = 2 * n
            coords = torch.stack(
                [torch.randint(0, max(1, s), (count,), generator=generator(seed)) for s in shape[:split]]
            )
            values = numbers((count, *shape[split:]), dtype, seed)
            made.append(stc.SparseTensor(coords, values, shape, coalesce=coalesce))
    return made


def dense(found: Any) -> torch.Tensor:
    return found.to_dense() if isinstance(found, stc.SparseTensor) else found  # type: ignore[no-any-return]


def expected(equation: str, operands: list[Any]) -> torch.Tensor:
    """The einsum of the dense operands, in a wide type."""
    first = dense(operands[0])
    wide = torch.complex128 if first.is_complex() else torch.float64
    return torch.einsum(equation, *(dense(o).to(wide) for o in operands))


def check(found: Any, equation: str, operands: list[Any], tolerance: float = 0) -> None:
    wanted = expected(equation, operands)
    limit = {"rtol": tolerance, "atol": 10 * tolerance} if tolerance else {}
    torch.testing.assert_close(dense(found).to(wanted.dtype), wanted, **limit)


@contextmanager
def unexpanded() -> Iterator[None]:
    """A block in which it is an error to expand blocks or dense modes."""
    cut = Pattern.cut

    def own(self: Pattern, sides: tuple[int, ...]) -> Any:
        assert self.blocks is None or max(sides) > 1 or max(self.blocks.sides) == 1, "blocks were expanded"
        return cut(self, sides)

    def expanded(self: Pattern, sizes: tuple[int, ...]) -> Pattern:
        assert not sizes, "dense modes were expanded"
        return self

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pattern, "cut", own)
        patch.setattr(Pattern, "expanded", expanded)
        yield
