"""A partition of one's own: nonzeros divided among the parts of a plan by how full their slice is, a format a part.

    python examples/custom_partition.py

A tensor is the sum of its parts, and an einsum is linear in it, so each part may be stored and run in its own way. Here
the few slices that hold most nonzeros are stored as fibers along their longest mode, everything else as plain nonzeros.
The rule does not ask which modes the output keeps (`by_rows` is False), so plans for other outputs use the same parts;
and both parts add to the same output rows (`whole_rows` is False). It prints how the two parts are run, and how a rule
that loses nonzeros is refused.
"""

import torch

import sparsetc as stc


@stc.plans.register_partition("heavy_slices")
def heavy_slices(
    coords: torch.Tensor, shape: tuple[int, ...], *, mode: int, nonzeros: int
) -> list[torch.Tensor | None]:
    """[nonzeros of the slices of `mode` that hold at least `nonzeros` of them, all the others]."""
    heavy = (torch.bincount(coords[mode], minlength=shape[mode]) >= nonzeros)[coords[mode]]
    return [torch.nonzero(heavy).flatten(), torch.nonzero(~heavy).flatten()]


def two_part_plan(x: stc.SparseTensor, rank: int) -> stc.plans.Plan:
    """Heavy slices of mode 1 as fibers along mode 1, the rest as nonzeros sorted by their output row (mode 0)."""
    on_gpu = x.device.type == "cuda"
    lanes = 8 if on_gpu else 1  # the torch programs take one nonzero a step and pad nothing
    longest = 32 if on_gpu else 0
    fibers = stc.plans.Storage(item=(0,), lane=(2,), leaf=(1,), lanes=lanes, max_fiber_len=longest, max_item_nnz=512)
    nonzeros = stc.plans.Storage(item=(0,), leaf=(1, 2), max_item_nnz=512, narrow=on_gpu)
    schedule = stc.plans.Schedule(warps=1, blocks=(("r", rank),), dot=False, lanes=lanes)
    return stc.plans.Plan(
        name="heavy-slices",
        parts=(
            stc.plans.Part("fiber", fibers, schedule, label="heavy slices"),
            stc.plans.Part("coo", nonzeros, schedule, label="the rest"),
        ),
        partition="heavy_slices",
        options=(("mode", 1), ("nonzeros", 200)),
    )


def main() -> None:
    """MTTKRP by the plan, and by the automatic one, against torch."""
    generator = torch.Generator().manual_seed(0)
    shape, rank = (30, 20, 16), 16
    density = torch.full(shape, 0.01)
    density[:, ::10, :] = 0.5  # every tenth slice of mode 1 is half full
    dense = torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < density)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = stc.SparseTensor.from_dense(dense).to(device)
    b, c = (torch.randn(n, rank, generator=generator).to(device) for n in shape[1:])
    expected = torch.einsum("ijk,jr,kr->ir", x.to_dense(), b, c)

    kernel = stc.compile("ijk,jr,kr->ir", x, b, c, plan=two_part_plan(x, rank))
    print(kernel.explain())
    assert [p.format for p in kernel.plan.parts] == ["fiber", "coo"]
    assert sum(p.nnz for p in kernel.plan.parts) == x.nnz
    torch.testing.assert_close(kernel(b, c), expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(stc.einsum("ijk,jr,kr->ir", x, b, c), expected, rtol=1e-4, atol=1e-3)

    # A rule that lost a nonzero would be refused.
    stc.plans.register_partition("lossy")(lambda coords, shape: [torch.arange(coords.shape[1] - 1)])
    lossy = stc.plans.Plan("lossy", kernel.plan.parts[1:], partition="lossy")
    try:
        stc.compile("ijk,jr,kr->ir", x, b, c, plan=lossy)
    except stc.PlanError as error:
        print("\nrefused:", error)
    else:
        raise AssertionError("a partition that loses a nonzero must be refused")


if __name__ == "__main__":
    main()
