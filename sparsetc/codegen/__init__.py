"""Tile programs -> text, modules and launches.

Numbers that kernels share with the code that launches them stand here, as modules of kernels import Triton.
"""

ROWS, COLUMNS = 16, 128
"""Sides of a tile of a transposed copy: of a row 128 elements in turn are read, of a column 16 are written."""
READ = 128
"""Entries that a program reads, or copies, at a time."""
BLOCK = 1024
"""Values that a program splits into halves."""
GROUP = 32
"""Consecutive values of a program, of which one warp finds the largest."""
ENTRIES, WIDE, WHOLE = 32, 64, 1024
"""Entries of a program that adds rows by atomics, elements of their rows, and of rows that are summed, at a time."""
LOOKED = 4096
"""Values that a program looks at together for extremes."""
