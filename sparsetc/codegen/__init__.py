"""Tile programs -> text, modules and launches; the lines of a text as its printer puts them down.

Numbers that kernels share with the code that launches them stand here, as modules of kernels import Triton.
"""

from collections.abc import Iterator
from contextlib import contextmanager

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


class Lines:
    """The lines of a function in the making, and the names of its variables."""

    def __init__(self, indent: int = 1) -> None:
        self.out: list[str] = []
        self.indent, self.variables = indent, 0

    def put(self, *lines: str) -> None:
        self.out += ["    " * self.indent + line for line in lines]

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Print a head and indent the lines of this block; without a head they are not indented."""
        if head:
            self.put(head)
        self.indent += bool(head)
        yield
        self.indent -= bool(head)

    def variable(self, called: str, text: str = "") -> str:
        """Return a new variable name, and print the assignment of `text` to it."""
        self.variables += 1
        name = f"{called}{self.variables}"
        if text:
            self.put(f"{name} = {text}")
        return name
