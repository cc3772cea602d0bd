"""A format of one's own: groups of similar rows, in dense tiles over the columns that they have (1-SA).

    python examples/row_blocks.py

Rows that have about the same columns make a group, wherever they lie in the matrix. A tile holds all rows of its group
over some columns, of which there are two sorts (Labini et al., "Blocking Techniques for Sparse Matrix Multiplication on
Tensor Accelerators", section 3):

        window   rows[item, place] x columns[tile, place]     compacted: the next columns that any row of the group has
        strip    rows[item, place] x tile_word[tile] * width  consecutive columns, from a multiple of the width on

        rows      [ 7 12 40 . | 3 5 9 11 | …      the rows of each group; . is no row, and holds the size of the mode
        item_ptr  [ 0       2          5 | …      the tiles of each group
        columns   [ 2 3 9 30 | 31 60 . . | …      the columns of each window, likewise
        values    [ tile 0 | tile 1 | …           height x width a tile, 0 where there is no nonzero

A view says where each coordinate is read, and nothing else is written here for the compiler: kernels of every einsum,
for tensor cores or without, on a GPU or on none, follow from it. Sides may be of any length.
"""

import torch

import sparsetc as stc
from sparsetc.formats import Packed
from sparsetc.ir.nest.coordinates import Listed
from sparsetc.ir.nest.nest import Nest, tiles, tiles_along
from sparsetc.ir.nest.values import Whole
from sparsetc.packing import words
from sparsetc.testing import check_format


@stc.plans.register_format
class RowBlocks:
    """Groups of rows of a matrix, or of slices of a tensor: the storage's item mode is grouped, its last is cut."""

    name = "row_blocks"

    def view(self, shape: tuple[int, ...], storage: stc.plans.Storage) -> Nest:
        """Rows are listed for each group; columns are for each window, or lie at a multiple of a strip's width."""
        if len(storage.item) != 1 or not storage.lane or storage.leaf:
            raise stc.FormatError(f"row blocks have one item mode, and the others at the lane, found {storage}")
        (row,), (*others, column) = storage.item, storage.lane
        height, width = storage.param("height"), storage.param("width")
        sides = tuple({row: height, column: width}.get(mode, 1) for mode in range(len(shape)))
        if storage.param("strips"):
            lane = words.fields(storage.lane, tiles_along(shape, sides), "tile_word")
        else:
            lane = (*words.fields(others, shape, "tile_word"), Listed(column, "columns", width))
        item = (Listed(row, "rows", height),)
        return tiles(item, lane, Whole(sides, (*others, row, column)))

    def pack(self, coords: torch.Tensor, shape: tuple[int, ...], storage: stc.plans.Storage) -> Packed:
        """Group the rows, number the windows or strips of each group, and put every nonzero into its tile."""
        view = self.view(shape, storage)
        (row,), (*others, column) = storage.item, storage.lane
        height, width = view.values.sides[row], view.values.sides[column]
        nonzeros = torch.arange(coords.shape[1], device=coords.device)
        ordered, rank = by_first(coords[row], coords[column])
        group, across = rank // height, rank % height
        keys = torch.stack([group, *coords[others]])
        if storage.param("strips"):
            number, along = coords[column] // width, coords[column] % width
        else:
            place = place_among(keys, coords[column])
            number, along = place // width, place % width
        tiles, tile = torch.unique(torch.cat([keys, number[None]]), dim=1, return_inverse=True)
        count, groups = tiles.shape[1], -(-ordered.numel() // height)
        positions = torch.full((count * height * width,), -1, device=coords.device)
        positions[(tile * height + across) * width + along] = nonzeros
        if int((positions >= 0).sum()) != nonzeros.numel():
            raise stc.FormatError("a tile holds one value a position: coalesce the operand, which has duplicates")
        grid = dict(zip((*others, column), tiles[1:], strict=True))
        arrays = {
            "item_ptr": torch.searchsorted(tiles[0].contiguous(), torch.arange(groups + 1, device=coords.device)).int(),
            "rows": listed(torch.arange(ordered.numel(), device=coords.device), ordered, groups * height, shape[row]),
            **words.encode(grid, [c for c in view.levels[1] if not isinstance(c, Listed)]),
        }
        if not storage.param("strips"):
            arrays["columns"] = listed(tile * width + along, coords[column], count * width, shape[column])
        heads = torch.zeros(groups, dtype=torch.long, device=coords.device).scatter_(0, group, nonzeros)
        return Packed(
            format=self.name,
            storage=storage,
            shape=shape,
            nnz=nonzeros.numel(),
            view=view,
            arrays=arrays,
            positions=positions,
            stored=positions.numel(),
            items=groups,
            representatives=(heads, None),
            padded=positions.numel() > nonzeros.numel(),
        )


def by_first(rows: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Put rows that begin at neighbouring columns side by side.

    Returns:
        The rows that have nonzeros, (n,), in that order; and the place of each nonzero's row among them, (nnz,).
    """
    found, number = torch.unique(rows, return_inverse=True)
    first = torch.full_like(found, torch.iinfo(torch.long).max).scatter_reduce_(0, number, columns, "amin")
    order = torch.argsort(first, stable=True)
    return found[order], torch.argsort(order)[number]


def place_among(keys: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The place of each nonzero's column, (nnz,), among the different columns of the nonzeros with the same keys."""
    found, number = torch.unique(torch.cat([keys, columns[None]]), dim=1, return_inverse=True)
    _, first = torch.unique_consecutive(found[:-1], dim=1, return_inverse=True)
    return (torch.arange(first.numel(), device=first.device) - torch.searchsorted(first, first))[number]


def listed(at: torch.Tensor, numbers: torch.Tensor, length: int, none: int) -> torch.Tensor:
    """Numbers at their places of a list, which holds `none` elsewhere."""
    return torch.full((length,), none, dtype=torch.int32, device=at.device).scatter_(0, at, numbers.int())


def blocked(height: int, width: int, strips: bool, item: int = 0, order: int = 2, **blocks: int) -> stc.plans.Plan:
    """A plan of row blocks alone: groups of the mode `item`, the last other mode cut into windows or strips."""
    if height < 1 or width < 1 or order < 2 or item not in range(order):
        found = f"height {height}, width {width}, item {item}, order {order}"
        raise stc.PlanError(f"row blocks have sides of 1 or more and an item mode of two modes or more, found {found}")
    lane = tuple(mode for mode in range(order) if mode != item)
    params = (("height", height), ("strips", int(strips)), ("width", width))
    storage = stc.plans.Storage(item=(item,), lane=lane, leaf=(), params=params)
    return stc.plans.Plan(
        "row_blocks", (stc.plans.Part("row_blocks", storage, stc.plans.Schedule(2, tuple(blocks.items()), dot=True)),)
    )


def main() -> None:
    """Run every kind of einsum over matrices and tensors in row blocks and compare with torch."""
    generator = torch.Generator().manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    extent = {"i": 35, "j": 18, "k": 7, "r": 20, "s": 16}
    equations = ("ij,jr->ir", "ij,ir->jr", "ij,ir,jr->ij", "ij,j->i", "ij,i->j", "ij,ir,js->rs", "ij,i,j->", "ij->ji")
    equations += ("ijk,jr,kr->ir", "ijk,ir,kr->jr", "ijk,jr,ks->irs", "ijk,i->jk", "ijk,ir,jr,kr->ijk")
    for equation in equations:
        letters, *terms = equation.split("->")[0].split(",")
        shape = [extent[c] for c in letters]
        matrix = torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.1)
        x = stc.SparseTensor.from_dense(matrix).to(device)
        dense = [torch.randn([extent[c] for c in t], generator=generator).to(device) for t in terms]
        expected = torch.einsum(equation, x.to_dense(), *dense)
        for height, width, strips, item in ((16, 16, False, 0), (16, 16, True, 0), (5, 12, False, 1), (8, 3, True, 1)):
            blocks = {letter: size for letter, size in (("r", 32), ("s", 16)) if letter in equation}
            plan = blocked(height, width, strips, item, x.order, **blocks)
            found = stc.einsum(equation, x, *dense, plan=plan)
            found = found.to_dense() if isinstance(found, stc.SparseTensor) else found
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            check_format("row_blocks", x.coords.cpu(), x.shape, plan.parts[0].storage)  # the package's own suite
    print("row blocks agree with torch in", len(equations), "einsums")

    # Gradients are einsums too, and run on the same packed matrix.
    x = stc.SparseTensor.from_dense((torch.rand(50, 70, generator=generator) < 0.1).float()).to(device)
    values = torch.randn(x.nnz, generator=generator).to(device).requires_grad_()
    b = torch.randn(70, 8, generator=generator).to(device).requires_grad_()
    y = stc.einsum("ij,jr->ir", x.with_values(values), b, plan=blocked(16, 16, strips=False, r=16))
    y.square().sum().backward()
    (expected,) = torch.autograd.grad((x.with_values(values).to_dense() @ b).square().sum(), b)
    torch.testing.assert_close(b.grad, expected, rtol=1e-4, atol=1e-3)


if __name__ == "__main__":
    main()
