"""Helpers for all of the package: caches, locks, names, files, records, warnings; and short names of types."""

Ints = tuple[int, ...]
"""Sizes, positions or numbers of modes, of any number."""
Names = tuple[str, ...]
"""Letters of an einsum, or other names."""
NamedInts = tuple[tuple[str, int], ...]
"""Numbers by letter or name, as what is hashed has them."""
