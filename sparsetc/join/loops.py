"""Loops over the tasks of a join, row by row (Gustavson): Python, which `support.files` makes machine code of.

In: numpy arrays, those that are written to included. Out: how many results there are. Places are unsigned: others are
tested at each access for being negative.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numpy as np

U = np.uint64
PAIRS, FOURS = U(0x5555555555555555), U(0x3333333333333333)
BYTES, ONES = U(0x0F0F0F0F0F0F0F0F), U(0x0101010101010101)
"""Bits of a word are counted by pairs, by fours and by bytes, which a compiler knows for one instruction. The number of
the lowest bit is that of the bits below it."""


def results(ends, first, row, column, columns: int, places) -> int:
    """Find the distinct places of all tasks, ascending; return how many there are.

    A bit a column is set by each task of a row, and a bit of another word by each word of these. Words are then read in
    order, so that nothing is sorted.

    Args:
        ends: (entries of x,) number of tasks up to and with each entry.
        first: (entries of x,) the first entry of y that each matches.
        row: (entries of x,) the row of the result of each, not falling.
        column: (entries of y,) the column of each.
        columns: of the result.
        places: (results, or more,) to write row * columns + column of each result to.
    """
    one, low = U(1), U(63)
    bits, words = np.zeros(columns // 64 + 1, np.uint64), np.zeros(columns // 4096 + 1, np.uint64)
    x = begin = 0
    n = U(0)
    while x < len(row):
        of = row[x]
        while x < len(row) and row[x] == of:
            for y in range(U(first[x]), U(first[x] + ends[x] - begin)):
                of_task = U(column[y])
                word = of_task >> U(6)
                bits[word] |= one << (of_task & low)
                words[word >> U(6)] |= one << (word & low)
            begin = ends[x]
            x += 1
        for group in range(U(len(words))):
            left = words[group]
            while left != 0:
                below = ~left & (left - one)
                below -= (below >> one) & PAIRS
                below = (below & FOURS) + ((below >> U(2)) & FOURS)
                word = (group << U(6)) + ((((below + (below >> U(4))) & BYTES) * ONES) >> U(56))
                left &= left - one
                of_word = bits[word]
                bits[word] = 0
                while of_word != 0:
                    below = ~of_word & (of_word - one)
                    below -= (below >> one) & PAIRS
                    below = (below & FOURS) + ((below >> U(2)) & FOURS)
                    lowest = (word << U(6)) + ((((below + (below >> U(4))) & BYTES) * ONES) >> U(56))
                    of_word &= of_word - one
                    places[n] = of * columns + np.int64(lowest)
                    n += one
            words[group] = 0
    return int(n)


def tasks(ends, first, row, column, columns: int, places, frame: int, x_base, x_word, z_word) -> None:
    """Write the entry of x and the result of each task, given the places of all results.

    Args:
        ends: this and all up to `places` as of `results`.
        first: as of `results`.
        row: as of `results`.
        column: as of `results`.
        columns: as of `results`.
        places: (results,) as `results` wrote them.
        frame: log2 of the tasks of a frame.
        x_base: the entry of x of the first task of each frame.
        x_word: (tasks,) to write the entry of x of each task to, less the base of its frame.
        z_word: (tasks,) to write the result of each task to.
    """
    number = np.zeros(columns, np.int64)  # of the result in each column of a row
    task = n = 0
    for entry in range(len(row)):
        while n < len(places) and places[n] < (row[entry] + 1) * columns:
            number[U(places[n] - row[entry] * columns)] = n
            n += 1
        for y in range(U(first[entry]), U(first[entry] + ends[entry] - task)):
            z_word[U(task)] = number[U(column[y])]
            x_word[U(task)] = entry - x_base[U(task >> frame)]
            task += 1


def first_products(ends, first, row, column, columns: int, places, x, y, sums, out) -> None:
    """Write what `products` does, in the same order of sums, without a list of tasks.

    Args:
        ends: this and all up to `places` as of `tasks`.
        first: as of `results`.
        row: as of `results`.
        column: as of `results`.
        columns: as of `results`.
        places: as of `tasks`.
        x: (entries of x,) values.
        y: (entries of y,) values.
        sums: (columns,) zeros, in which these are added up.
        out: (results,) to write to.
    """
    entry = task = n = 0
    while entry < len(row):
        of = row[entry]
        while entry < len(row) and row[entry] == of:
            factor = x[entry]
            for at in range(U(first[entry]), U(first[entry] + ends[entry] - task)):
                sums[U(column[at])] += factor * y[at]
            task = ends[entry]
            entry += 1
        while n < len(places) and places[n] < (of + 1) * columns:
            where = U(places[n] - of * columns)
            out[U(n)] = sums[where]
            sums[where] = 0
            n += 1


def products(ends, first, row, z_word, x, y, sums, out) -> None:
    """Write the sum of products of each result, of values of x and y in the order of tasks.

    Args:
        ends: as of `results`.
        first: as of `results`.
        row: as of `results`.
        z_word: (tasks,) the result of each task.
        x: (entries of x,) values.
        y: (entries of y,) values.
        sums: (most results of a row,) zeros, in which these are added up.
        out: (results,) to write to.
    """
    entry = begin = task = 0
    while entry < len(row):
        end, of = begin, row[entry]
        while entry < len(row) and row[entry] == of:
            shift, factor = U(first[entry] - task), x[entry]
            for at in range(U(task), U(ends[entry])):
                result = np.int64(z_word[at])
                sums[U(result - begin)] += factor * y[shift + at]
                end = max(end, result + 1)
            task = ends[entry]
            entry += 1
        for result in range(U(begin), U(end)):
            out[result] = sums[result - U(begin)]
            sums[result - U(begin)] = 0
        begin = end


def coordinates(places, columns: int, by_row: bool, of, out) -> None:
    """Write for each place, row * columns + column and rising, what its row has, or its column."""
    row = places[0] // columns if len(places) else 0
    for n in range(len(places)):
        while places[n] >= (row + 1) * columns:
            row += 1
        out[n] = of[row] if by_row else of[places[n] - row * columns]
