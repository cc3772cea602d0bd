"""Packing a text file of 3 M nonzeros on one CPU core, by memory limits: seconds of the core, and what memory grows by.

OMP_NUM_THREADS=1 python benchmarks/packing.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import record

import sparsetc as stc

LIMITS = ("1GB", "256MiB", "128MiB")
NNZ, SIDE = 3_000_000, 1_000_000


def peak() -> int:
    """Bytes of memory that this process has had at most; getrusage's would begin with its parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def grown(source: str, target: str, limit: str) -> None:
    """Pack, and print seconds and how many bytes more the process took than before."""
    small = Path(target).with_name("small.tns")
    small.write_text("1 1 1 1.0\n")
    stc.pack(small, target)  # imports what is imported on the way
    before, start = peak(), time.process_time()
    stc.pack(source, target, memory_limit=limit)
    print(round(time.process_time() - start, 2), peak() - before)


def main() -> None:
    """A process a limit, since a process's peak does not fall."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        source, random = Path(folder) / "x.tns", np.random.default_rng(0)
        columns = [*random.integers(1, SIDE, (3, NNZ)), np.round(random.random(NNZ), 4)]
        np.savetxt(source, np.stack(columns, 1), fmt=["%d", "%d", "%d", "%.4f"])
        for limit in LIMITS:
            command = [sys.executable, __file__, str(source), str(Path(folder) / "x.parquet"), limit]
            seconds, taken = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            size = source.stat().st_size
            rows.append(
                {"nnz": NNZ, "text_bytes": size, "limit": limit, "s": float(seconds), "taken_bytes": int(taken)}
            )
            print(rows[-1], flush=True)
    record("packing", rows)


if __name__ == "__main__":
    grown(*sys.argv[1:]) if len(sys.argv) > 1 else main()
