"""The same calls by two checkouts of the package, in turn on one GPU: no kernel may get slower.

    python benchmarks/before_after.py FOLDER       # of the other checkout, called by its commit

A case is an equation, a tensor and a plan, as the benchmarks `mttkrp`, `ttmc`, `hls`, `spmm`, `pair` and `ttv` have
them, and as a dense tensor. SPARSETC_DATA is as for all benchmarks. Each checkout runs in processes of its own, twice,
in turn; a case's time is the less of its two medians, replayed from a CUDA graph where it can be captured. Results are
compared between the checkouts before any time is reported.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import DEVICE, device_microseconds, microseconds, mttkrp_equation, record, tensor

import sparsetc as stc

GPU = DEVICE == "cuda"
TENSORS = ("uber_amj_4d", "guanine_TEvv_3d", "guanine_TEov_3d", "nell-2 x0.05", "flickr x0.05", "clustered")
MATRICES = ("R-MAT 14 x8", "R-MAT 14 x32", "pubmed_mat", "c2000_5_mat", "pruned 2048x512", "block .1 .1")
PAIRS = (
    ("guanine_TEoo_3d", "guanine_TEov_3d", "ijk,abk->ijab"),
    ("uber_amj_4d", "uber_amj_4d", "ijkl,mjkl->im"),
    ("R-MAT 14 x8", "R-MAT 14 x8", "ij,jk->ik"),
    ("bands 430x57", "bands 430x57", "ijk,ljk->il"),
)
SHARES = max(1, min(6, (os.cpu_count() or 1) // 2))
"""Processes a checkout that compile, before one process times."""
LIMIT = {"highest": 1e-5, "high": 4e-3, "medium": 3e-2}


def cases() -> Iterator[tuple[str, str, list[str], int, dict[str, Any]]]:
    """(benchmark, equation, tensors, rank, options) of each case."""
    for name in TENSORS if GPU else ("nell-2 x0.0002",):
        order = 4 if name == "uber_amj_4d" else 3
        for mode in range(order):
            yield "mttkrp", mttkrp_equation(order, mode), [name], 32, {}
        yield "hls", mttkrp_equation(order, 0), [name], 32, {"plan": "hls", "precision": "high"}
        if order == 3:
            yield "ttmc", "ijk,jr,ks->irs", [name], 32, {"precision": "high"}
            yield "ttv", "ijk,k->ij", [name], 32, {}
            yield "ttv", "ijk,kr->ijr", [name], 32, {}
    for name in MATRICES if GPU else ("R-MAT 14 x8",):
        for precision in LIMIT:
            yield "spmm", "ij,jr->ir", [name], 128, {"precision": precision}
    for rank in (128, 512, 4096) if GPU else (16,):
        for precision in LIMIT:
            yield "dense", "ij,jr->ir", ["half full"], rank, {"precision": precision, "plan": "dense"}
    for equation in ("ijk,jr,kr->ir", "ijk,jr,ks->irs", "ijk,k->ij"):
        for rank in (16, 128):
            yield "dense", equation, ["small clustered"], rank, {"plan": "dense", "output": "dense"}
        yield "dense", equation, ["small clustered"], 128, {"plan": "auto", "output": "dense"}
    for x, y, equation in PAIRS if GPU else PAIRS[2:3]:
        yield "pair", equation, [x, y], 0, {}


def call_of(equation: str, names: list[str], rank: int, options: dict[str, Any]) -> Any:
    """A compiled call; None where a tensor is absent or the plan does not apply."""
    sparse = [tensor(name) for name in names]
    if any(x is None for x in sparse):
        return None
    terms = equation.partition("->")[0].split(",")
    sizes = {c: n for term, x in zip(terms, sparse, strict=False) for c, n in zip(term, x.shape, strict=True)}
    g = torch.Generator(device=DEVICE).manual_seed(1)
    shapes = [[sizes.get(c, rank) for c in term] for term in terms[len(sparse) :]]
    dense = [torch.randn(*shape, generator=g, device=DEVICE) for shape in shapes]
    try:
        kernel = stc.compile(equation, *sparse, *dense, **options)
    except stc.PlanError:
        return None
    return kernel, dense


def values_of(result: Any) -> torch.Tensor:
    return result.values if isinstance(result, stc.SparseTensor) else result


def timed(folder: Path, share: int | None) -> None:
    """Run every case here, and keep its time and a digest of its result; of a `share` of the cases, compile only."""
    rows = {}
    for number, (benchmark, equation, names, rank, options) in enumerate(cases()):
        if share is not None and number % SHARES != share:
            continue
        made = call_of(equation, names, rank, options)
        if made is None:
            continue
        kernel, dense = made
        result = values_of(kernel(*dense))
        if share is not None:
            continue
        g = torch.Generator(device=DEVICE).manual_seed(2)
        probe = torch.randn(min(result.numel(), 1 << 20), generator=g, device=DEVICE)
        row = {"benchmark": benchmark, "equation": equation, "tensors": names, **options, "plan": kernel.plan.name}
        row |= {"norm": float(result.double().norm()), "probe": float((result.flatten()[: len(probe)] * probe).sum())}
        try:
            row["us"] = device_microseconds(lambda k=kernel, d=dense: k(*d))
        except RuntimeError:  # a call that waits for the GPU cannot be captured
            row["us"] = microseconds(lambda k=kernel, d=dense: k(*d))
        rows[number] = row
        del kernel, dense, result, made
    (folder / "rows.json").write_text(json.dumps(rows))


def main(other: Path) -> None:
    """Compile for both at once; then time them in turn, compare results, print and record."""
    here = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as folder:
        roots = {"before": other.resolve(), "after": here}
        spaces = {name: Path(folder) / name for name in roots}

        def start(name: str, *flags: str) -> subprocess.Popen[bytes]:
            spaces[name].mkdir(exist_ok=True)
            environment = os.environ | {"PYTHONPATH": str(roots[name]), "SPARSETC_CACHE_DIR": str(spaces[name])}
            return subprocess.Popen([sys.executable, __file__, "--here", str(spaces[name]), *flags], env=environment)

        shares = [start(name, "--compile", str(share)) for name in roots for share in range(SHARES)]
        if any([one.wait() for one in shares]):  # noqa: C419 every one is waited for
            sys.exit("a checkout does not run the cases")
        found: dict[str, dict[str, Any]] = {name: {} for name in roots}
        for name in ("before", "after", "after", "before"):
            if start(name).wait():
                sys.exit(f"{name}: a case failed")
            for number, row in json.loads((spaces[name] / "rows.json").read_text()).items():
                known = found[name].setdefault(number, row)
                known["us"] = min(known["us"], row["us"])
    rows = []
    for number, after in found["after"].items():
        before = found["before"].get(number)
        if before is None:
            continue
        limit = LIMIT[after.get("precision", "highest")] * after["norm"]
        if abs(before["norm"] - after["norm"]) > limit or abs(before["probe"] - after["probe"]) > 8 * limit:
            sys.exit(f"results differ: {before} and {after}")
        about = {k: v for k, v in after.items() if k not in ("us", "norm", "probe")}
        rows.append(about | {"plan_before": before["plan"], "before_us": before["us"], "after_us": after["us"]})
    for benchmark in dict.fromkeys(row["benchmark"] for row in rows):
        ratios = [row["after_us"] / row["before_us"] for row in rows if row["benchmark"] == benchmark]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(
            f"{benchmark:8} {len(ratios):3} cases: after / before {mean:.3f} in geometric mean, {max(ratios):.3f} worst"
        )
    for row in sorted(rows, key=lambda row: row["before_us"] / row["after_us"])[:8]:
        print(row)
    print(record("before_after", rows, before=other.name))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1] == "--here":
        timed(Path(sys.argv[2]), int(sys.argv[4]) if "--compile" in sys.argv else None)
    else:
        main(Path(sys.argv[1]))
