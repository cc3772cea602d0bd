"""A format of one's own: a banded matrix whose columns are computed, so that nothing but its values is stored.

    python examples/custom_format.py

A matrix whose nonzeros all lie at ``column = row + offset``, ``first <= offset <= last``, is stored as in LAPACK's band
storage, one row after another, ``width = last - first + 1`` values each:

        values   [ . a01 a02 | a10 a11 a12 | a21 a22 a23 | …      0 where there is no nonzero
        row      = item                                           the number of the work item
        column   = row + first + place in the row                 no pointer, no index array

Registering the class is all: the format is then costed with the others under ``plan="auto"``, is known as
``plan="banded"``, prints in `explain`, and serves every einsum over a banded matrix, on a GPU and without one.

Places of the band without a nonzero are multiplied as zeros. A call whose dense operands hold an infinity or NaN, which
those zeros would turn into NaN, takes ``coo`` instead.
"""

import torch

import sparsetc as stc
from sparsetc.formats import Packed
from sparsetc.ir.nest.coordinates import Computed
from sparsetc.ir.nest.nest import Nest, runs
from sparsetc.ir.program.cost import Statistics
from sparsetc.planner import Candidate, schedule_of
from sparsetc.planner.problem import Counts, Problem
from sparsetc.testing import check_format

FILLED = 0.5
"""Share of the band that must hold nonzeros for the format to be offered."""


@stc.plans.register_format
class Banded:
    """Rows (or columns: whichever mode is the storage's item) of a band, one a work item."""

    name = "banded"

    def view(self, shape: tuple[int, ...], storage: stc.plans.Storage) -> Nest:
        """Both coordinates are formulas; items are equal chunks of `width` values, so they need no pointers."""
        (row,), (column,) = storage.item, storage.leaf
        width, first = storage.param("width"), storage.param("first")
        # position = row * width + place, so row + first + place = position - row * (width - 1) + first. Places beyond
        # the matrix's edge hold zeros; they wrap around, so that they too name a column there is.
        shift = first + -(first // shape[column]) * shape[column]
        formula = f"({{p}} - {{m{row}}} * {width - 1} + {shift}) % {shape[column]}"
        return runs((Computed(row, "{p}"),), (Computed(column, formula),), chunk=width)

    def pack(self, coords: torch.Tensor, shape: tuple[int, ...], storage: stc.plans.Storage) -> Packed:
        """No index arrays: only where each value goes."""
        (row,), (column,) = storage.item, storage.leaf
        width, nnz, rows = storage.param("width"), coords.shape[1], shape[row]
        place = coords[column] - coords[row] - storage.param("first")
        if nnz and not 0 <= int(place.min()) <= int(place.max()) < width:
            raise stc.FormatError("a nonzero lies outside the band of the storage")
        positions = torch.full((rows * width,), -1, dtype=torch.long, device=coords.device)
        positions[coords[row] * width + place] = torch.arange(nnz, device=coords.device)
        return Packed(
            format=self.name,
            storage=storage,
            shape=shape,
            nnz=nnz,
            view=self.view(shape, storage),
            arrays={},
            positions=positions,
            stored=rows * width,
            items=rows,
            representatives=(positions.view(rows, width).amax(1), None),
            padded=nnz < rows * width,
        )

    def offer(self, problem: Problem, counts: Counts) -> Candidate | None:
        """The plan for a matrix that is banded and fills its band; None for any other tensor."""
        if problem.order != 2 or counts.nnz == 0 or (problem.deterministic and not problem.kept):
            return None
        row = problem.kept[0] if len(problem.kept) == 1 else 0  # an output row is then one item, stored without atomics
        offset = counts.coords[1 - row] - counts.coords[row]
        first, last = int(offset.min()), int(offset.max())
        rows, width = counts.shape[row], last - first + 1
        if counts.nnz < FILLED * rows * width:
            return None
        storage = stc.plans.Storage(item=(row,), leaf=(1 - row,), params=(("first", first), ("width", width)))
        schedule = schedule_of(problem, blocks=False)
        part = stc.plans.Part(self.name, storage, schedule, counts.nnz, label=f"offsets {first}..{last}")
        expected = Statistics(rows, rows, rows * width, counts.nnz, problem.itemsize)
        return Candidate(stc.plans.Plan(self.name, (part,)), (expected,))


def banded(rows: int, columns: int, first: int, last: int, generator: torch.Generator) -> stc.SparseTensor:
    """A random matrix with a nonzero at every place of a band but a few."""
    row = torch.arange(rows).repeat_interleave(last - first + 1)
    column = row + torch.arange(first, last + 1).repeat(rows)
    held = (column >= 0) & (column < columns) & (torch.rand(row.shape, generator=generator) < 0.9)
    values = torch.randn(int(held.sum()), generator=generator)
    return stc.SparseTensor(torch.stack([row[held], column[held]]), values, (rows, columns))


def main() -> None:
    """Run every kind of einsum over banded matrices and compare with torch."""
    generator = torch.Generator().manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    equations = ("ij,jr->ir", "ij,ir->jr", "ij,ir,jr->ij", "ij,j->i", "ij,i->j", "ij,ir,js->rs", "ij,i,j->", "ij->ji")
    for rows, columns, first, last in ((60, 60, -4, 4), (45, 57, 3, 12), (40, 27, -18, -9)):
        x = banded(rows, columns, first, last, generator).to(device)
        extent = {"i": rows, "j": columns, "r": 20, "s": 16}
        for equation in equations:
            terms = equation.split("->")[0].split(",")[1:]
            dense = [torch.randn([extent[c] for c in t], generator=generator).to(device) for t in terms]
            expected = torch.einsum(equation, x.to_dense(), *dense)
            kernel = stc.compile(equation, x, *dense, plan="banded")
            assert kernel.plan.parts[0].format == "banded"
            found = kernel(*dense)
            found = found.to_dense() if isinstance(found, stc.SparseTensor) else found
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            storage = kernel.plan.parts[0].storage
        check_format("banded", x.coords.cpu(), x.shape, storage)  # the suite that the package's own formats pass
        check_format("banded", x.coords.cpu()[:, :0], x.shape, storage)  # a matrix without nonzeros
    print("banded matrices agree with torch in", len(equations), "einsums")

    # Gradients are einsums too, and run on the same packed matrix.
    values = x.values.clone().requires_grad_()
    b = torch.randn(columns, 8, generator=generator).to(device).requires_grad_()
    y = stc.einsum("ij,jr->ir", x.with_values(values), b, plan="banded")
    y.square().sum().backward()
    (expected,) = torch.autograd.grad((x.to_dense() @ b).square().sum(), b)
    torch.testing.assert_close(b.grad, expected, rtol=1e-4, atol=1e-3)

    # Under plan="auto" the cost model weighs the format with the others; explain() says what each was expected to take.
    # The kernel is only generated here, so no GPU is needed.
    x = banded(4000, 4000, -8, 8, generator).to(device)
    b = torch.randn(4000, 32, generator=generator).to(device)
    explanation = stc.explain("ij,jr->ir", x, b, backend="triton")
    print(explanation)
    assert any("banded" in name for name, _ in explanation.considered)
    sizes = {p: stc.compile("ij,jr->ir", x, b, plan=p).plan.parts[0].nbytes for p in ("banded", "coo")}
    print("\nbytes:", ", ".join(f"{name} {size:,}" for name, size in sizes.items()))
    # A matrix without a band is not offered the format.
    scattered = stc.SparseTensor.from_dense((torch.rand(400, 400, generator=generator) < 0.02).float()).to(device)
    assert all("banded" not in name for name, _ in stc.explain("ij,j->i", scattered, b[:400, 0]).considered)


if __name__ == "__main__":
    main()
