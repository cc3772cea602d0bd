"""A storage of one's own for all modes at once: mixed-mode fibers (MM-CSF, Nisa et al., SC 2019).

    python examples/mixed_mode.py

A CP or Tucker decomposition asks for an einsum a mode, and a copy of the tensor for each mode takes much memory. Here
each nonzero is stored once, in the longest of the fibers through it:

        forest 0    fibers along mode 0, of the nonzeros whose longest fiber runs along mode 0
        forest 1    fibers along mode 1, of the nonzeros whose longest fiber runs along mode 1
        …

Every einsum reads all forests and adds up what they give. The output's mode is the root of a forest, and all fibers of
an item add to one row; or it is in the middle, and each fiber adds to a row; or it is the leaf, and each nonzero does
(the slice, fiber and nonzero algorithms of section 5). The compiler finds which. The partition and the plan below are
all that is added to it.
"""

import torch

import sparsetc as stc
from sparsetc.partition.run_length import row_numbers
from sparsetc.planner.candidate import CPU_ITEM_NNZ, Candidate
from sparsetc.planner.methods.fibers import MAX_FIBER_LEN, expected_fibers
from sparsetc.planner.problem import Problem
from sparsetc.planner.schedule import DOT_LANES, schedule_of
from sparsetc.planner.statistics import Counts

ITEM_NNZ = 512
"""Most nonzeros of a forest that one work item takes on a GPU. Not measured."""


@stc.register_partition("longest_fiber")
def longest_fiber(coords: torch.Tensor, shape: tuple[int, ...]) -> list[torch.Tensor | None]:
    """For each mode, the nonzeros whose longest fiber runs along it (section 4.1, static strategy).

    Of two fibers as long as each other, that of the mode whose fibers are longer on average is taken, or of the lower
    mode. A fiber that is longer than every fiber which crosses it stays whole. Any other may be split: its nonzeros
    that lie on a longer fiber go with that one. The paper's dynamic strategy counts a fiber anew whenever one of its
    nonzeros went elsewhere; it can leave fewer fibers, and is a loop over the nonzeros.
    """
    lengths, fibers = [], []
    for along in range(len(shape)):
        number = row_numbers(coords, shape, tuple(m for m in range(len(shape)) if m != along))
        count = torch.bincount(number)
        lengths.append(count[number])
        fibers.append(int((count > 0).sum()))
    longest, share = torch.zeros_like(lengths[0]), torch.zeros_like(lengths[0])
    for along in sorted(range(len(shape)), key=fibers.__getitem__):  # the fewer fibers, the longer on average
        longer = lengths[along] > longest
        longest, share = torch.where(longer, lengths[along], longest), torch.where(longer, along, share)
    return [torch.nonzero(share == along).flatten() for along in range(len(shape))]


@stc.register_plan("mixed-mode", shared=True)
def mixed_mode(problem: Problem, counts: Counts) -> Candidate | None:
    """A forest of fibers for each mode. Nothing in its storages depends on the einsum, so all einsums share them."""
    if problem.order < 2 or (problem.deterministic and problem.backend == "triton"):  # forests add to the same rows
        return None
    schedule, parts, expected = schedule_of(problem, blocks=True), [], []
    for along, share in enumerate(counts.shares("longest_fiber")):
        storage = forest(along, share, problem.backend == "triton")
        parts.append(stc.Part("fiber", storage, schedule, share.nnz, label=f"fibers along mode {along}"))
        expected.append(expected_fibers(problem, share, storage, schedule))
    return Candidate(stc.Plan("mixed-mode", tuple(parts), partition="longest_fiber"), tuple(expected))


def forest(along: int, share: Counts, on_gpu: bool) -> stc.Storage:
    """Fibers along a mode; the mode of which the share has the fewest slices is the root, a matrix has none."""
    others = [m for m in range(len(share.shape)) if m != along]
    root = (min(others, key=lambda m: share.distinct((m,))),) if len(others) > 1 else ()
    middle = tuple(m for m in others if m not in root)
    if on_gpu:
        return stc.Storage(root, middle, (along,), DOT_LANES, MAX_FIBER_LEN, ITEM_NNZ, narrow=True)
    return stc.Storage(root, middle, (along,), max_item_nnz=CPU_ITEM_NNZ)


def mttkrp(order: int, mode: int) -> str:
    """``"ijk,jr,kr->ir"`` and its like."""
    letters = "ijklmnop"[:order]
    return ",".join([letters, *(f"{c}r" for c in letters if c != letters[mode])]) + f"->{letters[mode]}r"


def all_modes(x: stc.SparseTensor, factors: list[torch.Tensor], plan: str) -> list[torch.Tensor]:
    """MTTKRP of every mode."""
    kept = range(x.order)
    return [stc.einsum(mttkrp(x.order, m), x, *factors[:m], *factors[m + 1 :], plan=plan) for m in kept]


def gradients(x: stc.SparseTensor, factors: list[torch.Tensor], plan: str) -> tuple[torch.Tensor, ...]:
    """Gradients of the MTTKRP of mode 0, for the nonzeros' values and for each factor."""
    leaves = [t.clone().requires_grad_() for t in (x.values, *factors[1:])]
    result = stc.einsum(mttkrp(x.order, 0), x.with_values(leaves[0]), *leaves[1:], plan=plan)
    return torch.autograd.grad(result, leaves, factors[0])


def main() -> None:
    """MTTKRP of all modes of the Uber tensor, and gradients, from one copy; and what a copy a mode would take."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = stc.datasets.uber().to(device)
    generator = torch.Generator().manual_seed(0)
    factors = [torch.rand(n, 16, generator=generator).to(device) for n in x.shape]
    print(stc.explain(mttkrp(4, 0), x, *factors[1:], plan="mixed-mode"), "\n")

    expected = *all_modes(x, factors, "coo"), *gradients(x, factors, "coo")
    for plan in ("fiber", "mixed-mode"):
        stc.clear_cache()
        found = all_modes(x, factors, plan)
        kept = stc.cache_info()
        print(f"{plan}: {kept.storages} storages for all modes, of {kept.nbytes:,} bytes beside the values")
    # Gradients ask for the plan too, since it is shared: they read the forests that are packed already.
    found += gradients(x, factors, "mixed-mode")
    assert stc.cache_info().storages == x.order
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-4, atol=1e-4 * float(e.abs().max()))
    print(f"{len(found)} results, gradients among them, agree with plan coo; {x.order} storages serve them all")


if __name__ == "__main__":
    main()
