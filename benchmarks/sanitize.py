"""Kernels of tiles, hybrid plans, blocks, contractions of two sparse tensors, attention, losses and new patterns, on
small tensors: what to run under NVIDIA's compute-sanitizer. Results are checked.

compute-sanitizer --tool memcheck  python benchmarks/sanitize.py
compute-sanitizer --tool racecheck python benchmarks/sanitize.py
"""

from __future__ import annotations

import torch

import sparsetc as stc

CASES = {
    "ijk,jr,kr->ir": (40, 33, 50),
    "ijk,ir,jr->kr": (40, 33, 50),
    "ijkl,jr,kr,lr->ir": (20, 12, 30, 17),
    "ijk,jr,ks->irs": (20, 33, 50),
    "ij,jr->ir": (40, 50),
    "ijk,jr,kr->r": (40, 33, 50),
}
RANK = 20
PAIRS = {"ijk,klm->ijlm": (20, 21, 70, 20, 9), "bij,bjk->bik": (3, 20, 70, 33), "ijk,ijk->": (20, 21, 70)}
PATHS = ("scalar", stc.plans.plan_bcb(storage="whole"), stc.plans.plan_bcb(storage="bitmap"))


def main() -> None:
    """Everything."""
    tiles()
    pairs()
    blocks()
    windows()
    attention()
    losses()
    new_patterns()
    torch.cuda.synchronize()
    print("all results right")


def windows() -> None:
    """Windows of neighbouring and of similar rows, ragged, whole and beside runs, at every precision; in halves too."""
    g = torch.Generator().manual_seed(0)
    whole = torch.randn(83, 70, generator=g) * (torch.rand(83, 70, generator=g) < 0.2)
    x = stc.SparseTensor.from_dense(whole).cuda()
    for columns in (5, 40, 300):
        b = torch.randn(70, columns, generator=g).cuda()
        expected = whole.double().cuda() @ b.double()
        for plan in (
            *(stc.plans.plan_window(height=h, threshold=0, halves=own) for h in (16, 64) for own in (True, False)),
            stc.plans.plan_window(threshold=60),
            stc.plans.plan_1sa(tau=20, threshold=0),
        ):
            for precision, limit in (("highest", 1e-5), ("high", 2e-3), ("medium", 2e-2)):
                found = stc.einsum("ij,jk->ik", x, b, plan=plan, precision=precision)
                error = float((found.double() - expected).norm() / expected.norm())
                assert error <= limit, (plan, columns, precision, error)


def attention() -> None:
    """Masks whose windows are whole or cut, entries that are gathered or go by row, a bias by entry; with gradients."""
    g = torch.Generator("cuda").manual_seed(0)
    n, masks = 330, stc.masks
    scattered = (torch.rand(n, n, generator=g, device="cuda") < 0.03) | torch.eye(n, dtype=torch.bool, device="cuda")
    scattered[5] = True
    entries = stc.SparseTensor.from_dense(scattered.float())
    long = masks.sliding_window(20) | masks.global_tokens(9)
    given = [(mask, mask.dense(n, device="cuda")) for mask in (masks.causal(), long)] + [(entries, scattered)]
    for width, dtype, limit in ((64, torch.float16, 1e-2), (20, torch.float32, 1e-4)):
        for pattern, meets in given:
            for biased in (False, True) if pattern is entries else (False,):
                rows, columns = entries.indices()
                q, k, v = (torch.randn(2, n, width, generator=g, device="cuda", requires_grad=True) for _ in range(3))
                bias = torch.randn(entries.nnz, generator=g, device="cuda", requires_grad=True) if biased else None
                leaves = [q, k, v, *([] if bias is None else [bias])]
                found = stc.attention(*(t.to(dtype) for t in (q, k, v)), pattern, bias=bias)
                scores = (q @ k.mT * width**-0.5).masked_fill(~meets, -torch.inf)
                added = 0 if bias is None else torch.zeros(n, n, device="cuda").index_put((rows, columns), bias)
                expected = torch.softmax(scores + added, -1) @ v
                u = torch.randn(expected.shape, generator=g, device="cuda")
                ours = [found.float(), *torch.autograd.grad(found, leaves, u.to(dtype))]
                theirs = [expected, *torch.autograd.grad(expected, leaves, u)]
                for one, other in zip(ours, theirs, strict=True):
                    error = float((one - other).detach().norm() / other.detach().norm())
                    assert error <= limit, (pattern, dtype, biased, error)


def losses() -> None:
    """A Poisson loss of entries, with gradients of both factors."""
    g = torch.Generator("cuda").manual_seed(0)
    x = stc.SparseTensor.from_dense((torch.rand(90, 70, generator=g, device="cuda") < 0.1).float())
    a, b = (torch.rand(size, RANK, generator=g, device="cuda", requires_grad=True) for size in x.shape)
    counts = torch.rand(x.nnz, generator=g, device="cuda")
    found = stc.map_entries(lambda m, x: m - x * torch.log(m), x, products={"m": (a, b)}, entries={"x": counts}).sum()
    row, column = x.indices()
    m = (a[row] * b[column]).sum(-1)
    for one, other in zip(
        *(torch.autograd.grad(y, (a, b)) for y in (found, (m - counts * m.log()).sum())), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def new_patterns() -> None:
    """Graphs that come once and go, products by groups, and rows that are taken."""
    g = torch.Generator("cuda").manual_seed(0)
    b = torch.randn(300, RANK, generator=g, device="cuda", requires_grad=True)
    for _ in range(12):
        coords = torch.randint(300, (2, 3000), generator=g, device="cuda")
        values = torch.rand(3000, generator=g, device="cuda")
        found = stc.einsum("ij,jr->ir", stc.SparseTensor(coords, values, (300, 300)), b, output="dense")
        expected = torch.zeros_like(b).index_add(0, coords[0], b[coords[1]] * values[:, None])
        both = [(y, *torch.autograd.grad(y, b, torch.ones_like(y))) for y in (found, expected)]
        torch.testing.assert_close(*both, rtol=1e-4, atol=1e-4)
    routed = torch.stack((torch.arange(600, device="cuda"), torch.randint(4, (600,), generator=g, device="cuda")))
    tokens, experts = (torch.randn(size, generator=g, device="cuda") for size in ((600, 64), (4, 64, 32)))
    found = stc.einsum(
        "te,ti,eio->to", stc.SparseTensor(routed, torch.ones(600, device="cuda"), (600, 4)), tokens, experts
    )
    expected = torch.einsum("ti,tio->to", tokens, experts[routed[1]])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    x = stc.SparseTensor.from_dense((torch.rand(200, 50, generator=g, device="cuda") < 0.2).float())
    rows = torch.randint(200, (70,), generator=g, device="cuda")
    torch.testing.assert_close(x[rows].to_dense(), x.to_dense()[rows])


def blocks() -> None:
    """Blocks that are given, of sides that dots take as they are or padded, by dense operands and by one another."""
    g = torch.Generator().manual_seed(0)
    for side in (5, 8, 16, 32):
        coords = torch.nonzero(torch.rand(6, 5, generator=g) < 0.5).T
        values = torch.randn(coords.shape[1], side, side, generator=g)
        x = stc.SparseTensor.from_blocks(coords, values, (6 * side, 5 * side)).cuda()
        whole, b = x.expand_dense().to_dense(), torch.randn(5 * side, 2 * RANK, generator=g).cuda()
        torch.testing.assert_close(stc.einsum("ij,jr->ir", x, b), whole @ b, rtol=1e-4, atol=1e-4)
        product = stc.einsum("ij,kj->ik", x, x).expand_dense().to_dense()
        torch.testing.assert_close(product, whole @ whole.T, rtol=1e-4, atol=1e-4)


def pairs() -> None:
    """Every case by every path that has kernels of its own, deterministic and not."""
    g = torch.Generator().manual_seed(0)
    for equation, lengths in PAIRS.items():
        terms = equation.split("->")[0]
        sizes = dict(zip(dict.fromkeys(terms.replace(",", "")), lengths, strict=True))
        given = []
        for term in terms.split(","):
            shape = [sizes[c] for c in term]
            coords = torch.stack([torch.randint(0, n, (500,), generator=g) for n in shape])
            given.append(stc.SparseTensor(coords, torch.randn(500, generator=g), shape).to("cuda"))
        expected = torch.einsum(equation, *(x.to_dense().double() for x in given))
        for plan in PATHS:
            for deterministic in (False, True):
                found = stc.einsum(equation, *given, plan=plan, deterministic=deterministic, precision="highest")
                whole = found.to_dense() if isinstance(found, stc.SparseTensor) else found
                error = float((whole.double() - expected).norm() / expected.norm())
                assert error <= 1e-5, (equation, plan, deterministic, error)


def tiles() -> None:
    """Every case, tiles dense and as bitmaps, with leftovers and without, at two precisions."""
    g = torch.Generator().manual_seed(0)
    for equation, shape in CASES.items():
        coords = torch.stack([torch.randint(0, n, (400,), generator=g) for n in shape])
        coords[:, :200] %= 8  # half of them in one tile
        x = stc.SparseTensor(coords, torch.randn(400, generator=g), shape).to("cuda")
        own, *terms = equation.split("->")[0].split(",")
        sizes = dict(zip(own, shape, strict=True))
        dense = [torch.randn([sizes.get(c, RANK) for c in t], generator=g).cuda() for t in terms]
        expected = torch.einsum(equation, x.to_dense().double(), *(d.double() for d in dense))
        for precision, limit in (("highest", 1e-5), ("medium", 2e-2)):
            for threshold in (1, 40):
                for memory in (None, 40_000):
                    plan = stc.plans.plan_hls(threshold)
                    found = stc.einsum(equation, x, *dense, plan=plan, precision=precision, memory_limit=memory)
                    error = float((found.double() - expected).norm() / expected.norm())
                    assert error <= limit, (equation, precision, threshold, memory, error)


if __name__ == "__main__":
    main()
