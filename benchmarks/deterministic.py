"""What `deterministic=True` costs: MTTKRP of every mode, rank 32, float32, with it and without.

SPARSETC_DATA=<folder of .npz> python benchmarks/deterministic.py [names of tensors]

Microseconds of a captured graph of the call, both by ``"auto"``, once results are known to be right and the
deterministic one to have the same bits twice.
"""

from __future__ import annotations

import sys

import torch
from common import device_microseconds, factors, mttkrp_equation, record, relative_error, tensor

import sparsetc as stc

RANK = 32
TENSORS = ("uber_amj_4d", "guanine_TEvv_3d", "clustered", "nell-2 x0.25", "flickr x0.1", "delicious x0.25")


def main(names: list[str]) -> None:
    """Every tensor that is there."""
    rows = []
    for name in names or TENSORS:
        x = tensor(name)
        if x is None:
            continue
        f = factors(x, RANK)
        for mode in range(x.order):
            others = [m for n, m in enumerate(f) if n != mode]
            equation = mttkrp_equation(x.order, mode)
            default = stc.compile(equation, x, *others)
            ordered = stc.compile(equation, x, *others, deterministic=True)
            found = ordered(*others)
            assert torch.equal(found, ordered(*others))
            assert relative_error(found, default(*others).double()) < 1e-5
            del found
            us, with_it = (round(device_microseconds(lambda k=k: k(*others)), 1) for k in (default, ordered))  # noqa: B023
            row = {"tensor": name, "mode": mode, "plan": default.plan.name, "us": us}
            row |= {"deterministic": ordered.plan.name, "deterministic_us": with_it, "ratio": round(with_it / us, 2)}
            rows.append(row)
            print(row, flush=True)
            del default, ordered
            x.pattern.clear()
        del x, f
        torch.cuda.empty_cache()
    record("deterministic", rows, rank=RANK)


if __name__ == "__main__":
    main(sys.argv[1:])
