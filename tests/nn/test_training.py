"""A small transformer and a graph attention network, trained for 100 steps beside the same models over all pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from layer_cases import graph
from test_attention_layers import dense_attention
from torch import Tensor, nn

import sparsetc as stc

STEPS = 100
LENGTH, HEADS, WIDTH = 96, 2, 16
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    """A transformer's block with an embedding before and a projection to tokens behind."""

    def __init__(self, tokens: int, attend: Attend) -> None:
        super().__init__()
        size = HEADS * WIDTH
        self.embedding, self.position = nn.Embedding(tokens, size), nn.Embedding(LENGTH, size)
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(2))
        self.inner, self.outer = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.feed, self.back, self.head = nn.Linear(size, 2 * size), nn.Linear(2 * size, size), nn.Linear(size, tokens)
        self.attend = attend

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight
        q, k, v = self.inner(self.norms[0](x)).view(LENGTH, 3, HEADS, WIDTH).permute(1, 2, 0, 3)
        x = x + self.outer(self.attend(q, k, v).transpose(0, 1).flatten(1))
        return self.head(x + self.back(F.gelu(self.feed(self.norms[1](x)))))


def losses(model: nn.Module, loss: Callable[[], Tensor], rate: float) -> list[float]:
    """Train a model and return the loss of each step."""
    optimizer, found = torch.optim.Adam(model.parameters(), lr=rate), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        found.append(value.item())
    return found


def alike(ours: Sequence[float], theirs: Sequence[float]) -> None:
    """Check that both learned, and the same."""
    assert ours[-1] < ours[0] / 2
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-3, atol=1e-5)


def test_a_transformer_learns_as_over_all_pairs() -> None:
    mask = stc.masks.causal() & (stc.masks.sliding_window(20) | stc.masks.global_tokens(4))
    dense = mask.dense(LENGTH)
    tokens = torch.randint(11, (LENGTH + 1,), generator=torch.Generator().manual_seed(0))
    found = []
    for attend in (
        lambda q, k, v: stc.attention(q, k, v, mask),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=dense),
    ):
        torch.manual_seed(1)
        model = Block(11, attend)
        found.append(losses(model, lambda model=model: F.cross_entropy(model(tokens[:-1]), tokens[1:]), 3e-3))
    alike(*found)


def test_a_graph_attention_network_learns_as_over_all_pairs() -> None:
    adjacency = graph()
    n = adjacency.shape[0]
    meets = (adjacency.to_dense() != 0) | torch.eye(n, dtype=torch.bool)
    x = torch.randn(n, 5, generator=torch.Generator().manual_seed(0))
    labels = (meets.float() @ x)[:, :3].argmax(1)
    found = []
    for sparse in (True, False):
        torch.manual_seed(1)
        layers = nn.ModuleList([stc.nn.GATConv(5, 8, heads=2), stc.nn.GATConv(16, 3)])

        def loss(layers: nn.ModuleList = layers, sparse: bool = sparse) -> Tensor:
            h = x
            for layer in layers:
                h = F.elu(h)
                h = layer(adjacency, h) if sparse else dense_attention(layer, meets, h, h)
            return F.cross_entropy(h, labels)

        found.append(losses(layers, loss, 5e-2))
    alike(*found)
