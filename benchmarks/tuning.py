"""What measurement gains over the cost model: every named plan, the model's and the tuned one, timed in turn.

    python benchmarks/tuning.py [--half 0|1] [--seconds S] [tensor ...]

Of each case: the fastest named plan, what ``plan="auto"`` and ``tune="now"`` take of it, and what tuning took, with an
empty cache of kernels and with a full one. Every trial is a line of a record (`$SPARSETC_RESULTS/tuning.jsonl`), to
which `sparsetc tune refit` fits rates. ``--half`` takes every second tensor: rates are fitted to the others.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from math import exp, log
from pathlib import Path
from random import Random
from typing import Any

import torch
from common import DEVICE, RESULTS, record, tensor, warmed

import sparsetc as stc
from sparsetc.contraction.tuned import as_candidate, search_of
from sparsetc.explain import device_name
from sparsetc.ir.plan import AUTO
from sparsetc.planner import Candidate
from sparsetc.planner.registry import PLANS
from sparsetc.tuning.record import Known, facts_of

REAL = ("uber_amj_4d", "uber_amj_3d", "guanine_TEvv_3d", "guanine_TEov_3d", "guanine_TEoo_3d", "uracil3_t2_4d")
MADE = ("clustered", "nell-2 x0.05", "flickr x0.05", "delicious x0.02", "freebase-music x0.02", "darpa x0.05")
MATRICES = ("R-MAT 14 x8", "R-MAT 14 x128", "block .1 .1", "block .01 .1", "pruned 2048x2048", "pruned 512x2048")
REAL_MATRICES = ("c2000_5_mat", "bcsstk16_mat", "cora_mat", "pubmed_mat", "hamming10_4_mat", "econ_mbeacxc_mat")


RANKS = ((16, "highest"), (24, "highest"), (32, "highest"), (32, "medium"), (100, "highest"), (128, "high"))
Row = dict[str, Any]


def cases(order: int) -> Iterator[tuple[str, dict[str, int], str]]:
    """(equation, sizes of dense letters, precision)."""
    own = "ijklmn"[:order]
    if order == 2:
        for n in (8, 32, 128, 512):
            for precision in ("highest", "high", "medium") if n in (32, 128) else ("highest",):
                yield "ij,jr->ir", {"r": n}, precision
        yield "ij,ir,jr->ij", {"r": 64}, "highest"
        yield "ij,j->i", {}, "highest"
        return
    for mode in range(order):
        others = [c for c in own if c != own[mode]]
        factors = ",".join(f"{c}r" for c in others)
        for rank, precision in (
            (16, "highest"),
            (24, "highest"),
            (32, "highest"),
            (32, "medium"),
            (100, "highest"),
            (128, "high"),
        ):
            yield f"{own},{factors}->{own[mode]}r", {"r": rank}, precision
        chain = ",".join(f"{c}{r}" for c, r in zip(others, "rstuv", strict=False))
        rank = 16 if order == 3 else 8
        yield f"{own},{chain}->{own[mode]}{'rstuv'[: order - 1]}", dict.fromkeys("rstuv"[: order - 1], rank), "high"
    yield f"{own},{own[-1]}->{own[:-1]}", {}, "highest"
    yield f"{own},{own[-1]}r->{own[:-1]}r", {"r": 16}, "highest"


def named(step: Any) -> list[Candidate]:
    """The model's plan, then the best candidate of every name, those that the model puts far behind too."""
    best: dict[str, Candidate] = {}
    for name, method in PLANS.items():
        for candidate in method.estimates(step.problem):
            known = best.get(name)
            if candidate.seconds and (known is None or candidate.total < known.total):
                best[name] = candidate
    return list(best.values())


def compiled(
    equation: str, x: stc.SparseTensor, dense: list[torch.Tensor], **settings: Any
) -> tuple[stc.Kernel, float]:
    """A kernel, and the seconds that compiling it took with nothing kept of the pattern but its counts."""
    x.pattern.cache.clear()
    start = time.perf_counter()
    return stc.compile(equation, x, *dense, **settings), time.perf_counter() - start


def measured(
    name: str, x: stc.SparseTensor, equation: str, sizes: dict[str, int], precision: str, seconds: float, again: bool
) -> Row:
    """A row: microseconds of every plan, and what tuning took."""
    letters, *terms = equation.split("->")[0].split(",")
    extent = dict(zip(letters, x.shape, strict=True)) | sizes
    dense = [torch.randn([extent[c] for c in term], device=x.device) for term in terms]
    model, _ = compiled(equation, x, dense, precision=precision)
    step = model.step
    records = Path(os.environ["SPARSETC_CACHE_DIR"]) / "tuning"
    tuned, cold = compiled(equation, x, dense, precision=precision, tune=seconds)
    kept, warm = list(records.glob("*.jsonl")), None
    if again:
        text = [path.read_text() for path in kept]
        for path in kept:
            path.unlink()
        _, warm = compiled(equation, x, dense, precision=precision, tune=seconds)
        for path, old in zip(kept, text, strict=True):
            path.write_text(old)
    first, chosen = as_candidate(step), as_candidate(tuned.step)
    every = [c for c in named(step) if c.plan != first.plan]
    search = search_of(step, 30.0)
    trials = search.timed([first, chosen, *every])
    Known(facts_of(step.problem), AUTO, device_name(step.device)).add(search.trials)
    for path in kept:
        with open(RESULTS_FOLDER / "tuning.jsonl", "a") as file:
            file.write(path.read_text())
        path.unlink()
    us = {t.candidate.plan.name: round(1e6 * t.timing.median, 2) for t in trials[2:]}
    us[first.plan.name] = min(us.get(first.plan.name, 1e9), round(1e6 * trials[0].timing.median, 2))
    own = [round(1e6 * t.timing.median, 2) for t in trials[:2]]
    told = {"tensor": name, "equation": equation, "sizes": sizes, "precision": precision, "us": us}
    return told | {
        "model": own[0],
        "tuned": own[1],
        "plan": chosen.name,
        "first": first.name,
        "cold_s": round(cold, 2),
        "warm_s": warm and round(warm, 2),
    }


def summary(rows: list[Row], what: str) -> str:
    """How many times the best named plan's time another takes."""
    each = [row[what] / min([*row["us"].values(), row["tuned"], row["model"]]) for row in rows]
    mean = exp(sum(map(log, each)) / len(each))
    above = [sum(ratio > most for ratio in each) for most in (1.05, 1.2)]
    return f"{what}: mean {mean:.3f}, worst {max(each):.2f}, above 1.05 in {above[0]}, 1.2 in {above[1]} of {len(each)}"


RESULTS_FOLDER = Path(os.environ.get("SPARSETC_RESULTS", RESULTS))


def main() -> None:
    """Measure every case of every tensor."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--half", type=int, choices=(0, 1))
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument(
        "--until", type=float, default=1e9, help="seconds that cases are drawn for, as many of each tensor"
    )
    parser.add_argument("tensors", nargs="*")
    options = parser.parse_args()
    names = options.tensors or [*REAL, *MADE, *MATRICES, *REAL_MATRICES]
    rows: list[Row] = []
    if DEVICE == "cuda":
        warmed()
    end, random = time.perf_counter() + options.until, Random(0)
    for number, name in enumerate(names := names if options.half is None else names[options.half :: 2]):
        if (x := tensor(name)) is None:
            continue
        share = (end - time.perf_counter()) / (len(names) - number) + time.perf_counter()
        for equation, sizes, precision in random.sample(every := [*cases(x.order)], len(every)):
            if time.perf_counter() > share:
                break
            try:
                rows.append(measured(name, x, equation, sizes, precision, options.seconds, len(rows) % 5 == 0))
                print(rows[-1], flush=True)
            except (stc.SparsetcError, RuntimeError) as error:
                print(name, equation, precision, error, flush=True)
    for what in ("cold_s", "warm_s"):
        taken = sorted(row[what] for row in rows if row[what] is not None)
        print(what, "median", taken[len(taken) // 2], "worst", taken[-1])
    print(summary(rows, "model"), summary(rows, "tuned"), sep="\n")
    record("tuning", rows, seconds=options.seconds)


if __name__ == "__main__":
    main()
