"""One copy of a tensor for the einsums of all modes: planned together, and by a plan of one's own.

    python examples/one_copy.py

A CP or Tucker decomposition asks for an einsum a mode. A plan that suits one mode packs a copy of the tensor for it, so
four modes take four copies. `compile_many` plans the einsums together: within a memory limit it trades copies for the
plan ``"mm-csf"``, of which one copy serves all modes. The plan below is a simpler one of that kind: a single tree of
fibers (SPLATT-ONE), of which all einsums share the packed part, since nothing of its storage depends on the einsum. It
prints the bytes of the copies: 4.9 MB for one a mode, 2.4 MB for one tree.
"""

import torch

import sparsetc as stc
from sparsetc.formats.fiber import expected_fibers
from sparsetc.planner import Candidate, schedule_of
from sparsetc.planner.problem import Counts, Problem


@stc.plans.register_plan("one tree", shared=True)
def one_tree(problem: Problem, counts: Counts) -> Candidate | None:
    """Fibers along the longest mode, those of a slice of the shortest mode together."""
    if problem.order < 3 or problem.deterministic:  # modes below the root are added to in no order
        return None
    root, *between, leaf = sorted(range(problem.order), key=lambda mode: counts.shape[mode])
    storage = stc.plans.Storage((root,), tuple(between), (leaf,), max_item_nnz=4096)
    schedule = schedule_of(problem, blocks=True)
    sizes = expected_fibers(problem, storage, schedule)
    return Candidate(stc.plans.Plan("one tree", (stc.plans.Part("fiber", storage, schedule, counts.nnz),)), (sizes,))


def packed(kernels: tuple[stc.Kernel, ...]) -> int:
    """Bytes of what the kernels store beside the values, each part once."""
    parts = {part.packed.token: part.packed for kernel in kernels for part in kernel.step.parts}
    return sum(part.nbytes for part in parts.values())


def main() -> None:
    """MTTKRP of all modes of the Uber tensor: by a copy a mode, within a limit, and by one tree; and gradients."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = stc.datasets.uber().to(device)
    generator = torch.Generator().manual_seed(0)
    factors = [torch.rand(n, 16, generator=generator).to(device) for n in x.shape]
    equations = ["ijkl,jr,kr,lr->ir", "ijkl,ir,kr,lr->jr", "ijkl,ir,jr,lr->kr", "ijkl,ir,jr,kr->lr"]
    operands = [factors[:mode] + factors[mode + 1 :] for mode in range(4)]

    expected = stc.mttkrp(x, factors, plan="coo")  # of every mode
    wanted = {"a copy a mode": {}, "within 5 MB": {"memory_limit": "5MB"}, "one tree": {"plan": "one tree"}}
    sizes = {}
    for name, settings in wanted.items():
        kernels = stc.compile_many(equations, x, operands, **settings)
        sizes[name] = packed(kernels)
        print(f"{name}: {', '.join(k.plan.name for k in kernels)}; {sizes[name]:,} bytes beside the values")
        for kernel, own, right in zip(kernels, operands, expected, strict=True):
            torch.testing.assert_close(kernel(*own), right, rtol=1e-4, atol=1e-4 * float(right.abs().max()))
    assert 2 * max(sizes["within 5 MB"], sizes["one tree"]) < sizes["a copy a mode"]

    stc.clear_cache()
    leaves = [f.clone().requires_grad_() for f in factors]
    sum(result.sum() for result in stc.mttkrp(x, leaves, plan="mm-csf")).backward()
    print(f"results of all modes and their gradients by mm-csf: {stc.cache_info().storages} storages")
    assert stc.cache_info().storages == x.order


if __name__ == "__main__":
    main()
