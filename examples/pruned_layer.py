"""A linear layer without nine in ten of its weights: forward, backward and fine-tuning by sparse einsums.

    python examples/pruned_layer.py

The weights of least magnitude are cut, and those that are left are trained to do as the whole layer did, on inputs that
are correlated as activations are. The pattern is fixed, so it is planned and packed once; a step has new values only.
The same layer, dense with a mask, goes the same way, and the results agree. With a mask it costs what the whole layer
costs. Whether it takes less time without the weights that were cut depends on the device, whose dense products run at
its highest rate: the table says what it is here. Parameters, and so their gradients and an optimizer's moments, take a
tenth of the bytes on any device; beside them the places are kept once, as coordinates and as the kernels read them.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch.nn.functional import linear

import sparsetc as stc

INPUTS, OUTPUTS, BATCH = 2048, 1024, 64
CUT = 0.9  # the part of the weights that is pruned
STEPS, RATE = 20, 0.02


class MaskedLinear(torch.nn.Module):
    """x W^T of a dense W (outputs, inputs), with a mask: what the sparse layer is compared with."""

    mask: torch.Tensor

    def __init__(self, pruned: torch.Tensor) -> None:
        super().__init__()
        self.values = torch.nn.Parameter(pruned.clone())
        self.register_buffer("mask", pruned != 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply what the mask leaves."""
        return linear(x, self.values * self.mask)


Layer = stc.nn.SparseLinear | MaskedLinear


def main() -> None:
    """Outputs, gradients and fine-tuned weights of both layers agree."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    whole = (torch.randn(OUTPUTS, INPUTS) / INPUTS**0.5).to(device)
    mixing = torch.randn(BATCH // 2, INPUTS, device=device)  # fewer causes than inputs
    x, unseen = (correlated(mixing) for _ in range(2))

    pruned = by_magnitude(whole, CUT)
    sparse, masked = stc.nn.SparseLinear.from_dense(pruned), MaskedLinear(pruned)
    i = tuple(sparse.weight.coords)
    print(sparse.weight)

    # One pass: outputs, and the gradients of the inputs and of the weights.
    found, expected = both_ways(sparse, x), both_ways(masked, x)
    check("outputs", found[0], expected[0])
    check("gradient of inputs", found[1], expected[1])
    check("gradient of weights", found[2], expected[2][i])

    # A few steps on the pattern: what was lost by pruning comes back in part, on inputs that were not trained on too.
    lost = error(sparse, unseen, whole)
    fine_tune(sparse, x, linear(x, whole))
    fine_tune(masked, x, linear(x, whole))
    check("weights, fine-tuned", sparse.values, masked.values[i])
    left = error(sparse, unseen, whole)
    print(f"\nerror of the pruned layer {lost:.3f}, after {STEPS} steps {left:.3f}")
    assert left < lost / 2

    # Parameters alone, and with what says where they are: coordinates or the mask, and arrays of the three kernels.
    where = sum(c.nbytes for c in sparse.weight.coords) + stc.cache_info().nbytes
    print(f"\n{device:8} {'values, kB':>12} {'places, kB':>12} {'forward, ms':>12} {'and backward':>13}")
    for name, layer, places in (("sparse", sparse, where), ("masked", masked, masked.mask.nbytes)):
        forward, training = milliseconds(infer, layer, x), milliseconds(both_ways, layer, x)
        print(f"{name:8} {layer.values.nbytes / 1e3:12,.0f} {places / 1e3:12,.0f} {forward:12.2f} {training:13.2f}")


def by_magnitude(weight: torch.Tensor, cut: float) -> torch.Tensor:
    """The weights with the given part of them, those of least magnitude, set to 0."""
    limit = weight.abs().flatten().kthvalue(int(cut * weight.numel())).values
    return torch.where(weight.abs() > limit, weight, 0)


def correlated(mixing: torch.Tensor) -> torch.Tensor:
    """Inputs (batch, inputs) that are mixed from a few causes, and some noise."""
    causes = torch.randn(BATCH, mixing.shape[0], device=mixing.device)
    mixed = causes @ mixing / mixing.shape[0] ** 0.5
    return mixed + 0.1 * torch.randn_like(mixed)


def both_ways(layer: Layer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs, and gradients of their squared sum by the inputs and by the layer's values."""
    x = x.detach().requires_grad_()
    y = layer(x)
    return y, *torch.autograd.grad(y.square().sum() / 2, [x, layer.values])


@torch.no_grad()
def infer(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """The outputs alone."""
    return layer(x)


def fine_tune(layer: Layer, x: torch.Tensor, wanted: torch.Tensor) -> None:
    """Gradient descent on the difference to the wanted outputs."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (layer(x) - wanted).square().sum(1).mean().backward()
        optimizer.step()


def error(layer: Layer, x: torch.Tensor, whole: torch.Tensor) -> float:
    """How far outputs are from those of the whole layer, relative to their norm."""
    wanted = linear(x, whole)
    return float((infer(layer, x) - wanted).norm() / wanted.norm())


def milliseconds(function: Callable[..., object], *arguments: object) -> float:
    """Median of 20 calls, each waited for, after 3 to warm up."""
    times = []
    for _ in range(23):
        start = time.perf_counter()
        function(*arguments)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * median(times[3:])


def check(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-5 of the masked layer's."""
    difference = float((found - expected).norm() / expected.norm())
    print(f"{name:20} difference {difference:.1e}")
    assert difference < 1e-5


if __name__ == "__main__":
    main()
