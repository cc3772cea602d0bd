"""What torch does to functions, on functions with sparse einsums: compile, differentiate, batch, export.

    python examples/torch_compile.py

The model is a CP decomposition's gradient step at heart: MTTKRP of a small sparse tensor with learned factors. A kernel
and an einsum are one node of the graph that `torch.compile` makes; `torch.func` and autograd make einsums of the same
pattern of them. It prints the error of each beside dense tensors in float64.
"""

from collections.abc import Callable

import torch

import sparsetc as stc

MTTKRP = "ijk,jr,kr->ir"


def main() -> None:
    """Each result is compared with that of `torch.einsum` on the dense tensor, in float64."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dense = torch.randn(12, 10, 8, dtype=torch.float64, device=device).sub(1).relu()
    x = stc.SparseTensor.from_dense(dense)
    b, c = (torch.randn(n, 4, dtype=torch.float64, device=device) for n in x.shape[1:])

    def model(b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return stc.einsum(MTTKRP, x, b.sin(), c).tanh()  # type: ignore[union-attr]

    def expected(b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return torch.einsum(MTTKRP, dense, b.sin(), c).tanh()

    # One graph, without a break: what is not compiled yet is compiled while the graph is traced.
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    check("torch.compile", compiled(b, c), expected(b, c))

    # Gradients of a compiled function are sparsetc's kernels too.
    learned = b.clone().requires_grad_()
    (found,) = torch.autograd.grad(compiled(learned, c).sum(), learned)
    check("its gradient", found, torch.func.grad(loss(expected))(b, c))

    # torch.func, alone and nested: gradients, Jacobians by forward mode, batches, gradients of each in a batch.
    check("torch.func.grad", torch.func.grad(loss(model))(b, c), torch.func.grad(loss(expected))(b, c))
    check("torch.func.jacfwd", torch.func.jacfwd(model)(b, c), torch.func.jacfwd(expected)(b, c))
    batch = torch.stack([b, 2 * b, -b])
    each, wanted = (torch.func.vmap(f, (0, None))(batch, c) for f in (model, expected))
    check("torch.func.vmap", each, wanted)
    each, wanted = (torch.func.vmap(torch.func.grad(loss(f)), (0, None))(batch, c) for f in (model, expected))
    check("vmap of grad", each, wanted)

    # A kernel in a module is exported as one operator; any process that imported sparsetc runs the program.
    kernel = stc.compile(MTTKRP, x, b, c)

    class Model(torch.nn.Module):
        def forward(self, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            return kernel(b.sin(), c).tanh()  # type: ignore[union-attr]

    program = torch.export.export(Model(), (b, c))
    assert "sparsetc.contract" in str(program.graph)
    check("torch.export", program.module()(b, c), expected(b, c))

    # Tensors of one pattern share what is made of it; nothing of it outlives them, or a call of clear_cache.
    assert x.with_values(2 * x.values).pattern is x.pattern
    print(stc.cache_info())
    stc.clear_cache()
    assert stc.cache_info().kernels == 0


def loss(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The sum of what a function returns."""
    return lambda *tensors: f(*tensors).sum()


def check(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-10 of what torch alone finds."""
    error = float((found - expected).norm() / expected.norm())
    print(f"{name:18} error {error:.1e}")
    assert error < 1e-10


if __name__ == "__main__":
    main()
