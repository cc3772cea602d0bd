"""TTM chains, TTM and TTV of every mode from the one copy of ``"mm-csf"``, beside ``"auto"``; and packing's time.

SPARSETC_DATA=<folder of .npz> python benchmarks/roles.py [names of tensors]

Microseconds of a captured graph of the call, float32, results compared with one another first. ``pack_s`` is the time
of partition and packing of the one copy, which the first einsum needs; the others find it.
"""

from __future__ import annotations

import sys
import time

import torch
from common import device_microseconds, letters, record, relative_error, tensor

import sparsetc as stc

TENSORS = ("uber_amj_4d", "guanine_TEvv_3d", "nell-2 x0.25", "nell-2")
RANKS = {"ttmc": 16, "ttm": 16, "ttv": 0}


def problem(x: stc.SparseTensor, op: str, mode: int) -> tuple[str, list[torch.Tensor]]:
    """An equation whose kept (ttmc) or contracted (ttm, ttv) mode is this one, and dense operands."""
    own, rank = letters(x.order), RANKS[op]
    g = torch.Generator(device=x.device).manual_seed(0)
    if op == "ttmc":
        others = [m for m in range(x.order) if m != mode]
        dense = [torch.randn(x.shape[m], rank if x.order == 3 else 8, generator=g, device=x.device) for m in others]
        ranks = "rst"[: len(others)]
        terms = ",".join(own[m] + r for m, r in zip(others, ranks, strict=True))
        return f"{own},{terms}->{own[mode]}{ranks}", dense
    vector = torch.randn(x.shape[mode], *([rank] if rank else []), generator=g, device=x.device)
    r = "r" if rank else ""
    return f"{own},{own[mode]}{r}->{own.replace(own[mode], '')}{r}", [vector]


def main(names: list[str]) -> None:
    """Every tensor that is there."""
    rows = []
    for name in names or TENSORS:
        x = tensor(name)
        if x is None:
            continue
        for op in RANKS:
            for mode in range(x.order):
                equation, dense = problem(x, op, mode)
                torch.cuda.synchronize()
                start = time.perf_counter()
                one = stc.compile(equation, x, *dense, plan="mm-csf")
                torch.cuda.synchronize()
                seconds = time.perf_counter() - start
                best = stc.compile(equation, x, *dense)
                found, expected = one(*dense), best(*dense)
                if isinstance(found, stc.SparseTensor):
                    found, expected = found.values, expected.values
                assert relative_error(found, expected.double()) < 1e-5, (name, op, mode)
                del found, expected
                us, auto = (round(device_microseconds(lambda k=k: k(*dense)), 1) for k in (one, best))  # noqa: B023
                row = {"tensor": name, "op": op, "mode": mode, "us": us, "auto_us": auto, "auto": best.plan.name}
                rows.append(row | {"pack_s": round(seconds, 3)})
                print(rows[-1], flush=True)
                del one, best
        x.pattern.clear()
        del x
        torch.cuda.empty_cache()
    record("roles", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
