"""Sharded tensors over NCCL, on two GPUs: the checks of `distributed_cases`' einsums and decompositions."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import folders
import pytest
import torch

import sparsetc as stc

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]

ROOT = Path(__file__).parents[2]


def torchrun(tmp_path: Path, *command: str) -> str:
    """What two processes print."""
    paths = os.pathsep.join([str(ROOT), *folders.PATHS, os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": paths, "NCCL_NVLS_ENABLE": "0", "SPARSETC_CACHE_DIR": str(tmp_path)}
    run = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run([*run, *command], env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_two_gpus_give_what_one_does(tmp_path: Path, backend: str) -> None:
    assert torchrun(tmp_path, str(Path(__file__)), backend, str(tmp_path)).count("agrees") == 2


def test_the_example(tmp_path: Path) -> None:
    assert "over 2 ranks" in torchrun(tmp_path, str(ROOT / "examples" / "distributed_cp.py"))


def main(backend: str, folder: Path) -> None:
    """One rank."""
    import torch.distributed as dist
    from distributed_cases import compare, dense, same_models, tensor, written

    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    sd, f32 = stc.distributed, torch.float32
    x = tensor((60, 50, 40), f32).to(device)
    a, b, c = (dense(n, 16, dtype=f32, seed=n).to(device) for n in x.shape)
    for along in (None, 0, (1, 2), "ijk,k->ij"):
        s = sd.shard(x, along)
        assert s.gather().device == device
        compare(x, s, "ijk,jr,kr->ir", b, c, tol=1e-4)
        compare(x, s, "ijk,ir,kr->jr", a, c, tol=1e-4, gather=True)
        compare(x, s, "ijk,ir,jr->kr", a, b, tol=1e-4)
        compare(x, s, "ijk,jr,ks->irs", b, c, tol=1e-4)
        compare(x, s, "ijk,i->jk", a[:, 0].contiguous(), tol=1e-4)
        compare(x, s, "ijk,ir,jr,kr->ijk", a, b, c, tol=1e-4)
        compare(x, s, "ijk->", tol=1e-4)
    for dtype in (torch.float16, torch.bfloat16, torch.complex64, torch.int8, torch.int64):
        y = tensor((12, 10), dtype, 0.2).to(device)
        compare(y, sd.shard(y, 1), "ij,jr->ir", torch.ones(10, 2, dtype=dtype, device=device), tol=1e-1, gather=True)
    for plan in ("coo", "fiber", "rows", "hls", "mm-csf"):
        compare(x, s, "ijk,jr,kr->ir", b, c, tol=1e-4, plan=plan)
    for settings in ({}, {"nonnegative": True}):
        for along in (None, 0):
            s = sd.shard(x, along)
            found = stc.decomposition.cp_als(s, 8, n_iter_max=12, tol=0, random_state=0, **settings)
            expected = stc.decomposition.cp_als(x, 8, n_iter_max=12, tol=0, random_state=0, **settings)
            torch.testing.assert_close(torch.tensor(found.fits), torch.tensor(expected.fits), rtol=0, atol=1e-3)
    doubled = x.to(torch.float64)
    same_models(
        stc.decomposition.cp_als(sd.shard(doubled), 8, n_iter_max=5, tol=0, random_state=0),
        stc.decomposition.cp_als(doubled, 8, n_iter_max=5, tol=0, random_state=0),
    )
    path = folder / f"x-{len(backend)}.parquet"
    written(path, x.cpu(), s)
    assert torch.equal(sd.shard(path).gather().values, x.values)
    with pytest.raises(stc.DistributedError, match="different arguments"):
        stc.einsum("ijk,k->ij" if rank else "ijk,j->ik", s, (c if rank else b)[:, 0].contiguous())
    print(f"rank {rank} agrees")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
