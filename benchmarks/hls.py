"""Hybrid plans on tile tensors: MTTKRP and TTMc against the scalar plans of the same run, the threshold, storage.

    SPARSETC_DATA=<folder of .npz> python benchmarks/hls.py [mttkrp] [ttmc] [chained] [formats] [storage] [tensor ...]

MTTKRP in mode 0 (Uber: every mode) at ranks 32 and 128; the scalar plan is the faster of ``coo`` and ``fiber``. Times
are of the launches. `nonzeros_a_tile` is the mean over the tiles that hold any, with the default sides. `smape` is the
symmetric mean absolute percentage error against float64 (HLSTO, section VII-B).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import torch
from common import factors, kernel_microseconds, mttkrp_equation, mttkrp_reference, record, relative_error, tensor

import sparsetc as stc
from sparsetc.packing.base import pack, sides_of, tile_populations
from sparsetc.packing.partition import divide

TENSORS = (
    "clustered 600",
    "clustered 2000",
    "clustered",
    "guanine_TEvv_3d",
    "guanine_TEov_3d",
    "uracil3_t2_4d",
    "uber_amj_4d",
)
ERROR = {"highest": 1e-5, "high": 4e-3, "medium": 1e-2}
PEERS = {"uber_amj_4d": (134, 109, 128, 133), "guanine_TEvv_3d": (128, 129, 119)}
THRESHOLDS = (1, 64, 128, 181, 256, 362, 512, 724, 1024)


def smape(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Mean of |found - expected| / ((|found| + |expected|) / 2), in percent."""
    size = (found.double().abs() + expected.abs()) / 2
    return float(((found.double() - expected).abs() / size.clamp(min=1e-30)).mean()) * 100


def nonzeros_a_tile(x: stc.SparseTensor) -> float:
    """Mean population of the tiles that hold any nonzero, with the default sides."""
    population = tile_populations(x.coords, x.shape, sides_of(x.shape))  # of each nonzero's tile
    return round(x.nnz / float((1 / population.double()).sum()), 1)


def mttkrp() -> None:
    """Times of every plan, the threshold's sweep, errors; the fused launch against two."""
    rows: list[dict[str, Any]] = []
    for name in TENSORS:
        x = tensor(name)
        if x is None:
            continue
        for mode in range(x.order if name in PEERS else 1):
            for rank in (32, 128) if mode == 0 else (32,):
                rows += mttkrp_rows(name, x, mode, rank)
        x.pattern.clear()
    record("hls", rows)


def mttkrp_rows(name: str, x: stc.SparseTensor, mode: int, rank: int) -> list[dict[str, Any]]:
    """One mode at one rank."""
    f = factors(x, rank)
    dense = [m for n, m in enumerate(f) if n != mode]
    expected, equation, rows = mttkrp_reference(x, f, mode), mttkrp_equation(x.order, mode), []
    population = nonzeros_a_tile(x)

    def timed(plan: Any, precision: str) -> tuple[stc.Kernel, float]:
        k = stc.compile(equation, x, *dense, plan=plan, precision=precision)
        error = relative_error(k(*dense), expected)
        assert error < ERROR[precision], (name, mode, rank, plan, precision, error)
        return k, kernel_microseconds(k, dense)

    scalar = {plan: timed(plan, "highest")[1] for plan in ("coo", "fiber")}
    for precision in ("highest", "high", "medium"):
        k, auto = timed("auto", precision)
        swept = {t: timed(stc.plans.plan_hls(t), precision)[1] for t in THRESHOLDS} if mode == 0 else {}
        chosen, hls = timed("hls", precision)
        found = k(*dense)
        row = {
            "tensor": name,
            "mode": mode,
            "rank": rank,
            "precision": precision,
            "nnz": x.nnz,
            "nonzeros_a_tile": population,
            "scalar_us": {p: round(us, 1) for p, us in scalar.items()},
            "auto": k.plan.name,
            "auto_us": round(auto, 1),
            "hls_us": round(hls, 1),
            "threshold": chosen.step.choice.plan.option("threshold", None),
            "launches": chosen.explain().launches,
            "swept_us": {t: round(us, 1) for t, us in swept.items()},
            "over_scalar": round(min(scalar.values()) / auto, 2),
            "over_best_found": round(auto / min([*scalar.values(), *swept.values(), hls, auto]), 3),
            "peer_us": PEERS.get(name, (None,) * 4)[mode],
            "error": relative_error(found, expected),
            "smape_percent": smape(found, expected),
        }
        rows.append(row)
        peer = f" peer/auto {row['peer_us'] / auto:.2f}" if row["peer_us"] else ""
        print(
            f"{name:16s} mode {mode} R {rank:3d} {precision:8s} scalar {min(scalar.values()):6.1f} auto {auto:6.1f} "
            f"{k.plan.name:6s} ({row['over_scalar']:.2f}x) hls {hls:6.1f} at {row['threshold']} best swept "
            f"{min(swept.values(), default=0):6.1f} error {row['error']:.0e} smape {row['smape_percent']:.3f} %{peer}",
            flush=True,
        )
    return rows


def ttmc() -> None:
    """TTMc 32 x 32: two dots a tile against the gathered matrix product, at thresholds swept too."""
    rows: list[dict[str, Any]] = []
    for name in TENSORS:
        x = tensor(name) if "uber" not in name and "uracil" not in name else None  # tensors of order 3
        if x is not None:
            rows += ttmc_rows(name, x)
    record("hls_ttmc", rows)


def ttmc_rows(name: str, x: stc.SparseTensor) -> list[dict[str, Any]]:
    """One tensor at every precision."""
    equation, f, rows = "ijk,jr,ks->irs", factors(x, 32), []
    expected = stc.compile(equation, x, *f[1:], plan="fiber")(*f[1:]).double()
    population = nonzeros_a_tile(x)
    for precision in ("highest", "high", "medium"):
        times: dict[str, float] = {}
        for plan in ("coo", "fiber", "hls", "auto", *(stc.plans.plan_hls(t) for t in THRESHOLDS)):
            k = stc.compile(equation, x, *f[1:], plan=plan, precision=precision)
            assert relative_error(k(*f[1:]), expected) < 4 * ERROR[precision], (name, plan, precision)
            label = plan if isinstance(plan, str) else str(plan.option("threshold", None))
            times[label] = round(kernel_microseconds(k, f[1:]), 1)
            if plan == "hls":
                taken, stored = k.step.choice, [(p.format, p.nnz) for p in k.plan.parts]
                threshold = taken.plan.option("threshold", None)
                priced = round(1e6 * (taken.considered[0][1] or 0), 1)
            if plan == "auto":
                chosen = k.plan.name
        swept = {t: times.pop(str(t)) for t in THRESHOLDS}
        row = {
            "tensor": name,
            "precision": precision,
            "nonzeros_a_tile": population,
            "us": times,
            "swept_us": swept,
            "auto": chosen,
            "threshold": threshold,
            "stored": stored,
            "hls_priced_us": priced,
            "gain": round(min(times["coo"], times["fiber"]) / times["hls"], 2),
            "over_best_found": round(times["hls"] / min(*swept.values(), times["hls"]), 3),
        }
        rows.append(row)
        print(row, flush=True)
        x.pattern.clear()
    return rows


def chained() -> None:
    """The same with every tile dense, by positions and warps a program and tiles an item."""
    rows = []
    equation = "ijk,jr,ks->irs"
    for name in ("clustered 600", "clustered 2000", "guanine_TEvv_3d"):
        x = tensor(name)
        if x is None:
            continue
        f = factors(x, 32)
        expected = stc.compile(equation, x, *f[1:], plan="fiber")(*f[1:]).double()
        for precision in ("highest", "high", "medium"):
            plan = stc.compile(equation, x, *f[1:], plan=stc.plans.plan_hls(1), precision=precision).plan
            part, swept = plan.parts[0], {}
            for columns, warps, tiles in product((4, 8, 16), (2, 4), (8, 16, 32)):
                if columns == 16 and warps == 2:
                    continue
                schedule = replace(part.schedule, columns=columns, warps=warps)
                own = replace(part, schedule=schedule, storage=replace(part.storage, max_item_nnz=4096 * tiles))
                alone = replace(plan, parts=(own,), partition="all", options=(), shares=())
                k = stc.compile(equation, x, *f[1:], plan=alone, precision=precision)
                assert relative_error(k(*f[1:]), expected) < 4 * ERROR[precision]
                swept[f"{columns} positions, {warps} warps, {tiles} tiles"] = round(kernel_microseconds(k, f[1:]), 1)
                x.pattern.clear()
            best = min(swept, key=lambda s: swept[s])
            rows.append({"tensor": name, "precision": precision, "best": best, "us": swept})
            print(name, precision, best, swept, flush=True)
    record("ttmc_tiles", rows)


def formats() -> None:
    """All tiles of at least 200 nonzeros, stored dense and as bitmaps."""
    rows = []
    for name in TENSORS:
        x = tensor(name)
        if x is None:
            continue
        for rank in (32, 128):
            f = factors(x, rank)
            expected = mttkrp_reference(x, f, 0)
            for precision in ("highest", "medium"):
                equation, times, size = mttkrp_equation(x.order, 0), {}, {}
                plan = stc.compile(equation, x, *f[1:], plan=stc.plans.plan_hls(200), precision=precision).plan
                for format in ("dense_tile", "bitmap_tile"):
                    parts = (replace(plan.parts[0], format=format), *plan.parts[1:])
                    k = stc.compile(equation, x, *f[1:], plan=replace(plan, parts=parts), precision=precision)
                    assert relative_error(k(*f[1:]), expected) < ERROR[precision]
                    times[format] = round(kernel_microseconds(k, f[1:]), 1)
                    size[format] = k.plan.parts[0].nbytes
                rows.append({"tensor": name, "rank": rank, "precision": precision, "us": times, "bytes": size})
                print(f"{name:16s} R {rank:3d} {precision:8s} {times} {size}", flush=True)
        x.pattern.clear()
    record("tile_formats", rows)


def storage() -> None:
    """Bytes of the hybrid (bitmaps, the other nonzeros as runs) beside COO and dense, values of 32 and of 16 bits."""
    rows = []
    for name in TENSORS:
        x = tensor(name)
        if x is None:
            continue
        by_rows = stc.plans.Storage((0,), tuple(range(1, x.order)), ())
        shares = [x.coords[:, part] for part in divide("threshold", x.coords, x.shape, (0,), {"threshold": 78})]
        tiles = pack(shares[0], x.shape, "bitmap_tile", by_rows)
        rest = pack(
            shares[1], x.shape, "coo", stc.plans.Storage((), (), tuple(range(x.order)), max_item_nnz=128, narrow=True)
        )
        dense, coo = 4 * prod(x.shape), x.nnz * 4 * (x.order + 1)
        for width in (4, 2):
            hybrid = tiles.nbytes + rest.nbytes + width * x.nnz
            rows.append(
                {
                    "tensor": name,
                    "value_bytes": width,
                    "hybrid": hybrid,
                    "coo": coo,
                    "dense": dense,
                    "over_coo": round(hybrid / coo - 1, 4),
                    "over_dense": round(hybrid / dense - 1, 4),
                    "tiles_nnz": tiles.nnz,
                }
            )
            print(
                f"{name:16s} {8 * width} bits: {hybrid / 1e6:8.2f} MB, {hybrid / coo - 1:+.1%} of COO, "
                f"{hybrid / dense - 1:+.1%} of dense",
                flush=True,
            )
    record("hls_storage", rows)


if __name__ == "__main__":
    parts = {"mttkrp": mttkrp, "ttmc": ttmc, "chained": chained, "formats": formats, "storage": storage}
    TENSORS = tuple(a for a in sys.argv[1:] if a in TENSORS) or TENSORS
    for what in [a for a in sys.argv[1:] if a in parts] or parts:
        parts[what]()
