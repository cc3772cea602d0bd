"""Sparse tensors and matrices shaped like the published ones, made on any torch device.

Every function returns (coords, shape): coords is int64, (order, nnz), unique, in lexicographic order.
Values are the caller's.
"""

import math

import torch

# dims, nonzeros, fibers along the last mode, coefficient of variation of nonzeros per fiber,
# Zipf exponents (all but last mode; last mode)
PUBLISHED = {
    "nell-2": ((12092, 9184, 28818), 76_879_419, 337_365, 0.9, (0.6, 0.7), 0.7),
    "nell-1": ((2_902_330, 2_143_368, 25_495_389), 143_599_552, 17_370_000, 2.5, (0.7, 0.7), 0.8),
    "flickr": ((319_686, 28_153_045, 1_607_191), 112_890_310, 28_150_000, 1.0, (0.8, 0.3), 0.8),
    "delicious": ((532_924, 17_262_471, 2_480_308), 140_126_181, 47_260_000, 1.4, (0.8, 0.5), 0.9),
    "freebase-music": ((23_343_790, 23_344_784, 166), 99_546_551, 98_740_000, 0.1, (0.6, 0.6), 0.8),
    "darpa": ((22_476, 22_476, 23_776_223), 28_436_033, 76_424, 5.0, (0.9, 0.9), 0.2),
}


def _zipf(n, size, a, g, device):
    """Indices in [0, n) with P(rank k) ~ k^-a, ranks dealt to indices at random."""
    u = torch.rand(size, generator=g, device=device, dtype=torch.float64)
    x = n**u if a == 1 else ((n ** (1 - a) - 1) * u + 1) ** (1 / (1 - a))
    rank = (x.long() - 1).clamp_(0, n - 1)
    return torch.randperm(n, generator=g, device=device)[rank]


def _unique(columns, shape):
    key = columns[0]
    for c, d in zip(columns[1:], shape[1:], strict=True):
        key = key * d + c
    key = torch.unique(key)
    out = []
    for d in reversed(shape[1:]):
        out.append(key % d)
        key = key // d
    return torch.stack([key, *reversed(out)])


def like(name, scale=1.0, seed=0, device="cpu"):
    """A tensor like the published `name`; scale < 1 shrinks nonzeros and fibers by it, modes by scale**(1/order)."""
    dims, nnz, fibers, cv, lead_a, leaf_a = PUBLISHED[name]
    if scale != 1.0:
        s = scale ** (1 / len(dims))
        dims, nnz, fibers = tuple(max(2, int(d * s)) for d in dims), int(nnz * scale), max(1, int(fibers * scale))
    g = torch.Generator(device=device).manual_seed(seed)
    sigma = math.sqrt(math.log1p(cv * cv))
    length = torch.exp(torch.randn(fibers, generator=g, device=device) * sigma)
    length = (
        (length / length.mean() * (nnz / fibers) + torch.rand(fibers, generator=g, device=device))
        .long()
        .clamp_(1, dims[-1])
    )
    fiber = torch.repeat_interleave(torch.arange(fibers, device=device), length)
    lead = [_zipf(d, fibers, a, g, device)[fiber] for d, a in zip(dims[:-1], lead_a, strict=True)]
    return _unique([*lead, _zipf(dims[-1], fiber.numel(), leaf_a, g, device)], dims), dims


def clustered(shape=(480, 875, 749), nnz=10_700_000, tile=16, per_tile=205, seed=0, device="cpu"):
    """Nonzeros gathered in a share of the tiles, `per_tile` each on average, as in trajectory data (G1-G3)."""
    g = torch.Generator(device=device).manual_seed(seed)
    grid = [-(-d // tile) for d in shape]
    total = math.prod(grid)
    tiles = torch.randperm(total, generator=g, device=device)[: max(1, min(total, nnz // per_tile))]
    weight = torch.exp(torch.randn(tiles.numel(), generator=g, device=device))
    count = (weight / weight.mean() * (nnz / tiles.numel())).long().clamp_(1, tile ** len(shape) * 3 // 4)
    owner = torch.repeat_interleave(tiles, count)
    columns = []
    for b, d in zip(reversed(grid), reversed(shape), strict=True):
        inside = torch.randint(0, tile, (owner.numel(),), generator=g, device=device)
        columns.append(((owner % b) * tile + inside).clamp_(max=d - 1))
        owner = owner // b
    return _unique(list(reversed(columns)), shape), tuple(shape)


def rmat(log2_nodes=14, degree=32, abcd=(0.57, 0.19, 0.19, 0.05), seed=0, device="cpu"):
    """R-MAT graph: 2**log2_nodes nodes, `degree` edges a node before duplicates merge."""
    g = torch.Generator(device=device).manual_seed(seed)
    n = 1 << log2_nodes
    row = torch.zeros(n * degree, dtype=torch.int64, device=device)
    col = row.clone()
    cdf = torch.tensor(abcd, device=device).cumsum(0)
    for _ in range(log2_nodes):
        q = torch.bucketize(torch.rand(row.numel(), generator=g, device=device), cdf).clamp_(max=3)
        row, col = row * 2 + q // 2, col * 2 + q % 2
    return _unique([row, col], (n, n)), (n, n)


def power_law(n=317_000, nonzeros=2_100_000, exponent=0.6, seed=0, device="cpu"):
    """A graph whose nodes have Zipf degrees, in and out, and its edges no other structure."""
    g = torch.Generator(device=device).manual_seed(seed)
    return _unique([_zipf(n, nonzeros, exponent, g, device) for _ in range(2)], (n, n)), (n, n)


def block_matrix(n=8192, block=64, theta=0.1, rho=0.1, scramble=True, seed=0, device="cpu"):
    """A(block, theta, rho): a share theta of blocks is non-empty, a share rho of each is nonzero; rows scrambled."""
    g = torch.Generator(device=device).manual_seed(seed)
    b = n // block
    chosen = torch.nonzero(torch.rand(b, b, generator=g, device=device) < theta)
    inside = torch.rand(chosen.shape[0], block, block, generator=g, device=device) < rho
    which, r, c = torch.nonzero(inside, as_tuple=True)
    row, col = chosen[which, 0] * block + r, chosen[which, 1] * block + c
    if scramble:
        row = torch.randperm(n, generator=g, device=device)[row]
    return _unique([row, col], (n, n)), (n, n)


def matrix_stack(n, count, nonzeros, band=0, block=0, seed=0, device="cpu"):
    """`count` matrices n x n of one pattern side by side, as BCB-SpTC makes tensors of a series of matrices.

    Each has about `nonzeros`: within `band` of the diagonal, or in dense blocks of side `block` of which a third lie on
    the diagonal.
    """
    g = torch.Generator(device=device).manual_seed(seed)

    def draw(low, high, size):
        return torch.randint(low, high, (size,), generator=g, device=device)

    if block:
        blocks = nonzeros // block**2
        down, across = draw(0, n // block, blocks), draw(0, n // block, blocks)
        across[::3] = down[::3]
        inside = torch.arange(block**2, device=device)
        row = (down[:, None] * block + inside // block).flatten()
        col = (across[:, None] * block + inside % block).flatten()
    else:
        row = draw(0, n, nonzeros * 5 // 4)
        col = (row + draw(-band, band + 1, row.numel())).clamp_(0, n - 1)
    row, col = _unique([row, col], (n, n))
    which = torch.arange(count, device=device).repeat(row.numel())
    return torch.stack([row.repeat_interleave(count), col.repeat_interleave(count), which]), (n, n, count)


def pruned_weights(rows=2048, cols=512, sparsity=0.9, spread=0.25, seed=0, device="cpu"):
    """A layer's weights after pruning by magnitude: rows of uneven length, columns anywhere."""
    g = torch.Generator(device=device).manual_seed(seed)
    kept = torch.exp(torch.randn(rows, 1, generator=g, device=device) * spread)
    kept = (kept / kept.mean() * (1 - sparsity)).clamp_(max=1)
    coords = torch.nonzero(torch.rand(rows, cols, generator=g, device=device) < kept).T
    return coords.contiguous(), (rows, cols)


def hexahedral(nodes=(24, 24, 24), unknowns=3, device="cpu"):
    """The stiffness pattern of a regular mesh of hexahedra: 27 neighbours a node, dense blocks of its unknowns."""
    grid = torch.cartesian_prod(*(torch.arange(n, device=device) for n in nodes))
    steps = torch.cartesian_prod(*(torch.arange(-1, 2, device=device),) * 3)
    size, stride = (torch.tensor(own, device=device) for own in (nodes, (nodes[1] * nodes[2], nodes[2], 1)))
    beside = grid[:, None] + steps
    node, step = torch.nonzero(((beside >= 0) & (beside < size)).all(-1), as_tuple=True)
    own = torch.arange(unknowns, device=device)
    row = (node * unknowns)[:, None, None] + own[:, None]
    col = ((beside[node, step] * stride).sum(-1) * unknowns)[:, None, None] + own
    n = math.prod(nodes) * unknowns
    return _unique([c.flatten() for c in torch.broadcast_tensors(row, col)], (n, n)), (n, n)
