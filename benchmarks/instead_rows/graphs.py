"""Graphs: a new one at each step, layers that are trained on mini-batches, and layers on one graph.

The peers are gather and `index_add`, torch.sparse, and PyTorch Geometric where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import common
import synthetic
import torch
from torch.nn.functional import leaky_relu

import sparsetc as stc
from instead_rows.calls import each_once, plain_and_compiled, quiet, step, versioned
from instead_rows.operands import generator, normal, positive, with_loops
from instead_rows.row import CPU, FRESH, GPU, Call, Row, Task

WIDTH, HEADS, CLASSES = 64, 4, 16
STEP = 1e-4
"""Largest relative error of gradients in float32."""
Graph = tuple[torch.Tensor, torch.Tensor, int]
"""Coordinates (2, edges), weights, nodes."""


def random_graphs(edges: int, nodes: int) -> list[Graph]:
    """Uniform graphs of one size, duplicates among the edges."""
    shape, device = (2, edges), common.DEVICE
    drawn = [torch.randint(0, nodes, shape, generator=generator(seed), device=device) for seed in range(FRESH)]
    return [(coords, positive(edges, seed), nodes) for seed, coords in enumerate(drawn)]


def rmat_graphs() -> list[Graph]:
    """R-MAT graphs of differing sizes."""
    graphs = []
    for seed in range(FRESH):
        coords, (nodes, _) = synthetic.rmat(10 + seed % 5, 8 + seed % 7, seed=seed, device=common.DEVICE)
        graphs.append((coords, positive(coords.shape[1], seed), nodes))
    return graphs


def messages(coords: torch.Tensor, weights: torch.Tensor, nodes: int, x: torch.Tensor) -> torch.Tensor:
    """Gather, multiply, `index_add`."""
    return x.new_zeros(nodes, x.shape[1]).index_add(0, coords[0], x[coords[1]] * weights[:, None])


Product = Callable[[torch.Tensor], torch.Tensor]
"""Of a graph and the features of its nodes."""


def by_scatter(coords: torch.Tensor, weights: torch.Tensor, nodes: int) -> Product:
    """A product by gather and scatter."""
    return lambda x: messages(coords, weights, nodes, x)


def by_sparsetc(coords: torch.Tensor, weights: torch.Tensor, nodes: int) -> Product:
    """A product by a SparseTensor of fresh coordinates."""
    graph = stc.SparseTensor(coords, weights, (nodes, nodes))
    return lambda x: stc.einsum("ij,jr->ir", graph, x, output="dense")


def by_torch(coords: torch.Tensor, weights: torch.Tensor, nodes: int) -> Product:
    """A product by torch's COO."""
    graph = torch.sparse_coo_tensor(coords, weights, (nodes, nodes))
    return lambda x: graph @ x


def by_geometric(coords: torch.Tensor, weights: torch.Tensor, nodes: int) -> Product:
    """A message passing of PyTorch Geometric that multiplies by weights and sums."""
    from torch_geometric.nn import SimpleConv

    layer, index = SimpleConv(aggr="sum"), coords.flip(0)
    return lambda x: layer(x, index, weights)


WAYS = {"gather and index_add": by_scatter, "torch COO": by_torch}
if find_spec("torch_geometric"):
    WAYS[versioned("torch_geometric")] = by_geometric


Use = Callable[[Product, int, torch.dtype], Any]
"""Of a graph's product, its number of nodes, and the type of its weights."""


def each_new(graphs: list[Graph], way: Callable[..., Product], use: Use) -> Call:
    """A call that makes the product of a graph that is new, and uses it."""
    following = each_once(graphs)

    def call() -> Any:
        coords, weights, nodes = following()
        return use(way(coords, weights, nodes), nodes, weights.dtype)

    return call


def of_new_graphs(graphs: list[Graph], use: Use) -> Task:
    """The same use of one new graph after the other."""
    coords, weights, nodes = graphs[0]
    in_double = each_new([(coords, weights.double(), nodes)], by_scatter, use)
    instead = {name: each_new(graphs, way, use) for name, way in WAYS.items()}
    return Task(each_new(graphs, by_sparsetc, use), instead, in_double, STEP, fresh=True)


def new_graphs(graphs: Callable[[], list[Graph]], backward: bool) -> Task:
    """One product a graph, and the gradient of the features."""
    all_graphs = graphs()
    features = normal(max(nodes for _, _, nodes in all_graphs), WIDTH)

    def use(product: Product, nodes: int, dtype: torch.dtype) -> Any:
        x = features[:nodes].to(dtype).requires_grad_(backward)
        return step(lambda: product(x), [x], x.detach())() if backward else product(x)

    return of_new_graphs(all_graphs, use)


def two_layers(edges: int, nodes: int) -> Task:
    """A training step of two graph convolutions on a new graph: loss and gradients of the weights."""
    features, wanted = normal(nodes, WIDTH), normal(nodes, CLASSES, seed=1)
    matrices = [normal(WIDTH, WIDTH, seed=2) * 0.1, normal(WIDTH, CLASSES, seed=3) * 0.1]

    def use(product: Product, nodes: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        first, second = (matrix.detach().to(dtype).requires_grad_() for matrix in matrices)
        hidden = product(features.to(dtype) @ first).relu()
        loss = (product(hidden @ second) - wanted).square().mean()
        return loss.detach(), *torch.autograd.grad(loss, [first, second])

    return of_new_graphs(random_graphs(edges, nodes), use)


def graph_of(log2_nodes: int, degree: int) -> stc.SparseTensor:
    """An R-MAT graph with all self loops."""
    edges, (n, _) = synthetic.rmat(log2_nodes, degree, device=common.DEVICE)
    edges = with_loops(edges, n)
    return stc.SparseTensor(edges, positive(edges.shape[1]), (n, n))


def gat(x: torch.Tensor, edges: torch.Tensor, mix: Any, of_source: Any, of_target: Any, bias: Any) -> torch.Tensor:
    """Graph attention by gather and scatter."""
    target, source = edges
    n, mixed = len(x), (x @ mix.T).unflatten(1, of_source.shape)
    scores = leaky_relu((mixed * of_source).sum(-1)[source] + (mixed * of_target).sum(-1)[target], 0.2)
    places_of = target[:, None].expand_as(scores)
    most = scores.new_full((n, HEADS), -torch.inf).scatter_reduce(0, places_of, scores.detach(), "amax")
    weights = (scores - most[target]).exp()
    total = weights.new_zeros(n, HEADS).index_add(0, target, weights)
    sums = mixed.new_zeros(mixed.shape).index_add(0, target, mixed[source] * weights[:, :, None])
    return (sums / total[:, :, None]).flatten(1) + bias


def gcn(x: torch.Tensor, edges: torch.Tensor, weights: torch.Tensor, mix: Any, bias: Any) -> torch.Tensor:
    """A graph convolution by gather and scatter."""
    return messages(edges, weights, len(x), x @ mix.T) + bias


def sage(x: torch.Tensor, edges: torch.Tensor, of_neighbours: Any, of_self: Any) -> torch.Tensor:
    """GraphSAGE with means, by gather and scatter."""
    total = messages(edges, x.new_ones(edges.shape[1]), len(x), x)
    counts = x.new_zeros(len(x)).index_add(0, edges[0], x.new_ones(edges.shape[1]))
    return (total / counts.clamp(min=1)[:, None]) @ of_neighbours.T + x @ of_self.T


def layer(kind: str, log2_nodes: int, degree: int, backward: bool) -> Task:
    """A layer on one graph, forward or forward and backward, beside the same layer by hand and PyG's."""
    graph, n = graph_of(log2_nodes, degree), 1 << log2_nodes
    edges, edge_weights = graph.coords, graph.values
    x, g = normal(n, WIDTH), normal(n, WIDTH, seed=1)
    mix, other, bias = normal(WIDTH, WIDTH, seed=2) * 0.1, normal(WIDTH, WIDTH, seed=3) * 0.1, normal(WIDTH, seed=4)
    of_source, of_target = (normal(HEADS, WIDTH // HEADS, seed=seed) * 0.3 for seed in (5, 6))
    by_hand, parameters = {
        "GAT": (lambda x, *p: gat(x, edges, *p), [mix, of_source, of_target, bias]),
        "GCN": (lambda x, *p: gcn(x, edges, edge_weights.to(x.dtype), *p), [mix, bias]),
        "SAGE": (lambda x, *p: sage(x, edges, *p), [mix, other]),
    }[kind]
    inputs = [t.requires_grad_(backward) for t in (x, *parameters)]

    def ready(call: Call, wanted: list[torch.Tensor]) -> Call:
        return step(call, wanted, g) if backward else quiet(call)

    def expected() -> tuple[torch.Tensor, ...]:
        doubles = [t.detach().double().requires_grad_() for t in inputs]
        return step(lambda: by_hand(*doubles), doubles, g)()[: len(inputs) + 1 if backward else 1]

    instead = {
        name: ready(call, inputs) for name, call in plain_and_compiled("gather and scatter", by_hand, *inputs).items()
    }
    if find_spec("torch_geometric"):
        call, wanted = geometric_layer(kind, graph, x, parameters)
        instead[versioned("torch_geometric")] = ready(call, [x, *wanted])
    call, wanted = our_layer(kind, graph, x, parameters)
    return Task(ready(call, [x, *wanted]), instead, expected, STEP)


def our_layer(kind: str, graph: Any, x: torch.Tensor, parameters: list[torch.Tensor]) -> tuple[Call, list[Any]]:
    """The package's layer with these parameters, and its parameters in their order."""
    if kind == "SAGE":
        of_neighbours, of_self = parameters
        mean = partial(stc.einsum, "ij,jr->ir", graph.with_values(torch.ones_like(graph.values)), reduce="mean")
        return lambda: mean(x, output="dense") @ of_neighbours.T + x @ of_self.T, parameters
    if kind == "GCN":
        convolution = stc.nn.GraphConv(WIDTH, WIDTH).to(common.DEVICE)
        named = [convolution.linear.weight, convolution.bias]
    else:
        convolution = stc.nn.GATConv(WIDTH, WIDTH // HEADS, HEADS).to(common.DEVICE)
        named = [convolution.linear.weight, convolution.of_source, convolution.of_target, convolution.bias]
    return lambda: convolution(graph, x), set_to(named, parameters)


def geometric_layer(kind: str, graph: Any, x: torch.Tensor, parameters: list[torch.Tensor]) -> tuple[Call, list[Any]]:
    """PyG's layer with these parameters, and its parameters in their order."""
    from torch_geometric.nn import GATConv, GCNConv, SAGEConv

    index, weights = graph.coords.flip(0), graph.values
    if kind == "SAGE":
        convolution = SAGEConv(WIDTH, WIDTH, bias=False).to(common.DEVICE)
        return lambda: convolution(x, index), set_to([convolution.lin_l.weight, convolution.lin_r.weight], parameters)
    if kind == "GCN":
        convolution = GCNConv(WIDTH, WIDTH, normalize=False).to(common.DEVICE)
        return lambda: convolution(x, index, weights), set_to([convolution.lin.weight, convolution.bias], parameters)
    convolution = GATConv(WIDTH, WIDTH // HEADS, HEADS, add_self_loops=False).to(common.DEVICE)
    named = [convolution.lin.weight, convolution.att_src, convolution.att_dst, convolution.bias]
    return lambda: convolution(x, index), set_to(named, parameters)


def set_to(parameters: list[Any], values: list[torch.Tensor]) -> list[Any]:
    """Give a layer's parameters values."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value.detach().clone().view_as(parameter)
    return parameters


STEPS = (
    ("random graph, 16 K edges, 2,000 nodes", partial(random_graphs, 16_000, 2000)),
    ("random graph, 320 K edges, 20,000 nodes", partial(random_graphs, 320_000, 20_000)),
    ("R-MAT graphs of 1 to 16 K nodes", rmat_graphs),
)
ROWS = [
    *(
        Row(f"{name}, 64 features, {what}", "a new graph each step", partial(new_graphs, graphs, backward))
        for name, graphs in STEPS
        for what, backward in (("forward", False), ("forward and backward", True))
    ),
    Row("training step of 2 layers, 16 K edges, 2,000 nodes", "mini-batches", partial(two_layers, 16_000, 2000)),
    Row(
        "training step of 2 layers, 320 K edges, 20,000 nodes",
        "mini-batches",
        partial(two_layers, 320_000, 20_000),
        GPU,
    ),
    *(
        Row(
            f"{kind}, R-MAT {size} x{degree}, 64 features, {what}",
            "graph layers",
            partial(layer, kind, size, degree, backward),
            on,
        )
        for on, size, degree in ((GPU, 16, 16), (CPU, 12, 16))
        for kind in ("GCN", "SAGE", "GAT")
        for what, backward in (("forward", False), ("forward and backward", True))
    ),
]
