"""TTV and TTM of every mode with a sparse result, beside cuSPARSE's SpMV and SpMM on the unfolded tensor.

    SPARSETC_DATA=<folder of .npz> python benchmarks/ttv.py [names of tensors]

Microseconds of captured graphs by ``"auto"``, float32, once results agree with cuSPARSE's. The unfolded matrix has a
row for each fiber that is not empty, and 32-bit indices. ``floor_us`` is the time of 4 bytes a value, 2 or 4 a leaf
coordinate, and the result, at the rate of reading memory that is measured first.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from common import DEVICE, device_microseconds, letters, record, relative_error, tensor

import sparsetc as stc

TENSORS = ("uber_amj_4d", "ratings", "nell-2 x0.5", "nell-2")
RANKS = (1, 16, 64)
READ = 1 << 28


def ratings() -> stc.SparseTensor:
    """A tensor like a table of ratings, skewed: users, films, and stars."""
    g = torch.Generator(device=DEVICE).manual_seed(0)
    sides = ((6040, 1.5), (3706, 2), (5, 1))
    each = [(torch.rand(1_000_000, device=DEVICE, generator=g) ** p * n).long().clamp(max=n - 1) for n, p in sides]
    return stc.SparseTensor(torch.stack(each), torch.rand(1_000_000, device=DEVICE), (6040, 3706, 5)).coalesce()


def read_rate() -> float:
    """Bytes a second in which a tensor of 1 GB is summed."""
    x = torch.ones(READ, device=DEVICE)
    return 4 * READ / (1e-6 * device_microseconds(lambda: x.sum()))


def unfolded(x: stc.SparseTensor, mode: int) -> torch.Tensor:
    """The matrix of the fibers along a mode that are not empty, in CSR and in the order of their coordinates."""
    kept = [m for m in range(x.order) if m != mode]
    key = torch.zeros_like(x.coords[0])
    for m in kept:
        key = key * x.shape[m] + x.coords[m]
    order = torch.argsort(key)
    lengths = torch.unique_consecutive(key[order], return_counts=True)[1]
    pointers = torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0)).int()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the layout a beta
        columns, values = x.coords[mode][order].int(), x.values[order]
        return torch.sparse_csr_tensor(pointers, columns, values, (lengths.numel(), x.shape[mode]))


def measured(x: stc.SparseTensor, mode: int, rank: int, matrix: torch.Tensor, rate: float) -> dict[str, Any]:
    """One mode and rank."""
    own, g = letters(x.order), torch.Generator(device=DEVICE).manual_seed(1)
    kept = own.replace(own[mode], "")
    text = f"{own},{own[mode]}->{kept}" if rank == 1 else f"{own},{own[mode]}r->{kept}r"
    dense = torch.randn((x.shape[mode], rank)[: 1 if rank == 1 else 2], generator=g, device=DEVICE)
    kernel = stc.compile(text, x, dense, output="sparse")
    found = kernel(dense).values
    assert relative_error(found, (matrix @ dense).double()) < 1e-5
    leaf = 2 if x.shape[mode] <= 1 << 16 else 4
    needed = (4 + leaf) * x.nnz + 4 * found.numel()
    rows = found.shape[0]
    del found
    us, peer = (round(device_microseconds(f), 1) for f in (lambda: kernel(dense), lambda: matrix @ dense))
    return {
        "op": "ttv" if rank == 1 else f"ttm{rank}",
        "mode": mode,
        "rows": rows,
        "plan": kernel.plan.name,
        "us": us,
        "expected_us": round(1e6 * sum(kernel.step.choice.seconds), 1),
        "floor_us": round(1e6 * needed / rate, 1),
        "cusparse_us": peer,
        "over_cusparse": round(peer / us, 2),
    }


def main(names: list[str]) -> None:
    """Every tensor that is there."""
    rate, rows = read_rate(), []
    print(f"memory is read at {rate / 1e12:.2f} TB/s")
    for name in names or TENSORS:
        x = ratings() if name == "ratings" else tensor(name)
        if x is None:
            continue
        for mode in range(x.order):
            matrix = unfolded(x, mode)
            for rank in RANKS:
                rows.append({"tensor": name, "nnz": x.nnz, **measured(x, mode, rank, matrix, rate)})
                print(rows[-1], flush=True)
            x.pattern.clear()
        del x, matrix
        torch.cuda.empty_cache()
    record("ttv_peers", rows, read_rate=rate)


if __name__ == "__main__":
    main(sys.argv[1:])
