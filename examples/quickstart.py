"""What sparsetc does, on a tensor that comes with it: einsums with a sparse operand, and a look at the kernels.

    python examples/quickstart.py

Without a GPU the generated torch programs run instead of Triton's. It prints the error of six results beside float64,
then how one kernel is planned (`explain`) and its source.
"""

import torch

import sparsetc as stc


def main() -> None:
    """Six einsums; each result is compared with the sum over nonzeros, spelled out in float64."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    # Uber pickups by day, hour, latitude and longitude: 23 x 24 x 887 x 1410, 303,343 nonzeros.
    x = stc.datasets.uber().to(device)
    print(x)
    i, j, k, l = x.coords  # noqa: E741
    v = x.values.double()

    # MTTKRP: a factor matrix a mode, all but one contracted. The first call compiles; the kernel stays with the tensor.
    a, b, c, d = (torch.rand(size, 16, device=device) for size in x.shape)
    found = stc.einsum("ijkl,jr,kr,lr->ir", x, b, c, d)
    expected = rows(i, v[:, None] * b.double()[j] * c.double()[k] * d.double()[l], x.shape[0])
    check("MTTKRP, mode 0", found, expected)

    # The same by name, in another mode.
    found = stc.mttkrp(x, [a, b, None, d], mode=2)
    expected = rows(k, v[:, None] * a.double()[i] * b.double()[j] * d.double()[l], x.shape[2])
    check("MTTKRP, mode 2", found, expected)

    # A TTM chain: a rank a contracted mode.
    b4, c4, d4 = b[:, :4].contiguous(), c[:, :4].contiguous(), d[:, :4].contiguous()
    found = stc.einsum("ijkl,jr,ks,lt->irst", x, b4, c4, d4)
    each = torch.einsum("n,nr,ns,nt->nrst", v, b4.double()[j], c4.double()[k], d4.double()[l])
    check("TTM chain, mode 0", found, rows(i, each, x.shape[0]))

    # Tensor times vector: what keeps two or more sparse modes is sparse again.
    w = torch.rand(x.shape[3], device=device)
    found = stc.einsum("ijkl,l->ijk", x, w)
    assert isinstance(found, stc.SparseTensor)
    check("TTV, mode 3", found.values.sum(), (v * w.double()[l]).sum())

    # A product sampled at the nonzeros: the result has x's pattern.
    found = stc.einsum("ijkl,ir,jr,kr,lr->ijkl", x, a, b, c, d)
    model = (a.double()[i] * b.double()[j] * c.double()[k] * d.double()[l]).sum(1)
    check("sampled product", found.values, v * model)

    # Any index may be on a dense operand alone, or be summed without one.
    found = stc.einsum("ijkl,kr->jr", x, c)
    check("pickups by hour, weighted", found, rows(j, v[:, None] * c.double()[k], x.shape[1]))

    # Compile once, call often; ask why the kernel is as it is, and read it.
    kernel = stc.compile("ijkl,jr,kr,lr->ir", x, b, c, d)
    torch.testing.assert_close(kernel(b, c, d), kernel(b, c, d))
    print()
    print(kernel.explain())
    print()
    print(kernel.source)


def rows(index: torch.Tensor, each: torch.Tensor, size: int) -> torch.Tensor:
    """Sum what every nonzero contributes into its output row."""
    return each.new_zeros(size, *each.shape[1:]).index_add_(0, index, each)


def check(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-5 of the float64 result."""
    error = float((found.double() - expected).norm() / expected.norm())
    print(f"{name:26} error {error:.1e}")
    assert error < 1e-5


if __name__ == "__main__":
    main()
