"""Bytes that packing takes at its peak, beyond coordinates and what is packed, of every format and partition.

    python benchmarks/packing_memory.py [--out benchmarks/results/packing_memory.json]

The bound is three times the coordinates' own bytes, 24 a nonzero and mode, which `tests/packing/test_packing_memory.py`
asserts. Torch's allocator of the CPU counts, so that scratch inside of its functions is counted too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from peak_memory import SHAPES, packings, peak

BOUND = 3
"""Times the coordinates' bytes that scratch may take."""


def measured(order: int, nnz: int) -> Iterator[dict[str, Any]]:
    """A row a packing: bytes a nonzero of coordinates, what is packed and scratch; and the share of the bound."""
    for name, coords, run in packings(order, nnz):
        most, left, _ = peak(run)
        n, own = coords.shape[1], 8 * coords.numel()
        yield {
            "packing": name,
            "order": order,
            "nonzeros": n,
            "coordinates": own / n,
            "packed": round(left / n, 1),
            "scratch": round((most - left) / n, 1),
            "of_bound": round((most - left) / (BOUND * own), 2),
        }


def main() -> None:
    """Print the table, and write it where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nnz", type=int, default=200_000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = [row for order in SHAPES for row in measured(order, given.nnz)]
    for row in rows:
        print("  ".join(f"{value!s:>24}" if name == "packing" else f"{value!s:>10}" for name, value in row.items()))
    if given.out:
        about = "bytes a nonzero, as benchmarks/packing_memory.py measures them; scratch is beside what is packed"
        given.out.write_text(json.dumps({"about": about, "bound": f"{BOUND} x coordinates", "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
