"""A mixture of experts: the products of all experts as one einsum, whose pattern is new at each step.

    python examples/mixture_of_experts.py

A router sends each token to its two best experts of eight. An expert is a matrix (inputs, outputs). A loop over experts
multiplies the tokens of one after another. Here where tokens go is a sparse matrix (tokens, experts), and all products
are ``"te,ti,eio->to"``: an entry multiplies row t of the tokens by matrix e of the experts.

Where tokens go is known when the router has run, so the pattern of each step was not seen before. The table says what a
step takes, with that: beside a loop over experts, and beside torch's own grouped product where there is one. The
results of all agree with a loop in float64, forward and backward.
"""

import time
from collections.abc import Callable
from statistics import median

import torch

import sparsetc as stc

TOKENS, EXPERTS, CHOSEN = 1024, 8, 2
INPUTS, OUTPUTS = 256, 512
STEPS = 8

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class MixtureOfExperts(torch.nn.Module):
    """The sum of each token's two best experts, weighted by the router; `product` multiplies tokens with experts."""

    def __init__(self, product: Product, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.product = product
        self.router = torch.nn.Linear(INPUTS, EXPERTS, bias=False)  # float32, so that all send tokens the same way
        self.weights = torch.nn.Parameter((torch.randn(EXPERTS, INPUTS, OUTPUTS) / INPUTS**0.5).to(dtype))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return (tokens, outputs)."""
        gates, expert = self.router(tokens.to(self.router.weight.dtype)).softmax(1).topk(CHOSEN)
        sent = tokens.repeat_interleave(CHOSEN, 0)
        products = self.product(sent, expert.flatten(), self.weights)
        return (products.view(len(tokens), CHOSEN, OUTPUTS) * gates[:, :, None]).sum(1)


def main() -> None:
    """Outputs and gradients agree at each of a few steps, whose tokens and so whose patterns differ."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    products: dict[str, Product] = {"sparsetc": by_routing, "loop over experts": by_loop}
    if grouped_mm_serves(device, dtype):
        products["torch._grouped_mm"] = by_grouped_mm
    exact = MixtureOfExperts(by_loop, dtype).to(device, torch.float64)
    layers = {name: MixtureOfExperts(product, dtype).to(device) for name, product in products.items()}
    steps = [torch.randn(TOKENS, INPUTS).to(device, dtype) for _ in range(STEPS)]
    for name, layer in layers.items():
        for tokens in steps[:3]:
            check(name, layer, exact, tokens)

    print(f"\n{device:24} {'forward, ms':>12} {'and backward':>13}")
    for name, layer in layers.items():
        print(f"{name:24} {milliseconds(infer, layer, steps):12.2f} {milliseconds(train, layer, steps):13.2f}")


def by_routing(tokens: torch.Tensor, expert: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Multiply (tokens, inputs) with the matrices of their experts: one einsum of where they go."""
    token = torch.arange(len(expert), device=expert.device)
    coords, shape = torch.stack((token, expert)), (len(tokens), len(weights))
    ones = tokens.new_ones(len(expert))
    routing = stc.SparseTensor(coords, ones, shape, coalesce=False, check=False)  # in range, and no two are the same
    return stc.einsum("te,ti,eio->to", routing, tokens, weights, output="dense")


def by_loop(tokens: torch.Tensor, expert: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The same, one expert after another."""
    out = tokens.new_zeros(len(tokens), weights.shape[2])
    for number, weight in enumerate(weights):
        here = (expert == number).nonzero().flatten()
        out = out.index_copy(0, here, tokens[here] @ weight)
    return out


def by_grouped_mm(tokens: torch.Tensor, expert: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The same by torch's product of groups, which needs no padding."""
    order = expert.argsort()
    ends = torch.bincount(expert, minlength=len(weights)).cumsum(0, dtype=torch.int32)
    products = torch._grouped_mm(tokens[order], weights, offs=ends)
    return torch.empty_like(products).index_copy(0, order, products)


def grouped_mm_serves(device: str, dtype: torch.dtype) -> bool:
    """Return True if this torch has a product of groups for the device and the type."""
    one = torch.zeros(1, 16, 16, device=device, dtype=dtype)
    try:
        torch._grouped_mm(one[0], one, offs=torch.full((1,), 16, device=device, dtype=torch.int32))
    except (AttributeError, RuntimeError):
        return False
    return True


def train(layer: torch.nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Outputs, and gradients of half their squared sum by the tokens and by all weights."""
    tokens = tokens.detach().requires_grad_()
    out = layer(tokens)
    return out, *torch.autograd.grad(out.square().sum() / 2, [tokens, *layer.parameters()])


@torch.no_grad()
def infer(layer: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The outputs alone."""
    return layer(tokens)


def check(name: str, layer: torch.nn.Module, exact: torch.nn.Module, tokens: torch.Tensor) -> None:
    """Compare outputs and gradients with those in float64."""
    errors = []
    for one, other in zip(train(layer, tokens), train(exact, tokens.double()), strict=True):
        errors.append(float((one - other).norm() / other.norm()))
    print(f"{name:24} errors of outputs and gradients {', '.join(f'{error:.0e}' for error in errors)}")
    assert max(errors) < (1e-5 if tokens.dtype == torch.float32 else 3e-2)


def milliseconds(function: Callable[..., object], layer: torch.nn.Module, steps: list[torch.Tensor]) -> float:
    """Median time of a step on tokens that are new to the layer, each waited for, after two to warm up."""
    times = []
    for tokens in steps:
        start = time.perf_counter()
        function(layer, tokens)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * median(times[2:])


if __name__ == "__main__":
    main()
