"""Loops over sorted coordinates: Python, which `support.files` makes machine code of where numba is installed.

In: numpy arrays, those that are written to included. Out: how much was written. Where two rising runs of numbers are
merged, no branch depends on which number is smaller, since a processor guesses every other one wrong.
"""

from __future__ import annotations

from typing import Any

Numbers = Any
"""A one-dimensional array of int64. (numpy's own type would take numba longer.)"""


def union(of_x: Numbers, of_y: Numbers, left: Numbers, right: Numbers) -> int:
    """Write where each number of two rising runs goes in their union to `left` and `right`; return its length."""
    i = j = n = 0
    while i < len(of_x) and j < len(of_y):
        a, b = of_x[i], of_y[j]
        left[i] = right[j] = n  # again for the larger of the two
        i += a <= b
        j += b <= a
        n += 1
    for rest in range(i, len(of_x)):
        left[rest] = n + rest - i
    for rest in range(j, len(of_y)):
        right[rest] = n + rest - j
    return n + len(of_x) - i + len(of_y) - j


def add(left: Numbers, right: Numbers, of_x: Any, of_y: Any, out: Any) -> None:
    """Add elements of x at `left` and of y at `right` of `out`, which holds zeros."""
    for i in range(len(left)):
        out[left[i]] = of_x[i]
    for j in range(len(right)):
        out[right[j]] += of_y[j]


def intersection(of_x: Numbers, of_y: Numbers, left: Numbers, right: Numbers) -> int:
    """Write the positions of numbers that two rising runs share to `left` and `right`; return their count."""
    i = j = n = 0
    while i < len(of_x) and j < len(of_y):
        a, b = of_x[i], of_y[j]
        left[n] = i  # again while they differ
        right[n] = j
        n += a == b
        i += a <= b
        j += b <= a
    return n


def runs(kinds: Numbers, first: Numbers, ends: Numbers, coords: Any, taken: Any, entries: Any) -> None:
    """Write the coordinates and entries of runs of some kinds, run after run; the first is the number of the run."""
    n = 0
    for run in range(len(kinds)):
        begin = first[kinds[run]]
        end = begin + ends[run] - n
        number, entry = taken[0, n : ends[run]], entries[n : ends[run]]
        for at in range(len(number)):  # of parts of arrays, whose positions begin at 0, numba makes vectors
            number[at] = run
            entry[at] = begin + at
        for mode in range(1, len(coords)):
            given, new = coords[mode, begin:end], taken[mode, n : ends[run]]
            for at in range(len(new)):
                new[at] = given[at]
        n = ends[run]
