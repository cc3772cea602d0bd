"""The loop over the tasks of a join, row by row (Gustavson): Python, which `support.compiled` makes machine code of.

In: numpy arrays, those that are written to included. Out: how many results there are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

LOWEST = np.uint64(0x03F79D71B4CB0A89)
"""A de Bruijn sequence: the lowest bit of a word times it has the bit's number, by `NUMBERS`, in its upper six bits."""
NUMBERS = np.zeros(64, np.int64)
NUMBERS[[(int(LOWEST) << bit & (1 << 64) - 1) >> 58 for bit in range(64)]] = range(64)


def results(
    ends: Any,
    first: Any,
    row: Any,
    column: Any,
    columns: int,
    places: Any,
    frame: int,
    x_base: Any,
    x_word: Any,
    z_word: Any,
) -> int:
    """Find the distinct places of all tasks, ascending, and the result of each task; return how many results there are.

    A bit a column is set by each task of a row, and a bit of another word by each word of these. Words are then read in
    order, so that nothing is sorted.

    Args:
        ends: (entries of x,) number of tasks up to and with each entry.
        first: (entries of x,) the first entry of y that each matches.
        row: (entries of x,) the row of the result of each, not falling.
        column: (entries of y,) the column of each.
        columns: of the result.
        places: (results, or more,) to write row * columns + column of each result to.
        frame: log2 of the tasks of a frame.
        x_base: the entry of x of the first task of each frame.
        x_word: (tasks,) to write the entry of x of each task to, less the base of its frame.
        z_word: (tasks,) to write the result of each task to.
    """
    one, low = np.uint64(1), np.uint64(63)
    bits, words = np.zeros(columns // 64 + 1, np.uint64), np.zeros(columns // 4096 + 1, np.uint64)
    number = np.zeros(columns, np.int32)  # of a column's result among those of its row
    x = n = begin = 0
    while x < len(row):
        last = x
        end = begin
        before = n
        while last < len(row) and row[last] == row[x]:
            for y in range(first[last], first[last] + ends[last] - end):
                word = column[y] >> 6
                bits[word] |= one << (np.uint64(column[y]) & low)
                words[word >> 6] |= one << (np.uint64(word) & low)
            end = ends[last]
            last += 1
        for group in range(len(words)):
            left = words[group]
            while left != 0:
                word = group * 64 + NUMBERS[((left & (~left + one)) * LOWEST) >> np.uint64(58)]
                left &= left - one
                of_word = bits[word]
                bits[word] = 0
                while of_word != 0:
                    place = word * 64 + NUMBERS[((of_word & (~of_word + one)) * LOWEST) >> np.uint64(58)]
                    of_word &= of_word - one
                    number[place] = n - before
                    places[n] = row[x] * columns + place
                    n += 1
            words[group] = 0
        task = begin
        for entry in range(x, last):
            for y in range(first[entry], first[entry] + ends[entry] - task):
                z_word[task] = before + number[column[y]]
                x_word[task] = entry - x_base[task >> frame]
                task += 1
        x, begin = last, end
    return n


def products(ends: Any, first: Any, row: Any, z_word: Any, x: Any, y: Any, sums: Any, out: Any) -> None:
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
            at = first[entry] - task
            while task < ends[entry]:
                result = z_word[task]
                sums[result - begin] += x[entry] * y[at + task]
                end = max(end, result + 1)
                task += 1
            entry += 1
        for result in range(begin, end):
            out[result] = sums[result - begin]
            sums[result - begin] = 0
        begin = end


def coordinates(places: Any, columns: int, by_row: bool, of: Any, out: Any) -> None:
    """Write for each place, row * columns + column and rising, what its row has, or its column."""
    row = places[0] // columns if len(places) else 0
    for n in range(len(places)):
        while places[n] >= (row + 1) * columns:
            row += 1
        out[n] = of[row] if by_row else of[places[n] - row * columns]
