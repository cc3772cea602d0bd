"""Random einsums of tensors in blocks, with dense and other sparse operands, against torch on dense tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from block_cases import Spec, check, dense, numbers, operands_of
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsetc as stc


@dataclass(frozen=True)
class Drawn:
    """An einsum, and what its operands are made of."""

    equation: str
    specs: tuple[Spec, ...]
    sizes: dict[str, int]
    blocks: int
    coalesce: bool
    form: str

    def operands(self) -> list[Any]:
        """The operands; no blocks where one has an empty mode."""
        terms = self.equation.split("->")[0].split(",")
        empty = any(0 in [self.sizes[c] for c in t] for t, s in zip(terms, self.specs, strict=True) if s != "dense")
        n = 0 if empty else self.blocks
        return operands_of(self.equation, self.specs, n, coalesce=self.coalesce, sizes=self.sizes)


@st.composite
def einsums(draw: st.DrawFn) -> Drawn:
    """An einsum of an operand in blocks, of order 1 to 4, and up to two others of any kind."""
    letters = "ijklm"
    sizes = {c: draw(st.sampled_from([0, 1, 2, 3, 4, 5, 6] if c == "m" else [1, 2, 3, 4, 5, 6])) for c in letters}
    kinds = ["blocks", *draw(st.lists(st.sampled_from(["blocks", "dense", "sparse", "semi"]), max_size=2))]
    terms, specs = [], list[Spec]()
    for kind in kinds:
        term = draw(st.text(letters, min_size=2 if kind == "semi" else 1, max_size=4 if kind == "blocks" else 3))
        terms.append(term)
        if kind == "blocks":
            modes = draw(st.integers(1, len(term)))
            specs.append(tuple(draw(st.integers(1, 4)) for _ in range(modes)))
        else:
            specs.append(kind)
    used = sorted({c for t in terms for c in t})
    output = "".join(draw(st.permutations(used))[: draw(st.integers(0, len(used)))])
    form = draw(st.sampled_from(["auto", "dense"]))
    return Drawn(
        f"{','.join(terms)}->{output}", tuple(specs), sizes, draw(st.integers(0, 8)), draw(st.booleans()), form
    )


@settings(max_examples=200)
@given(st.data())
def test_blocks_of_any_dense_tensor(data: st.DataObject) -> None:
    """Just the blocks that hold an element to take, in order; zeros, and elements that a mask leaves out, are 0."""
    shape = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    sides = tuple(data.draw(st.integers(1, 4)) for _ in shape)
    masked, seed = data.draw(st.booleans()), data.draw(st.integers(0, 99))
    g = torch.Generator().manual_seed(seed)
    dense = torch.randn(shape, generator=g) * (torch.rand(shape, generator=g) < 0.2)
    mask = torch.rand(shape, generator=g) < 0.1 if masked else None
    x = stc.SparseTensor.from_dense(dense.requires_grad_(), mask=mask, blocksize=sides)
    taken = dense.detach() != 0 if mask is None else mask
    corners = {tuple(c // s for c, s in zip(at, sides, strict=True)) for at in taken.nonzero().tolist()}
    assert x.blocksize == sides
    assert list(map(tuple, x.coords.T.tolist())) == sorted(corners)
    assert torch.equal(x.to_dense(), torch.where(taken, dense, 0))
    assert torch.equal(torch.autograd.grad(x.to_dense().sum(), dense)[0], taken if masked else in_any(x, shape))
    stc.SparseTensor.from_blocks(x.coords, x.values.detach(), shape)  # zero past the end
    assert torch.equal(stc.SparseTensor.from_dense(dense, mask=mask).coords, taken.nonzero().T)


def in_any(x: stc.SparseTensor, shape: list[int]) -> torch.Tensor:
    """Return 1 for each element that lies in a block, else 0."""
    return x.with_values(torch.ones_like(x.values)).to_dense()


@settings(max_examples=300)
@given(einsums())
def test_any_einsum_agrees_with_torch(drawn: Drawn) -> None:
    operands = drawn.operands()
    found = stc.einsum(drawn.equation, *operands, output=drawn.form)
    check(found, drawn.equation, operands, 1e-9)
    if isinstance(found, stc.SparseTensor):
        assert found.values.shape == found.pattern.values_shape(found.shape[found.sparse_order :])
        if found.blocksize:  # in range, and zero past the end
            stc.SparseTensor.from_blocks(found.coords, found.values, found.shape)
        else:
            stc.SparseTensor(found.coords, found.values, found.shape)


@settings(max_examples=60)
@given(einsums())
def test_any_gradient_agrees_with_torch(drawn: Drawn) -> None:
    operands = drawn.operands()
    values = [o.values if isinstance(o, stc.SparseTensor) else o for o in operands]
    leaves = [v.clone().requires_grad_() for v in values]
    pairs = zip(operands, leaves, strict=True)
    own = [o.with_values(v) if isinstance(o, stc.SparseTensor) else v for o, v in pairs]
    result = torch.einsum(drawn.equation, *map(dense, own))
    weights = numbers(tuple(result.shape), torch.float64, 9)
    wanted = torch.autograd.grad((result * weights).sum(), leaves)
    found = dense(stc.einsum(drawn.equation, *own, output=drawn.form))
    torch.testing.assert_close(torch.autograd.grad((found * weights).sum(), leaves), wanted)
