"""A graph convolution network (Kipf & Welling 2017): sparse einsums against torch.sparse, from the same weights.

    python examples/gnn.py

The graph is made of the tensor that comes with sparsetc, of the size of a small citation graph: 19,200 places of New
York, each a latitude and a longitude with an Uber pickup, joined to the places next to them. What is known of a place
is how many pickups it has by hour of the day. What is asked is in which quarter of the city it lies: north or south and
east or west of the median place. That is a task for show, which a map answers better. But all of it is data, and half
of the places are held out; hours alone say little of it, the hours of the surroundings more. It prints the time of an
epoch, the loss and the accuracy of each way.
"""

import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy

import sparsetc as stc

HIDDEN, CLASSES, EPOCHS, WARM_UP = 64, 4, 40, 5
PROPAGATE = "ij,jh->ih"  # each node gathers the rows of its neighbours

Layer = Callable[[torch.Tensor], torch.Tensor]


class Task(NamedTuple):
    """Features (n, f), labels (n,) and masks (n,) of the nodes that are trained on and of those held out."""

    features: torch.Tensor
    labels: torch.Tensor
    trained: torch.Tensor
    held_out: torch.Tensor


class Run(NamedTuple):
    """What training gave: the loss of each epoch, milliseconds an epoch, and the accuracy on held-out nodes."""

    losses: torch.Tensor
    ms: float
    accuracy: float


def main() -> None:
    """Train with and without the graph; losses with sparsetc and with torch.sparse agree."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    graph, task = city(stc.datasets.uber().to(device))
    graph = stc.nn.normalized(graph, add_self_loops=False)  # a place is joined to itself already
    csr = graph.to_torch(torch.sparse_csr)
    print(graph)

    layers: dict[str, Layer] = {
        "sparsetc": convolution(graph),
        "torch.sparse, CSR": lambda h: csr @ h,
        "without the graph": lambda h: h,
    }
    widths = (task.features.shape[1], HIDDEN, CLASSES)
    weights = [torch.randn(m, n).to(device) / m**0.5 for m, n in pairwise(widths)]
    runs = {name: train(layer, task, weights) for name, layer in layers.items()}

    print(f"\n{device:20} {'ms an epoch':>12} {'last loss':>10} {'held out':>9}")
    for name, run in runs.items():
        print(f"{name:20} {run.ms:12.2f} {run.losses[-1]:10.4f} {run.accuracy:9.1%}")
    ours, theirs, without = runs.values()
    # Sums in another order differ by rounding, and each step of Adam makes more of it.
    torch.testing.assert_close(ours.losses[:5], theirs.losses[:5], rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-3, atol=0)
    assert ours.accuracy > without.accuracy + 0.05

    # einsum takes a graph as it is, a torch tensor of any sparse layout or a scipy matrix, without a copy of yours.
    h = torch.randn(graph.shape[1], HIDDEN, device=device)
    torch.testing.assert_close(stc.einsum(PROPAGATE, csr, h), csr @ h, rtol=1e-4, atol=1e-5)
    if find_spec("scipy"):
        found = stc.einsum(PROPAGATE, graph.cpu().to_scipy(), h.cpu())
        torch.testing.assert_close(found, (csr @ h).cpu(), rtol=1e-4, atol=1e-5)


def city(x: stc.SparseTensor) -> tuple[stc.SparseTensor, Task]:
    """The graph of places with pickups, each joined to itself and up to eight others, and what is asked of it."""
    places, by_hour = stc.einsum("ijkl->kl", x), stc.einsum("ijkl->jkl", x)
    assert isinstance(places, stc.SparseTensor)  # it keeps two modes: an entry a place
    assert isinstance(by_hour, stc.SparseTensor)
    n, (north, east) = places.nnz, places.coords
    number = torch.full((x.shape[2] + 2, x.shape[3] + 2), -1, device=x.device)  # of a place; a margin of none around
    number[north + 1, east + 1] = torch.arange(n, device=x.device)

    around = torch.stack([number[north + 1 + i, east + 1 + j] for i in (-1, 0, 1) for j in (-1, 0, 1)])
    joined = around >= 0
    edges = torch.stack([torch.arange(n, device=x.device).expand_as(around)[joined], around[joined]])
    graph = stc.SparseTensor(edges, torch.ones(edges.shape[1], device=x.device), (n, n))

    hour, k, l = by_hour.coords  # noqa: E741
    features = torch.zeros(n, x.shape[1] + 1, device=x.device)
    features[number[k + 1, l + 1], hour] = by_hour.values.log1p()
    features[:, -1] = 1  # the first layer's bias
    labels = 2 * (north > north.median()).long() + (east > east.median())
    trained = (torch.rand(n) < 0.5).to(x.device)  # the same half on any device
    return graph, Task(features, labels, trained, ~trained)


def convolution(graph: stc.SparseTensor) -> Layer:
    """Graph times features; its gradient, which autograd takes, is the einsum "ij,ih->jh" of the same pattern."""

    def layer(h: torch.Tensor) -> torch.Tensor:
        # Losses are compared: this asks for float32's error, whatever torch's setting is.
        return stc.einsum(PROPAGATE, graph, h, precision="highest")  # type: ignore[return-value]

    return layer


def train(layer: Layer, task: Task, weights: list[torch.Tensor]) -> Run:
    """Full-batch Adam on softmax(layer(relu(layer(features W0)) W1)), from copies of the weights."""
    first, second = (w.clone().requires_grad_() for w in weights)
    optimizer = torch.optim.Adam([first, second], lr=0.02)
    losses, times = [], []

    def scores() -> torch.Tensor:
        return layer(layer(task.features @ first).relu() @ second)

    for _ in range(EPOCHS):
        start = now()
        optimizer.zero_grad()
        loss = cross_entropy(scores()[task.trained], task.labels[task.trained])
        loss.backward()
        optimizer.step()
        times.append(now() - start)
        losses.append(loss.detach())
    with torch.no_grad():
        right = scores().argmax(1) == task.labels
    return Run(torch.stack(losses).cpu(), 1e3 * median(times[WARM_UP:]), float(right[task.held_out].float().mean()))


def now() -> float:
    """Seconds, once the GPU has done what it was asked to."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
