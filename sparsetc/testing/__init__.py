"""What tests of the compiler, and of what extends it, are made of.

`check_format` is the conformance suite of formats. `reference` says what an einsum is, `interpret` what a plan and a
program of tiles are, by plain torch that shares no code with the generated kernels.
"""

from sparsetc.packing.stored import check_arrays, read
from sparsetc.testing.conformance import PATTERNS, UNBOUNDED, check_format, pattern

__all__ = ["PATTERNS", "UNBOUNDED", "check_arrays", "check_format", "pattern", "read"]
