"""Sharded tensors over gloo: groups of 1 to 4 ranks run every check of `distributed_cases`, processes started once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import distributed_cases as cases
import folders
import processes

import sparsetc as stc

ROOT = Path(__file__).parents[2]


def became(folder: Path) -> list[dict[str, str]]:
    """What became of each check, of each rank; rank 1 dies before it can say so."""
    size = max(cases.SIZES)
    paths = os.pathsep.join([str(ROOT), *folders.PATHS, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    script = ROOT / "tests" / "distributed" / "distributed_cases.py"
    ranks = [processes.Script([script, rank, size, folder], env=env) for rank in range(size)]
    try:
        said = [rank.result().stderr for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    files = [folder / f"{rank}.json" for rank in range(size)]
    assert all(path.exists() for rank, path in enumerate(files) if rank != 1), "\n".join(said)
    return [json.loads(path.read_text()) for path in files if path.exists()]


def test_groups_of_one_to_four_ranks(tmp_path: Path) -> None:
    """One test of many checks: processes are started once, wherever tests are dealt to workers."""
    found = became(tmp_path)
    for name, n in cases.checked():
        assert any(f"{name}-{n}" in one for one in found), f"{name} was not run by {n} ranks"
    assert "lost-3" in found[0]
    failed = [f"{name}, rank {rank}: {said}" for rank, one in enumerate(found) for name, said in one.items() if said]
    assert not failed, "\n".join(failed)


def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = processes.run([*run, ROOT / "examples" / "distributed_cp.py"], env=env, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "over 2 ranks" in result.stdout


def test_there_is_one_einsum_and_one_cp_als() -> None:
    assert (stc.distributed.einsum, stc.distributed.compile) == (stc.einsum, stc.compile)
    assert stc.distributed.cp_als is stc.decomposition.cp_als


def test_without_a_process_group_there_is_one_rank(tmp_path: Path) -> None:
    for name in ("einsums_are_those_of_one_process", "sparse_results_are_operands", "packed_files_are_read_in_parts"):
        cases.CHECKS[name](None, tmp_path)
