"""Groups of similar rows on a GPU: the same as on the CPU, whatever the order in which a GPU adds and sorts."""

from __future__ import annotations

import pytest
import torch

from sparsetc.similarity.groups import group_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("tau", [0.1, 0.3, 0.5, 0.8])
@pytest.mark.parametrize(("n_rows", "n_columns", "nnz"), [(3000, 2000, 60_000), (20_000, 50_000, 100_000), (1, 9, 5)])
def test_the_same_groups_as_on_the_cpu(n_rows: int, n_columns: int, nnz: int, tau: float) -> None:
    g = torch.Generator().manual_seed(0)
    kind = torch.randint(0, max(n_rows // 20, 1), (n_rows,), generator=g)
    rows = torch.randint(0, n_rows, (nnz,), generator=g)
    near = torch.randint(0, 8, (nnz,), generator=g).square() * 31  # of each kind's own columns, and some of any
    columns = (kind[rows] * 7919 + near) % n_columns
    anywhere = torch.rand(nnz, generator=g) < 0.1
    columns[anywhere] = torch.randint(0, n_columns, (int(anywhere.sum()),), generator=g)
    expected = group_rows(rows, columns, n_rows, n_columns, width=16, tau=tau)
    for _ in range(2):
        found = group_rows(rows.cuda(), columns.cuda(), n_rows, n_columns, width=16, tau=tau)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))
