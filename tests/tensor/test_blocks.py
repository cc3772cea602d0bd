"""Tensors in blocks: what they are made of and turned into, and what keeps the blocks."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from block_cases import blocks_of, filled, in_blocks, numbers
from cases import reduced

import sparsetc as stc
from sparsetc.__main__ import main

ORDERS = {
    "vector": ((7,), (3,)),
    "matrix": ((5, 6), (2, 3)),
    "matrix of whole blocks": ((6, 8), (2, 4)),
    "order 3": ((5, 4, 7), (2, 1, 3)),
    "order 4": ((3, 4, 5, 2), (2, 3, 2, 1)),
    "with a dense mode": ((5, 6, 3), (2, 3)),
    "one block": ((3, 3), (5, 4)),
    "of ones": ((5, 6), (1, 1)),
    "an empty mode": ((0, 6), (2, 3)),
}
LAYOUTS = (torch.sparse_bsr, torch.sparse_bsc)


# -- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coalesce", [True, False])
@pytest.mark.parametrize("n", [9, 1, 0])
@pytest.mark.parametrize("name", ORDERS)
def test_what_blocks_are(name: str, n: int, coalesce: bool) -> None:
    shape, sides = ORDERS[name]
    n = 0 if 0 in shape else n
    coords, blocks = blocks_of(shape, sides, n)
    x = stc.SparseTensor.from_blocks(coords, blocks, shape, coalesce=coalesce)
    whole = filled(blocks, coords, shape)
    assert (x.shape, x.blocksize, x.order) == (shape, sides, len(shape))
    assert (x.sparse_order, x.dense_order) == (len(sides), len(shape) - len(sides))
    assert x.values.shape == (x.nnz, *sides, *shape[len(sides) :])
    assert x.is_coalesced == coalesce
    assert x.nnz == (torch.unique(coords, dim=1).shape[1] if coalesce else n)
    assert f"blocksize={sides}" in repr(x)
    assert f"blocksize={sides}" in repr(x.pattern)
    torch.testing.assert_close(x.to_dense(), whole)
    expanded = x.expand_dense()
    assert (expanded.blocksize, expanded.dense_order, expanded.shape) == ((), 0, shape)
    torch.testing.assert_close(expanded.to_dense(), whole)
    assert expanded.is_coalesced == coalesce
    if coalesce:
        assert torch.equal(expanded.coords, expanded.coalesce().coords)
    torch.testing.assert_close(x.coalesce().to_dense(), whole)
    assert x.coalesce().blocksize == sides
    modes = (*reversed(range(len(sides))), *range(len(sides), len(shape)))
    turned = x.permute(modes)
    assert turned.blocksize == sides[::-1]
    torch.testing.assert_close(turned.to_dense(), whole.permute(modes))
    assert x.permute(modes).pattern is turned.pattern
    torch.testing.assert_close(x.to_torch(torch.sparse_coo).to_dense(), whole)
    torch.testing.assert_close(stc.SparseTensor(*x.to_numpy()).to_dense(), whole)


def test_copies_of_all_kinds() -> None:
    x = in_blocks((5, 6, 3), (2, 3), 9)
    whole = x.to_dense()
    buffer = io.BytesIO()
    torch.save([x, x.with_values(2 * x.values)], buffer)
    buffer.seek(0)
    loaded, double = torch.load(buffer)
    assert loaded.pattern is double.pattern
    torch.testing.assert_close(double.to_dense(), 2 * whole)
    for made in (pickle.loads(pickle.dumps(x)), copy.copy(x), copy.deepcopy(x), loaded):
        assert made.blocksize == x.blocksize
        assert torch.equal(made.to_dense(), whole)
    assert copy.copy(x).pattern is x.pattern
    narrow = x.to(torch.float32)
    assert narrow.pattern is x.pattern
    assert narrow.blocksize == x.blocksize
    assert x.to("meta").blocksize == x.blocksize
    assert x.to("meta").shape == x.shape


def test_a_damaged_pickle_is_refused() -> None:
    x = in_blocks((5, 6), (2, 3), 4)
    make, (coords, sides, shape, coalesced) = reduced(x.pattern)
    for bad in (
        (coords, (2,), shape, coalesced),
        (coords, (2, 0), shape, coalesced),
        (coords + 5, sides, shape, coalesced),
        (coords.flip(1), sides, shape, coalesced),
        (coords, "ab", shape, coalesced),
    ):
        with pytest.raises(stc.SparsetcError):
            make(*bad)
    tensor, (pattern, values) = reduced(x)
    with pytest.raises(stc.FormatError, match="blocks of"):
        tensor(pattern, values.mT)


def test_values_that_are_the_callers_and_that_are_not() -> None:
    coords, blocks = blocks_of((6, 6), (2, 3), 1)
    x = stc.SparseTensor.from_blocks(coords, blocks, (6, 6))
    coords += 1
    blocks *= 2
    torch.testing.assert_close(x.to_dense(), filled(blocks, coords - 1, (6, 6)))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"blocks": torch.ones(2, 2, 3)},
            stc.FormatError,
            r"block 1 has a nonzero at coordinate 5 of mode 0, whose size",
        ),
        ({"blocks": torch.full((2, 2, 3), torch.nan)}, stc.FormatError, "past the end of the shape must be zero"),
        (
            {"coords": [[0, 3], [1, 0]]},
            stc.CoordinateError,
            "mode 0: block 1 has 3, but the size of mode 0 is 3 blocks",
        ),
        ({"coords": [[0, -1], [1, 0]]}, stc.CoordinateError, "block 1 has -1"),
        ({"coords": [[0, 2]]}, stc.ShapeError, "shape .5, 6. has 2 modes|dense modes of blocks"),
        ({"coords": [[0, 1, 2], [0, 0, 0]]}, stc.FormatError, "3 columns but there are 2 values"),
        ({"coords": [[0.5, 1], [0, 0]]}, stc.FormatError, "coords must be integers"),
        ({"blocks": torch.zeros(2, 2)}, stc.FormatError, "a side of 1 or more for each of 2 modes"),
        ({"blocks": torch.zeros(2, 0, 3)}, stc.FormatError, "a side of 1 or more for each of 2 modes"),
        ({"blocks": torch.zeros(2, 2, 3, dtype=torch.complex32)}, stc.DtypeError, "values must be one of"),
        ({"shape": (5, 6, 2)}, stc.ShapeError, "has 3 modes, but a block has 2"),
        ({"shape": (5, -6)}, stc.ShapeError, "from 0 on"),
        ({"shape": None}, stc.ShapeError, "shape must be a sequence"),
        ({"blocks": torch.zeros(2, 2, 3, 4), "shape": (5, 6, 3)}, stc.ShapeError, "dense modes of blocks"),
    ],
)
def test_what_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"coords": [[0, 2], [1, 0]], "blocks": torch.zeros(2, 2, 3), "shape": (5, 6)} | change
    with pytest.raises(error, match=message):
        stc.SparseTensor.from_blocks(**given)


def test_zeros_past_the_end_and_values_put_there_later() -> None:
    coords, blocks = blocks_of((5, 7), (2, 3), 20)
    x = stc.SparseTensor.from_blocks(coords, blocks, (5, 7))
    b = numbers((7, 4), torch.float64, 1)
    wild = x.with_values(torch.where(x.values == 0, torch.full_like(x.values, torch.nan), x.values))
    whole = x.to_dense()
    for found, wanted in (
        (wild.to_dense(), whole),
        (wild.expand_dense().to_dense(), whole),
        (stc.einsum("ij->i", wild), whole.sum(1)),
        (stc.einsum("ij,jr->ir", wild, b), whole @ b),
        (stc.einsum("ij,jr->ir", wild, b, plan="coo"), whole @ b),
        (stc.einsum("ij->ji", wild).to_dense(), whole.T),
    ):
        torch.testing.assert_close(found, wanted)


# -- torch, scipy, files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("sides", [(2, 3), (1, 4), (3, 1), (6, 12)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("blocks_kept")
def test_torch_blocks_are_taken_as_they_are(
    layout: torch.layout, sides: tuple[int, int], batch: tuple[int, ...]
) -> None:
    whole = in_blocks((6, 12), sides, 5).to_dense().expand(*batch, 6, 12).contiguous()
    given = whole.to_sparse_bsr(sides) if layout == torch.sparse_bsr else whole.to_sparse_bsc(sides)
    x = stc.SparseTensor.from_torch(given)
    assert x.blocksize == (*[1] * len(batch), *sides)
    torch.testing.assert_close(x.to_dense(), whole)
    assert stc.SparseTensor.from_torch(given).pattern is x.pattern
    b = numbers((12, 4), torch.float64, 1)
    torch.testing.assert_close(stc.einsum("...ij,jr->...ir", given, b, output="dense"), whole @ b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("blocks_kept")
def test_torch_blocks_with_dense_modes(layout: torch.layout) -> None:
    values = numbers((3, 2, 3, 5), torch.float64, 0)
    index = torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1])
    given = torch.sparse_compressed_tensor(*index, values, (4, 6, 5), layout=layout)  # type: ignore[call-overload]
    x = stc.SparseTensor.from_torch(given)
    assert (x.blocksize, x.dense_order, x.shape) == ((2, 3), 1, (4, 6, 5))
    at = torch.tensor([[0, 0, 1], [0, 1, 1]])
    torch.testing.assert_close(
        x.to_dense(), filled(values, at if layout == torch.sparse_bsr else at.flip(0), (4, 6, 5))
    )


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
@pytest.mark.parametrize("coalesce", [True, False])
@pytest.mark.usefixtures("blocks_kept")
def test_torch_blocks_come_back(layout: torch.layout | None, coalesce: bool) -> None:
    x = in_blocks((6, 12), (2, 6), 7, coalesce=coalesce)
    for sides in (None, (2, 6), (2, 3), (1, 2)):
        if layout is None and sides is not None:
            continue
        found = x.to_torch(layout, sides)
        assert found.layout == (layout or torch.sparse_bsr)
        assert found.values().shape[1:] == (sides or (2, 6))
        torch.testing.assert_close(found.to_dense(), x.to_dense())
        torch.testing.assert_close(stc.SparseTensor.from_torch(found).to_dense(), x.to_dense())


def test_other_layouts_of_torch_have_blocks_expanded() -> None:
    x = in_blocks((6, 12), (2, 6), 7)
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
        torch.testing.assert_close(x.to_torch(layout).to_dense(), x.to_dense())
    torch.testing.assert_close(x.to_torch(torch.sparse_bsr, (3, 4)).to_dense(), x.to_dense())
    ragged = in_blocks((5, 7), (2, 3), 7)
    assert ragged.to_torch().layout == torch.sparse_coo
    torch.testing.assert_close(ragged.to_torch().to_dense(), ragged.to_dense())
    assert in_blocks((4, 4, 4), (2, 2, 2), 5).to_torch().layout == torch.sparse_coo
    with pytest.raises(stc.ShapeError, match="must divide the shape"):
        ragged.to_torch(torch.sparse_bsr)


@pytest.mark.usefixtures("blocks_kept")
def test_scipy_blocks() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    x = in_blocks((6, 12), (2, 3), 7)
    given = x.to_scipy()
    assert given.format == "bsr"
    assert given.blocksize == (2, 3)
    again = stc.SparseTensor.from_scipy(given)
    assert again.blocksize == (2, 3)
    torch.testing.assert_close(again.to_dense(), x.to_dense())
    assert stc.SparseTensor.from_scipy(given).pattern is again.pattern
    b = numbers((12, 4), torch.float64, 1)
    torch.testing.assert_close(stc.einsum("ij,jr->ir", given, b), x.to_dense() @ b)
    unsorted = sparse.bsr_array((given.data[1::-1].copy(), [1, 0], [0, 0, 2, 2]), shape=(6, 12), blocksize=(2, 3))
    torch.testing.assert_close(stc.SparseTensor.from_scipy(unsorted).to_dense(), torch.from_numpy(unsorted.toarray()))


@pytest.mark.usefixtures("blocks_kept")
def test_files(tmp_path: Path) -> None:
    x = in_blocks((5, 7, 3), (2, 3), 7)
    wild = x.with_values(torch.where(x.values == 0, torch.full_like(x.values, torch.inf), x.values))
    stc.write(tmp_path / "x.npz", wild)
    again = stc.read(tmp_path / "x.npz")
    assert (again.blocksize, again.shape) == (x.blocksize, x.shape)
    assert torch.equal(again.to_dense(), x.to_dense())


def test_the_command_line_counts_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stc.write(tmp_path / "x.npz", in_blocks((5, 7), (2, 3), 1))
    main(["info", str(tmp_path / "x.npz")])
    said = capsys.readouterr().out
    assert "order 2, 1 blocks of 2 x 3" in said
    assert "blocks a fiber" in said


def test_files_of_text_have_nonzeros(tmp_path: Path) -> None:
    x = in_blocks((5, 7), (2, 3), 7)
    for name in ("x.tns", "x.mtx"):
        stc.write(tmp_path / name, x)
        torch.testing.assert_close(stc.read(tmp_path / name).to_dense().double(), x.to_dense(), rtol=1e-6, atol=1e-6)


def test_gradients_to_the_values_of_a_torch_tensor() -> None:
    given = in_blocks((6, 12), (2, 6), 7).to_torch().requires_grad_()
    b = numbers((12, 4), torch.float64, 1)
    (found,) = torch.autograd.grad(stc.einsum("ij,jr->ir", given, b).square().sum(), given)
    whole = given.to_dense().detach().requires_grad_()
    (wanted,) = torch.autograd.grad((whole @ b).square().sum(), whole)
    mask = given.detach().to_dense() != 0
    torch.testing.assert_close(found.to_dense(), wanted * mask)
