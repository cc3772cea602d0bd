"""What the compiler makes of many problems, kept in a file and compared after a change: sources, and prices of plans.

    python benchmarks/replay.py write FILE         # before a change
    python benchmarks/replay.py compare FILE       # after it: prints what differs; status 1 where anything does

A case is a problem, a precision and a backend: the equations of the benchmarks on small tensors like theirs, by
``"auto"`` and by every plan by name, the cases of the golden sources, and 200 random einsums. Kept are the plan, every
plan considered with its price, and the generated source. Nothing runs, no GPU is needed; it takes under a minute.
"""

from __future__ import annotations

import difflib
import gzip
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import synthetic
import torch

import sparsetc as stc

sys.path.append(str(Path(__file__).parent.parent / "tests"))

PLANS = ("auto", "coo", "fiber", "rows", "coo+rows", "fiber+rows", "hls", "mm-csf", "window", "1-sa", "dense")
PAIR_PLANS = ("auto", "scalar", "dense", "bcb", "bcb+scalar")
TENSORS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "nell-2": (
        lambda: synthetic.like("nell-2", 2e-4),
        ("ijk,jr,kr->ir", "ijk,ir,jr->kr", "ijk,k->ij", "ijk,kr->ijr", "ijk,ir,jr,kr->ijk", "ijk,i,j,k->"),
    ),
    "flickr": (lambda: synthetic.like("flickr", 1e-4), ("ijk,ir,kr->jr", "ijk,jr,ks->irs", "ijk,ir,js->krs")),
    "clustered": (
        lambda: synthetic.clustered((96, 112, 80), 40_000),
        ("ijk,jr,kr->ir", "ijk,jr,ks->irs", "ijk,kr->ijr"),
    ),
    "R-MAT": (lambda: synthetic.rmat(10, 8), ("ij,jr->ir", "ij,j->i", "ij,ir,jr->ij")),
    "blocks": (lambda: synthetic.block_matrix(512, 32, 0.1, 0.3), ("ij,jr->ir",)),
    "half full": (lambda: full((256, 256), 0.5), ("ij,jr->ir",)),
}
"""Tensors like those of the benchmarks, and their equations."""
PAIRS = ("ijk,klm->ijlm", "ijk,ljk->il", "ijk,ijm->km", "ij,jk->ik")
RANDOM = 200


def full(shape: tuple[int, ...], share: float) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Nonzeros anywhere, so many of all positions."""
    g = torch.Generator().manual_seed(0)
    return torch.nonzero(torch.rand(shape, generator=g) < share).T.contiguous(), shape


def sparse(coords: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> stc.SparseTensor:
    """A tensor of ones."""
    return stc.SparseTensor(coords, torch.ones(coords.shape[1], dtype=dtype), shape)


def dense_of(equation: str, sizes: dict[str, int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Dense operands of ones behind the first operand."""
    one = torch.ones((), dtype=dtype)
    return [one.expand([sizes[c] for c in term]) for term in equation.split("->")[0].split(",")[1:]]


def benchmarks() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """(name, arguments, settings) of every benchmark's equation by every plan."""
    for name, (made, equations) in TENSORS.items():
        x = sparse(*made())
        for equation in equations:
            for rank in (16, 128):
                sizes = {**dict(zip("ijkl", x.shape, strict=False)), "r": rank, "s": min(rank, 32)}
                arguments = (equation, x, *dense_of(equation, sizes))
                yield from settings_of(f"{name} {equation} r={rank}", arguments, PLANS if rank == 16 else ("auto",))
    for equation in PAIRS:
        sizes = dict(zip("ijklm", (40, 30, 50, 20, 60), strict=True))
        operands = [sparse(*full(tuple(sizes[c] for c in term), 0.02)) for term in equation.split("->")[0].split(",")]
        yield from settings_of(equation, (equation, *operands), PAIR_PLANS)


def settings_of(
    name: str, arguments: tuple[Any, ...], plans: tuple[str, ...]
) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """By each plan in Triton, by ``"auto"`` in torch and at other precisions."""
    each = [("triton", plan, "highest") for plan in plans]
    each += [("torch", "auto", "highest"), ("triton", "auto", "high"), ("triton", "auto", "medium")]
    for backend, plan, precision in each:
        asked = {"backend": backend, "plan": plan, "precision": precision}
        yield f"{name} {backend} {plan} {precision}", arguments, asked


def randomly() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Einsums of one sparse operand of order 1 to 5 and up to three dense ones, with any output."""
    for seed in range(RANDOM):
        r = random.Random(seed)
        own = "ijklm"[: r.randint(1, 5)]
        sizes = {c: r.choice((1, 3, 8, 17, 40)) for c in own} | {c: r.choice((1, 4, 16, 33)) for c in "rst"}
        terms = [own]
        for letter in "rst"[: r.randint(0, 3)]:
            terms.append("".join(r.sample(own, min(len(own), r.randint(1, 2)))) + r.choice(("", letter)))
        letters = sorted(set("".join(terms)))
        equation = f"{','.join(terms)}->{''.join(r.sample(letters, min(len(letters), r.randint(0, 3))))}"
        x = sparse(*full(tuple(sizes[c] for c in own), r.choice((0.02, 0.2))), r.choice((torch.float32, torch.float64)))
        backend = r.choice(("triton", "torch"))
        settings = {"backend": backend, "plan": "auto", "precision": "highest", "output": "dense"}
        yield f"random {seed} {equation} {backend}", (equation, x, *dense_of(equation, sizes, x.dtype)), settings


def replayed() -> dict[str, dict[str, Any]]:
    """What the compiler makes of every case."""
    import folders

    sys.path += folders.PATHS
    import golden_cases
    import golden_pairs

    found: dict[str, dict[str, Any]] = {}
    for module in (golden_cases, golden_pairs):
        for name in module.CASES:
            found[f"golden {name}"] = {"source": module.source(name)}
    for name, arguments, settings in (*benchmarks(), *randomly()):
        try:
            kernel = stc.compile(*arguments, **settings)
        except stc.SparsetcError as error:
            found[name] = {"refused": str(error)}
            continue
        steps = kernel.explain().steps
        found[name] = {
            "plan": [step.plan for step in steps],
            "considered": [[list(one) for one in step.considered] for step in steps],
            "source": kernel.source,
        }
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What changed, a case and a line each; of a source, its unified difference."""
    lines = []
    for name in sorted({*before, *after}):
        old, new = before.get(name, {}), after.get(name, {})
        for what in sorted({*old, *new}):
            if old.get(what) == new.get(what):
                continue
            if what == "source" and what in old and what in new:
                texts = (old[what].splitlines(), new[what].splitlines())
                lines += [f"{name}: source", *difflib.unified_diff(*texts, "before", "after", lineterm="", n=1)]
            else:
                lines.append(f"{name}: {what}\n  before {old.get(what)}\n  after  {new.get(what)}")
    return lines


def main() -> int:
    if len(sys.argv) != 3 or sys.argv[1] not in ("write", "compare"):
        print(__doc__)
        return 2
    with tempfile.TemporaryDirectory() as folder, stc.options(cache_dir=folder, device="cpu", memory_limit="8GB"):
        found = replayed()
    found = json.loads(json.dumps(found))
    path = Path(sys.argv[2])
    if sys.argv[1] == "write":
        path.write_bytes(gzip.compress(json.dumps(found).encode(), mtime=0))
        print(f"{len(found)} cases")
        return 0
    lines = differences(json.loads(gzip.decompress(path.read_bytes())), found)
    print("\n".join(lines) or f"{len(found)} cases are as they were")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
