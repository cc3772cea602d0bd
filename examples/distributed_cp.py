"""A CP decomposition over several processes: each has a part of the tensor, and all find the model that one would.

    torchrun --nproc-per-node 2 examples/distributed_cp.py

Where there are GPUs each process takes one, and they talk by NCCL; elsewhere by gloo. Started without torchrun, the
same lines run on one process. It prints how the tensor is cut, and the fit beside that of one process.
"""

import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import sparsetc as stc

RANK = 8


def begin() -> torch.device:
    """Join the processes that torchrun started, if it did; the device of this one."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=timedelta(seconds=60))
    return device


def main() -> None:
    """Cut the Uber tensor, run an einsum and a decomposition on all ranks, and compare with one process."""
    device = begin()
    x = stc.datasets.uber().to(device)
    shared = stc.distributed.shard(x)
    first = shared.ranks.rank == 0
    if first:
        print(shared.cut)

    b, c, d = (torch.rand(n, RANK, generator=torch.Generator().manual_seed(n)).to(device) for n in x.shape[1:])
    kernel = stc.compile("ijkl,jr,kr,lr->ir", shared, b, c, d)
    rows, expected = kernel(b, c, d), stc.einsum("ijkl,jr,kr,lr->ir", x, b, c, d)
    whole = rows.full_tensor() if isinstance(rows, DTensor) else rows  # of one process without torchrun it is the whole
    assert torch.allclose(whole, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    if first:
        print(f"a call sends {kernel.explain().nbytes:,} bytes from rank 0")

    model = stc.decomposition.cp_als(shared, RANK, n_iter_max=10, tol=0, random_state=0)
    alone = stc.decomposition.cp_als(x, RANK, n_iter_max=10, tol=0, random_state=0)
    assert abs(model.fits[-1] - alone.fits[-1]) < 1e-3
    if first:
        print(f"fit {model.fits[-1]:.4f} on {shared.ranks.size} ranks, {alone.fits[-1]:.4f} on one process")

    # Of a packed file each rank reads its own part; it need not fit in the memory of one.
    folder = shared.ranks.objects(tempfile.mkdtemp() if first else None)[0]
    path = Path(folder) / "uber.parquet"
    if first:
        stc.write(path, x.cpu())
    shared.ranks.objects("written")
    read = stc.distributed.shard(path, "ijkl,l->ijk", device=device)
    y = stc.einsum("ijkl,l->ijk", read, torch.ones(x.shape[3], device=device))
    assert y.nnz == stc.einsum("ijkl,l->ijk", x, torch.ones(x.shape[3], device=device)).nnz
    if first:
        print(f"a sparse result stays in shares: {y.cut.nnz} entries")
        path.unlink()
        path.parent.rmdir()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
