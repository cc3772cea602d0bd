"""MTTKRP, float32, "highest", R = 32, every mode: time, time over floor, time over the best peer.

    SPARSETC_DATA=<folder of .npz> python benchmarks/mttkrp.py [plan ...]

Peers were measured on an H200 (BLCO, MM-CSF, GenTen; the best of them a mode), and `probe` is a plain sorted-run Triton
kernel on the same GPU: numbers to beat, in microseconds. They mean something on that GPU only.
"""

from __future__ import annotations

import sys
from math import exp, log

from common import (
    factors,
    kernel_microseconds,
    microseconds,
    mttkrp_equation,
    mttkrp_reference,
    record,
    relative_error,
    tensor,
)

import sparsetc as stc

PEERS = {
    "uber_amj_4d": (134, 109, 128, 133),
    "guanine_TEvv_3d": (128, 129, 119),
    "clustered": (476, 499, 564),
    "nell-2 x0.25": (1140, 1310, 1610),
    "flickr x0.1": (1470, 1560, 1420),
}
PROBE = {
    "guanine_TEvv_3d": (40, 40, 40),
    "clustered": (150, 150, 150),
    "nell-2 x0.25": (280, 280, 340),
    "flickr x0.1": (390, 620, 400),
}


def main() -> None:
    plans = sys.argv[1:] or ["auto"]
    rows = []
    for name, peers in PEERS.items():
        x = tensor(name)
        if x is None:
            continue
        f = factors(x, 32)
        for mode in range(x.order):
            dense = [m for n, m in enumerate(f) if n != mode]
            expected = mttkrp_reference(x, f, mode)
            for plan in plans:
                try:
                    k = stc.compile(mttkrp_equation(x.order, mode), x, *dense, plan=plan, precision="highest")
                except stc.PlanError:
                    continue
                error = relative_error(k(*dense), expected)
                assert error < 1e-5, (name, mode, plan, error)
                e = k.explain()
                row = {
                    "tensor": name,
                    "mode": mode,
                    "asked": plan,
                    "plan": k.plan.name,
                    "nnz": x.nnz,
                    "error": error,
                    "call_us": round(microseconds(lambda: k(*dense)), 1),  # noqa: B023, F821
                    "kernel_us": round(kernel_microseconds(k, dense), 1),
                    "predicted_us": round(sum(p.predicted_us for p in e.parts), 1),
                    "floor_us": round(sum(p.roofline_us for p in e.parts), 1),
                    "bound_by": [p.bound_by for p in e.parts],
                    "peer_us": peers[mode],
                    "probe_us": PROBE.get(name, (None,) * 4)[mode],
                }
                rows.append(row)
                print(
                    f"{name:16s} {mode} {plan:10s} {k.plan.name:10s}"
                    f" call {row['call_us']:7.1f} kernel {row['kernel_us']:7.1f}"
                    f" predicted {row['predicted_us']:7.1f} floor {row['floor_us']:6.1f} {'+'.join(row['bound_by'])}"
                    f" peer/kernel {peers[mode] / row['kernel_us']:.2f} error {error:.0e}",
                    flush=True,
                )
                del k
            x.pattern.clear()
        del x, f
    chosen = [r for r in rows if r["asked"] == plans[0]]
    mean = exp(sum(log(r["peer_us"] / r["kernel_us"]) for r in chosen) / max(1, len(chosen)))
    print(f"geometric mean over the best peer, {plans[0]}: {mean:.2f}")
    record("mttkrp" if plans == ["auto"] else "mttkrp_plans", rows, geometric_mean_over_best_peer=round(mean, 3))


if __name__ == "__main__":
    main()
