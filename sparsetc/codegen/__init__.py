"""Tile programs -> text, modules and launches; the lines of a text as its printer puts them down."""

from collections.abc import Iterator
from contextlib import contextmanager


class Lines:
    """The lines of a function in the making, and the names of its variables."""

    def __init__(self, indent: int = 1) -> None:
        self.out: list[str] = []
        self.indent, self.variables = indent, 0

    def put(self, text: str) -> None:
        self.out.append("    " * self.indent + text)

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
