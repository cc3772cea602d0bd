"""What devices can do: the rates by which costs become seconds.

Plain data. The defaults of `Rates` are those of an NVIDIA H200, and serve every GPU that was not calibrated
(`sparsetc.calibrate` measures the one at hand); `CPU` are those of two CPU cores, for the generated torch programs.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsetc.ir.plan import F16X3


@dataclass(frozen=True)
class Rates:
    """What a device can do, bytes and operations a second; the defaults were measured on an H200."""

    name: str = "NVIDIA H200"
    calibrated: str = ""
    """Day on which `calibrate` measured them, empty for rates that come with the package."""
    memory: float = 4.4e12
    l2: float = 10.5e12
    l1: float = 26e12
    """128 bytes a cycle of each of 132 multiprocessors at 1.95 GHz, of which kernels were seen to reach 0.79."""
    add: float = 3.7e12
    multiply: float = 50e12
    dot: tuple[tuple[str, float], ...] = (
        ("ieee", 14e12),
        ("tf32x3", 118e12),
        ("tf32", 460e12),
        ("bf16", 624e12),
    )
    l2_bytes: int = 50_000_000
    l1_bytes: int = 200_000
    launch: float = 4e-6
    program: float = 1e-9
    """Seconds a program takes beside its loads, over the whole device: 0.57e-9 to start (16,384 empty ones took
    9.3 us), the rest to read where its work lies."""
    wait: float = 1e-6
    """Seconds a round of dependent loads takes when memory is busy."""
    fiber: float = 45e-12
    """Seconds a fiber takes beside its nonzeros: its words are read, then its nonzeros' words, then rows (three waits
    in a row). Fitted to fibers of 5 (Uber), 25 and 80 nonzeros (clustered, guanine)."""
    warps: int = 528
    """Warps that a device issues from at once: 4 a multiprocessor."""
    expand: float = 0.5e12
    """Positions of bitmap tiles that are expanded a second (0.3e12 to 1.4e12, by the precision and the warps)."""
    tile: float = 2.2e-9
    """Seconds a program's turn over a tile takes beside its dots, over the whole device. Fitted to tiles of 16x16x16
    and 8x8x8x8, ranks 32 and 128, three precisions."""

    def matrix(self, precision: str) -> float:
        """Multiplications and additions in dots a second; f16x3 takes three of 16-bit parts, which go as bfloat16."""
        own = dict(self.dot)
        return own["bf16"] / 3 if precision == F16X3 else own.get(precision, self.multiply)

    def describe(self) -> str:
        """Whose rates these are, for a reader."""
        return f"{self.name} ({f'calibrated {self.calibrated}' if self.calibrated else 'defaults'})"


CPU = Rates(
    name="2 CPU cores",
    memory=20e9,
    l2=60e9,
    l1=200e9,
    add=10e9,
    multiply=50e9,
    dot=(("ieee", 100e9), ("tf32x3", 100e9), ("tf32", 100e9), ("bf16", 100e9)),
    l2_bytes=32_000_000,
    l1_bytes=1_000_000,
    launch=50e-6,
    program=50e-9,
    wait=0.0,
    fiber=1e-9,
    expand=1e9,
    tile=1e-6,
)
