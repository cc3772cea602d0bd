"""An operation of one's own: a weighted CP residual, and the norms that CP methods ask for, over `einsum`.

    python examples/custom_op.py

An operation is a function that writes an equation from its operands' orders. `register_op` makes it known by its name.
Whatever order the tensor has, and whatever plan is chosen, no kernel is written by hand, and gradients flow. It prints
a line for each order that agrees with torch.
"""

import torch

import sparsetc as stc


@stc.register_op
def cp_residual(
    x: stc.SparseTensor, factors: list[torch.Tensor], weights: torch.Tensor | None = None
) -> stc.SparseTensor:
    """What a weighted CP model leaves of a tensor at its nonzeros: ``x - sum_r w_r a_r o b_r o ...``, of x's pattern.

    Args:
        x: sparse, any order.
        factors: a (size, rank) matrix a mode.
        weights: (rank,); all 1 by default.
    """
    letters = "ijklmnop"[: x.order]
    ones = x.with_values(torch.ones_like(x.values))  # the model, sampled where x has a nonzero
    terms = [letters, *(c + "r" for c in letters), *(["r"] if weights is not None else [])]
    dense = [*factors, *([weights] if weights is not None else [])]
    model = stc.einsum(f"{','.join(terms)}->{letters}", ones, *dense)
    return x.with_values(x.values - model.values)


@stc.register_op
def cp_inner(x: stc.SparseTensor, factors: list[torch.Tensor]) -> torch.Tensor:
    """<x, model> for every component: (rank,). Summed, it is what the fit of a CP decomposition needs of x."""
    letters = "ijklmnop"[: x.order]
    return stc.einsum(f"{letters},{','.join(c + 'r' for c in letters)}->r", x, *factors)


def main() -> None:
    """Compare with torch on small tensors of order 2 to 4."""
    torch.manual_seed(0)
    for shape in ((30, 20), (12, 9, 10), (7, 6, 5, 8)):
        dense = torch.randn(shape) * (torch.rand(shape) < 0.2)
        x = stc.SparseTensor.from_dense(dense)
        factors = [torch.randn(n, 5, requires_grad=True) for n in shape]
        weights = torch.rand(5)
        letters = "ijkl"[: len(shape)]
        terms = ",".join(c + "r" for c in letters)
        model = torch.einsum(f"{terms},r->{letters}", *factors, weights)

        residual = stc.OPERATIONS["cp_residual"](x, factors, weights)
        assert torch.equal(residual.coords, x.coords)
        torch.testing.assert_close(residual.values, (dense - model)[dense != 0], rtol=1e-4, atol=1e-4)

        inner = stc.OPERATIONS["cp_inner"](x, factors)
        expected = torch.einsum(f"{letters},{terms}->r", dense, *factors)
        torch.testing.assert_close(inner, expected, rtol=1e-4, atol=1e-4)

        found = torch.autograd.grad(residual.values.square().sum(), factors)
        wanted = torch.autograd.grad((dense - model)[dense != 0].square().sum(), factors)
        for f, w in zip(found, wanted, strict=True):
            torch.testing.assert_close(f, w, rtol=1e-3, atol=1e-3)
        print(f"order {len(shape)}: residual, inner product and gradients agree with torch")
    print("operations:", ", ".join(sorted(stc.OPERATIONS)))


if __name__ == "__main__":
    main()
