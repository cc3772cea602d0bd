"""What tests of the compiler, and of what extends it, are made of: conformance of formats, and fuzzing.

`check_format` is the conformance suite of formats. ``python -m sparsetc.testing fuzz`` draws einsums, gradients,
contractions of sparse operands, or files, for as long as it is told to, and prints a reproducer of what it finds.
"""

from sparsetc.packing.stored import check_arrays, read
from sparsetc.testing.conformance import PATTERNS, UNBOUNDED, check_format, pattern

__all__ = ["PATTERNS", "UNBOUNDED", "check_arrays", "check_format", "pattern", "read"]
