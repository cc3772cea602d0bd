"""Contractions of sparse tensors: a result's pattern found once, values computed often, sums and gradients.

    python examples/sparse_contraction.py

A block-sparse tensor, as in quantum chemistry, is contracted with itself over one mode. The same einsum takes three
paths; which is fastest depends on the patterns, and `explain`, which is printed, shows what each is expected to take.
"""

import torch

import sparsetc as stc


def block_tensor(side: int, blocks: int, seed: int) -> stc.SparseTensor:
    """(side, side, side) with dense blocks of 8 x 8 x 8 in random places."""
    g = torch.Generator().manual_seed(seed)
    corners = torch.randint(0, side // 8, (3, blocks, 1), generator=g) * 8
    inside = torch.cartesian_prod(*3 * [torch.arange(8)]).T.unsqueeze(1)
    coords = torch.unique((corners + inside).reshape(3, -1), dim=1)
    return stc.SparseTensor(coords, torch.rand(coords.shape[1], generator=g), (side,) * 3)


def main() -> None:
    """Contract, change values, accumulate, differentiate; each compared with dense torch."""
    x = block_tensor(32, 12, seed=0)
    equation = "ijk,abk->ijab"
    expected = torch.einsum(equation, x.to_dense(), x.to_dense())

    for plan in ("scalar", "dense", "bcb"):
        z = stc.einsum(equation, x, x, plan=plan)
        torch.testing.assert_close(z.to_dense(), expected)

    kernel = stc.compile(equation, x, x)  # the pattern of the result is known from here on
    print(kernel.explain())
    twice = kernel.with_values(2 * x.values, x.values)()  # values only
    torch.testing.assert_close(twice.values, 2 * kernel().values)

    total = stc.contract(x, x, ((2,), (2,)), input=kernel(), alpha=0.5, beta=1.0)  # 0.5 x.x + z
    torch.testing.assert_close(total.to_dense(), 1.5 * expected)

    values = x.values.clone().requires_grad_()  # the norm of the contraction, by the values of both operands
    learned = x.with_values(values)
    stc.einsum("ijk,abk,ijl,abl->", learned, learned, learned, learned).backward()
    dense = x.to_dense().requires_grad_()
    torch.einsum("ijk,abk,ijl,abl->", dense, dense, dense, dense).backward()
    torch.testing.assert_close(values.grad, dense.grad[tuple(x.coords)], rtol=1e-4, atol=1e-2)
    print("all results agree")


if __name__ == "__main__":
    main()
